"""The whole engine samples the target's own distribution: the first three tokens against exact enumeration.

Five kinds of requests share every batch of a 6-token model, with every drafter. tests/decoding/test_verify.py shows how
small a bias of the verifier alone would be seen; here it is what the engine makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspine.decoding import verify
from dspine.decoding.calibration import Calibration, ConfidenceMap
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.drafters.base import BlockDrafter, Draft
from dspine.drafters.registry import DRAFTERS
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeDrafter = Callable[..., BlockDrafter]

V = 6
PROMPT = [2, 4]
TRIALS = 600  # per case and drafter
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.4, "min_p": 0.15},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.6},
}


class NoTokenizer:
    """Six tokens without text."""

    eos_token_id = None
    chat_template = None

    def decode(self, ids: list[int], **options: Any) -> str:
        return ""


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> PreTrainedModel:
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return make_model("llama", vocab_size=V, pad_token_id=None, eos_token_id=None, seed=3, **small)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, model: PreTrainedModel, make_drafter: MakeDrafter) -> Engine:
    target = Target.wrap(model, NoTokenizer(), "six-tokens")
    # All but one with a small draft vocabulary, so that some tokens can only come from the target.
    ids = None if request.param == "dflash" else torch.tensor([0, 2, 4, 5])
    shape = {"num_layers": 1, "transfer_rank": 4, "num_candidates": 3, "target_layer_ids": (0,)}
    drafter = make_drafter(target, request.param, draft_ids=ids, block_size=3, **shape)
    return Engine(target, drafter.runner(target), max_rows=64, width=3)


def sampled(engine: Engine, cases: dict[str, dict[str, Any]], trials: int) -> tuple[dict[str, Counter[tuple[int, ...]]], int]:
    """How often each case gave each text of three tokens, its requests in mixed batches; and how many tokens were drafted."""
    requests = [
        (name, engine.submit(PROMPT, SamplingParams(max_new_tokens=3, seed=1000 * number + trial, **params)))
        for trial in range(trials)
        for number, (name, params) in enumerate(cases.items())
    ]
    engine.run()
    counts: dict[str, Counter[tuple[int, ...]]] = {name: Counter() for name in cases}
    for name, request in requests:
        counts[name][tuple(request.output_ids)] += 1
    return counts, sum(sum(request.accepted) for _, request in requests)


def exact(model: PreTrainedModel, params: dict[str, Any]) -> np.ndarray:
    """P(three tokens) [v, v, v] through transformers' own processors, one context at a time."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.get("repetition_penalty", 1.0))])
    chain.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        chain.append(TopKLogitsWarper(params["top_k"]))
    chain.append(TopPLogitsWarper(params.get("top_p", 1.0)))
    chain.append(MinPLogitsWarper(params.get("min_p", 0.0)))

    @torch.no_grad()
    def p(*chosen: int) -> Tensor:
        context = torch.tensor([[*PROMPT, *chosen]])
        return chain(context, model(context).logits[:, -1].double()).softmax(-1)[0]

    first = p()
    second = torch.stack([p(x) for x in range(V)])
    third = torch.stack([torch.stack([p(x, y) for y in range(V)]) for x in range(V)])
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def p_value(counts: Counter[tuple[int, ...]], expected: np.ndarray) -> float:
    """Of the chi-square test, texts too rare for it taken together; 0 where something impossible was written."""
    observed = np.zeros_like(expected)
    for text, count in counts.items():
        observed[text] = count
    if observed[expected == 0].any():
        return 0.0
    expected = expected / expected.sum() * observed.sum()
    often = expected >= 5
    rest = [observed[~often].sum()], [expected[~often].sum()]
    if rest[1][0] < 5:
        often[np.unravel_index(np.argmin(np.where(often, expected, np.inf)), often.shape)] = False
        rest = [observed[~often].sum()], [expected[~often].sum()]
    return float(chisquare(np.append(observed[often], rest[0]), np.append(expected[often], rest[1])).pvalue)


@pytest.mark.parametrize("engine", DRAFTERS, indirect=True)
def test_the_engine_samples_the_targets_distribution(engine: Engine, model: PreTrainedModel) -> None:
    counts, accepted = sampled(engine, CASES, TRIALS)
    assert accepted > TRIALS, "nearly nothing was accepted, so speculation was not tested"
    assert {name: p_value(counts[name], exact(model, params)) > 1e-3 for name, params in CASES.items()} == dict.fromkeys(
        CASES, True
    )


def residual_without_q(p: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return p


def acceptance_of_too_much(p_drafted: Tensor, q_drafted: Tensor) -> Tensor:
    return (1.5 * p_drafted / q_drafted).clamp(max=1.0)


@pytest.mark.parametrize("engine", ["dspine"], indirect=True)
@pytest.mark.parametrize("broken", [residual_without_q, acceptance_of_too_much])
def test_a_broken_verifier_is_seen(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, engine: Engine, model: PreTrainedModel
) -> None:
    monkeypatch.setattr(verify, broken.__name__.split("_")[0], broken)
    counts, _ = sampled(engine, {"temperature": CASES["temperature"]}, 2 * TRIALS)
    assert p_value(counts["temperature"], exact(model, CASES["temperature"])) < 1e-4


# --- widths by confidence --------------------------------------------------------------------------------------------

HOT = {"temperature": CASES["temperature"]}


@pytest.fixture
def scheduled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One row, so that each decision is its own, and costs at which about half of the slots are worth verifying."""
    monkeypatch.setattr(Engine, "_time_forward", lambda engine, tokens: 1.0 + 0.4 * tokens)
    as_it_is = ConfidenceMap(temperature=1.0, slope=(1.0,) * 3, offset=(0.0,) * 3, mean_acceptance=(0.5,) * 3)
    calibration = Calibration(drafter="any", drafter_sha256="", prompts="none", num_prompts=0, maps=(as_it_is,))
    return Engine(engine.target, engine.drafter, max_rows=1, width="confidence", calibration=calibration)


@pytest.mark.parametrize("engine", DRAFTERS, indirect=True)
def test_widths_by_confidence_leave_the_distribution_as_it_is(
    engine: Engine, scheduled: Engine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: Counter[int] = Counter()
    record_round = DecodeStats.record_round

    def count(stats: DecodeStats, num_drafted: int, num_accepted: int) -> None:
        widths[num_drafted] += 1
        record_round(stats, num_drafted, num_accepted)

    monkeypatch.setattr(DecodeStats, "record_round", count)
    counts, accepted = sampled(scheduled, HOT, TRIALS)
    assert accepted > TRIALS / 2, "nearly nothing was accepted, so speculation was not tested"
    assert min(n for _, n in widths.most_common(2)) > TRIALS / 20, f"the width hardly ever changed: {widths}"
    assert p_value(counts["temperature"], exact(model, CASES["temperature"])) > 1e-3


@pytest.mark.parametrize("engine", DRAFTERS, indirect=True)
def test_a_confidence_that_has_seen_its_token_is_found_out(
    engine: Engine, scheduled: Engine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drawn token's own probability under q, a natural choice, biases the output: likely tokens get likelier."""
    runner = scheduled.drafter
    assert runner is not None
    propose = runner.propose

    def peeking(*arguments: Any) -> Draft:
        draft = propose(*arguments)
        assert draft.q_ids is not None
        assert draft.q_probs is not None
        own = verify.SparseQ(draft.q_ids, draft.q_probs).of(draft.tokens)
        return replace(draft, confidence=lambda: own)

    monkeypatch.setattr(runner, "propose", peeking)
    counts, _ = sampled(scheduled, HOT, 2 * TRIALS)
    assert p_value(counts["temperature"], exact(model, CASES["temperature"])) < 1e-4
