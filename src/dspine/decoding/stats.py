"""What decoding did, counted once and defined once: acceptance length, acceptance by position, time.

    stats = DecodeStats()
    stats.record_round(num_drafted=7, num_accepted=3)
    stats.acceptance_length  # 4.0

A round is one target forward that verifies a block. The bonus (or correction) token counts in the acceptance length
and nowhere else. All means run over rounds, never over requests, so merged statistics weigh every round alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _add(into: list[int], values: list[int]) -> None:
    """Element-wise sum in place; the shorter list counts as followed by zeros."""
    into.extend([0] * (len(values) - len(into)))
    for position, value in enumerate(values):
        into[position] += value


def _ratios(numerators: list[int], denominators: list[int]) -> list[float]:
    return [above / below if below else 0.0 for above, below in zip(numerators, denominators, strict=True)]


@dataclass
class DecodeStats:
    """Counters of one request, or of many merged. Lists are by draft position 1..M at index 0..M-1."""

    rounds: int = 0
    tokens: int = 0  # what the user got: after truncation by eos, stop strings and max_new_tokens
    drafted_at: list[int] = field(default_factory=list)  # rounds that proposed a token at this position
    reached_at: list[int] = field(default_factory=list)  # ... and accepted all tokens before it
    accepted_at: list[int] = field(default_factory=list)  # ... and this one too
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    prefill_s: float = 0.0

    def record_round(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verification of `num_drafted` candidates (0 = plain decoding) of which `num_accepted` stood."""
        assert 0 <= num_accepted <= num_drafted, f"{num_accepted} of {num_drafted} drafted tokens accepted"
        self.rounds += 1
        missed = num_drafted - num_accepted
        _add(self.drafted_at, [1] * num_drafted)
        _add(self.reached_at, [1] * min(num_accepted + 1, num_drafted) + [0] * max(missed - 1, 0))
        _add(self.accepted_at, [1] * num_accepted + [0] * missed)

    @property
    def num_drafted_tokens(self) -> int:
        return sum(self.drafted_at)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted candidates, without the bonus tokens."""
        return sum(self.accepted_at)

    @property
    def acceptance_length(self) -> float:
        """tau = mean over rounds of num_accepted, + 1. Plain decoding has 1; 0 where no round has run."""
        return self.num_accepted_tokens / self.rounds + 1.0 if self.rounds else 0.0

    @property
    def mean_width(self) -> float:
        """Slots verified per round, the anchor included: mean num_drafted, + 1; 0 where no round has run."""
        return self.num_drafted_tokens / self.rounds + 1.0 if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted candidates / proposed candidates, over all positions."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.drafted_at else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Cumulative, P(num_accepted >= j) for j = 1..M, over the rounds that proposed j tokens or more."""
        return _ratios(self.accepted_at, self.drafted_at)

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(token j accepted | tokens 1..j-1 accepted) for j = 1..M, over the rounds that proposed token j."""
        return _ratios(self.accepted_at, self.reached_at)

    @property
    def decode_s(self) -> float:
        """Time in rounds: everything but the prefill."""
        return self.draft_s + self.verify_s + self.other_s

    @property
    def tpot_s(self) -> float:
        """Time per output token = mean round time / tau, prefill excluded; 0 where no round has run."""
        return self.decode_s / (self.num_accepted_tokens + self.rounds) if self.rounds else 0.0

    def merge(self, other: DecodeStats) -> None:
        """Add another's counts and times to these."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        _add(self.drafted_at, other.drafted_at)
        _add(self.reached_at, other.reached_at)
        _add(self.accepted_at, other.accepted_at)
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s
        self.other_s += other.other_s
        self.prefill_s += other.prefill_s

    def to_dict(self) -> dict[str, Any]:
        """Counters and what follows from them, ready for JSON."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "num_drafted_tokens": self.num_drafted_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "mean_width": self.mean_width,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "conditional_acceptance": self.conditional_acceptance,
            "drafted_at": list(self.drafted_at),
            "reached_at": list(self.reached_at),
            "accepted_at": list(self.accepted_at),
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": self.other_s,
            "prefill_s": self.prefill_s,
            "tpot_s": self.tpot_s,
        }
