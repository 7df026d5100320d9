"""Which rule a width names, and what each rule lets a round do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dspine.decoding.calibration import Calibration, ConfidenceMap
from dspine.decoding.confidence import ConfidenceScheduler
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.width import CostTable, WidthController
from dspine.decoding.width_policy import ConfidenceWidth, FixedWidth, MeasuredWidth, new_width_policy
from dspine.errors import UserError

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
FLAT = CostTable(lambda tokens: 1.0)  # a token more costs nothing: the whole block is best
STEEP = CostTable(lambda tokens: float(tokens))  # a token more costs a whole step: nothing but plain decoding is


def test_auto_follows_the_costs_of_greedy_rounds() -> None:
    assert new_width_policy("auto", 8, (0.9,), FLAT).width([GREEDY]) == 8
    assert new_width_policy("auto", 8, (0.9,), STEEP).width([GREEDY]) == 1


def test_auto_keeps_the_whole_block_where_a_row_samples() -> None:
    assert new_width_policy("auto", 8, (0.9,), STEEP).width([GREEDY, SAMPLED]) == 8


def test_auto_learns_every_rows_outcome() -> None:
    controller = WidthController(4, (0.5, 0.5, 0.5), FLAT)
    other = WidthController(4, (0.5, 0.5, 0.5), FLAT)
    MeasuredWidth(controller).record([GREEDY, GREEDY], 0.1, 3, [3, 1])
    other.record(3, 3)
    other.record(3, 1)
    assert (
        controller.expected_lengths()[3] == other.expected_lengths()[3] != WidthController(4, (0.5,), FLAT).expected_lengths()[3]
    )


@pytest.mark.parametrize("params", [[GREEDY], [SAMPLED, GREEDY]])
def test_a_number_is_that_number(params: list[SamplingParams]) -> None:
    policy = new_width_policy(3, 8, (), STEEP)
    assert (policy.width(params), policy.reads_confidence) == (3, False)
    assert policy.tokens_to_verify([[0.0, 0.0]], params) == 2


def test_without_a_drafter_every_name_is_plain_decoding() -> None:
    for width in ("auto", "confidence", 1):
        assert new_width_policy(width, 1, (), STEEP).width([GREEDY]) == 1


def test_confidence_without_calibration_verifies_whole_blocks() -> None:
    policy = new_width_policy("confidence", 8, (0.9,), STEEP)
    assert isinstance(policy, FixedWidth)
    assert policy.width([GREEDY]) == 8


class Scripted(ConfidenceScheduler):
    """Answers as told and remembers what it is asked."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def tokens_to_draft(self, params: Sequence[SamplingParams]) -> int:
        return 5

    def tokens_to_verify(self, confidence: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> int:
        return 2

    def record(self, params: Sequence[SamplingParams], draft_s: float, num_verified: int, num_accepted: int) -> None:
        self.recorded.append((draft_s, num_verified, num_accepted))


def test_confidence_drafts_and_verifies_as_the_scheduler_says() -> None:
    scheduler = Scripted()
    policy = ConfidenceWidth(scheduler)
    policy.record([GREEDY, GREEDY], 0.25, 2, [2, 1])
    assert (policy.reads_confidence, policy.width([GREEDY])) == (True, 6)  # the anchor is a slot too
    assert policy.tokens_to_verify([[0.9] * 5], [GREEDY]) == 2
    assert scheduler.recorded == [(0.25, 2, 3)]


def test_confidence_with_calibration_reads_confidences() -> None:
    only = ConfidenceMap(temperature=0, slope=(1.0,) * 3, offset=(0.0,) * 3, mean_acceptance=(0.5,) * 3)
    calibration = Calibration(drafter="any", drafter_sha256="", prompts="none", num_prompts=0, maps=(only,))
    assert new_width_policy("confidence", 4, (0.9,), FLAT, calibration).reads_confidence


@pytest.mark.parametrize("width", [0, 9, -1, "full", 2.5])
def test_other_widths_are_refused(width: Any) -> None:
    with pytest.raises(UserError, match="from 1 \\(plain\\) to 8"):
        new_width_policy(width, 8, (), FLAT)
