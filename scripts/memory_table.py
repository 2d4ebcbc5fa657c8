"""What each precision of the state costs in memory, per sequence, as a page in markdown.

Asks the package: caches of one row are built on the device "meta", in the shapes of the four large presets. Nothing is
measured and no memory is taken. docs/memory.md is what this prints.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.operators import plain_bytes
from benchmarks.precision_grid import Setting, parse_precisions
from benchmarks.presets import Preset, chosen_presets
from benchmarks.tables import as_markdown

import replay_transformers as rt
from replay_transformers.geometry import STATE_SPACE
from replay_transformers.kernels.formats import FORMATS

STOCK = ("float32", "bfloat16")
PRECISIONS = (
    "float32", "float32/bfloat16", "float32/fp8", "float32/nvfp4", "bfloat16", "float16_sr", "fp8", "nvfp4",
)  # fmt: skip
COLUMNS = ("state", "checkpoint", "copy", "rings", "convolution", "together", "read per step", "written per step")
ACTIVATIONS = torch.bfloat16
SHORT, LONG = 1024, 1024 + 8000  # tokens of attention; the difference is a thousand times 8
MIB = 2**20

OPENING = """\
# Memory

What a sequence takes in a cache, by the precision of its state: `scripts/memory_table.py` (with the extra `dev`) prints
this page. It builds caches of one row on the device "meta" from the configurations of released models and asks them
(`memory_footprint()`); nothing here was measured on a GPU.

All figures are MiB per sequence, over all state-space layers, with bfloat16 activations, `window` {window} and
`max_draft` 0, as `generate` builds caches for calls without a drafter. With `max_draft` {max_draft}, which caches of
your own have by default, rings take {rings:.1f} and the convolution {convolution:.1f} times as much. *copy* is what
`readout=` adds. *Read* and *written per step* are state and records of a step that does not flush, half-way through the
window, without the convolution's inputs; one step in {window} also reads the checkpoint, and writes it and the copy.
Stock reads and writes its whole state at every step. Attention's keys and values come on top, the same for every row of
a table.
"""


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Models; by default the four large ones.")] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help=f"Precisions; by default {', '.join(PRECISIONS)}.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write as well, for example docs/memory.md.")] = None,
) -> None:
    """Print the page."""
    text = page(chosen_presets(preset), parse_precisions(checkpoint or list(PRECISIONS), "auto"))
    print(text, end="")
    if output is not None:
        output.write_text(text)


def page(presets: list[Preset], precisions: list[Setting]) -> str:
    """The text of docs/memory.md."""
    config = rt.ReplayConfig()
    small, large = (footprint(presets[0], Setting("float32"), max_draft=count) for count in (0, config.max_draft))
    more = {name: large[kind] / small[kind] for name, kind in (("rings", "ring"), ("convolution", "convolution"))}
    sections = [OPENING.format(window=config.window, max_draft=config.max_draft, **more)]
    for preset in presets:
        rows = [*stock_rows(preset), *replay_rows(preset, precisions)]
        sections.append(f"## {preset.name}\n\n{introduction(preset)}\n\n{as_markdown(COLUMNS, rows)}\n")
    return "\n".join(sections)


def footprint(preset: Preset, precision: Setting, length: int = SHORT, max_draft: int = 0) -> dict[str, int]:
    """Bytes by kind of a cache of one row."""
    config = dataclasses.replace(precision.config("auto"), max_draft=max_draft)
    cache = rt.ReplayCache(preset.config(), config, max_cache_len=length)
    cache.allocate(1, ACTIVATIONS, torch.device("meta"))
    return cache.memory_footprint()


def introduction(preset: Preset) -> str:
    """A state-space layer's shape, and what attention takes."""
    layer, kinds = preset.geometry(), [geometry.kind for geometry in preset.geometries()]
    each = [footprint(preset, Setting("float32"), length)["attention"] for length in (SHORT, LONG)]
    attention = 1000 * (each[1] - each[0]) / (LONG - SHORT)
    shape = f"{layer.heads} heads, {layer.head_dim} x {layer.state_dim}"
    return (
        f"{sum(kind in STATE_SPACE for kind in kinds)} state-space layers of {shape}; "
        f"{kinds.count('attention')} layers of attention, {attention / MIB:.1f} MiB per 1,000 tokens."
    )


def stock_rows(preset: Preset) -> Iterator[list[str]]:
    """Stock's state in two precisions; its convolution keeps a window of the kernel's length."""
    layer = preset.geometry()
    convolution = preset.ssm_layers * layer.conv_dim * layer.conv_kernel * ACTIVATIONS.itemsize
    for name in STOCK:
        state = footprint(preset, Setting(name))["checkpoint"]
        yield row(f"stock, {name}", [state, 0, 0, convolution, state + convolution, state, state])


def replay_rows(preset: Preset, precisions: list[Setting]) -> Iterator[list[str]]:
    """A replay cache's buffers."""
    for precision in precisions:
        sizes = footprint(preset, precision)
        kinds = [sizes[kind] for kind in ("checkpoint", "readout", "ring", "convolution")]
        traffic = plain_bytes(preset.geometry(), 1, 1, rt.ReplayConfig().window // 2, FORMATS[precision.read])
        yield row(precision.label, [*kinds, sum(kinds), *(preset.ssm_layers * count for count in traffic)])


def row(name: str, sizes: list[Any]) -> list[str]:
    """Bytes as MiB, nothing as a dash."""
    return [name, *(f"{size / MIB:.2f}" if size else "-" for size in sizes)]


if __name__ == "__main__":
    typer.run(main)
