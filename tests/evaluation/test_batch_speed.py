"""Batches against transformers: the same answers of the same length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from dspine.api import LLM
from dspine.errors import UserError
from dspine.evaluation.batch_speed import measure_batch
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]


def test_a_batch_gives_the_answers_of_transformers_whatever_ends_them(tiny_target: Target, make_model: MakeModel) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = list(range(4, 260, 2))  # would end nearly at once
    report = measure_batch(LLM(tiny_target, None), model, PROMPTS, max_new_tokens=8, repeats=2)
    assert report.identical_share == 1.0
    assert (report.batch, report.tokens) == (3, 24)
    assert report.ratio == pytest.approx(report.plain_tok_per_s / report.transformers_tok_per_s)


def test_no_repeat_is_no_measurement(tiny_target: Target, make_model: MakeModel) -> None:
    with pytest.raises(UserError, match="repeats = 0"):
        measure_batch(LLM(tiny_target, None), make_model("llama"), PROMPTS, max_new_tokens=4, repeats=0)
