"""What is recorded inside `generate`: a mark at every step, logits for comparison, tokens that are forced."""

import itertools
import time
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from .several_gpus import devices_of
from .timing import synchronise


class StepRecorder(LogitsProcessor):
    """Called by `generate` once per step.

    Args:
        device: where the model is; of several devices the one of its outputs.
        rows: rows whose logits are kept; none by default.
        forced: ``[B, steps]`` tokens to go on with, whatever the logits say.
    """

    def __init__(self, device: torch.device, rows: list[int] | None = None, forced: torch.Tensor | None = None):
        self.device = device
        self.rows = rows
        self.forced = forced
        self.logits: list[torch.Tensor] = []
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Take the time, on the GPU's own clock if there is one."""
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mark the step; keep its logits and force its token if asked to."""
        step = len(self.marks) - 1  # the first mark is the start of the call
        self.mark()
        if self.rows is not None:
            self.logits.append(scores[self.rows].float().cpu())
        if self.forced is not None:
            chosen = torch.full_like(scores, float("-inf"))
            return chosen.scatter_(1, self.forced[:, step : step + 1], 0.0)  # type: ignore[return-value]
        return scores

    def milliseconds(self) -> list[float]:
        """From mark to mark: the first is prompt and first token, each other one a decode step."""
        pairs = itertools.pairwise(self.marks)
        if self.device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


def run_generate(model: Any, ids: torch.Tensor, new_tokens: int, recorder: StepRecorder, **arguments: Any) -> Any:
    """Greedy `generate` of exactly ``new_tokens`` tokens; returns ``(seconds, tokens)``."""
    devices = devices_of(model)
    synchronise(devices)
    start = time.perf_counter()
    recorder.mark()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([recorder]),
        **arguments,
    )
    synchronise(devices)
    return time.perf_counter() - start, output
