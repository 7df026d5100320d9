"""Speed reports: what is timed, in which order, and how medians and ratios are taken. No test depends on real speed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.errors import UserError
from dspine.evaluation import speed
from dspine.evaluation.speed import measure_speed
from dspine.evaluation.timing import Timing, engine_decode, transformers_decode
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeDrafter = Callable[..., BlockDrafter]
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: MakeDrafter) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target), max_rows=1, width=4)


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
    real = engine_decode

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
    real = engine_decode

    def fake(engine):  # type: ignore[no-untyped-def]
        decode = real(engine)

        def changed(ids: list[int], params: SamplingParams) -> Timing:
            timing = decode(ids, params)
            return Timing(next(outputs), timing.elapsed_s, timing.ttft_s, timing.stats)

        return changed

    monkeypatch.setattr(speed, "engine_decode", fake)
    assert measure_speed(llm, PROMPTS[:1], SamplingParams(max_new_tokens=4), repeats=2).identical is False


def test_impossible_measurements_are_explained(tiny_target: Target, llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(UserError, match="tiny-llama has no drafter here"):
        measure_speed(LLM(tiny_target, None), PROMPTS, params)
    with pytest.raises(UserError, match="repeats = 0"):
        measure_speed(llm, PROMPTS, params, repeats=0)
