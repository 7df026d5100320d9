"""Speed reports: what is timed, in which order, and how medians and ratios are taken. No test depends on real speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.errors import UserError
from dspine.evaluation import speed
from dspine.evaluation.speed import (
    PromptTimings,
    Timing,
    engine_decode,
    interleave,
    measure_batch,
    measure_speed,
    product_share,
    transformers_decode,
)
from dspine.kernels.linear import PackedLinear
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeDrafter = Callable[..., BlockDrafter]
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: MakeDrafter) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target), max_rows=1, width=4)


def test_an_answers_speed_is_the_median_of_its_repeats() -> None:
    timings = tuple(Timing([1] * 10, seconds) for seconds in (1.0, 2.0, 50.0))
    assert PromptTimings(timings=timings).tok_per_s == 5.0


def test_ways_are_interleaved_and_take_turns_in_going_first() -> None:
    calls: list[tuple[str, int, int]] = []

    def way(name: str) -> speed.Decode:
        def decode(prompt: list[int], params: SamplingParams) -> Timing:
            calls.append((name, prompt[0], params.max_new_tokens))
            return Timing([1], 1.0)

        return decode

    steps: list[int] = []
    measured = interleave([way("a"), way("b")], [[1], [2]], SamplingParams(max_new_tokens=50), 2, steps.append)
    assert calls[:2] == [("a", 1, speed.WARM_UP_TOKENS), ("b", 1, speed.WARM_UP_TOKENS)]
    assert [(name, prompt) for name, prompt, _ in calls[2:]] == [
        ("a", 1), ("b", 1), ("b", 2), ("a", 2),
        ("b", 1), ("a", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip
    assert [[len(prompt.timings) for prompt in prompts] for prompts in measured] == [[2, 2], [2, 2]]
    assert sum(steps) == 4


def test_the_report_of_a_real_measurement_adds_up(llm: LLM, make_model: MakeModel) -> None:
    params = SamplingParams(max_new_tokens=10)
    report = measure_speed(llm, PROMPTS, params, repeats=2, reference=transformers_decode(make_model("llama")))
    assert report.identical is True
    assert report.transformers_identical_share == 1.0
    assert (report.prompts, report.repeats) == (3, 2)
    plain = [engine_decode(llm.engine(False))(ids, params).token_ids for ids in PROMPTS]
    assert report.tokens == sum(map(len, plain))
    assert report.draft_share + report.verify_share + report.other_share == pytest.approx(1.0)
    assert min(report.draft_share, report.verify_share, report.other_share) > 0
    assert report.matrix_product_share is not None
    assert 0 < report.matrix_product_share < 1
    assert report.acceptance_length >= 1
    assert len(report.acceptance_by_position) == 3
    assert report.plain_ttft_s > 0
    assert json.loads(json.dumps(report.to_dict()))["machine"]["threads"] >= 1


def test_without_a_reference_its_keys_are_missing(llm: LLM) -> None:
    data = measure_speed(llm, PROMPTS[:1], SamplingParams(max_new_tokens=4)).to_dict()
    assert not [key for key in data if "transformers" in key]
    assert {
        "speedup",
        "acceptance_length",
        "identical",
        "plain_tok_per_s",
        "spec_tok_per_s",
        "draft_share",
        "other_share",
    } <= set(data)


def test_identity_is_not_expected_of_sampling(llm: LLM) -> None:
    report = measure_speed(llm, PROMPTS[:1], SamplingParams(max_new_tokens=4, temperature=1.0, seed=0))
    assert report.identical is None
    assert "identical" in report.to_dict()


def test_ratios_are_taken_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Speeds 1, 2, 9 against 2, 8, 9: ratios 2, 4 and 1, whose median is 2, though the medians' quotient is 4."""
    seconds = {
        ("plain", 0): 1.0,
        ("plain", 1): 0.5,
        ("plain", 2): 1 / 9,
        ("spec", 0): 0.5,
        ("spec", 1): 0.125,
        ("spec", 2): 1 / 9,
    }
    real = speed.engine_decode

    def fake(engine):  # type: ignore[no-untyped-def]
        decode, name = real(engine), "plain" if engine.drafter is None else "spec"

        def timed(ids: list[int], params: SamplingParams) -> Timing:
            timing = decode(ids, params)
            return Timing([1], seconds[name, PROMPTS.index(ids)], timing.ttft_s, timing.stats)

        return timed

    monkeypatch.setattr(speed, "engine_decode", fake)
    report = measure_speed(llm, PROMPTS, SamplingParams(max_new_tokens=4))
    assert report.speedup == pytest.approx(2.0)
    assert [report.plain_tok_per_s, report.spec_tok_per_s] == pytest.approx([2.0, 8.0])


def test_a_difference_in_any_repeat_is_no_identity(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = iter([[1], [1], [1], [1], [2], [1]])  # warm-up of both, then two repeats
    real = speed.engine_decode

    def fake(engine):  # type: ignore[no-untyped-def]
        decode = real(engine)

        def changed(ids: list[int], params: SamplingParams) -> Timing:
            timing = decode(ids, params)
            return Timing(next(outputs), timing.elapsed_s, timing.ttft_s, timing.stats)

        return changed

    monkeypatch.setattr(speed, "engine_decode", fake)
    assert measure_speed(llm, PROMPTS[:1], SamplingParams(max_new_tokens=4), repeats=2).identical is False


def test_a_batch_gives_the_answers_of_transformers_whatever_ends_them(tiny_target: Target, make_model: MakeModel) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = list(range(4, 260, 2))  # would end nearly at once
    report = measure_batch(LLM(tiny_target, None), model, PROMPTS, max_new_tokens=8, repeats=2)
    assert report.identical_share == 1.0
    assert (report.batch, report.tokens) == (3, 24)
    assert report.ratio == pytest.approx(report.plain_tok_per_s / report.transformers_tok_per_s)


def test_the_product_share_is_that_of_the_calls_with_weights(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that sleep are nearly all of a round, and afterwards nothing is timed any more."""
    call = PackedLinear.__call__

    def slow(self: PackedLinear, x: Tensor, add: Tensor | None = None) -> Tensor:
        time.sleep(0.002)
        return call(self, x, add)

    with monkeypatch.context() as patched:
        patched.setattr(PackedLinear, "__call__", slow)
        share = product_share(llm.engine(), PROMPTS[:1], SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert PackedLinear.__call__ is slow
    assert share is not None
    assert 0.6 < share < 1
    assert product_share(llm.engine(), PROMPTS[:1], SamplingParams(max_new_tokens=1)) is None


def test_impossible_measurements_are_explained(tiny_target: Target, llm: LLM, make_model: MakeModel) -> None:
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(UserError, match="tiny-llama has no drafter here"):
        measure_speed(LLM(tiny_target, None), PROMPTS, params)
    with pytest.raises(UserError, match="repeats = 0"):
        measure_speed(llm, PROMPTS, params, repeats=0)
    with pytest.raises(UserError, match="repeats = 0"):
        measure_batch(llm, make_model("llama"), PROMPTS, max_new_tokens=4, repeats=0)
