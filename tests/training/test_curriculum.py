"""Schedules at their corners and between them."""

from __future__ import annotations

import itertools
import math

import pytest

from dspine.training.curriculum import alignment_weight, ce_fraction, learning_rate_scale, true_predecessor_probability

TOTAL = 1000


def test_learning_rate_warms_up_then_falls_along_a_cosine() -> None:
    scale = [learning_rate_scale(step, TOTAL, 0.04) for step in range(TOTAL)]
    assert scale[0] == pytest.approx(1 / 40)
    assert scale[19] == pytest.approx(0.5)
    assert scale[39] == scale[40] == 1.0
    assert scale[40 + 480] == pytest.approx(0.5)
    assert scale[40 + 240] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert 0 < scale[-1] < 1e-4
    assert all(a > b for a, b in itertools.pairwise(scale[40:]))


def test_very_short_runs_still_learn() -> None:
    assert learning_rate_scale(0, 1, 0.04) == 1.0
    assert all(0 < learning_rate_scale(step, 3, 0.0) <= 1 for step in range(3))
    assert learning_rate_scale(9, 10, 1.0) == 1.0


def test_alignment_weight_rises_over_the_warm_up() -> None:
    assert alignment_weight(0, TOTAL, 0.04, 0.5) == 0
    assert alignment_weight(10, TOTAL, 0.04, 0.5) == pytest.approx(0.125)
    assert alignment_weight(40, TOTAL, 0.04, 0.5) == alignment_weight(999, TOTAL, 0.04, 0.5) == 0.5


def test_true_predecessors_are_weaned() -> None:
    total = 600
    assert true_predecessor_probability(0, total) == true_predecessor_probability(99, total) == 0.5
    assert true_predecessor_probability(100, total) == pytest.approx(0.5)
    assert true_predecessor_probability(150, total) == pytest.approx(0.25)
    assert true_predecessor_probability(175, total) == pytest.approx(0.125)
    assert true_predecessor_probability(200, total) == pytest.approx(0, abs=1e-12)
    assert true_predecessor_probability(201, total) == true_predecessor_probability(599, total) == 0


def test_true_predecessors_by_other_settings() -> None:
    assert true_predecessor_probability(0, 10, start=0.0) == 0
    # An end at the hold is a step down; a hold of 0 falls from the first step on.
    assert [true_predecessor_probability(s, 10, 0.8, 0.5, 0.5) for s in (4, 5)] == [0.8, 0.0]
    assert true_predecessor_probability(5, 10, 0.8, 0.0, 1.0) == pytest.approx(0.4)


def test_cross_entropy_first() -> None:
    assert [ce_fraction(s, 10, 0.1, 0.3) for s in (0, 2, 3, 9)] == [1.0, 1.0, 0.1, 0.1]
    assert ce_fraction(0, 10, 0.1, 0.0) == 0.1
