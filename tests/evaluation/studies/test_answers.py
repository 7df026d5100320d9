"""The truth of the studies: greedy answers, generated or given, and blocks that lie inside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.errors import UserError
from dspine.evaluation.studies.answers import AnswerSource, block_anchors, check_disjoint, collect_answers
from dspine.targets.chat import ChatFormat
from dspine.targets.model import Target
from dspine.training.corpus import Answer
from dspine.training.prompts import collect_prompts
from dspine.training.regenerate import EngineAnswerer, RegenerateSettings, regenerate

WritePrompts = Callable[..., Path]


def test_answers_are_the_targets_greedy_ones(tiny_target: Target, answers: list[Answer]) -> None:
    assert [answer.ref for answer in answers] == [("questions", line) for line in range(12)]
    for answer in answers[:5]:
        prompt = answer.ids[: answer.prompt_length]
        engine = Engine(tiny_target)
        request = engine.submit(prompt, SamplingParams(max_new_tokens=30))
        engine.run()
        assert answer.ids == prompt + request.output_ids


def test_generated_answers_are_kept_and_more_are_added(tiny_target: Target, write_prompts: WritePrompts, tmp_path: Path) -> None:
    source = AnswerSource(prompts=write_prompts(tmp_path / "q.jsonl", 5), max_new_tokens=6, limit=2)
    steps: list[int] = []
    two = collect_answers(source, tiny_target, tmp_path, steps.append)
    assert (len(two), sum(steps), source.count()) == (2, 2, 2)
    four = collect_answers(replace(source, limit=4), tiny_target, tmp_path)
    assert four[:2] == two
    assert len(four) == 4
    # Fewer than the file holds: the rest is left out.
    assert collect_answers(source, tiny_target, tmp_path) == two


def test_given_answers_are_used_as_far_as_asked(tiny_target: Target, write_prompts: WritePrompts, tmp_path: Path) -> None:
    prompts, others = write_prompts(tmp_path / "q.jsonl", 3), write_prompts(tmp_path / "p.jsonl", 2, "other")
    file = tmp_path / "given.jsonl.gz"
    settings = RegenerateSettings(max_new_tokens=20)
    chat = ChatFormat.of(tiny_target)
    regenerate(collect_prompts([others, prompts]), EngineAnswerer(tiny_target), chat, file, settings)
    source = AnswerSource(prompts=prompts, answers=file, limit=2, max_new_tokens=5)
    found = collect_answers(source, tiny_target, tmp_path / "unused")
    assert [answer.ref for answer in found] == [("q", 0), ("q", 1)]
    assert all(len(answer.ids) - answer.prompt_length <= 5 for answer in found)
    assert not (tmp_path / "unused").exists()
    write_prompts(tmp_path / "r.jsonl", 1)
    with pytest.raises(UserError, match="answers no prompt of"):
        collect_answers(replace(source, prompts=tmp_path / "r.jsonl"), tiny_target, tmp_path)


def test_sampled_answers_are_refused(tiny_target: Target, write_prompts: WritePrompts, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "q.jsonl", 1)
    settings = RegenerateSettings(max_new_tokens=4, temperature=0.5)
    answerer, chat = EngineAnswerer(tiny_target), ChatFormat.of(tiny_target)
    regenerate(collect_prompts([prompts]), answerer, chat, tmp_path / "a.jsonl", settings)
    source = AnswerSource(prompts=prompts, answers=tmp_path / "a.jsonl", max_new_tokens=4)
    with pytest.raises(UserError, match=r"sampled at temperature 0\.5"):
        collect_answers(source, tiny_target, tmp_path)


def test_a_prompt_is_not_both_fitted_to_and_tested_on(answers: list[Answer]) -> None:
    check_disjoint(answers[:2], answers[2:])
    # The same text under another name is the same prompt, whatever was answered.
    copy = Answer(("elsewhere", 7), [*answers[3].ids, 5], answers[3].prompt_length)
    with pytest.raises(UserError, match=r"elsewhere\.jsonl line 8 is among the test prompts"):
        check_disjoint([answers[0], copy], answers[2:])


def test_blocks_lie_inside_the_answer() -> None:
    answer = Answer(("q", 3), list(range(4, 34)), 10)
    every = block_anchors(answer, 7, 1000, seed=0)
    # The last prompt token is the first anchor; the last block ends with the answer.
    assert every.tolist() == list(range(9, 23))
    few = block_anchors(answer, 7, 4, seed=0)
    assert len(few) == 4
    assert set(few.tolist()) < set(every.tolist())
    assert few.tolist() == block_anchors(answer, 7, 4, seed=0).tolist() != block_anchors(answer, 7, 4, seed=1).tolist()
    assert block_anchors(Answer(("q", 0), [5] * 12, 10), 7, 4, seed=0).shape == (0,)
    assert block_anchors(Answer(("q", 0), [5] * 4, 2), 7, 4, seed=0).shape == (0,)
