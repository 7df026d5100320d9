"""Choosing how many slots to verify: the rate it maximises, what it learns, and what must not mislead it."""

from __future__ import annotations

import pytest

from dspine.decoding.width import PRIOR_ROUNDS, PROBE_EVERY, CostTable, WidthController


def costs(base: float = 1.0, per_token: float = 0.0) -> CostTable:
    return CostTable(lambda tokens: base + per_token * tokens)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_costs_are_measured_once_after_a_warm_up_and_their_median_counts() -> None:
    calls: list[int] = []
    answers = iter([99.0, 5.0, 1.0, 3.0])

    def measure(tokens: int) -> float:
        calls.append(tokens)
        return next(answers)

    table = CostTable(measure)
    assert [table.seconds(4), table.seconds(4)] == [3.0, 3.0]
    assert calls == [4] * 4


def test_costs_between_points_lie_on_the_line_and_beyond_them_on_the_ray() -> None:
    table = CostTable(lambda tokens: {1: 10.0, 4: 16.0, 8: 20.0, 64: 100.0}[tokens])
    assert [table.seconds(n) for n in (1, 2, 4, 6, 8, 128)] == [10.0, 12.0, 16.0, 18.0, 20.0, 200.0]


# --- choice ----------------------------------------------------------------------------------------------------------


def test_expected_length_is_one_plus_the_survival_of_every_slot() -> None:
    controller = WidthController(4, (0.8, 0.5, 0.25), costs())
    assert [round(controller.expected_lengths()[w - 1], 6) for w in (1, 2, 3, 4)] == [1.0, 1.8, 2.2, 2.3]


def test_the_choice_is_the_best_rate_by_brute_force() -> None:
    controller = WidthController(8, (0.8, 0.7, 0.6, 0.5), costs(1.0, 0.15))
    controller.record_draft(0.3)
    rates = {w: controller.expected_lengths()[w - 1] / (0.3 + 1.0 + 0.15 * w) for w in range(2, 9)}
    assert controller.choose(1) == max(rates, key=lambda w: rates[w])
    assert 2 < controller.choose(1) < 8


def test_free_verification_takes_the_whole_block() -> None:
    assert WidthController(8, (0.9,), costs()).choose(1) == 8


def test_nothing_is_drafted_where_verification_costs_as_much_as_decoding() -> None:
    assert WidthController(8, (0.6,), costs(0.0, 1.0)).choose(1) == 1


def test_more_rows_make_narrower_rounds() -> None:
    controller = WidthController(8, (0.8, 0.7, 0.6, 0.5), costs(8.0, 0.2))
    controller.record_draft(0.5)
    assert controller.choose(1) > controller.choose(16)


def test_a_short_list_of_expectations_goes_on_with_its_last() -> None:
    assert WidthController(5, (0.5,), costs()).expected_lengths()[4] == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)


# --- learning --------------------------------------------------------------------------------------------------------


def test_acceptance_of_slots_that_were_reached_is_learned() -> None:
    controller = WidthController(4, (0.5, 0.5, 0.5), costs())
    for _ in range(400):
        controller.record(3, 1)  # the first always stands, the second never
    assert controller.expected_lengths()[1] == pytest.approx(2.0, abs=0.01)
    assert controller.expected_lengths()[3] == pytest.approx(2.0, abs=0.01), "the third is never reached"


def test_one_round_moves_the_expectation_a_little() -> None:
    controller = WidthController(2, (0.5,), costs())
    controller.record(1, 1)
    assert controller.expected_lengths()[1] - 1 == pytest.approx((0.98 * 0.5 * PRIOR_ROUNDS + 1) / (0.98 * PRIOR_ROUNDS + 1))


def test_one_slow_draft_does_not_end_drafting() -> None:
    controller = WidthController(8, (0.9,), costs())
    for _ in range(9):
        controller.record_draft(0.1)
    controller.record_draft(1000.0)
    assert controller.choose(1) == 8


def test_plain_rounds_are_interrupted_by_a_look_whether_drafting_pays_again() -> None:
    controller = WidthController(8, (0.9,), costs())
    controller.record_draft(1000.0)
    chosen = [controller.choose(1) for _ in range(2 * PROBE_EVERY)]
    assert [i + 1 for i, width in enumerate(chosen) if width > 1] == [PROBE_EVERY, 2 * PROBE_EVERY]
    for _ in range(9):
        controller.record_draft(0.1)
    assert controller.choose(1) == 8
