"""Fit a drafter's confidence to what the target accepts, and say how far off it is before and after.

    report = calibrate(llm, prompts, "train", temperatures=(0.0, 1.0), max_new_tokens=128)
    report.calibration.write(folder)

Every prompt is decoded with the whole block verified. Three of four prompts fit the maps, the fourth judges them: no number of
the report is of a prompt that was fitted on. Prompts that the drafter was trained on would make it look surer than it is
elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.api import LLM
from dspine.decoding.calibration import Calibration, ConfidenceMap, Reliability, Rounds, fit_map, reliability, survival
from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.checkpoint import drafter_sha256
from dspine.errors import UserError
from dspine.evaluation.machine import machine_facts
from dspine.files import write_text

HELD_OUT_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How good the probabilities of the held-out rounds are: of a token given all before it, and of it and all before it."""

    acceptance: Reliability
    survival: Reliability

    def to_dict(self) -> dict[str, Any]:
        return {"acceptance": self.acceptance.model_dump(), "survival": self.survival.model_dump()}


@dataclass(frozen=True, kw_only=True)
class TemperatureReport:
    temperature: float
    fitted_rounds: int
    held_out_rounds: int
    before: Judged
    after: Judged

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "before": self.before.to_dict(), "after": self.after.to_dict()}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    target: str
    drafter: str
    prompts: str
    num_prompts: int
    max_new_tokens: int
    temperatures: tuple[TemperatureReport, ...]
    calibration: Calibration
    machine: dict[str, str | int]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **vars(self),
            "temperatures": [t.to_dict() for t in self.temperatures],
            "calibration": self.calibration.model_dump(),
        }

    def write(self, file: Path) -> None:
        write_text(file, json.dumps(self.to_dict(), indent=2) + "\n")


def calibrate(
    llm: LLM,
    prompts: Sequence[list[int]],
    name: str,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> CalibrationReport:
    """Maps for each of the temperatures, from the answers to encoded prompts; `name` is what their file is called.

    Raises UserError where there is no drafter from a checkpoint, or nothing to learn from.
    """
    if llm.drafter is None or llm.drafter.folder is None:
        raise UserError(f"{llm.target.name} has no drafter from a checkpoint here; name one to calibrate")
    if len(prompts) < HELD_OUT_EVERY:
        raise UserError(f"{len(prompts)} prompts are too few to calibrate on: every fourth only judges; give at least 4")
    reports: list[TemperatureReport] = []
    maps: list[ConfidenceMap] = []
    for temperature in temperatures:
        params = [
            SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed + i) for i in range(len(prompts))
        ]
        rows = observe(llm, prompts, params, on_progress)
        fitted, held_out = (
            [row for i, row in rows if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == out] for out in (False, True)
        )
        rounds, judging = rounds_of(fitted), rounds_of(held_out)
        maps.append(fit_map(rounds, 0.0 if params[0].is_greedy else temperature))
        reports.append(
            TemperatureReport(
                temperature=temperature,
                fitted_rounds=len(fitted),
                held_out_rounds=len(held_out),
                before=judge(judging, judging.confidence),
                after=judge(judging, maps[-1].acceptance(judging.confidence)),
            )
        )
    return CalibrationReport(
        target=llm.target.name,
        drafter=llm.drafter.config.drafter,
        prompts=name,
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        temperatures=tuple(reports),
        calibration=Calibration(
            drafter=llm.drafter.config.drafter,
            drafter_sha256=drafter_sha256(llm.drafter),
            prompts=name,
            num_prompts=len(prompts),
            maps=tuple(maps),
        ),
        machine=machine_facts(llm.target.device),
    )


Row = tuple[list[float], int]  # raw confidences of a round's tokens, how many of them were accepted


def observe(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], on_progress: Callable[[int], None]
) -> list[tuple[int, Row]]:
    """Every round of every answer, with the index of its prompt; the whole block is verified."""
    assert llm.drafter is not None
    rows: list[tuple[int, Row]] = []
    index: dict[int, int] = {}

    def keep(request: Request, confidence: list[float], num_accepted: int) -> None:
        rows.append((index[request.id], (confidence, num_accepted)))

    width = llm.drafter.config.max_width
    engine = Engine(llm.target, llm.drafter.runner(llm.target), max_rows=llm.max_rows, width=width, observer=keep)
    for i, (ids, wanted) in enumerate(zip(prompts, params, strict=True)):
        index[engine.submit(ids, wanted).id] = i
    while engine.has_work:
        on_progress(sum(p.request.finish_reason is not None for p in engine.step()))
    if not rows:
        raise UserError(f"this {llm.drafter.config.drafter} drafter never said how sure it is: nothing was drafted, or it cannot")
    return rows


def judge(rounds: Rounds, acceptance: np.ndarray) -> Judged:
    """How good acceptance probabilities [n, m] are, alone and as running products."""
    reached, drafted = rounds.reached, rounds.drafted
    return Judged(
        acceptance=reliability(acceptance[reached], rounds.survived[reached]),
        survival=reliability(survival(acceptance)[drafted], rounds.survived[drafted]),
    )


def rounds_of(rows: Sequence[Row]) -> Rounds:
    """Rows side by side; what a round did not draft is NaN."""
    confidence = np.full((len(rows), max((len(row) for row, _ in rows), default=1)), np.nan)
    for into, (row, _) in zip(confidence, rows, strict=True):
        into[: len(row)] = row
    return Rounds(confidence, np.array([accepted for _, accepted in rows], dtype=np.int64))
