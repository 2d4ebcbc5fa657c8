"""What a check found, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replay_transformers.cli.check import NO_GAIN, REFUSED, Check
from replay_transformers.geometry import LayerGeometry

__all__ = ["check_as_json", "check_as_text"]

KINDS = {"mamba2": "Mamba-2", "gated_delta": "Gated DeltaNet", "attention": "attention", "none": "nothing to cache"}
COLUMNS = {
    "checkpoint": "state", "readout": "copy", "ring": "rings", "convolution": "conv", "attention": "keys",
}  # fmt: skip
STEPS = {"triton": "Triton", "reference": "PyTorch", None: ""}
STYLES = {REFUSED: "bold red", NO_GAIN: "bold yellow"}
MIB, GIB = 2**20, 2**30


def check_as_text(check: Check) -> Group:
    """The layers, the memory, the findings and the verdict."""
    dtype = str(check.dtype).removeprefix("torch.")
    head = Text(f"{check.model_class}, {dtype}, weights {check.weights / GIB:.2f} GiB", style="bold")
    parts: list[RenderableType] = [head]
    if check.footprints:
        parts.append(_layers(check))
    parts += [Text(line) for line in _memory(check)]
    parts += [Text.assemble((f"{one.level}: ", STYLES.get(one.level, "bold")), one.text) for one in check.findings]
    verdict = ("refused", "bold red") if check.is_refused else ("supported", "bold green")
    return Group(*parts, Text.assemble("replay cache: ", verdict))


def _layers(check: Check) -> Table:
    assert check.places is not None
    kinds = [kind for kind, size in check.per_sequence.items() if size]
    table = Table(
        title="KiB per sequence in the cache; heads x channels x state; what runs the steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for title in ("", "layer", "device", "steps"):
        table.add_column(title, no_wrap=True)
    for kind in kinds:
        table.add_column(COLUMNS[kind], justify="right", no_wrap=True)
    rows = zip(check.geometries, check.places.of_layer, check.footprints, strict=True)
    for index, (layer, device, sizes) in enumerate(rows):
        cells = [_kib(sizes[kind]) for kind in kinds]
        steps, end = STEPS[check.implementation(index)], index + 1 == len(check.geometries)
        table.add_row(str(index), _describe(layer), device, steps, *cells, end_section=end)
    table.add_row("", "all", "", "", *(_kib(check.per_sequence[kind]) for kind in kinds))
    return table


def _kib(size: int) -> str:
    return f"{size / 1024:,.{0 if size >= 100 * 1024 else 1}f}" if size else "-"


def _describe(layer: LayerGeometry) -> str:
    name = KINDS[layer.kind]
    if layer.kind == "attention":
        return f"{name} {layer.heads}x{layer.head_dim}"
    if layer.kind == "none":
        return name
    return f"{name} {layer.heads}x{layer.head_dim}x{layer.state_dim}"


def _memory(check: Check) -> Iterator[str]:
    if not check.footprints:
        return
    question, total = check.question, sum(check.per_sequence.values())
    yield f"cache: {total / MIB:.2f} MiB per sequence of {question.length} tokens"
    for name, place in check.places.running.items() if check.places else ():
        room = "memory not known" if place.memory is None else f"{place.memory / GIB:.2f} GiB"
        yield f"{name}: {room}, {place.weights / GIB:.2f} GiB of weights, {len(place.layers)} layers"
    if check.batch is not None:
        yield f"largest batch that fits, prompts of {question.prompt} tokens: {check.batch}"
    if check.peak is not None:
        peak, places = check.peak, check.places
        are_several = places is not None and bool(places.offloaded or len(places.running) > 1)
        where = ", wherever the weights are" if are_several else ""
        yield (
            f"at the peak of a batch of {peak.rows}{where}: {peak.total / GIB:.2f} GiB = "
            f"weights {peak.weights / GIB:.2f}, cache {sum(peak.cache.values()) / GIB:.2f}, "
            f"activations of the prompt {peak.prefill / GIB:.2f} or of a step {peak.step / GIB:.2f}, "
            f"whichever is larger (logits: {peak.logits / GIB:.2f})"
        )


def check_as_json(check: Check) -> dict[str, Any]:
    """A check as JSON values."""
    question = check.question
    record: dict[str, Any] = {
        "model": question.source,
        "class": check.model_class,
        "transformers": transformers.__version__,
        "dtype": str(check.dtype).removeprefix("torch."),
        "settings": question.settings,
        "length": question.length,
        "prompt": question.prompt,
        "refused": check.is_refused,
        "findings": [asdict(finding) for finding in check.findings],
        "weights_bytes": check.weights,
    }
    if check.places is not None:
        record["layers"] = [
            {
                "index": index,
                **asdict(layer),
                "device": check.places.of_layer[index],
                "steps": check.implementation(index),
                "bytes_per_sequence": sizes,
            }
            for index, (layer, sizes) in enumerate(zip(check.geometries, check.footprints, strict=True))
        ]
        record["bytes_per_sequence"] = check.per_sequence
        record["devices"] = {
            name: {"memory_bytes": place.memory, "weights_bytes": place.weights, "layers": place.layers}
            for name, place in check.places.running.items()
        }
    record["largest_batch"] = check.batch
    record["peak"] = None if check.peak is None else {**asdict(check.peak), "total": check.peak.total}
    return record
