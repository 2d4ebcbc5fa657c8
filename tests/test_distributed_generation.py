"""The pieces of data-parallel generation: parts, prompts, batches, settings, draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.cli.loading import CommandError, Loaded, load
from scripts.distributed_generation.generation import Draw, Engine, random_numbers
from scripts.distributed_generation.parts import Parts, Writer, encoded
from scripts.distributed_generation.prompts import Batch, Prompt, encode, form_batches, read_prompts
from scripts.distributed_generation.settings import Settings, differences

MODEL, NEW = "qwen3_5_draft", 6
TEXTS = (
    "import os\nimport ",
    "def add(a, b):\n    return a",
    "x = [",
    "try:\n    import json\nexcept ",
    "with open(path",
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(rt.sample_model(MODEL), "float32", "cpu")


def test_broken_lines_within_a_part_are_reported(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out")
    parts.folder.mkdir()
    writer = Writer(parts.part(0))
    for index in range(3):
        writer.write(encoded({"index": index, "prompt": "half a pair: \ud800, é"}))
    whole = parts.part(0).read_bytes()
    assert parts.count() == 3
    for end in range(len(whole)):
        parts.part(0).write_bytes(whole[:end])
        parts.repair()
        kept = whole[: whole.rfind(b"\n", 0, end) + 1]
        assert parts.part(0).read_bytes() == kept
        assert sorted(parts.done()) == list(range(kept.count(b"\n")))
    parts.part(0).write_bytes(whole.replace(b'"index": 1', b'"in\0ex": 1'))
    with pytest.raises(CommandError, match="remove it"):
        parts.done()
    parts.part(0).write_bytes(whole)
    with pytest.raises(CommandError, match="1 prompts are missing"):
        parts.merge(4, {})


def test_batches_follow_from_the_prompts_alone() -> None:
    lengths = [3, 9, 1, 9, 4, 17, 2]
    prompts = [Prompt(index, "x", ids=(1,) * length) for index, length in enumerate(lengths)]
    prompts.insert(2, Prompt(7, None, error="broken"))
    assert form_batches(prompts, 2, 1) == [
        Batch(0, (5, 1), 17), Batch(1, (3, 4), 9), Batch(2, (0, 6), 3), Batch(3, (2,), 1)
    ]  # fmt: skip
    assert [batch.length for batch in form_batches(prompts, 2, 8)] == [24, 16, 8, 8]


def test_prompts_are_read_line_by_line(tmp_path: Path, loaded: Loaded) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("\ufeffone\r\n\n  two\u2028\x85 \nthree\n".encode() + b"\xff\n")
    texts = read_prompts(path, "prompt", None)
    assert [prompt.text for prompt in texts] == ["one", "  two\u2028\x85 ", "three", None]
    assert "line 5 is not UTF-8" in (texts[3].error or "")
    assert len(read_prompts(path, "prompt", 2)) == 2
    path = tmp_path / "in.jsonl"
    rows = ['{"text": "a", "id": [1]}', "[", "[1]", '{"x": 1, "id": 2}', '{"text": 3}', '{"text": "\\ud800"}']
    rows.append(json.dumps({"text": "x = 1\n" * 2000}))
    path.write_text("\n".join(rows))
    prompts = encode(read_prompts(path, "text", None), loaded.tokenizer, 4096, NEW)
    assert prompts[0].head == {"index": 0, "id": [1], "prompt": "a"}
    assert prompts[0].ids
    found = [str(prompt.error) for prompt in prompts]
    for error, message in zip(
        found,
        ["None", "line 2 is not JSON", "expected an object", "has no 'text'", "must be a string", "encoded", "4096"],
        strict=True,
    ):
        assert message in error
    with pytest.raises(CommandError, match="has no prompt: line 1 has no 'prompt', only 'text', 'id'"):
        read_prompts(path, "prompt", None)
    with pytest.raises(CommandError, match="cannot read"):
        read_prompts(tmp_path / "none", "prompt", None)


@pytest.mark.parametrize("line", ["[" * 100000, '{"prompt": "x", "id": ' + "[" * 100000 + "]" * 100000 + "}"])
def test_lines_nested_too_deeply_are_errors(tmp_path: Path, line: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    prompts = read_prompts(path, "prompt", None)
    assert [prompt.error for prompt in prompts] == [None, "line 2 is nested too deeply"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"{}", b"\xff", b"[" * 100000, b'{"settings": 1, "environment": {}, "finished": null}',
     b'{"settings": {}, "environment": {}, "finished": {}}'],
    ids=["empty", "half", "list", "number", "no-keys", "no-text", "deep", "other-keys", "no-bytes"],
)  # fmt: skip
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    parts = Parts(tmp_path / "out")
    parts.folder.mkdir()
    parts.header.write_bytes(content)
    with pytest.raises(CommandError, match=r"header\.json is damaged.*--redo"):
        parts.begin({}, {}, redo=False)
    assert parts.begin({}, {}, redo=True) == (False, [])
    assert parts.begin({}, {}, redo=False) == (False, [])


@pytest.mark.parametrize("output", ["", "/", ".", ".."])
def test_outputs_that_are_folders_are_refused(output: str) -> None:
    with pytest.raises(CommandError, match="--output must name a file"):
        Parts(Path(output))


def test_wrong_settings() -> None:
    for options, message in (
        ({"dtype": "int4"}, "--dtype"),
        ({"cache": "dynamic", "window": 4, "prompt_lookup": 2}, "--window, --prompt-lookup"),
        ({"checkpoint": "fp7"}, "checkpoint must be one of"),
        ({"do_sample": True, "temperature": 0.0}, "--temperature"),
        ({"num_return_sequences": 2}, "--do-sample"),
    ):
        with pytest.raises(CommandError, match=message):
            Settings("qwen3_5", **options)  # type: ignore[arg-type]
    plain, drawn = Settings(MODEL, seed=1), Settings(MODEL, seed=1, temperature=2.0)
    assert differences(plain.fingerprint("p", "cpu"), drawn.fingerprint("p", "cpu")) == [], "it does not sample"
    rounded = Settings(MODEL, seed=1, checkpoint="fp8_sr").fingerprint("p", "cpu")
    assert sorted(differences(plain.fingerprint("p", "cuda"), rounded)) == [
        "--checkpoint: float32 then, fp8_sr now", "--device: cuda then, cpu now", "--seed: not used then, 1 now",
        "--threads: not used then, 1 now",
    ]  # fmt: skip


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    found = []
    for content in (b"abc", b"abd", b"abcd"):
        weights.write_bytes(content)
        found.append(Settings(str(tmp_path)).fingerprint("", "cpu")["--model"])
    assert len(set(found)) == 3


def test_draws_follow_the_distribution_and_nothing_else() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -torch.inf, 0.5])
    settings = Settings(MODEL, do_sample=True, temperature=0.7)
    steps = 4000
    numbers = random_numbers(0, 5, 0, steps)
    draw = Draw(numbers[None], 3, settings)
    tokens = [draw(torch.zeros(1, 3 + step), scores[None]).argmax().item() for step in range(steps)]
    share = torch.bincount(torch.tensor(tokens), minlength=5) / steps
    torch.testing.assert_close(share, (scores / 0.7).softmax(0), atol=0.03, rtol=0)
    assert share[3] == 0
    together = Draw(torch.stack([random_numbers(0, 4, 0, steps), numbers]), 3, settings)
    others = [together(torch.zeros(2, 3 + step), scores.expand(2, 5)).argmax(-1)[1].item() for step in range(50)]
    assert others == tokens[:50]
    assert not torch.equal(random_numbers(0, 5, 1, 9), numbers[:9])
    assert not torch.equal(random_numbers(1, 5, 0, 9), numbers[:9])


def engine(loaded: Loaded, texts: Sequence[str], **options: Any) -> tuple[Engine, list[Batch]]:
    settings = Settings(MODEL, max_new_tokens=20, **options)
    prompts = encode([Prompt(index, text) for index, text in enumerate(texts)], loaded.tokenizer, None, 20)
    return Engine(loaded, settings, prompts), form_batches(prompts, settings.batch, settings.multiple)


def test_samples_do_not_depend_on_companions_drafts_or_padding(loaded: Loaded) -> None:
    """Up to rounding, which draws hardly ever notice in float32."""
    texts, found = TEXTS[:4], []
    for options in ({"batch": 4}, {"batch": 1}, {"batch": 3, "pad_multiple": 16}, {"batch": 4, "prompt_lookup": 3}):
        maker, batches = engine(loaded, texts, do_sample=True, num_return_sequences=2, **options)
        lines = {line["index"]: line["completions"] for batch in batches for line in maker.run(batch)}
        found.append([lines[index] for index in range(len(texts))])
    assert found[1:] == found[:1] * 3
    assert all(one != other for one, other in found[0])


def test_fixed_shapes_stay_the_same(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches have the same rows and a padded length; what fills the last one up is left out."""
    shapes, generate = [], type(loaded.model).generate

    def spied(self: Any, *arguments: Any, **options: Any) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return generate(self, *arguments, **options)

    monkeypatch.setattr(type(loaded.model), "generate", spied)
    maker, batches = engine(loaded, TEXTS, batch=2, cache="replay_static")
    lines = [line for batch in batches for line in maker.run(batch)]
    assert shapes == [(2, 64)] * 3
    plain, batches = engine(loaded, TEXTS, batch=2)
    assert lines == [line for batch in batches for line in plain.run(batch)]
    assert set(shapes[3:]) != {(2, 64)}


def test_end_tokens_end_a_line(loaded: Loaded) -> None:
    maker, _ = engine(loaded, ["x"])
    prompt = Prompt(0, "x", ids=(5,))
    line = maker.line(prompt, [[7, 2, 9, 2], [7, 8, 9, 10]])
    assert line["completion_tokens"] == [2, 4]
    assert line["finish"] == ["end", "length"]


@pytest.mark.parametrize("size", [1, 4])
def test_out_of_memory_says_where_and_what_to_do(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def generate(self: Any, **_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(loaded.model), "generate", generate)
    maker, batches = engine(loaded, ["x = 1", "y"], batch=size)
    with pytest.raises(CommandError, match=r"batch 1, .* prompts 0") as raised:
        maker.run(batches[0])
    assert ("--batch 2 --redo" if size == 4 else "--batch is 1 already") in str(raised.value)
