"""Acceptance over a benchmark: counts that add up, turns that continue, a report that is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.errors import UserError
from dspine.evaluation.acceptance import AcceptanceReport, bootstrap_interval, measure_acceptance
from dspine.evaluation.benchmarks import Benchmark
from dspine.targets.model import Target

MakeDrafter = Callable[..., BlockDrafter]
BENCHMARK = Benchmark("little", (("first question", "and then?"), ("second",), ("x" * 505,), ("third", "more", "even more")))
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: MakeDrafter) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target, "dflash"), max_rows=3, width=4)


@pytest.fixture(scope="module")
def report(llm: LLM) -> AcceptanceReport:
    return measure_acceptance(llm, BENCHMARK, PARAMS, chat=False)


def test_every_turn_is_decoded_and_counted(report: AcceptanceReport) -> None:
    assert [c.turns for c in report.conversations] == [2, 1, 0, 3]
    assert [c.skipped_turns for c in report.conversations] == [0, 0, 1, 0]
    assert (report.prompts, report.skipped_turns) == (4, 1)
    assert report.tokens == sum(c.tokens for c in report.conversations) <= 6 * 12
    assert report.rounds == sum(c.rounds for c in report.conversations)
    assert len(report.acceptance_by_position) == len(report.conditional_acceptance) == 3
    assert report.acceptance_length == pytest.approx(1 + sum(report.acceptance_by_position))
    assert report.acceptance_length_ci95[0] <= report.acceptance_length <= report.acceptance_length_ci95[1]
    assert 1 < report.acceptance_length < 4
    assert (report.target, report.drafter, report.width, report.benchmark) == ("tiny-llama", "dflash", "4", "little")


def test_later_turns_continue_with_the_generated_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    engine = llm.engine()
    submit = engine.submit

    def spy(ids: list[int], params: SamplingParams):  # type: ignore[no-untyped-def]
        prompts.append(llm.target.tokenizer.decode(ids))
        return submit(ids, params)

    monkeypatch.setattr(engine, "submit", spy)
    measure_acceptance(llm, Benchmark("one", (("hello", "go on"),)), replace(PARAMS, temperature=0.0), chat=False)
    answer = llm.generate("hello", max_new_tokens=12).text
    assert prompts[:2] == ["hello", f"hello\n{answer}\ngo on"]


def test_the_same_seed_gives_the_same_report(llm: LLM, report: AcceptanceReport) -> None:
    again = measure_acceptance(llm, BENCHMARK, PARAMS, chat=False)
    assert again.conversations == report.conversations
    other = measure_acceptance(llm, BENCHMARK, replace(PARAMS, seed=4), chat=False)
    assert other.conversations != report.conversations


def test_progress_counts_conversations(llm: LLM) -> None:
    steps: list[int] = []
    measure_acceptance(llm, BENCHMARK, PARAMS, chat=False, on_progress=steps.append)
    assert sum(steps) == 4


def test_the_written_report_is_the_whole_report(report: AcceptanceReport, tmp_path: Path) -> None:
    report.write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert data["acceptance_length"] == report.acceptance_length
    assert data["conversations"][0]["tokens"] == report.conversations[0].tokens
    assert data["machine"]["torch"]
    assert set(data) - set(report.summary()) == {"conversations"}
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_nothing_to_measure_is_explained(llm: LLM, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="tiny-llama has no drafter here"):
        measure_acceptance(LLM(tiny_target, None), BENCHMARK, PARAMS, chat=False)
    with pytest.raises(
        UserError, match="nothing was drafted on long: its prompts leave no room for 12 new tokens in the context of"
    ):
        measure_acceptance(llm, Benchmark("long", (("x" * 505,),)), PARAMS, chat=False)


def test_the_interval_is_that_of_resampled_conversations() -> None:
    assert bootstrap_interval([5, 5, 5], [5, 5, 5], 200) == (2.0, 2.0)
    # Two conversations of tau 1 and 3 with equal rounds: the mean of two draws is 1, 2 or 3.
    assert bootstrap_interval([0, 20], [10, 10], 4000) == (1.0, 3.0)
    low, high = bootstrap_interval([20 + i % 3 for i in range(400)], [10] * 400, 500)
    assert 3.08 < low < 3.1 < high < 3.12
