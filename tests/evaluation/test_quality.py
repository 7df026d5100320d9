"""The same text and the same score with and without the drafter, prompt by prompt."""

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
from dspine.evaluation import quality
from dspine.evaluation.benchmarks import Benchmark
from dspine.evaluation.conversations import Conversation, decode_conversations
from dspine.evaluation.quality import QualityReport, compare, first_difference, measure_quality
from dspine.evaluation.references import MathAnswer, Reference
from dspine.targets.model import Target

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=12, seed=0)
BENCHMARK = Benchmark("little", (("first", "and then?"), ("second",), ("x" * 505,), ("third",)), tuple(map(MathAnswer, "1234")))


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target, "dspine"), max_rows=2, width=4)


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A tiny random model never gives a right answer: grade by the reference alone, even ones are right."""
    asked: list[tuple[str, str]] = []

    def grade(reference: Reference, answer: str) -> bool:
        assert isinstance(reference, MathAnswer)
        asked.append((reference.answer, answer))
        return int(reference.answer) % 2 == 0

    monkeypatch.setattr(quality, "is_right", grade)
    return asked


def test_greedy_texts_are_the_same_and_so_are_scores(llm: LLM, graded: list[tuple[str, str]]) -> None:
    report = measure_quality(llm, BENCHMARK, PARAMS, chat=False)
    assert (report.prompts, report.compared, report.identical, report.skipped_turns) == (4, 3, 3, 1)
    assert (report.graded, report.plain_score, report.spec_score) == (3, 2 / 3, 2 / 3)
    assert report.score_difference_ci95 == (0.0, 0.0)
    assert [(r.plain_right, r.spec_right) for r in report.conversations] == [(False,) * 2, (True,) * 2, (None,) * 2, (True,) * 2]
    assert [number for number, _ in graded] == ["1", "2", "4"], "equal answers are graded once"
    assert graded[1][1] == llm.generate("second", max_new_tokens=12, speculative=False).text


def test_a_difference_is_found_and_scored(llm: LLM, graded: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = decode_conversations

    def broken(*arguments, speculative: bool, **options):  # type: ignore[no-untyped-def]
        for conversation in decode(*arguments, speculative=speculative, **options):
            if speculative and conversation.index == 1:
                conversation.output_ids[0][5] += 1
                conversation.answers[0] += "!"
            yield conversation

    monkeypatch.setattr(quality, "decode_conversations", broken)
    monkeypatch.setattr(quality, "is_right", lambda reference, answer: not answer.endswith("!"))
    report = measure_quality(llm, BENCHMARK, PARAMS, chat=False)
    assert (report.identical, report.compared) == (2, 3)
    assert report.conversations[1].first_difference == (0, 5)
    assert (report.plain_score, report.spec_score) == (1.0, 2 / 3)
    assert report.score_difference_ci95 is not None
    assert report.score_difference_ci95[0] < 0


def test_without_references_only_texts_are_compared(llm: LLM) -> None:
    report = measure_quality(llm, replace(BENCHMARK, references=()), PARAMS, chat=False)
    assert (report.identical, report.graded) == (3, 0)
    assert (report.plain_score, report.spec_score, report.score_difference_ci95) == (None, None, None)


def test_sampled_texts_differ_but_are_repeatable(llm: LLM) -> None:
    sampled = replace(PARAMS, temperature=1.0)
    once = measure_quality(llm, replace(BENCHMARK, references=()), sampled, chat=False)
    again = measure_quality(llm, replace(BENCHMARK, references=()), sampled, chat=False)
    assert once.identical < once.compared
    assert once.conversations == again.conversations


def test_an_interrupted_measurement_goes_on(llm: LLM, graded: list[tuple[str, str]], tmp_path: Path) -> None:
    file, heard = tmp_path / "q.json", []

    def stop(result: object) -> None:
        heard.append(result)
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_quality(llm, BENCHMARK, PARAMS, chat=False, file=file, on_result=stop)
    graded.clear()
    report = measure_quality(llm, BENCHMARK, PARAMS, chat=False, file=file)
    assert [number for number, _ in graded] == ["4"]
    assert report.conversations == measure_quality(llm, BENCHMARK, PARAMS, chat=False).conversations
    assert json.loads(file.read_text())["identical"] == 3
    graded.clear()
    assert measure_quality(llm, BENCHMARK, PARAMS, chat=False, file=file) == report
    assert graded == []
    other = replace(BENCHMARK, references=tuple(map(MathAnswer, "5678")))
    with pytest.raises(UserError, match=r"q\.json was measured with references_sha256 = '"):
        measure_quality(llm, other, PARAMS, chat=False, file=file)


def test_the_place_of_a_difference() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3]], [[1, 9], [3]]) == (0, 1)
    assert first_difference([[1, 2], [3]], [[1, 2], [4]]) == (1, 0)
    assert first_difference([[1, 2]], [[1, 2, 3]]) == (0, 2)
    assert first_difference([[1, 2], [3]], [[1, 2]]) == (1, 0)


def test_a_conversation_without_an_answer_is_not_graded() -> None:
    result = compare(Conversation(0, ("a",), skipped_turns=1), Conversation(0, ("a",), skipped_turns=1), MathAnswer("1"))
    assert (result.plain_right, result.spec_right, result.first_difference) == (None, None, None)


def test_nothing_to_decode_is_explained(llm: LLM) -> None:
    with pytest.raises(UserError, match="nothing was decoded on long: its prompts leave no room for 12 new tokens"):
        measure_quality(llm, Benchmark("long", (("x" * 505,),)), PARAMS, chat=False)


def test_the_summary_leaves_the_conversations_out(llm: LLM) -> None:
    report: QualityReport = measure_quality(llm, replace(BENCHMARK, references=()), PARAMS, chat=False)
    assert "conversations" not in report.summary()
    assert report.summary()["drafter_sha256"]
