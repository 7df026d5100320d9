"""Maps from confidence to probability: what they recover, what they refuse, and the error measures by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspine.decoding.calibration import (
    FILE,
    Calibration,
    ConfidenceMap,
    Rounds,
    fit_map,
    load_calibration,
    reliability,
    survival,
)
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import drafter_sha256, load_drafter, save_drafter
from dspine.errors import UserError
from dspine.targets.model import Target


def drawn(true_slope: float, true_offset: float, n: int = 20000, m: int = 3, seed: int = 0) -> Rounds:
    """Rounds whose tokens are accepted with sigmoid(slope logit(confidence) + offset)."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.02, 0.98, (n, m))
    logit = np.log(confidence / (1 - confidence))
    accepted = rng.uniform(size=(n, m)) < 1 / (1 + np.exp(-(true_slope * logit + true_offset)))
    return Rounds(confidence, accepted.cumprod(1).sum(1))


def test_rounds_say_what_they_teach() -> None:
    rounds = Rounds(np.array([[0.5, 0.6, 0.7], [0.5, 0.6, np.nan], [0.1, 0.2, 0.3]]), np.array([1, 2, 0]))
    assert rounds.survived.tolist() == [[True, False, False], [True, True, False], [False, False, False]]
    assert rounds.reached.tolist() == [[True, True, False], [True, True, False], [True, False, False]]


def test_the_map_behind_the_data_is_found_at_every_position() -> None:
    found = fit_map(drawn(0.7, -0.4), 0.0)
    assert found.slope == pytest.approx((0.7,) * 3, abs=0.06)
    assert found.offset == pytest.approx((-0.4,) * 3, abs=0.12)  # an eighth of the rounds reach the last one


def test_calibration_mends_what_was_off() -> None:
    fitted, fresh = fit_map(drawn(0.6, -0.8), 0.0), drawn(0.6, -0.8, seed=1)
    reached, happened = fresh.reached, fresh.survived
    before = reliability(fresh.confidence[reached], happened[reached])
    after = reliability(fitted.acceptance(fresh.confidence)[reached], happened[reached])
    assert before.ece > 0.1
    assert after.ece < 0.015
    assert after.brier < before.brier
    survived = reliability(survival(fitted.acceptance(fresh.confidence)).ravel(), happened.ravel())
    assert survived.ece < 0.015


def test_a_position_that_few_rounds_reach_follows_the_others() -> None:
    rounds = drawn(0.7, -0.4, n=4000)
    lonely = Rounds(np.concatenate((rounds.confidence, np.full((4000, 1), np.nan)), 1), rounds.num_accepted.copy())
    lonely.confidence[:2, 3], lonely.num_accepted[:2] = 0.5, 4
    found = fit_map(lonely, 0.0)
    assert found.slope[3] == pytest.approx(0.7, abs=0.1)
    assert found.offset[3] == pytest.approx(-0.4, abs=0.5)


def test_a_confidence_that_says_the_opposite_is_replaced_by_the_mean() -> None:
    found = fit_map(drawn(-1.0, 0.0), 0.0)
    assert found.slope == (0.0,) * 3
    assert found.acceptance(np.array([[0.1, 0.5, 0.9]]))[0] == pytest.approx(found.mean_acceptance, abs=0.02)


@pytest.mark.parametrize("accepted", [0, 2])
def test_all_or_nothing_gives_finite_maps(accepted: int) -> None:
    found = fit_map(Rounds(np.full((50, 2), 0.9999999), np.full(50, accepted)), 0.0)
    probability = found.acceptance(np.array([[1.0, 1.0]]))
    assert np.isfinite(probability).all()
    assert (probability > 0.9).all() if accepted else (probability[0, 0] < 0.2)


def test_nothing_drafted_is_refused() -> None:
    with pytest.raises(UserError, match="nothing was drafted, so there is nothing to calibrate on"):
        fit_map(Rounds(np.full((3, 2), np.nan), np.zeros(3, dtype=np.int64)), 0.0)


def test_error_measures_by_hand() -> None:
    predicted, happened = np.array([0.05, 0.05, 0.92, 0.98, 1.0]), np.array([False, True, True, True, True])
    found = reliability(predicted, happened)
    assert [(b.predicted, b.observed, b.count) for b in found.bins] == [(0.05, 0.5, 2), (pytest.approx(2.9 / 3), 1.0, 3)]
    assert found.ece == pytest.approx((2 * 0.45 + 3 * (1 - 2.9 / 3)) / 5)
    assert found.brier == pytest.approx((0.05**2 + 0.95**2 + 0.08**2 + 0.02**2) / 5)
    assert found.skill == pytest.approx(1 - found.brier / (0.8 * 0.2))
    assert reliability(np.full(4, 0.5), np.array([True, False, True, False])).skill == 0
    assert reliability(np.array([1.0, 0.0]), np.array([True, False])).skill == 1


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_target: Target, make_drafter: Callable[..., BlockDrafter], tmp_path: Path) -> Path:
    save_drafter(make_drafter(tiny_target), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def calibration(mark: str) -> Calibration:
    one = ConfidenceMap(temperature=0.0, slope=(0.5, 0.7), offset=(0.1, -0.3), mean_acceptance=(0.6, 0.5))
    return Calibration(drafter="dspine", drafter_sha256=mark, prompts="some", num_prompts=4, maps=(one,))


def test_a_calibration_is_read_back_beside_its_weights(tiny_target: Target, folder: Path) -> None:
    drafter = load_drafter(folder, tiny_target)
    assert load_calibration(drafter) is None
    written = calibration(drafter_sha256(drafter))
    assert written.write(folder) == folder / FILE
    assert load_calibration(load_drafter(folder, tiny_target)) == written


def test_a_calibration_of_something_else_is_refused(
    tiny_target: Target, make_drafter: Callable[..., BlockDrafter], folder: Path
) -> None:
    drafter = load_drafter(folder, tiny_target)
    calibration(drafter_sha256(drafter)).write(folder)
    with pytest.raises(UserError, match="was fitted to other weights or options of the drafter"):
        load_calibration(load_drafter(folder, tiny_target, options={"num_candidates": 2}))
    kept = (folder / FILE).read_text()
    save_drafter(make_drafter(tiny_target, seed=1), folder)
    assert not (folder / FILE).exists(), "new weights come without the old ones' calibration"
    (folder / FILE).write_text(kept)
    with pytest.raises(UserError, match="was fitted to other weights or options of the drafter"):
        load_calibration(load_drafter(folder, tiny_target))


@pytest.mark.parametrize("text", ["", "{", json.dumps({"drafter": "dspine"})])
def test_a_damaged_calibration_is_refused(tiny_target: Target, folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    with pytest.raises(UserError, match=r"calibration\.json is damaged; run `dspine calibrate` again"):
        load_calibration(load_drafter(folder, tiny_target))
