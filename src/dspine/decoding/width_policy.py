"""What decides how many slots a round drafts and verifies: a fixed number, measured costs, or how sure the drafter is.

    policy = new_width_policy("auto", limit=8, expected=(0.7, 0.6), costs=CostTable(measure))
    width = policy.width(params)

A round of width w drafts w - 1 tokens for each row; a policy that reads confidences may verify fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from dspine.decoding.calibration import Calibration
from dspine.decoding.confidence import ConfidenceScheduler
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.width import CostTable, WidthController
from dspine.errors import UserError

Width = int | Literal["auto", "confidence"]


class WidthPolicy(Protocol):
    """`params` are those of the live rows. `reads_confidence`: whether `tokens_to_verify` is to be asked."""

    reads_confidence: bool

    def width(self, params: Sequence[SamplingParams]) -> int:
        """Slots to draft in the next round, the anchor included; may time a few forwards the first time."""
        ...

    def tokens_to_verify(self, confidence: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> int:
        """How many drafted tokens to verify in every row, for raw confidences [b][m]."""
        ...

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: Sequence[int]) -> None:
        """Learn from a drafted round: `num_verified` tokens in each row, `num_accepted` [b] of them accepted."""
        ...


class FixedWidth:
    """The same width every round."""

    reads_confidence = False

    def __init__(self, width: int) -> None:
        self._width = width

    def width(self, params: Sequence[SamplingParams]) -> int:
        return self._width

    def tokens_to_verify(self, confidence: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> int:
        return len(confidence[0])

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: Sequence[int]) -> None:
        pass


class MeasuredWidth(FixedWidth):
    """The width that measured costs favour. A timing must not change which random numbers a seeded request uses, so rounds
    that sample keep the largest width."""

    def __init__(self, controller: WidthController) -> None:
        super().__init__(controller.maximum)
        self._controller = controller

    def width(self, params: Sequence[SamplingParams]) -> int:
        return self._controller.choose(len(params)) if all(p.is_greedy for p in params) else self._width

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: Sequence[int]) -> None:
        self._controller.record_draft(draft_s)
        for accepted in num_accepted:
            self._controller.record(num_verified, accepted)


class ConfidenceWidth:
    """Whole blocks are drafted, and verified as far as the drafter is sure of them."""

    reads_confidence = True

    def __init__(self, scheduler: ConfidenceScheduler) -> None:
        self._scheduler = scheduler

    def width(self, params: Sequence[SamplingParams]) -> int:
        return 1 + self._scheduler.tokens_to_draft(params)

    def tokens_to_verify(self, confidence: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> int:
        return self._scheduler.tokens_to_verify(confidence, params)

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: Sequence[int]) -> None:
        self._scheduler.record(params, draft_s, num_verified, sum(num_accepted))


def new_width_policy(
    width: Width, limit: int, expected: Sequence[float], costs: CostTable, calibration: Calibration | None = None
) -> WidthPolicy:
    """The policy that `width` names, for a drafter of blocks of `limit` (1: no drafter) and `expected` acceptances.

    "confidence" verifies whole blocks where there is no `calibration`. Raises UserError for a width that is none.
    """
    if isinstance(width, int) and 1 <= width <= limit:
        return FixedWidth(width)
    if width not in ("auto", "confidence"):
        raise UserError(
            f"width = {width!r}: give 'auto', 'confidence' or a whole number from 1 (plain) to {limit} (the drafter's block size)"
        )
    if limit == 1:
        return FixedWidth(1)
    if width == "auto":
        return MeasuredWidth(WidthController(limit, expected, costs))
    return FixedWidth(limit) if calibration is None else ConfidenceWidth(ConfidenceScheduler(calibration, limit - 1, costs))
