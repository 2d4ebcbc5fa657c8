"""Plot the benchmarks' JSON into docs/ and print tables in markdown."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.plots import (
    plot_bandwidth,
    plot_generate,
    plot_precision,
    plot_precision_steps,
    plot_speculative,
    plot_speed_up,
)
from benchmarks.precision_tables import (
    HEADS_SUMMARY,
    RATIO_COLUMNS,
    SYNTHETIC_COLUMNS,
    heads,
    heads_summary,
    precision_summary,
    ratio_rows,
    summary_columns,
    synthetic_rows,
    texts,
)
from benchmarks.precision_tables import synthetic as layers
from benchmarks.results import RESULTS, ROOT
from benchmarks.speculative_tables import REAL_COLUMNS, SUMMARY_COLUMNS, real, real_rows, speculative_summary, synthetic
from benchmarks.summary import (
    KERNEL_SUMMARY,
    LARGEST_SUMMARY,
    PRECISION_SUMMARY,
    fixed,
    generate_columns,
    generate_summary,
    kernel_summary,
    largest,
    largest_summary,
    precisions,
)
from benchmarks.summary import precision_summary as step_precision_summary
from benchmarks.tables import as_markdown


def main(
    kernels: Annotated[Path | None, typer.Option(help="By default the newest results/kernels-*.json.")] = None,
    generate: Annotated[Path | None, typer.Option(help="By default the newest results/generate-*.json.")] = None,
    speculative: Annotated[Path | None, typer.Option(help="By default the newest results/speculative-*.json.")] = None,
    precision: Annotated[Path | None, typer.Option(help="By default the newest results/precision-*.json.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the plots.")] = ROOT / "docs",
    suffix: Annotated[str, typer.Option(help="svg or png.")] = "svg",
) -> None:
    """Draw what there are results for."""
    given = {"kernels": kernels, "generate": generate, "speculative": speculative, "precision": precision}
    for benchmark, path in given.items():
        path = path or newest(benchmark)
        if path is None:
            print(f"no results/{benchmark}-*.json")
            continue
        data = json.loads(path.read_text())
        cells, where = data["cells"], caption(data)
        if not cells:
            print(f"no cells in {path}")
        elif benchmark == "kernels":
            report(
                plot_speed_up(cells, output / f"kernels-speed-up.{suffix}", where),
                plot_bandwidth(cells, output / f"kernels-bandwidth.{suffix}", where),
            )
            print(f"\n{as_markdown(KERNEL_SUMMARY, kernel_summary(cells))}")
            if set(precisions(cells)) - {"float32", "bfloat16"}:
                report(plot_precision_steps(cells, output / f"kernels-precision.{suffix}", where))
                print(f"\n{as_markdown(PRECISION_SUMMARY, step_precision_summary(cells))}")
            print(f"\n{where}\n")
        elif benchmark == "speculative":
            known = {key: cell for key, cell in synthetic(cells).items() if cell["status"] == "measured"}
            if known:
                report(plot_speculative(known, output / f"speculative-speed-up.{suffix}", where))
                print(f"\n{as_markdown(SUMMARY_COLUMNS, speculative_summary(known))}")
            if real(cells):
                print(f"\n{as_markdown(REAL_COLUMNS, real_rows(real(cells)))}")
            print(f"\n{where}\n")
        elif benchmark == "precision":
            known = {key: cell for key, cell in texts(cells).items() if "bins" in cell}
            if known:
                report(plot_precision(known, output / f"precision-divergence.{suffix}", where))
                print(f"\n{as_markdown(summary_columns(known), precision_summary(known))}")
                print(f"\n{as_markdown(RATIO_COLUMNS, ratio_rows(known))}")
                print(f"\n{as_markdown(HEADS_SUMMARY, heads_summary(heads(cells)))}")
            if layers(cells):
                print(f"\n{as_markdown(SYNTHETIC_COLUMNS, synthetic_rows(layers(cells)))}")
            print(f"\n{where}\n")
        else:
            known = fixed(cells)
            if known:
                report(plot_generate(known, output / f"generate-step.{suffix}", where))
                print(f"\n{as_markdown(generate_columns(known), generate_summary(known))}")
            if largest(cells):
                print(f"\n{as_markdown(LARGEST_SUMMARY, largest_summary(largest(cells)))}")
            print(f"\n{where}\n")


def newest(benchmark: str) -> Path | None:
    """The results file measured last; of one day the one with more cells."""

    def age(path: Path) -> tuple[str, int]:
        data = json.loads(path.read_text())
        return max((where["date"] for where in data["environments"]), default=""), len(data["cells"])

    return max(RESULTS.glob(f"{benchmark}-*.json"), key=age, default=None)


def caption(data: dict[str, Any]) -> str:
    """GPU, versions and commits of all cells."""
    places = {
        part["environment"]
        for cell in data["cells"].values()
        for part in (cell, *(step for step in cell.get("replay", {}).values() if "environment" in step))
    }
    used = [data["environments"][index] for index in sorted(places)]
    parts = []
    for name in ("gpu", "torch", "triton", "transformers", "commit", "date"):
        values = ", ".join(dict.fromkeys(str(where[name]) for where in used))
        parts.append(values if name in ("gpu", "date") else f"{name} {values}")
    return " · ".join(parts)


def report(*paths: Path) -> None:
    """Say what was written."""
    for path in paths:
        print(f"written {path}")


if __name__ == "__main__":
    typer.run(main)
