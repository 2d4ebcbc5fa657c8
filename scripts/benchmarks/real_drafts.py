"""Real text: the sample models continue files that they were not trained on, with each drafter."""

import fnmatch
from dataclasses import dataclass, replace
from typing import Any

import replay_transformers as rt
from replay_transformers.cli.loading import Loaded, load
from replay_transformers.cli.speculation import PLAIN, DraftRun, SpeculationSettings, speculate

FAMILIES = ("qwen3_5", "nemotron_h")
LENGTHS = ("fixed", "adaptive")


@dataclass(frozen=True)
class RealCell:
    """A sample model, and how long drafts are.

    Args:
        texts: files that are continued. prompt: tokens of them that are given.
        backend: what compiles the target's forwards.
    """

    family: str
    settings: SpeculationSettings
    dtype: str
    texts: int
    prompt: int
    backend: str

    @property
    def key(self) -> str:
        """Its name in the results."""
        settings = self.settings
        return f"real/{self.family}/{settings.cache}/{self.dtype}/{settings.length}/d{settings.drafts}/{self.backend}"


def real_cells(
    settings: SpeculationSettings, dtype: str, texts: int, prompt: int, backend: str, only: list[str] | None
) -> list[RealCell]:
    """Each sample model, with drafts of full length and with as many tokens as pay."""
    cells = [
        RealCell(family, replace(settings, length=length), dtype, texts, prompt, backend)
        for family in FAMILIES
        for length in LENGTHS
    ]
    return [cell for cell in cells if not only or any(fnmatch.fnmatch(cell.key, f"*{part}*") for part in only)]


def load_family(family: str, dtype: str, device: str) -> tuple[Loaded, Any]:
    """A sample model, and the smaller one that drafts for it."""
    models = [load(rt.sample_model(name), dtype, device) for name in (family, f"{family}_draft")]
    return models[0], models[1].model


def measure_real(loaded: Loaded, assistant: Any, texts: list[str], cell: RealCell) -> dict[str, Any]:
    """All texts with each drafter, one at a time: times and counts are sums over the texts."""
    runs = []
    for text in texts[: cell.texts]:
        inputs = {name: ids[:, : cell.prompt] for name, ids in loaded.encode(text).items()}
        runs.append(speculate(loaded, assistant, inputs, cell.settings))
    plain = sum(run[PLAIN].median_seconds for run in runs)
    return {
        "model": cell.family,
        "dtype": cell.dtype,
        "cache": cell.settings.cache,
        "draft_length": cell.settings.length,
        "drafts": cell.settings.drafts,
        "backend": cell.backend,
        "texts": len(runs),
        "prompt": cell.prompt,
        "new_tokens": cell.settings.max_new_tokens,
        "drafters": {name: _summed([run[name] for run in runs], plain) for name in runs[0]},
    }


def _summed(runs: list[DraftRun], plain: float) -> dict[str, Any]:
    refusal = next((run.refusal for run in runs if run.refusal is not None), None)
    if refusal is not None:
        return {"refusal": refusal}
    seconds = sum(run.median_seconds for run in runs)
    total = DraftRun(
        turns=sum(run.turns for run in runs),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
    )
    return {
        "seconds": round(seconds, 4),
        "speed_up": round(plain / seconds, 4),
        "forwards": sum(run.forwards for run in runs),
        "tokens_per_forward": round(total.tokens_per_forward, 4),
        "drafted": total.drafted,
        "accepted": total.accepted,
        "texts_equal": sum(run.is_equal for run in runs),
    }
