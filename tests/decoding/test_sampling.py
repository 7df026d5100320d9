"""SamplingParams' checks; every warper against transformers' own; draws against their distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspine.decoding import sampling
from dspine.decoding.sampling import SamplingParams, draw, penalise, sample, target_distribution, uniforms
from dspine.errors import UserError

NAN, INF = math.nan, math.inf
BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, INF, 101, 10**400, "1", None, True, [1.0], 1j],
    "top_k": [-1, 5.0, 0.5, NAN, "3", None, True, -(10**5000)],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INF, "0.9", None, False],
    "min_p": [-0.01, 1.01, NAN, -INF, "0.1", None, True],
    "repetition_penalty": [0, -1.0, 0.001, 1e9, NAN, INF, "1.1", None, True],
    "max_new_tokens": [0, -5, 16.0, NAN, "8", None, True],
    "stop": [("",), ["ok", ""], "", 7, None, (1,), ["a", None], {"a": 1}, b"bytes"],
    "seed": [1.5, NAN, "7", True, 2**64, -(2**63) - 1],
    "ignore_eos": [0, 1, "yes", None],
    "logprobs": [-1, 21, 1.0, "5", True],
}
WARPERS = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_k": 10**9},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8123, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 400, "top_p": 0.97},
    {"temperature": 1.0, "top_k": 60, "top_p": 0.31},
    {"temperature": 1.2, "top_p": 0.95, "min_p": 0.1},
]


def transformers_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers' `generate` builds for these settings, in fp64: its fp32 sums blur where a nucleus ends."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.empty(logits.shape[0], 0, dtype=torch.long), logits.double()).softmax(-1).float()


# --- SamplingParams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    # Ids by number: pytest would print the values, and one of them has 5001 digits.
    [pytest.param(field, value, id=f"{field}-{i}") for field, values in BAD_VALUES.items() for i, value in enumerate(values)],
)
def test_impossible_values_name_the_field_and_the_remedy(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{field}=.*; (give|leave it out)|^stop=.*; leave it out") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("field", BAD_VALUES)
@given(value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.text(), max_size=2))
@settings(max_examples=60)
def test_anything_is_accepted_as_it_is_or_refused_in_one_sentence(field: str, value: Any) -> None:
    try:
        params = SamplingParams(**{field: value})
    except UserError as error:
        message, kept = str(error), None
    else:
        message, kept = "", getattr(params, field)
    if message:
        assert message.startswith(f"{field}=")
        return
    assert kept == ((value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value)
    assert type(kept) in {float, int, tuple, bool, type(None)}


@given(
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 200_000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
)
@settings(max_examples=150)
def test_every_allowed_setting_yields_a_distribution(**values: Any) -> None:
    params = SamplingParams(**values)
    logits = torch.tensor([[30.0, -30.0, 2.0, 2.0, -INF, 0.0], [0.0] * 6])
    logits = penalise(logits, torch.tensor([True, False] * 3), torch.tensor([2]), params.repetition_penalty)
    probs = target_distribution(logits, params)
    assert bool((probs >= 0).all())
    assert probs.sum(-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert probs[0, 4] == 0


def test_numbers_are_stored_as_plain_python() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), seed=np.int32(3), max_new_tokens=np.int16(9))
    assert [type(x) for x in (params.temperature, params.top_k, params.seed, params.max_new_tokens)] == [float, int, int, int]
    assert SamplingParams(temperature=1) == SamplingParams(temperature=1.0)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1, -(2**63)])
def test_every_allowed_seed_suits_torch(seed: int | None) -> None:
    kept = SamplingParams(seed=seed).seed
    if kept is not None:
        torch.Generator().manual_seed(kept)
    assert kept == seed


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=1e-7).is_greedy
    assert not SamplingParams(temperature=1e-3).is_greedy


# --- penalise ---------------------------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 11), max_size=8),
    drafted=st.lists(st.integers(0, 11), max_size=6),
    penalty=st.sampled_from([1.0, 1.1, 1.5, 0.8, 3.0]),
    seed=st.integers(0, 1000),
)
def test_penalty_equals_transformers_slot_by_slot(prompt: list[int], drafted: list[int], penalty: float, seed: int) -> None:
    logits = torch.randn(len(drafted) + 1, 12, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 3], logits[:, 5] = 0.0, -INF
    before = logits.clone()
    seen = torch.zeros(12, dtype=torch.bool)
    seen[prompt] = True
    got = penalise(logits, seen, torch.tensor(drafted, dtype=torch.long), penalty)
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    for t in range(len(drafted) + 1):
        history = torch.tensor([prompt + drafted[:t]], dtype=torch.long)
        assert torch.equal(got[t], reference(history, logits[t : t + 1].clone())[0])
    assert torch.equal(logits, before)


def test_a_drafted_token_counts_only_behind_itself() -> None:
    got = penalise(torch.ones(3, 4), torch.zeros(4, dtype=torch.bool), torch.tensor([2, 0]), 2.0)
    assert got.tolist() == [[1, 1, 1, 1], [1, 1, 0.5, 1], [0.5, 1, 0.5, 1]]


def test_penalty_works_in_fp32_and_checks_the_number_of_slots() -> None:
    logits = torch.full((1, 4), 1.0078125, dtype=torch.bfloat16)
    seen = torch.tensor([True, False, False, False])
    got = penalise(logits, seen, torch.empty(0, dtype=torch.long), 1.3)
    assert got.dtype == torch.float32
    assert got[0, 0] == torch.tensor(1.0078125) / 1.3
    with pytest.raises(AssertionError, match="1 slots take 0 drafted tokens, not 2"):
        penalise(logits, seen, torch.tensor([1, 2]), 1.3)


# --- target_distribution ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", [3, 257, 5000])
@pytest.mark.parametrize("kwargs", WARPERS, ids=str)
def test_warpers_equal_transformers(kwargs: dict[str, Any], v: int) -> None:
    params = SamplingParams(**kwargs)
    generator = torch.Generator().manual_seed(v)
    # Peaked rows, as a trained model has, and flat ones, whose nucleus outgrows the first guess.
    scale = torch.tensor([0.01, 1.0, 3.0, 6.0, 10.0])[:, None]
    logits = torch.randn(5, v, generator=generator) * scale
    before = logits.clone()
    got, wanted = target_distribution(logits, params), transformers_distribution(logits, params)
    assert got.dtype == torch.float32
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-8)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kwargs", WARPERS, ids=str)
def test_ties_are_cut_as_transformers_cuts_them(kwargs: dict[str, Any]) -> None:
    # Coarse logits, as a bf16 head gives: ties at every boundary, more of them than the first guess holds.
    params = SamplingParams(**kwargs)
    generator = torch.Generator().manual_seed(0)
    few_values = torch.randint(-3, 4, (6, 2000), generator=generator).float()
    few_at_the_top = (torch.randn(6, 2000, generator=generator) * 2.5).round()
    logits = torch.cat([few_values, few_at_the_top])
    # Row by row: one that must look at more tokens would take the others along.
    got = torch.cat([target_distribution(row[None], params) for row in logits])
    wanted = transformers_distribution(logits, params)
    # Among equals transformers' choice is its sort's; how many stay, and with what probability, is not.
    torch.testing.assert_close(got.sort(-1).values, wanted.sort(-1).values, rtol=2e-5, atol=1e-8)


def test_only_as_much_is_sorted_as_the_cut_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = sampling._most_likely

    def recorded(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
        sizes.append(size)
        return original(logits, size)

    monkeypatch.setattr(sampling, "_most_likely", recorded)
    peaked = torch.linspace(30, -30, 10_000)[None]
    flat = torch.linspace(0.1, 0, 10_000)[None]

    def looked_at(logits: Tensor, **kwargs: Any) -> list[int]:
        sizes.clear()
        target_distribution(logits, SamplingParams(temperature=1.0, **kwargs))
        return list(sizes)

    assert looked_at(peaked) == looked_at(peaked, min_p=0.1) == []
    assert looked_at(peaked, top_p=0.5) == [256]
    assert looked_at(flat, top_p=0.9) == [256, 2048, 10_000]
    assert looked_at(flat, top_k=20, top_p=0.9) == [21]
    assert looked_at(torch.zeros(1, 10_000), top_k=20) == [21, 168, 1344, 10_000]


def test_greedy_is_the_one_hot_argmax() -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0], [5.0, 5.1, 5.2]])
    assert target_distribution(logits, SamplingParams(top_k=2)).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_low_temperatures_neither_overflow_nor_blur() -> None:
    probs = target_distribution(torch.tensor([[1e4, -1e4, 1e4 - 1]]), SamplingParams(temperature=1e-5))
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
def test_logits_that_are_not_finite_are_refused(bad: list[float], kwargs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not finite; load the target in float32"):
        target_distribution(torch.tensor([[0.0, 1.0], bad]), SamplingParams(**kwargs))


# --- draw and sample --------------------------------------------------------------------------------------------------


def test_draw_inverts_the_cumulative_distribution() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    below_one = 1 - 2**-53
    points = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, below_one], dtype=torch.float64)
    assert draw(weights.expand(6, 6), points).tolist() == [1, 1, 3, 3, 4, 4]


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    token = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0


def test_rare_tokens_keep_their_probability_in_a_large_vocabulary() -> None:
    # fp32 partial sums near 1 could not tell 1e-9 apart; the interval of the last token must be that wide.
    probs = torch.full((1, 100_000), 1e-9)
    probs[0, 0] = 1 - 99_999e-9
    total = probs.double().sum()
    at = torch.tensor([1 - 1.5e-9, 1 - 0.5e-9], dtype=torch.float64) / float(total) * float(total)
    assert draw(probs.expand(2, -1), at).tolist() == [99_998, 99_999]


def test_sample_takes_one_number_per_row_and_repeats_with_the_seed() -> None:
    probs = torch.rand(7, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    one, two, plain = (torch.Generator().manual_seed(5) for _ in range(3))
    assert torch.equal(sample(probs, one), sample(probs, two))
    uniforms(7, plain)
    assert torch.equal(one.get_state(), plain.get_state())


def test_sample_follows_its_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02])
    drawn = sample(probs.expand(200_000, 5), torch.Generator().manual_seed(3))
    observed = torch.bincount(drawn, minlength=5).numpy()
    expected = probs.double().numpy() / probs.double().sum().item() * 200_000
    assert chisquare(observed, expected).pvalue > 1e-3
    assert chisquare(observed, np.roll(expected, 1)).pvalue < 1e-6
