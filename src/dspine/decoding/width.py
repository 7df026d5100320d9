"""How many slots to verify per round: the width that gives the most tokens per second on this machine, now.

    tau(w) = 1 + sum_{t < w} prod_{j <= t} c_j;   choose w maximising tau(w) / (T_draft + T_verify(w))

c_j are running conditional acceptances, started from the checkpoint's held-out ones; T_verify comes from a few timed
forwards of this target on this machine, interpolated over tokens per forward.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

PRIOR_ROUNDS = 32.0  # weight of the checkpoint's own acceptance, in rounds
DECAY = 0.98  # per round: about the last fifty count
DRAFT_TIMES = 9  # the median of the last few: one hiccup of the machine must not end drafting
PROBE_EVERY = 64  # plain rounds between drafted ones that see whether drafting still does not pay
_POINTS = (1, 4, 8, 16, 32, 64)


class CostTable:
    """Seconds of one verification forward by its number of tokens, measured when first asked for."""

    def __init__(self, measure: Callable[[int], float], repeats: int = 3) -> None:
        self._measure, self._repeats = measure, repeats
        self._seconds: dict[int, float] = {}  # of the measured points
        self._asked: dict[int, float] = {}  # of any number: a round asks for many, always the same

    def seconds(self, tokens: int) -> float:
        """Linear between measured points; beyond the last one proportional to tokens."""
        if tokens not in self._asked:
            self._asked[tokens] = self._interpolated(tokens)
        return self._asked[tokens]

    def _interpolated(self, tokens: int) -> float:
        upper = next((p for p in _POINTS if p >= tokens), _POINTS[-1])
        if tokens >= upper:
            return self._at(upper) * tokens / upper
        lower = max(p for p in _POINTS if p < tokens)
        share = (tokens - lower) / (upper - lower)
        return (1 - share) * self._at(lower) + share * self._at(upper)

    def _at(self, point: int) -> float:
        if point not in self._seconds:
            self._measure(point)  # warm-up
            self._seconds[point] = statistics.median(self._measure(point) for _ in range(self._repeats))
        return self._seconds[point]


def timed(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class WidthController:
    """Chooses the width of a round and learns from its outcome. `maximum` is the drafter's block size."""

    def __init__(self, maximum: int, expected: Sequence[float], costs: CostTable) -> None:
        self.maximum, self._costs = maximum, costs
        known = list(expected) or [0.6]
        rates = [known[min(t, len(known) - 1)] for t in range(maximum - 1)]
        self._reached = [PRIOR_ROUNDS] * (maximum - 1)
        self._accepted = [PRIOR_ROUNDS * rate for rate in rates]
        self._draft_s: deque[float] = deque(maxlen=DRAFT_TIMES)
        self._plain_rounds = 0

    def record_draft(self, draft_s: float) -> None:
        """Learn from a round's drafting time."""
        self._draft_s.append(draft_s)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from one row's verification."""
        for t in range(min(num_drafted, num_accepted + 1, self.maximum - 1)):
            self._reached[t] = self._reached[t] * DECAY + 1
            self._accepted[t] = self._accepted[t] * DECAY + (t < num_accepted)

    def expected_lengths(self) -> list[float]:
        """tau(w) of w = 1 to the maximum."""
        lengths, survival = [1.0], 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            survival *= accepted / reached
            lengths.append(lengths[-1] + survival)
        return lengths

    def choose(self, rows: int) -> int:
        """The best width for a round of `rows` rows; 1 means that drafting does not pay."""
        draft_s = statistics.median(self._draft_s) if self._draft_s else 0.2 * self._costs.seconds(rows)
        rates = {
            width: length / (draft_s + self._costs.seconds(rows * width))
            for width, length in enumerate(self.expected_lengths(), 1)
            if width > 1
        }
        best = max(rates, key=rates.__getitem__)
        if rates[best] > 1.0 / self._costs.seconds(rows):
            self._plain_rounds = 0
            return best
        self._plain_rounds += 1
        return best if self._plain_rounds % PROBE_EVERY == 0 else 1
