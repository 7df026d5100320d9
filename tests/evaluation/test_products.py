"""The share of matrix products. Their speed is made, not measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch import Tensor

from dspine.api import LLM
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.evaluation.products import product_share
from dspine.kernels.linear import PackedLinear
from dspine.targets.model import Target

PROMPTS = [[10, 11, 12]]


@pytest.fixture(scope="module")
def llm(tiny_target: Target, make_drafter: Callable[..., BlockDrafter]) -> LLM:
    return LLM(tiny_target, make_drafter(tiny_target), max_rows=1, width=4)


def test_the_product_share_is_that_of_the_calls_with_weights(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that sleep are nearly all of a round, and afterwards nothing is timed any more."""
    call = PackedLinear.__call__

    def slow(self: PackedLinear, x: Tensor, add: Tensor | None = None) -> Tensor:
        time.sleep(0.002)
        return call(self, x, add)

    with monkeypatch.context() as patched:
        patched.setattr(PackedLinear, "__call__", slow)
        share = product_share(llm.engine(), PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert PackedLinear.__call__ is slow
    assert share is not None
    assert 0.6 < share < 1
    assert product_share(llm.engine(), PROMPTS, SamplingParams(max_new_tokens=1)) is None
