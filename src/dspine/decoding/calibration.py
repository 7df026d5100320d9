"""From a drafter's raw confidence to the probability that a drafted token is accepted, and how far off either is.

    P(token t accepted | all before it) = sigmoid(slope_t logit(confidence_t) + offset_t)
    survival_t = prod_{j <= t} P(token j accepted | all before it)

One monotone map a draft position and temperature (Platt scaling: Platt, "Probabilistic Outputs for Support Vector Machines",
1999; temperature scaling, Guo et al., arXiv 1706.04599, is the case of no offset). Few rounds reach deep positions, so every
position's map is pulled towards the one of all positions together. `dspine calibrate` fits and writes them.

Shapes: n rounds, m draft positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import drafter_sha256
from dspine.errors import UserError
from dspine.files import write_text

FILE = "calibration.json"
CLIP = 1e-4  # a confidence nearer to 0 or 1 than this is not told apart from it
POOL_ROUNDS = 50.0  # what the map of all positions weighs in each position's, in units of the prior's precision
NEWTON_STEPS = 50
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Rounds:
    """What calibration learns from: rounds that verified all they drafted. `confidence` [n, m], NaN past a round's last
    drafted token; `num_accepted` [n]."""

    confidence: Floats
    num_accepted: NDArray[np.int64]

    @property
    def drafted(self) -> Bools:
        """[n, m]"""
        return ~np.isnan(self.confidence)

    @property
    def survived(self) -> Bools:
        """[n, m]: the token and all before it were accepted."""
        return np.arange(self.confidence.shape[1]) < self.num_accepted[:, None]

    @property
    def reached(self) -> Bools:
        """[n, m]: drafted, and all before it accepted: whether it was accepted itself says something about its confidence."""
        return self.drafted & (np.arange(self.confidence.shape[1]) <= self.num_accepted[:, None])


class ConfidenceMap(BaseModel):
    """The map of every draft position at one temperature, and how often its tokens are accepted whatever the confidence."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(ge=0)
    slope: tuple[float, ...] = Field(min_length=1)
    offset: tuple[float, ...]
    mean_acceptance: tuple[float, ...] = Field(description="P(token t accepted | all before it), over all confidences")

    def acceptance(self, confidence: Floats) -> Floats:
        """P(accepted | all before it) [..., m] of confidences [..., m]; NaN stays NaN."""
        m = confidence.shape[-1]
        return _sigmoid(np.array(self.slope[:m]) * _logit(confidence) + np.array(self.offset[:m]))


class Calibration(BaseModel):
    """The maps of one checkpoint, as `calibration.json` beside its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    drafter: str
    drafter_sha256: str = Field(description="digest of the weights and options that it was fitted to")
    prompts: str = Field(description="name of the prompt file the maps were fitted on")
    num_prompts: int
    maps: tuple[ConfidenceMap, ...] = Field(min_length=1)

    def map_for(self, params: SamplingParams) -> ConfidenceMap | None:
        """The map fitted nearest to a request's temperature. Greedy and sampled requests accept by different rules, so
        neither takes the other's; None where there is none of its kind."""
        fitting = [m for m in self.maps if (m.temperature == 0) == params.is_greedy]
        return min(fitting, key=lambda m: abs(m.temperature - params.temperature), default=None)

    def write(self, folder: Path) -> Path:
        """Write it into a checkpoint folder by one rename. Raises UserError where it cannot be written."""
        file = folder / FILE
        try:
            write_text(file, json.dumps(self.model_dump(), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {file} ({error.strerror}); copy the checkpoint where you may write") from error
        return file


def load_calibration(drafter: BlockDrafter) -> Calibration | None:
    """The calibration beside a drafter's weights; None where there is none.

    Raises UserError for a damaged one, and for one of other weights or options.
    """
    if drafter.folder is None or not (drafter.folder / FILE).is_file():
        return None
    file = drafter.folder / FILE
    try:
        calibration = Calibration.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"{file} is damaged; run `dspine calibrate` again") from error
    if calibration.drafter_sha256 != drafter_sha256(drafter):
        raise UserError(f"{file} was fitted to other weights or options of the drafter; run `dspine calibrate` again")
    return calibration


# -- fitting ----------------------------------------------------------------------------------------------------------


def fit_map(rounds: Rounds, temperature: float) -> ConfidenceMap:
    """The maps that make what was observed likeliest. Raises UserError where no token was drafted."""
    reached, accepted, x = rounds.reached, rounds.survived, _logit(rounds.confidence)
    if not reached.any():
        raise UserError("nothing was drafted, so there is nothing to calibrate on; give more or other prompts")
    pooled = _platt(x[reached], accepted[reached], np.array([1.0, 0.0]), 1.0)
    fits, means = [], []
    overall = float(accepted[reached].mean())
    for t in range(x.shape[1]):
        here = reached[:, t]
        fits.append(_platt(x[here, t], accepted[here, t], pooled, POOL_ROUNDS))
        means.append((float(accepted[here, t].sum()) + overall) / (float(here.sum()) + 1.0))
    slopes, offsets = np.array(fits).T.tolist()
    return ConfidenceMap(
        temperature=temperature, slope=tuple(slopes), offset=tuple(offsets), mean_acceptance=tuple(means)
    )  # fmt: skip


def _platt(x: Floats, y: Bools, prior: Floats, precision: float) -> Floats:
    """(slope, offset) >= (0, any) that minimise the log-loss of sigmoid(slope x + offset) for y, plus the pull to `prior`.

    Newton's method; the prior makes the problem strictly convex, so that it has one solution even where all y agree.
    """
    theta, design = prior.copy(), np.stack((x, np.ones_like(x)), 1)
    pull = np.array([precision, precision / 10])  # an offset moves more freely: a slope has logits of several units to act on

    def loss(theta: Floats) -> float:
        z = design @ theta
        return float((np.logaddexp(0, z) - y * z).sum() + 0.5 * (pull * (theta - prior) ** 2).sum())

    for _ in range(NEWTON_STEPS):
        p = _sigmoid(design @ theta)
        gradient = design.T @ (p - y) + pull * (theta - prior)
        hessian = (design * (p * (1 - p))[:, None]).T @ design + np.diag(pull)
        step = np.linalg.solve(hessian, gradient)
        while loss(theta - step) > loss(theta) and np.abs(step).max() > 1e-9:
            step = step / 2  # a full step may overshoot from afar
        theta = theta - step
        if np.abs(step).max() < 1e-8:
            break
    if theta[0] >= 0:
        return theta
    rate = (float(y.sum()) + 0.5) / (len(y) + 1.0)  # the confidence says nothing, or the opposite: only the mean is left
    return np.array([0.0, float(np.log(rate / (1 - rate)))])


def _logit(probability: Floats) -> Floats:
    clipped = np.clip(probability, CLIP, 1 - CLIP)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


# -- how good probabilities are ---------------------------------------------------------------------------------------


class Bin(BaseModel):
    """Predictions of one bin: their mean, how often it happened, how many there are."""

    predicted: float
    observed: float
    count: int


class Reliability(BaseModel):
    """Expected calibration error (Naeini et al., 2015: mean over predictions of their bin's |predicted - observed|), Brier score
    (mean squared error against what happened) and the bins of equal width, empty ones left out.

    `skill` is 1 - Brier score / that of always saying the mean: what is known beyond the mean, so that drafters of unlike
    acceptance compare. 1 is perfect, 0 is nothing.
    """

    ece: float
    brier: float
    skill: float
    count: int
    bins: tuple[Bin, ...]


def reliability(predicted: Floats, happened: Bools, num_bins: int = 10) -> Reliability:
    """Of predicted probabilities [n] of events that `happened` [n] or not."""
    which = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    bins = [
        Bin(predicted=float(predicted[which == i].mean()), observed=float(happened[which == i].mean()), count=int(count))
        for i, count in enumerate(np.bincount(which, minlength=num_bins))
        if count
    ]
    total = len(predicted)
    ece = sum(bin.count * abs(bin.predicted - bin.observed) for bin in bins) / max(total, 1)
    brier = float(np.mean((predicted - happened) ** 2)) if total else 0.0
    spread = float(np.var(happened)) if total else 0.0
    skill = 1 - brier / spread if spread else 0.0
    return Reliability(ece=ece, brier=brier, skill=skill, count=total, bins=tuple(bins))


def survival(acceptance: Sequence[float] | Floats) -> Floats:
    """Running product along the last dimension."""
    return np.asarray(np.cumprod(np.asarray(acceptance, dtype=np.float64), -1), dtype=np.float64)
