"""Assisted generation with a known outcome: a drafter of no cost, a target that accepts a set number of its drafts.

The target runs as ever. What it chooses is replaced by the known sequence, behind its own argmax: with random weights
in bfloat16 the two best tokens are often equal up to rounding, and drafts of its own tokens would not be accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.generation.acceptance import Accepted, Draft, accept_equal
from replay_transformers.generation.loop import Loop
from replay_transformers.generation.rows import Rows
from replay_transformers.patches.row_models import ReplayRows

from .generate_steps import StepRecorder
from .timing import reset_peaks, synchronise

SMALL = 4 * 2**20  # bytes of a buffer under which a launch costs more than the copy


class KnownText:
    """The sequences of a batch, and drafts of which so many are right.

    Args:
        ids: int64 ``[B, S]``, prompts and what follows.
        prompt: tokens of the prompts.
        accepted: drafts that are right in each round, the first ones.
        vocabulary: tokens there are.

    Attributes:
        place: tokens of every row before the round that is next; the host knows, since all rows accept alike.
    """

    def __init__(self, ids: torch.Tensor, prompt: int, accepted: int, vocabulary: int) -> None:
        self.ids, self.prompt, self.accepted = ids, prompt, accepted
        self.place = prompt
        self.drafts = ids.clone()
        wrong = self.drafts[:, prompt + 1 + accepted :: accepted + 1]
        wrong.copy_((wrong + 1) % vocabulary)


class KnownDrafter:
    """Proposes the known drafts; all rows are equally long, so that a draft is a slice."""

    reads_states = False

    def __init__(self, text: Any, most: int) -> None:
        self.text, self.most = text, most
        self.counts = torch.full((len(text.ids),), most, device=text.ids.device)

    def start(self, rows: Rows, states: torch.Tensor | None) -> None:
        """Nothing to prepare."""

    def draft(self, rows: Rows, length: int) -> Draft:
        """The next ``length`` tokens, with the wrong ones among them."""
        begin = self.text.place
        return Draft(self.text.drafts[:, begin : begin + length], self.counts)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: torch.Tensor | None) -> None:
        """Nothing to keep."""


@dataclass
class KnownLoop(Loop):
    """The target takes its argmax and then chooses the known tokens.

    Args:
        text: the known sequences.
        kept_rows: rows whose scores are kept, up to the token at ``kept_until``.
        kept: their scores ``[tokens, rows, vocabulary]`` on the host, round by round, rejected drafts left out.
    """

    text: KnownText = field(kw_only=True)
    kept_rows: list[int] = field(default_factory=list, kw_only=True)
    kept_until: int = field(default=0, kw_only=True)
    kept: list[torch.Tensor] = field(default_factory=list, kw_only=True)

    def choose(self, rows: Rows, draft: Draft, scores: torch.Tensor) -> Accepted:
        """The known tokens; drafts are compared with them."""
        scores.argmax(-1)
        begin, added = self.text.place, min(self.text.accepted + 1, scores.shape[1])
        accepted = accept_equal(draft, self.text.ids[:, begin : begin + scores.shape[1]])
        self.text.place += added
        if begin < self.kept_until:
            self.kept.append(scores[self.kept_rows, :added].float().cpu().transpose(0, 1))
        return accepted


class RoundRecorder(StepRecorder):
    """Takes the time of rounds. As a loop's clock it is asked as the first one begins and as each is over.

    Args:
        devices: where the model is, that of its outputs first.
        warm: marks after which peak memory counts. warmed: called then. rows, forced: as in `StepRecorder`.
    """

    def __init__(
        self, devices: list[torch.device], warm: int, warmed: Callable[[], None] | None = None, **others: Any
    ) -> None:
        super().__init__(devices[0], **others)
        self.devices, self.warm, self.warmed = devices, warm, warmed

    def mark(self) -> None:
        """Take the time, on the GPU's own clock if there is one."""
        if len(self.marks) == self.warm:
            reset_peaks(self.devices)
            if self.warmed is not None:
                self.warmed()
        super().mark()

    def clock(self) -> float:
        """For `Loop`; the fixed length of its drafts does not depend on it."""
        self.mark()
        return float(len(self.marks))

    def rounds(self) -> list[float]:
        """Milliseconds of each round; where rounds go ahead of the host the first one has the next one's as well."""
        synchronise(self.devices)
        return self.milliseconds()


class SnapshotRows(ReplayRows):
    """Rolls back by copies: of what a forward writes, before it, and back when it has drafts rejected.

    The cache commits all tokens of a forward; those that are accepted of a rejected draft are fed again. Its kernels
    and its window are those of the replay cache. It takes the time of nothing but the copies and that forward.

    Args:
        model, cache, call: as for `ReplayRows`.
        again: runs the forward over the accepted tokens.
        kept: tokens of a forward that are kept, the same in every round and row.
    """

    def __init__(self, model: Any, cache: Any, call: Callable[..., Any], again: Callable[..., Any], kept: int) -> None:
        super().__init__(model, cache, call)
        self.verify, self.again, self.kept = call, again, kept
        self.held: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []
        self.fed: torch.Tensor | None = None
        self.longest = 0

    @property
    def snapshot_bytes(self) -> int:
        """What the copies take."""
        return sum(copy.nbytes for copy in self.copies)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copy the state, then take in ``[B, T]`` more tokens; logits ``[B, T, vocabulary]`` behind each of them."""
        if not self.held:
            self.held = self._buffers()
            self.copies = [torch.empty_like(buffer) for buffer in self.held]
        copy_all(self.copies, self.held)
        self.fed, self.longest = tokens, self.cache.cursor.longest
        return super().forward(tokens)

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Commit everything; where drafts are rejected, in a state that has not seen them."""
        assert self.fed is not None
        if self.kept < self.fed.shape[1]:
            copy_all(self.held, self.copies)
            self.cache.cursor.longest = self.longest
            self.call = self.again
            super().forward(self.fed[:, : self.kept])
            self.call = self.verify
        super().reject(torch.zeros_like(rejected), longest)

    def _buffers(self) -> list[torch.Tensor]:
        cursor = self.cache.cursor
        layers = [
            buffer
            for layer in self.cache.replay_layers
            for name, buffer in layer.buffers().items()
            if name == "conv_ring" or name.split(".")[0] in ("checkpoint", "readout")
        ]
        return [*cursor.tensors(), cursor.early, *layers]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors in place, each on its device, small ones of a device and a dtype in one launch."""
    small: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if source.nbytes > SMALL:
                target.copy_(source)
                continue
            mine, theirs = small.setdefault((source.device, source.dtype), ([], []))
            mine.append(target)
            theirs.append(source)
        for mine, theirs in small.values():
            torch._foreach_copy_(mine, theirs)
