"""`replay-transformers check`: what it says of a model, and of the memory that a batch will need."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from typer.testing import CliRunner

import replay_transformers as rt
from replay_transformers.cli import app as commands
from replay_transformers.cli import check as checking
from replay_transformers.cli import check_report
from replay_transformers.cli.check_memory import Load, Peak, layer_footprints, meta_cache, predict_peak
from replay_transformers.cli.check_places import MOST_ROWS, Place, Places, largest_batch
from replay_transformers.kernels.formats import CHECKPOINTS, READOUTS
from replay_transformers.patches import versions
from scripts.benchmarks.presets import load_presets
from tests.support.models import ALL_FAMILIES, nemotron_h_config, qwen3_5_config

GIB = 2**30
RESULTS = Path(__file__).parents[1] / "results" / "generate-nvidia-h200.json"


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(commands.app, ["check", *map(str, arguments)], terminal_width=200)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not rt.is_enabled()
    return result


def record(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def findings(found: dict[str, Any], level: str) -> str:
    return "\n".join(one["text"] for one in found["findings"] if one["level"] == level)


def saved(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.core
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_layers_and_bytes_are_those_of_a_real_cache(name: str) -> None:
    options = ("--readout", "fp8", "--window", "5", "--max-draft", "3", "--length", "40", "--prompt", "20")
    found = record(name, *options, "--dtype", "float32", "--memory", "1")
    config = transformers.AutoConfig.from_pretrained(rt.sample_model(name))
    cache = rt.ReplayCache(config, rt.ReplayConfig(window=5, max_draft=3, readout="fp8"), max_cache_len=40)
    cache.allocate(1, torch.float32, torch.device("cpu"))
    assert found["bytes_per_sequence"] == cache.memory_footprint()
    assert [layer["kind"] for layer in found["layers"]] == [geometry.kind for geometry in cache.geometries]
    for layer, geometry in zip(found["layers"], cache.geometries, strict=True):
        assert (layer["heads"], layer["state_dim"]) == (geometry.heads, geometry.state_dim)
    for kind, size in found["bytes_per_sequence"].items():
        assert sum(layer["bytes_per_sequence"][kind] for layer in found["layers"]) == size
    model = transformers.AutoModelForCausalLM.from_pretrained(rt.sample_model(name), dtype=torch.float32)
    held = [*model.parameters(), *model.buffers()]
    assert found["weights_bytes"] == sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert found["refused"] is False
    assert found["class"] == type(model).__name__


def test_as_text() -> None:
    text = " ".join(run("qwen3_5", "--memory", "1").output.split())
    assert "Qwen3_5ForCausalLM, bfloat16" in text
    assert "Gated DeltaNet 4x64x64 cpu PyTorch" in text
    assert "largest batch that fits, prompts of 512 tokens:" in text
    assert "no gain: off a GPU plain PyTorch runs" in text
    assert text.endswith("replay cache: supported")


def test_without_a_gpu_or_memory_it_says_that_it_cannot_say() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose free memory is taken")
    found = record("nemotron_h")
    assert found["largest_batch"] is None
    assert found["peak"]["rows"] == 1
    assert "the memory of cpu is not known" in findings(found, "note")


def test_memory_that_does_not_hold_the_model() -> None:
    note = "the memory does not hold the model and a single sequence"
    found = record("qwen3_5", "--memory", "0.001")
    assert found["largest_batch"] == 0
    assert found["refused"] is False
    assert note in findings(found, "note").splitlines()
    assert note in " ".join(run("qwen3_5", "--memory", "0.001").output.split())
    assert note not in findings(record("qwen3_5", "--memory", "1"), "note")


def test_other_models_are_refused(tmp_path: Path) -> None:
    llama = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    found = record(saved(llama, tmp_path), code=1)
    assert found["refused"]
    assert "does not support model type 'llama'" in findings(found, "refused")
    assert "layers" not in found
    assert "replay cache: refused" in run(tmp_path, code=1).output


def test_layers_without_state_are_refused(tmp_path: Path) -> None:
    folder = saved(qwen3_5_config(["full_attention", "full_attention"]), tmp_path)
    assert "has no state-space layer" in findings(record(folder, code=1), "refused")


def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {id(one): one for one in (transformers, versions.transformers, check_report.transformers)}.values():
        monkeypatch.setattr(module, "__version__", "5.99.0")
    rt.disable()  # what is on already is not asked for its version again
    assert "supports transformers 5.17.0 to" in findings(record("qwen3_5", code=1), "refused")


def test_heads_that_groups_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = saved(nemotron_h_config(mamba_num_heads=5, mamba_head_dim=12, n_groups=2), tmp_path)
    assert "heads that are a multiple of groups; got" in findings(record(folder, code=1), "refused")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere/model",), "there is no folder '/nowhere/model'"),
        (("nobody/no-such-model",), "cannot read the configuration of 'nobody/no-such-model': "),
        (
            ("qwen35",),
            "there is no model 'qwen35'; the sample models are nemotron_h, nemotron_h_draft, qwen3_5, qwen3_5_draft",
        ),
        (("qwen3_5", "--checkpoint", "int4"), "checkpoint must be one of"),
        (("qwen3_5", "--readout", "fp8_sr"), "readout must be"),
        (("qwen3_5", "--decay-skip", "1"), "decay_skip must lie in"),
        (("qwen3_5", "--length", "8", "--prompt", "9"), "does not fit into --length 8"),
        (("qwen3_5", "--device-map", "nonsense"), "--device-map takes auto or a device"),
        (("qwen3_5", "--device-map", "meta"), "holds no values"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Loading")]
    assert len(lines) == 1, lines
    assert message in lines[0]


@pytest.mark.parametrize("memory", ["inf", "1e300", "nan", "-1"])
def test_memory_that_no_device_has(memory: str) -> None:
    assert "--memory" in run("qwen3_5", "--memory", memory, code=2).stderr


def changed(folder: Path, **values: Any) -> Path:
    """The configuration of a sample model with other values."""
    config = json.loads((Path(rt.sample_model("qwen3_5")) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_value_head_dim": None}, "'linear_value_head_dim' expected int, got NoneType"),
        ({"linear_value_head_dim": "12"}, "'linear_value_head_dim' expected int, got str"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn', expected one of float32, bfloat16, float16, float64"),
        ({"dtype": "nonsense"}, "cannot read the configuration"),
    ],
)
def test_configurations_of_nonsense(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    lines = run(changed(tmp_path, **values), code=2).stderr.splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]


def test_sizes_that_no_layer_can_have(tmp_path: Path) -> None:
    folder = changed(tmp_path, linear_num_key_heads=0)
    assert "needs sizes of at least 1" in run(folder, code=1).stdout


def test_another_dtype_than_that_of_the_configuration(tmp_path: Path) -> None:
    found = record(changed(tmp_path, dtype="float8_e4m3fn"), "--dtype", "bfloat16")
    assert (found["dtype"], found["refused"]) == ("bfloat16", False)


@pytest.mark.parametrize("method", ["fp8", None])
def test_quantised_weights_are_counted_unquantised(method: str | None, tmp_path: Path) -> None:
    name = {"quant_method": method} if method else {}
    folder = changed(tmp_path, quantization_config={"weight_block_size": [128, 128], **name})
    found, plain = record(folder), record("qwen3_5")
    assert found["weights_bytes"] == plain["weights_bytes"]
    said = "(fp8) " if method else ""
    note = (
        f"quantization_config {said}is left out of account: weights are counted unquantised, 2 bytes each in bfloat16"
    )
    assert note in findings(found, "note")
    assert "quantization_config" not in findings(plain, "note")
    assert note in " ".join(run(folder).output.split())


@pytest.mark.parametrize(
    ("options", "installed", "message"),
    [
        (("--window", "1"), "3.6.0", "window 1 writes the state at every step"),
        (("--window", "600"), "3.6.0", "longer than the kernels take (512)"),
        (("--checkpoint", "float64"), "3.6.0", "no kernels for a state in float64"),
        ((), None, "Triton is not installed"),
        ((), "3.4.0", "Triton 3.4.0 is too old"),
    ],
)
def test_what_does_not_gain(
    options: tuple[str, ...], installed: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = None if installed is None else checking.OLDEST_TRITON.__class__(installed)
    monkeypatch.setattr(checking, "installed_triton", lambda: version)
    found = record("nemotron_h", "--device-map", "cuda", "--memory", "1", *options)
    assert message in findings(found, "no gain")
    assert len([one for one in found["findings"] if one["level"] == "no gain"]) == 1
    assert list(found["devices"]) == ["cuda:0"]
    expected = "triton" if "--window" in options and "1" in options else "reference"
    assert {layer["steps"] for layer in found["layers"] if layer["kind"] == "mamba2"} == {expected}


def test_what_runs_the_steps_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on a GPU, also for weights that wait on the CPU; plain PyTorch on a CPU."""
    monkeypatch.setattr(checking, "installed_triton", lambda: checking.OLDEST_TRITON)
    for options, expected in (
        (("--device-map", "cuda", "--memory", "1"), "triton"),
        (("--device-map", "auto", "--memory", "0.005"), "triton"),
        (("--memory", "1"), "reference"),
    ):
        found = record("qwen3_5", *options)
        kinds = {layer["kind"]: layer["steps"] for layer in found["layers"]}
        assert kinds == {"gated_delta": expected, "attention": None}
    notes = findings(record("qwen3_5", "--device-map", "cuda", "--memory", "1"), "note")
    assert "rows keep no records unless they speculate" in notes
    assert "prompts are scanned by plain PyTorch" in notes


def test_drafters() -> None:
    is_old = Version(transformers.__version__) < Version("5.23")
    expected = "no MTP head can be used: use_mtp needs transformers 5.23.0" if is_old else "MTP head: one layer"
    assert expected in findings(record("qwen3_5"), "note")
    notes = findings(record("nemotron_h"), "note")
    assert expected in notes
    assert "no MTP head" in findings(record("nemotron_h_draft"), "note")
    assert "no early exit: assistant_early_exit is not supported" in notes
    assert "prompt lookup and assistant models" in notes


def test_layers_that_do_not_fit_the_gpu_are_offloaded() -> None:
    whole = record("qwen3_5", "--device-map", "auto", "--memory", "1")
    assert {layer["device"] for layer in whole["layers"]} == {"cuda:0"}
    assert whole["devices"]["cuda:0"]["weights_bytes"] == whole["weights_bytes"]
    found = record("qwen3_5", "--device-map", "auto", "--memory", "0.005")
    assert [layer["device"] for layer in found["layers"]] == sorted(
        (layer["device"] for layer in found["layers"]), reverse=True
    )
    assert {layer["device"] for layer in found["layers"]} == {"cuda:0", "cpu"}
    assert "brought over at every step" in findings(found, "no gain")
    where = ", wherever the weights are: "
    assert where in run("qwen3_5", "--device-map", "auto", "--memory", "0.005").output
    assert where not in run("qwen3_5", "--device-map", "auto", "--memory", "1").output


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_every_precision_can_be_predicted(family: str) -> None:
    model = on_meta(family)
    for checkpoint in CHECKPOINTS:
        load = Load(rt.ReplayConfig(checkpoint=checkpoint), 40, 20, torch.bfloat16)
        assert 0 < predict_peak(model, load, 3).step < predict_peak(model, load, 3).prefill
    for readout in READOUTS:
        peak = predict_peak(model, Load(rt.ReplayConfig(readout=readout), 40, 20, torch.bfloat16), 3)
        assert (
            peak.cache
            == meta_cache(
                model.config, Load(rt.ReplayConfig(readout=readout), 40, 20, torch.bfloat16), 3
            ).memory_footprint()
        )


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_activations_grow_with_rows_and_prompt(family: str) -> None:
    model = on_meta(family)

    def prefill(rows: int, prompt: int) -> int:
        return predict_peak(model, Load(rt.ReplayConfig(), 400, prompt, torch.float32), rows).prefill

    assert prefill(8, 50) == pytest.approx(2 * prefill(4, 50), rel=0.02)
    assert prefill(4, 300) > 2 * prefill(4, 60)  # states do not grow


def on_meta(family: str) -> Any:
    config = ALL_FAMILIES[family]().config
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("library", [True, False])
def test_predictions_are_near_what_an_h200_measured(library: bool) -> None:
    """The benchmark's prompts went through the libraries' scans; plain ones take more."""
    cells = json.loads(RESULTS.read_text())["cells"]
    for name in ("nemotron-3-nano-4b", "qwen3.5-4b"):
        cell = cells[f"{name}/replay_static/b256/p64"]
        model = load_presets()[name].build("meta", torch.bfloat16)
        config = rt.ReplayConfig(max_draft=cell.get("max_draft", 8))  # older cells do not say, and had 8
        load = Load(config, cell["prompt"] + 81, cell["prompt"], torch.bfloat16, library)
        predicted = predict_peak(model, load, cell["batch"]).total / GIB
        low, high = (0.95, 1.05) if library else (1, 1.1)
        assert low < predicted / cell["peak_gib"] < high


def test_the_largest_batch_is_the_largest() -> None:
    footprints = [{"checkpoint": 10, "attention": 5}] * 2

    def peak(rows: int) -> Peak:
        return Peak(rows, 100, {}, 0, prefill=7 * rows + 3 + rows // 10, step=5)

    for memory in (0, 100, 139, 140, 141, 1000, 99999):
        place = Place("cuda:0", memory, weights=100, layers=[0, 1])
        found = largest_batch(Places({"cuda:0": place}, ["cuda:0"] * 2, {}), footprints, peak)
        fits = [rows for rows in range(1, 3000) if 100 + 30 * rows + peak(rows).prefill <= memory]
        assert found == max(fits, default=0)
    asked: list[int] = []
    place = Place("cuda:0", 2**60, weights=100, layers=[0, 1])

    def counted(rows: int) -> Peak:
        asked.append(rows)
        return peak(rows)

    assert largest_batch(Places({"cuda:0": place}, ["cuda:0"] * 2, {}), footprints, counted) == MOST_ROWS - 1
    assert len(asked) < 10, "more fit than are asked for: no step row by row"
    two = {name: Place(name, memory, 0, [index]) for index, (name, memory) in enumerate([("a", 900), ("b", 90)])}
    assert largest_batch(Places(two, ["a", "b"], {}), footprints, functools.partial(peak)) == 3
    two["b"].memory = None
    assert largest_batch(Places(two, ["a", "b"], {}), footprints, peak) is None


def test_footprints_of_layers_add_up() -> None:
    load = Load(rt.ReplayConfig(checkpoint="nvfp4", readout="fp8"), 64, 8, torch.bfloat16)
    cache = meta_cache(qwen3_5_config(), load, rows=2)
    parts = layer_footprints(cache)
    assert {kind: sum(part[kind] for part in parts) for kind in parts[0]} == cache.memory_footprint()
    assert len(cache.layers) == len(parts)
