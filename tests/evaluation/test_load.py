"""The engine under a closed loop of requests: so many at once, answers in order, the same ones as one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.evaluation.load import Answer, EngineWay, engine_ways
from dspine.targets.model import Target

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def test_answers_come_in_order_whatever_the_concurrency(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> None:
    drafter = make_drafter(tiny_target)
    order = (2, 0, 1, 2, 0)
    outputs = []
    for way in engine_ways(tiny_target, {"dspine": drafter, "narrow": drafter}, PROMPTS, PARAMS, 3):
        for concurrency in (1, 2, 4):
            answers = asyncio.run(way.decode(order, concurrency, 12))
            outputs.append([answer.output for answer in answers])
            assert {answer.tokens for answer in answers} == {12}
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0][0] == outputs[0][3] != outputs[0][1]


def test_ways_say_what_they_are(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> None:
    plain, mine = engine_ways(tiny_target, {"mine": make_drafter(tiny_target, "dflash")}, PROMPTS, PARAMS)
    assert (plain.facts.name, plain.facts.drafter, plain.facts.decoder) == ("plain", "none", "engine")
    assert (mine.facts.name, mine.facts.drafter, mine.facts.model) == ("mine", "dflash", "tiny-llama")


def test_a_request_is_sent_when_there_is_room_for_it(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits in the engine: its time to the first token would count the wait."""
    waiting: list[int] = []
    step = Engine.step

    def watched(self: Engine) -> list[object]:
        waiting.append(self.num_live + self.num_waiting)
        return list(step(self))

    monkeypatch.setattr(Engine, "step", watched)
    heard: list[int] = []
    way = EngineWay("plain", tiny_target, None, PROMPTS, PARAMS)
    answers = asyncio.run(way.decode((0, 1, 2, 0, 1), 2, 4, lambda: heard.append(1)))
    assert max(waiting) == 2
    assert len(heard) == len(answers) == 5
    assert all(0 < answer.ttft_s <= answer.elapsed_s for answer in answers)


def test_every_request_samples_by_a_seed_of_its_prompt(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    submit = Engine.submit

    def watched(self: Engine, prompt_ids: list[int], params: SamplingParams) -> Request:
        seeds.append(params.seed)
        return submit(self, prompt_ids, params)

    monkeypatch.setattr(Engine, "submit", watched)
    for seed in (7, None):
        params = SamplingParams(temperature=1.0, max_new_tokens=2, seed=seed)
        asyncio.run(EngineWay("plain", tiny_target, None, PROMPTS, params).decode((1, 2), 1, 2))
    assert seeds == [8, 9, None, None]


def test_the_time_per_token_is_that_after_the_first() -> None:
    assert Answer(tokens=5, ttft_s=1.0, elapsed_s=3.0).tpot_s == 0.5
    assert Answer(tokens=1, ttft_s=1.0, elapsed_s=1.0).tpot_s is None
