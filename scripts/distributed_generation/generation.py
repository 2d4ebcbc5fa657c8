"""Generates a batch: greedy, or sampling in which every prompt has random numbers of its own."""

import hashlib
from contextlib import nullcontext
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import replay_transformers as rt
from replay_transformers.cli.loading import CommandError, Loaded

from .prompts import Batch, Prompt
from .settings import REPLAY, Settings

NO_MEMORY_ON_CPU = "can't allocate memory"


class Draw(LogitsProcessor):
    """Leaves one token of each row, drawn with the row's own random number for that step; greedy decoding takes it.

    What is drawn depends on the scores and the numbers alone: not on the other rows, and not on how many tokens of a
    draft are judged at once.

    Args:
        numbers: float64 ``[B, steps]`` in [0, 1).
        length: tokens of the padded prompts.
        settings: temperature and top-p.
    """

    def __init__(self, numbers: torch.Tensor, length: int, settings: Settings) -> None:
        self.numbers, self.length = numbers, length
        self.warpers = LogitsProcessorList()
        if settings.temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[B, vocabulary]`` that are -inf but for one token in each row."""
        step = min(input_ids.shape[1] - self.length, self.numbers.shape[1] - 1)  # a last call may be in vain
        warped: Any = self.warpers(input_ids, scores)  # type: ignore[arg-type]
        mass = warped.double().softmax(-1).cumsum(-1)
        aim = self.numbers[:, step, None] * mass[:, -1:]
        token = torch.searchsorted(mass, aim, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def random_numbers(seed: int, index: int, sequence: int, steps: int) -> torch.Tensor:
    """The numbers of one sequence of one prompt, float64 ``[steps]`` in [0, 1): the same on every device."""
    key = hashlib.sha256(f"{seed}/{index}/{sequence}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.rand(steps, generator=generator, dtype=torch.float64)


class Engine:
    """A model with the settings of a run.

    Args:
        loaded: model and tokenizer; the tokenizer is set to pad on the left.
        settings: of the run. Where shapes are fixed, every batch is filled up to the same number of rows.
        prompts: all of them, encoded.
    """

    def __init__(self, loaded: Loaded, settings: Settings, prompts: list[Prompt]) -> None:
        self.model, self.tokenizer, self.settings, self.prompts = loaded.model, loaded.tokenizer, settings, prompts
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        usable = sum(not prompt.error for prompt in prompts)
        self.rows = min(settings.batch, usable) if settings.has_fixed_shapes else 0
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def run(self, batch: Batch) -> list[dict[str, Any]]:
        """The lines of a batch's prompts.

        Raises:
            CommandError: the memory does not suffice.
        """
        settings, copies = self.settings, self.settings.num_return_sequences
        chosen = [self.prompts[index] for index in batch.indices]
        filled = chosen + chosen[-1:] * (self.rows - len(chosen))  # with fixed shapes: the rest is thrown away
        ids = [{"input_ids": list(prompt.ids)} for prompt in filled for _ in range(copies)]
        inputs = self.tokenizer.pad(ids, padding="max_length", max_length=batch.length, return_tensors="pt")
        processors = LogitsProcessorList()
        if settings.do_sample:
            numbers = [
                random_numbers(settings.seed, prompt.index, copy, settings.max_new_tokens)
                for prompt in filled
                for copy in range(copies)
            ]
            processors.append(Draw(torch.stack(numbers).to(self.model.device), batch.length, settings))
        try:
            with rt.enable() if settings.cache in REPLAY else nullcontext():
                sequences = self.model.generate(
                    input_ids=inputs["input_ids"].to(self.model.device),
                    attention_mask=inputs["attention_mask"].to(self.model.device),
                    max_new_tokens=settings.max_new_tokens,
                    do_sample=False,
                    num_beams=1,
                    pad_token_id=self.tokenizer.pad_token_id,
                    logits_processor=processors,
                    **settings.cache_arguments(),
                )
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_MEMORY_ON_CPU in str(error):
                raise CommandError(self.out_of_memory(batch)) from error
            raise
        new = sequences[:, batch.length :].tolist()
        return [self.line(prompt, new[row * copies : (row + 1) * copies]) for row, prompt in enumerate(chosen)]

    def line(self, prompt: Prompt, new: list[list[int]]) -> dict[str, Any]:
        """A prompt's line: an end token counts, what stands behind it does not."""
        tokens = [self.cut(sequence) for sequence in new]
        return prompt.head | {
            "completions": [self.tokenizer.decode(sequence, skip_special_tokens=True) for sequence in tokens],
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": [len(sequence) for sequence in tokens],
            "finish": ["end" if sequence[-1] in self.ends else "length" for sequence in tokens],
        }

    def cut(self, sequence: list[int]) -> list[int]:
        """A sequence up to its first end token."""
        end = next((place for place, token in enumerate(sequence) if token in self.ends), len(sequence) - 1)
        return sequence[: end + 1]

    def out_of_memory(self, batch: Batch) -> str:
        """What to say, and what to do."""
        size, copies = self.settings.batch, self.settings.num_return_sequences
        rows = max(self.rows, len(batch.indices)) * copies
        advice = (
            f"start anew with a smaller batch, --batch {size // 2} --redo (other batches round differently, so what is "
            "done cannot be kept)"
            if size > 1
            else "--batch is 1 already: fewer --num-return-sequences or --max-new-tokens, or a narrower --checkpoint"
        )
        return (
            f"out of memory in batch {batch.number + 1}, {rows} rows of {batch.length} tokens and "
            f"{self.settings.max_new_tokens} new ones, prompts {', '.join(map(str, batch.indices))}: {advice}"
        )
