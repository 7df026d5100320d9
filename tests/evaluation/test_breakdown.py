"""The parts of a round: which ones a drafter has, that they add up, and that recording changes no output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspine.api import LLM
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.drafters.registry import DRAFTERS
from dspine.errors import UserError
from dspine.evaluation.breakdown import LARGEST_RESIDUAL, BreakdownReport, measure_breakdown
from dspine.targets.model import Target

MakeDrafter = Callable[..., BlockDrafter]
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
TARGETS_OWN = {"verification", "acceptance", "bookkeeping"}
DRAFTERS_OWN = {
    "dflash": {"draft_backbone", "head", "selection"},
    "dspine": {"draft_backbone", "injection", "head", "transition_cache", "selection"},
    "domino": {"draft_backbone", "head", "selection"},
    "dspark": {"draft_backbone", "head", "selection"},
    "dflash2": {"draft_backbone", "head", "transition_cache", "selection"},
    "eagle3": {"draft_backbone", "head", "selection"},
}


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafters_parts_add_up_to_the_round(name: str, tiny_target: Target, make_drafter: MakeDrafter) -> None:
    """Rounds of a tiny model take a millisecond, where any gap between the stages would show."""
    llm = LLM(tiny_target, make_drafter(tiny_target, name), max_rows=1, width=4)
    report = measure_breakdown(llm, PROMPTS, PARAMS)
    assert {part.stage for part in report.stages} == TARGETS_OWN | DRAFTERS_OWN[name]
    assert all(part.round_ms > 0 for part in report.stages)
    assert abs(report.residual_share) <= LARGEST_RESIDUAL
    assert report.sum_agrees
    assert sum(part.round_ms for part in report.stages) == pytest.approx(report.round_ms * (1 - report.residual_share))
    assert sum(part.share for part in report.stages) == pytest.approx(1)


def test_rounds_and_tokens_are_those_outside_the_prefills(tiny_target: Target) -> None:
    """Plain decoding of 24 tokens: one in the prefill, one in the round of the same step, 22 in rounds of their own."""
    finished: list[int] = []
    report = measure_breakdown(LLM(tiny_target, None, max_rows=2), PROMPTS, PARAMS, on_progress=finished.append)
    assert (report.drafter, report.width, report.acceptance_length) == ("none", "1", 1.0)
    assert {part.stage for part in report.stages} == TARGETS_OWN
    assert (report.rounds, report.tokens) == (22 + 22, 22 * 3), "two prompts together, then the third"
    assert report.token_ms == pytest.approx(report.round_ms * report.rounds / report.tokens)
    assert report.clock == "perf_counter"
    assert finished == [2, 1]


def test_recording_changes_no_output(tiny_target: Target, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_target, make_drafter(tiny_target), max_rows=1, width=4)
    requests: list[Request] = []
    submit = llm.engine().submit

    def kept(prompt_ids: list[int], params: SamplingParams) -> Request:
        requests.append(submit(prompt_ids, params))
        return requests[-1]

    monkeypatch.setattr(llm.engine(), "submit", kept)
    measure_breakdown(llm, PROMPTS[:1], PARAMS)
    *_, recorded, ordinary = requests
    assert recorded.output_ids == ordinary.output_ids


def report_with(residual_share: float, tiny_target: Target) -> BreakdownReport:
    report = measure_breakdown(LLM(tiny_target, None, max_rows=1), PROMPTS[:1], PARAMS)
    return dataclasses.replace(report, residual_share=residual_share)


def test_parts_that_do_not_add_up_are_an_error(tiny_target: Target) -> None:
    report_with(0.029, tiny_target).check_sum()
    for residual_share, sum_of_parts in ((0.031, "96.9%"), (-0.04, "104.0%")):
        with pytest.raises(UserError, match=f"add up to {sum_of_parts} of the rounds"):
            report_with(residual_share, tiny_target).check_sum()


def test_the_result_is_json(tiny_target: Target, tmp_path: Path) -> None:
    report = report_with(0.01, tiny_target)
    report.write(tmp_path / "b.json")
    data: dict[str, Any] = json.loads((tmp_path / "b.json").read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["sum_agrees"] is True
    assert data["stages"][0]["stage"] == "verification"
    assert data["machine"]["threads"] >= 1


def test_answers_of_a_single_round_are_no_measurement(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="no answer took more than one round"):
        measure_breakdown(LLM(tiny_target, None, max_rows=1), PROMPTS, SamplingParams(max_new_tokens=1))
