"""The command line, on tiny models in folders of their own."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import replay_transformers as rt
from replay_transformers.cli import app as commands
from replay_transformers.cli import compare as comparing
from tests.support.models import FAMILIES, VOCABULARY

PROMPT = "import os, sys; def"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token per printable character, as many as the tiny models know."""
    symbols = ["<pad>", "<s>", "</s>", *string.printable][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, build in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp("models") / name
        build().save_pretrained(made[name])
        character_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture
def _tiny_samples(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rt, "sample_model", lambda name: str(folders[name]))


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(commands.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not rt.is_enabled()
    return result


def records(*arguments: str | Path, code: int = 0) -> list[dict[str, Any]]:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def joined(text: str) -> str:
    """Lines that were wrapped at the console's width, in one."""
    return " ".join(text.split())


def test_version() -> None:
    assert run("--version").output.split()[:2] == ["replay-transformers", rt.__version__]


def test_help_names_the_commands() -> None:
    text = run("--help").output
    assert "demo" in text
    assert "generate" in text


@pytest.mark.core
@pytest.mark.usefixtures("_tiny_samples")
def test_demo() -> None:
    text = joined(run("demo", "--max-new-tokens", "20", "--window", "4").output)
    assert text.count("tokens equal: yes (20 of 20, greedy)") == 2
    for name in FAMILIES:
        assert f"{name}, stock cache" in text
        assert f"{name}, replay cache" in text
    assert text.count("class Stack:") == 4
    assert "state, writes" in text
    # 19 decode steps: flushes in steps 5, 9, 13 and 17
    assert text.count("The mean is over 12 steps, from flush to flush.") == 2


def test_demo_on_the_models_that_ship() -> None:
    found = records("demo", "--max-new-tokens", "36")
    assert [record["model"] for record in found] == ["qwen3_5", "nemotron_h"]
    for record in found:
        assert record["tokens_equal"]
        assert record["caches"]["replay"]["steps_that_wrote_the_state"] == 2
        assert len(record["caches"]["replay"]["seconds"]) == commands.DEMO_ROUNDS
        sizes = record["bytes_per_decode_step"]
        assert sizes["replay_mean"]["writes"]["state"] == pytest.approx(sizes["stock"]["writes"]["state"] / 16)


@pytest.mark.usefixtures("_tiny_samples")
def test_demo_of_one_model_with_a_prompt_and_without_the_text() -> None:
    text = run("demo", "--model", "nemotron_h", "--prompt", "zebra", "--max-new-tokens", "6", "--quiet").output
    assert "tokens equal: yes (6 of 6, greedy)" in text
    assert "The mean is over 5 steps, too few for a whole window." in joined(text)
    assert "qwen3_5" not in text
    assert "zebra" not in text


@pytest.mark.usefixtures("_tiny_samples")
def test_seeds_pick_prompts() -> None:
    few = ("demo", "--model", "qwen3_5", "--max-new-tokens", "2")
    prompts = [records(*few, "--seed", str(seed))[0]["prompt"] for seed in (0, 1, len(commands.PROMPTS))]
    assert prompts[0] != prompts[1]
    assert prompts[0] == prompts[2]


@pytest.mark.core
@pytest.mark.parametrize("cache", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_as_json(family: str, cache: str, folders: dict[str, Path]) -> None:
    (record,) = records(
        "generate", folders[family], "--prompt", PROMPT, "--cache", cache, "--window", "5", "--max-new-tokens", "18"
    )
    assert record["model"] == family
    assert record["tokens_equal"] is True
    assert record["first_difference"] is None
    stock, replay = record["caches"]["stock"], record["caches"]["replay"]
    assert stock["new_tokens"] == replay["new_tokens"] == reference_tokens(folders[family], 18)
    assert stock["decode_steps_counted"] == stock["steps_that_wrote_the_state"] == 17
    assert replay["decode_steps_counted"] == 17
    assert replay["steps_that_wrote_the_state"] == 3
    assert len(stock["seconds"]) == len(replay["seconds"]) == 1
    sizes = record["bytes_per_decode_step"]
    state = sizes["stock"]["reads"]["state"]
    assert sizes["stock"]["writes"]["state"] == sizes["replay_flush"]["writes"]["state"] == state
    assert sizes["replay_plain"]["reads"]["state"] == state
    assert sizes["replay_plain"]["writes"]["state"] == 0
    assert sizes["replay_mean"]["writes"]["state"] == pytest.approx(state / 5)


def reference_tokens(folder: Path, count: int) -> list[int]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = character_tokenizer()(PROMPT, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


def test_generate_without_comparing(folders: dict[str, Path]) -> None:
    text = run("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "4", "--no-compare").output
    assert PROMPT in text
    assert "stock" not in text
    assert "tokens equal" not in text


def test_one_token_has_no_decode_step(folders: dict[str, Path]) -> None:
    command = ("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "1")
    (record,) = records(*command)
    assert record["bytes_per_decode_step"] == dict.fromkeys(
        ("stock", "replay_plain", "replay_flush", "replay_mean"), None
    )
    assert "tokens equal: yes (1 of 1, greedy)" in run(*command).output


def test_a_long_run_counts_a_whole_window(folders: dict[str, Path]) -> None:
    command = ("generate", folders["nemotron_h"], "--prompt", PROMPT, "--max-new-tokens", "90")
    (record,) = records(*command, "--window", "40")
    replay = record["caches"]["replay"]
    assert len(replay["new_tokens"]) == 90
    assert (replay["decode_steps_counted"], replay["steps_that_wrote_the_state"]) == (81, 2)
    (record,) = records(*command, "--window", "4")
    assert record["caches"]["replay"]["decode_steps_counted"] == 63


def lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the replay cache's second token be another one."""
    original = comparing._generate

    def generate(loaded: Any, inputs: Any, arguments: Any, *args: Any, **kwargs: Any) -> list[int]:
        tokens = original(loaded, inputs, arguments, *args, **kwargs)
        if "cache_config" in arguments:
            tokens[1] += 1
        return tokens

    monkeypatch.setattr(comparing, "_generate", generate)


@pytest.mark.usefixtures("_tiny_samples")
def test_different_tokens_fail_in_float32(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    lie(monkeypatch)
    text = run("demo", "--max-new-tokens", "4", code=1).output
    assert text.count("tokens equal: no (the first difference is in new token 2)") == 2
    command = ("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "4")
    (record,) = records(*command, code=1)
    assert (record["tokens_equal"], record["first_difference"]) == (False, 1)


def test_a_narrow_state_may_give_other_tokens(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    command = ("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "6", "--readout", "fp8")
    (record,) = records(*command)
    assert record["precision"] == {"readout": "fp8"}
    steps = record["bytes_per_decode_step"]
    assert 0 < steps["replay_plain"]["reads"]["state"] < steps["stock"]["reads"]["state"] / 2
    lie(monkeypatch)
    text = " ".join(run(*command).output.split())
    assert "window 16, readout fp8" in text
    assert "With a state of another precision they may part" in text
    run(*command[:-2], "--readout", "float32", code=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_different_tokens_are_explained_in_half_precision(
    dtype: str, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    lie(monkeypatch)
    command = ("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "4", "--dtype", dtype)
    text = run(*command).output
    assert "tokens equal: no" in text
    assert "no error by itself" in text


def unsupported(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("model", "extra", "message"),
    [
        ("/nowhere/model", (), "there is no folder '/nowhere/model'"),
        ("./model", (), "there is no folder './model'"),
        ("nobody/no-such-model", (), "cannot load 'nobody/no-such-model': "),
        (
            "qwen35",
            (),
            "there is no model 'qwen35'; the sample models are nemotron_h, nemotron_h_draft, qwen3_5, qwen3_5_draft",
        ),
        ("llama", (), "does not support model type 'llama'"),
        ("empty", (), "cannot load"),
        ("qwen3_5", ("--device", "nonsense"), "cannot use device 'nonsense'"),
        ("qwen3_5", ("--prompt", ""), "the prompt is empty"),
        ("qwen3_5", ("--readout", "int3"), "readout must be None or one of"),
    ],
)
def test_errors_are_one_line(
    model: str, extra: tuple[str, ...], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"llama": unsupported(tmp_path), "empty": tmp_path / "empty", **folders}
    result = run("generate", places.get(model, model), "--prompt", PROMPT, *extra, code=2)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Loading")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.parametrize("option", ["--window", "--max-new-tokens"])
def test_numbers_below_one_are_refused(option: str, folders: dict[str, Path]) -> None:
    result = run("generate", folders["qwen3_5"], "--prompt", PROMPT, option, "0", code=2)
    assert "Traceback" not in result.stderr


def test_transformers_settings_come_back(folders: dict[str, Path]) -> None:
    logging = transformers.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    run("generate", folders["qwen3_5"], "--prompt", PROMPT, "--max-new-tokens", "2")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_text_with_markup_is_printed_as_it_is(folders: dict[str, Path]) -> None:
    prompt = "[bold]x[/bold] :smile: a[0]"
    text = run("generate", folders["qwen3_5"], "--prompt", prompt, "--max-new-tokens", "2").output
    assert text.count(prompt) == 2


def test_the_console_command_is_this_one() -> None:
    from configparser import ConfigParser
    from importlib import import_module

    setup = ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    name, target = setup["options.entry_points"]["console_scripts"].strip().split(" = ")
    module, function = target.split(":")
    assert name == "replay-transformers"
    assert getattr(import_module(module), function) is commands.main


def test_generate_takes_the_name_of_a_sample_model() -> None:
    assert records("generate", "nemotron_h_draft", "--prompt", "def ", "--max-new-tokens", "4")


def test_a_broken_weights_file_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(rt.sample_model("nemotron_h_draft"), folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    result = run("generate", folder, "--prompt", "def ", code=2)
    assert "cannot load" in joined(result.stderr)
