"""How many drafted tokens to verify, decided after drafting by how sure the drafter is of them (DSpark's scheduling).

A round of b rows that verifies the first t drafted tokens of each takes D + V(b (t + 1)) seconds: D drafting, V by the measured
cost table. It yields 1 + sum_{j <= t} survival_j tokens a row, survival_j being the product of the calibrated acceptance
probabilities up to token j. The largest long-run rate lambda of tokens over seconds is reached by the rule (Dinkelbach 1967;
the same follows from the renewal-reward theorem)

    verify token t too as long as     sum_rows survival_t  >  lambda (V(b (t + 1)) - V(b t))

so that a round that looks good does not stop early because its own rate is high. V need not be convex: tokens behind t
may pay for it together with it; for those the rule takes mean acceptances. The forward is a rectangle, so rows share a width.

**Exactness.** Think of the drafted tokens as cards, face down. The rule decides on verifying slot t knowing the tokens before
it and what slot t is drawn from (a confidence is a function of those two, see `Draft.confidence`); only once slot t is in is
its card turned. So x_t ~ q_t given all that was known when slot t was taken in, which is all that the proof of speculative
sampling asks of a drafted token: slot t emits p_t exactly. Where the rule stops, the next token is drawn from p, as after
any fully accepted block, its card unseen.

A rule that looks at card t before it decides is wrong. Let p = q = (0.9, 0.1) and drop x where q(x) < 0.5: the first token
comes out with probability 0.9 + 0.1 * 0.9 = 0.99. The best prefix by hindsight is wrong too: survival_{t + 1} depends on x_t, and
would decide on slot t. That is why tokens behind t count with their means, and why the rule stops at the first token that does
not pay. (At temperature 0 any rule is exact.) The tests sample a wrong rule and see its bias.

The clock decides through V and lambda alone, and sampled rounds use a lambda that does not move: a seed gives the same text
again in the same engine and company, but not in another process, where the table may come out otherwise.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspine.decoding.calibration import Calibration, ConfidenceMap, survival
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.width import DECAY, DRAFT_TIMES, PRIOR_ROUNDS, PROBE_EVERY, CostTable

DRAFT_SHARE = 0.2  # drafting's share of a plain step, until one has been timed


@dataclass
class _Yield:
    """Tokens and seconds of the last rounds of one number of rows, old ones fading."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = self.tokens * DECAY + tokens, self.seconds * DECAY + seconds


class ConfidenceScheduler:
    """Decides how many tokens a round drafts, then how many of them it verifies, and learns the rate of it all.

    `max_tokens` are the drafter's M. Rows whose kind of request has no map make a round verify everything.
    """

    def __init__(self, calibration: Calibration, max_tokens: int, costs: CostTable) -> None:
        self._calibration, self._max_tokens, self._costs = calibration, max_tokens, costs
        self._draft_s: deque[float] = deque(maxlen=DRAFT_TIMES)
        self._yields: dict[int, _Yield] = {}
        self._expected: dict[tuple[float, ...], float] = {}
        self._plain_rounds = 0

    def tokens_to_draft(self, params: Sequence[SamplingParams]) -> int:
        """All M, or 0 where drafting has not been paying. Only greedy rounds may do without: see the module's last paragraph."""
        maps = self._maps(params)
        if maps is None:
            return self._max_tokens
        rows = len(maps)
        learned = self._yield(rows, maps)  # the first time, this measures the costs of all widths: never in a round that is timed
        if not all(p.is_greedy for p in params):
            return self._max_tokens
        if learned.rate > rows / self._costs.seconds(rows):
            self._plain_rounds = 0
            return self._max_tokens
        self._plain_rounds += 1
        return self._max_tokens if self._plain_rounds % PROBE_EVERY == 0 else 0

    def tokens_to_verify(self, confidence: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> int:
        """How many of the drafted tokens to verify in every row, for raw confidences [b][m]."""
        maps = self._maps(params)
        drafted = len(confidence[0])
        if maps is None:
            return drafted
        rows = len(maps)
        greedy = all(p.is_greedy for p in params)
        rate = self._yield(rows, maps).rate if greedy else self._expected_rate(rows, maps)
        acceptance = np.array([m.acceptance(np.array(row)) for m, row in zip(maps, confidence, strict=True)])
        reached = survival(acceptance)  # [b, m]; column t is looked at only when tokens 0..t - 1 are in
        means = np.array([m.mean_acceptance[:drafted] for m in maps])
        for t in range(drafted):
            if not self._pays(t, reached[:, t], means, rate):
                return t
        return drafted

    def _pays(self, t: int, reached: np.ndarray, means: np.ndarray, rate: float) -> bool:
        """Whether token t (from 0), which survives with probabilities `reached` [b], is worth its time, alone or with some of
        those behind it."""
        rows, expected = len(reached), reached
        before, gain = self._costs.seconds(rows * (t + 1)), 0.0
        for last in range(t, means.shape[1]):
            gain += float(expected.sum())
            if gain > rate * (self._costs.seconds(rows * (last + 2)) - before):
                return True
            if last + 1 < means.shape[1]:
                expected = expected * means[:, last + 1]
        return False

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: int) -> None:
        """Learn from a drafted round: `num_verified` tokens in each row, `num_accepted` of all rows together."""
        self._draft_s.append(draft_s)
        maps = self._maps(params)
        if maps is None or not all(p.is_greedy for p in params):
            return
        rows = len(maps)
        seconds = statistics.median(self._draft_s) + self._costs.seconds(rows * (num_verified + 1))
        self._yield(rows, maps).add(num_accepted + rows, seconds)

    def _maps(self, params: Sequence[SamplingParams]) -> list[ConfidenceMap] | None:
        """Every row's map; None where one has none."""
        maps = [self._calibration.map_for(p) for p in params]
        found = [m for m in maps if m is not None]
        return found if len(found) == len(maps) else None

    def _yield(self, rows: int, maps: Sequence[ConfidenceMap]) -> _Yield:
        if rows not in self._yields:
            rate = self._expected_rate(rows, maps)
            seconds = PRIOR_ROUNDS * self._costs.seconds(rows * 2)
            self._yields[rows] = _Yield(rate * seconds, seconds)
        return self._yields[rows]

    def _expected_rate(self, rows: int, maps: Sequence[ConfidenceMap]) -> float:
        """lambda before anything is known of these requests: the best rate at one fixed width, at mean acceptances."""
        key = tuple(m.temperature for m in maps)
        if key not in self._expected:
            lengths = sum(np.cumsum(survival(m.mean_acceptance[: self._max_tokens])) for m in maps)
            draft_s = DRAFT_SHARE * self._costs.seconds(rows)
            self._expected[key] = max(
                (rows + float(length)) / (draft_s + self._costs.seconds(rows * (t + 2)))
                for t, length in enumerate(np.atleast_1d(lengths))
            )
        return self._expected[key]
