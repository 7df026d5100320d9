"""Log-probabilities of output tokens are the target's own, however the tokens came about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspine.decoding.engine import Engine
from dspine.decoding.logprobs import TokenLogprobs, token_logprobs
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.targets.model import Target

PROMPTS = [[7, 9, 30], [80, 81, 82, 83, 84], [100]]


def test_the_likeliest_tokens_come_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    expected = logits.log_softmax(-1)
    first, second = token_logprobs(logits, [2, 0], 2)
    assert first.logprob == pytest.approx(float(expected[0, 2]))
    assert [token for token, _ in first.alternatives] == [1, 2]
    assert [value for _, value in first.alternatives] == pytest.approx([float(expected[0, 1]), float(expected[0, 2])])
    assert [token for token, _ in second.alternatives] == [0, 3]
    assert token_logprobs(logits, [0], 0)[0].alternatives == ()
    assert len(token_logprobs(logits, [0], 20)[0].alternatives) == 4, "a vocabulary has no more"


def collect(engine: Engine, params: dict[str, Any]) -> list[tuple[Request, list[TokenLogprobs]]]:
    requests = [engine.submit(prompt, SamplingParams(**params)) for prompt in PROMPTS]
    found: dict[int, list[TokenLogprobs]] = {request.id: [] for request in requests}
    while engine.has_work:
        for progress in engine.step():
            assert len(progress.logprobs) == len(progress.token_ids)
            found[progress.request.id] += progress.logprobs
    return [(request, found[request.id]) for request in requests]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.5}],
    ids=["greedy", "sampled", "penalised"],
)
def test_they_are_those_of_the_targets_own_forward(
    width: int, params: dict[str, Any], tiny_target: Target, make_drafter: Callable[..., BlockDrafter]
) -> None:
    engine = Engine(tiny_target, make_drafter(tiny_target).runner(tiny_target), max_rows=2, width=width)
    for request, logprobs in collect(engine, {"max_new_tokens": 20, "ignore_eos": True, "logprobs": 3, **params}):
        assert len(logprobs) == len(request.output_ids) == 20
        tokens = torch.tensor([request.prompt_ids + request.output_ids])
        hidden = tiny_target.forward(tokens, tiny_target.new_cache(1, tokens.shape[1])).hidden
        expected = tiny_target.logits(hidden)[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        for row, token, entry in zip(expected, request.output_ids, logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [value for _, value in entry.alternatives] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert dict(entry.alternatives) == {t: pytest.approx(float(row[t]), abs=1e-4) for t, _ in entry.alternatives}


def test_an_answer_cut_inside_a_round_has_no_more_entries_than_tokens(
    tiny_target: Target, make_drafter: Callable[..., BlockDrafter]
) -> None:
    engine = Engine(tiny_target, make_drafter(tiny_target).runner(tiny_target), max_rows=3, width=6)
    for request, logprobs in collect(engine, {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 0}):
        assert len(logprobs) == len(request.output_ids) == 2
