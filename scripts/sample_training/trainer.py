"""Trains one model on random windows of a token stream; on a GPU a whole step is one CUDA graph."""

import contextlib
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from .models import MtpHead

WARM_UP_STEPS = 100
LAST_RATE = 0.02
MTP_WEIGHT = 0.3
# No padding and one file after the other: nothing to mask. Stated outright, so that no forward looks for it.
NO_MASK = {"full_attention": None, "linear_attention": None}


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The states [B, T, width] after the last norm for int64 ids [B, T], without a cache."""
    return model.model(input_ids=ids, attention_mask=dict(NO_MASK), use_cache=False).last_hidden_state


class Trainer:
    """AdamW with a short warm-up and a cosine decay; ``steps`` may be changed until the first decayed step."""

    def __init__(
        self,
        model: PreTrainedModel,
        mtp: MtpHead | None,
        tokens: torch.Tensor,
        *,
        batch: int,
        length: int,
        rate: float,
        steps: int,
        seed: int,
        device: str,
        only_head: bool = False,
    ):
        """Move everything to ``device``.

        Args:
            model: Trained in place, in float32.
            mtp: The head to train beside it, if any.
            tokens: [N] int64, N > length.
            batch: Windows in a step.
            length: Tokens that the model sees in a window.
            rate: The learning rate after the warm-up.
            steps: Length of the schedule.
            seed: Picks the windows.
            device: ``cpu`` or ``cuda``.
            only_head: Leave the model as it is.
        """
        if len(tokens) <= length:
            raise ValueError(f"expected more than {length} training tokens, got {len(tokens)}")
        self.model = model.to(torch.device(device)).train()  # type: ignore[arg-type]
        self.mtp = mtp.to(device).train() if mtp is not None else None
        self.tokens = tokens.to(device)
        self.rate, self.steps = rate, steps
        self.windows = torch.Generator(device).manual_seed(seed)
        self.offsets = torch.arange(length + 1, device=device)
        self.window = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.only_head = only_head
        self.model.requires_grad_(not only_head)
        both = [*self.model.parameters(), *(self.mtp.parameters() if self.mtp is not None else ())]
        self.parameters = [parameter for parameter in both if parameter.requires_grad]
        self.optimizer = self._optimizer(torch.device(device).type == "cuda")
        self.stream = torch.cuda.Stream() if torch.device(device).type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)
        self.done = 0
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def _optimizer(self, on_gpu: bool) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters if p.ndim >= 2]
        others = [p for p in self.parameters if p.ndim < 2]
        # A tensor that the graph reads, so that the schedule goes on between replays.
        self.current_rate: Any = torch.zeros((), device=self.tokens.device) if on_gpu else 0.0
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.current_rate,
            betas=(0.9, 0.95),
            fused=on_gpu,
            capturable=on_gpu,
        )

    def step(self) -> None:
        """One optimiser step on fresh windows; returns before a GPU has finished it."""
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            starts = torch.randint(
                len(self.tokens) - len(self.offsets) + 1,
                (len(self.window), 1),
                generator=self.windows,
                device=self.tokens.device,
            )
            self.window.copy_(self.tokens[starts + self.offsets])
            self._set_rate(self.rate * schedule(self.done, self.steps))
            if self.graph is not None:
                self.graph.replay()
            elif self.stream is None or self.done < 3:
                self._update()
            else:
                self._capture()
        self.done += 1

    def record(self) -> dict[str, Any]:
        """The schedule and the last loss as JSON values."""
        return {"last_training_loss": round(self.loss.item(), 4), "steps": self.done, "learning_rate": self.rate}

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _capture(self) -> None:
        """Record the step as a graph on this trainer's own stream, then run it."""
        assert self.stream is not None
        self.stream.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._update()
        self.graph = graph
        graph.replay()

    def _update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, total = self._losses()
        total.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def _losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss in nats per token of the main model, or of the head if only that is trained, and what is
        trained."""
        ids = self.window
        with torch.set_grad_enabled(not self.only_head):
            hidden = hidden_states(self.model, ids[:, :-1])
        ahead_loss = torch.zeros((), device=ids.device)
        if self.mtp is not None:
            ahead = self.mtp(self.model, ids[:, 1:-1], hidden[:, :-1])
            ahead_loss = cross_entropy(ahead.flatten(0, 1).float(), ids[:, 2:].flatten())
        if self.only_head:
            return ahead_loss, ahead_loss
        loss = cross_entropy(self.model.lm_head(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss, loss + MTP_WEIGHT * ahead_loss


def schedule(step: int, steps: int) -> float:
    """The share of the full learning rate at a step: a linear warm-up, then a cosine down to ``LAST_RATE``."""
    warm_up = min(WARM_UP_STEPS, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
