"""How many tokens to draft: as many as pay, by what was accepted and how long rounds took on this machine."""

from dataclasses import dataclass, field

__all__ = ["FIRST_LENGTH", "DraftLength"]

MEMORY = 0.9  # of what was seen before, at every new round
CLEAR_GAIN = 2.0  # expected tokens per round with which drafts pay on any machine
FIRST_LENGTH = 4  # of the first drafts
FIRST_PROBE, LAST_PROBE = 16, 256  # rounds without drafts before the next try, doubled at every vain one
PROBE_ROUNDS = 2


@dataclass
class DraftLength:
    """The length of the next draft, one for the whole batch.

    Expected tokens of a round with K drafts, each accepted with probability p if the one before is, in the share f of
    rows that have a draft: ``1 + f (p + p^2 + ... + p^K)``. The K with the most tokens per second wins. The time of a
    round is what rounds of that length took; for a length that was not tried it follows from two that were.

    Args:
        most: the longest draft.
        mode: "adaptive"; "fixed": always the longest; "off": none (`ReplayConfig.draft_length`).
        levels: lengths to choose from, 0 and ``most`` included; None: all.
        unsteady: of each length so many rounds are not timed: they may compile or capture.
        seconds: what a round took, by the length of its draft.
    """

    most: int
    mode: str = "adaptive"
    levels: list[int] | None = None
    unsteady: int = 1
    seconds: dict[int, float] = field(default_factory=dict)
    _rounds: dict[int, int] = field(default_factory=dict)
    _accepted: float = 0.0
    _rejected: float = 0.0
    _proposing: float = 0.0
    _asked: float = 0.0
    _idle: int = 0
    _interval: int = FIRST_PROBE
    _probing: int = 0

    def choose(self) -> int:
        """Tokens to draft in the next round."""
        if self.mode != "adaptive" or self.most == 0:
            return self.most if self.mode != "off" else 0
        if self._probing:
            return self._first()
        best = self._best()
        if best == 0 and self._idle >= self._interval:
            self._probing, self._idle = PROBE_ROUNDS, 0
            self._interval = min(2 * self._interval, LAST_PROBE)
            self._accepted = self._rejected = self._proposing = self._asked = 0.0
            return self._first()
        return best

    def observe(self, drafted: int, rows: int, proposing: int, accepted: int, rejected: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            drafted: length of its draft.
            rows: rows that were not finished. proposing: those of them that had a draft.
            accepted: accepted drafts, of all rows. rejected: rows in which one was rejected.
            seconds: how long the round took.
        """
        if self.mode != "adaptive":
            return
        self._rounds[drafted] = self._rounds.get(drafted, 0) + 1
        if self._rounds[drafted] > self.unsteady:
            known = self.seconds.get(drafted)
            self.seconds[drafted] = seconds if known is None else MEMORY * known + (1 - MEMORY) * seconds
        if drafted == 0:
            self._idle += 1
            return
        self._idle = 0
        self._accepted = MEMORY * self._accepted + accepted
        self._rejected = MEMORY * self._rejected + rejected
        self._proposing = MEMORY * self._proposing + proposing
        self._asked = MEMORY * self._asked + rows
        if self._probing:
            self._probing -= 1
        elif self._best() > 0:
            self._interval = FIRST_PROBE

    def expected(self, length: int) -> float:
        """Tokens per row and round with drafts of this length."""
        judged = self._accepted + self._rejected
        likely = self._accepted / judged if judged else 0.0
        share = self._proposing / self._asked if self._asked else 0.0
        return 1 + share * sum(likely**place for place in range(1, length + 1))

    def _first(self) -> int:
        """The length to try where nothing is known."""
        lengths = self.levels or range(self.most + 1)
        return max(length for length in lengths if length <= max(FIRST_LENGTH, min(lengths[1:])))

    def _best(self) -> int:
        if not self._asked:
            return self._first()
        lengths = self.levels or list(range(self.most + 1))
        is_dear = self.levels is not None  # to find out how long a round takes may mean to compile one
        if 0 not in self.seconds and not (is_dear and self.expected(self.most) >= CLEAR_GAIN):
            return 0
        return max(lengths, key=lambda length: (self.expected(length) / self._time(length), -length))

    def _time(self, length: int) -> float:
        """Seconds of a round, as measured, or on the line through the two nearest lengths that were."""
        known = sorted(self.seconds, key=lambda other: (abs(other - length), other))
        if length in self.seconds or len(known) < 2:
            return self.seconds[known[0]] if known else 1.0
        near, far = known[:2]
        slope = (self.seconds[far] - self.seconds[near]) / (far - near)
        return self.seconds[near] + max(slope, 0.0) * (length - near)
