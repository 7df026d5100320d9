"""Where one round's time goes: backbone, injection, head, transition cache, selection, verification, acceptance, bookkeeping.

    report = measure_breakdown(llm, prompts, SamplingParams(max_new_tokens=160))
    report.stages[0].round_ms, report.residual_share

The stages' times come from `dspine.stages`, exclusive and by the device's clock; the whole is the wall time of the same
rounds by the host's. What they differ by is the residual. Prefills, and the round that runs in the same step, are left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspine.api import LLM
from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.errors import UserError
from dspine.evaluation.machine import machine_facts
from dspine.evaluation.timing import WARM_UP_TOKENS
from dspine.files import write_text
from dspine.stages import STAGES, Stage, StageRecorder

LARGEST_RESIDUAL = 0.03  # of the whole: beyond it the parts do not explain the round


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One stage's exclusive time, in the mean round and per token generated; `share` of the sum of all stages."""

    stage: Stage
    round_ms: float
    token_ms: float
    share: float


@dataclass(frozen=True, kw_only=True)
class BreakdownReport:
    """Stages that a drafter does not have are not in `stages`; the others keep the order of `dspine.stages.STAGES`.

    `round_ms` and `token_ms` are the whole; `residual_share` = (whole - sum of stages) / whole; `recording_share` is by how
    much rounds were slower because they were recorded, and may be negative by noise; `tokens` are those of the recorded
    rounds, after truncation; `acceptance_length` is over all rounds of the recorded answers.
    """

    target: str
    drafter: str
    width: str
    temperature: float
    max_new_tokens: int
    seed: int | None
    prompts: int
    batch: int
    rounds: int
    tokens: int
    acceptance_length: float
    clock: str
    stages: tuple[StageTime, ...]
    round_ms: float
    token_ms: float
    residual_share: float
    recording_share: float
    machine: dict[str, str | int]

    @property
    def sum_agrees(self) -> bool:
        return abs(self.residual_share) <= LARGEST_RESIDUAL

    def check_sum(self) -> None:
        """Raise UserError where the stages do not add up to the rounds."""
        if not self.sum_agrees:
            raise UserError(
                f"the stages add up to {1 - self.residual_share:.1%} of the rounds' time, not to within {LARGEST_RESIDUAL:.0%} "
                "of it; something else was using the machine: run it again on an idle one, with more prompts"
            )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sum_agrees": self.sum_agrees}

    def write(self, file: Path) -> None:
        """Write JSON by one rename."""
        write_text(file, json.dumps(self.to_dict(), indent=2) + "\n")


@dataclass
class _Rounds:
    """What was decoded outside the prefills, and the wall time of it."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0


def measure_breakdown(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> BreakdownReport:
    """Decode `llm.max_rows` prompts at a time, each group once recorded and once as always; which goes first takes turns.

    Raises UserError where no answer has a round after its first one.
    """
    engine, batch = llm.engine(), llm.max_rows
    recorder = StageRecorder.on(llm.target.device)
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for warm_up in (groups[0], groups[0][:1]):  # a group ends with few rows, whose costs are measured at first sight too
        _decode(engine, warm_up, short, None, _Rounds())
    recorded, ordinary, total = _Rounds(), _Rounds(), DecodeStats()
    for number, group in enumerate(groups):
        for turn in (number, number + 1):
            if turn % 2:
                _decode(engine, group, params, None, ordinary)
            else:
                for request in _decode(engine, group, params, recorder, recorded):
                    total.merge(request.stats)
        on_progress(len(group))
    if not (recorded.rounds and ordinary.rounds):
        raise UserError("no answer took more than one round; raise the number of new tokens or take other prompts")
    stages_s = sum(recorder.stage_s.values())
    return BreakdownReport(
        target=llm.target.name,
        drafter=llm.drafter.config.drafter if llm.drafter is not None else "none",
        width=str(llm.width) if llm.drafter is not None else "1",
        temperature=params.temperature,
        max_new_tokens=params.max_new_tokens,
        seed=params.seed,
        prompts=len(prompts),
        batch=batch,
        rounds=recorded.rounds,
        tokens=recorded.tokens,
        acceptance_length=total.acceptance_length,
        clock=recorder.clock.name,
        stages=_stage_times(recorder, recorded),
        round_ms=1000 * recorder.round_s / recorded.rounds,
        token_ms=1000 * recorder.round_s / recorded.tokens,
        residual_share=1 - stages_s / recorder.round_s,
        recording_share=(recorded.seconds / recorded.rounds) / (ordinary.seconds / ordinary.rounds) - 1,
        machine=machine_facts(llm.target.device),
    )


def _decode(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, recorder: StageRecorder | None, rounds: _Rounds
) -> list[Request]:
    """Decode `prompts` together and add to `rounds` all but the first step."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.step()  # the prefills, and the first round with them
    started = time.perf_counter()
    while engine.has_work:
        if recorder is None:
            progress = engine.step()
        else:
            with recorder.round():
                progress = engine.step()
        rounds.rounds += 1
        rounds.tokens += sum(len(p.token_ids) for p in progress)
    rounds.seconds += time.perf_counter() - started  # the last round's tokens are on the host: its work is done
    return requests


def _stage_times(recorder: StageRecorder, recorded: _Rounds) -> tuple[StageTime, ...]:
    whole_s = sum(recorder.stage_s.values())
    return tuple(
        StageTime(
            stage=name,
            round_ms=1000 * recorder.stage_s[name] / recorded.rounds,
            token_ms=1000 * recorder.stage_s[name] / recorded.tokens,
            share=recorder.stage_s[name] / whole_s,
        )
        for name in STAGES
        if name in recorder.stage_s
    )
