"""How sure a drafter is of a token: known before the token is drawn, whichever drafter, and the top of what it is drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspine.drafters.registry import DRAFTERS
from dspine.targets.model import Target

M = 7


def propose(runner: Any, cache: Any, situation: Any, uniforms: torch.Tensor | None, temperature: float = 1.0) -> Any:
    rows = situation.tokens.shape[0]
    temperatures = torch.full((rows,), temperature if uniforms is not None else 0.0)
    return runner.propose(situation.tokens[:, 0], cache, M, temperatures, uniforms)


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_confidence_of_a_token_does_not_depend_on_the_token(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, kind: str
) -> None:
    """Other draws from slot t on leave the confidences up to slot t as they were."""
    runner = make_drafter(tiny_target, kind, noise=0.5).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    generator = torch.Generator().manual_seed(4)
    first = torch.rand(3, M, generator=generator)
    before = propose(runner, cache, situation, first)
    confidence = before.confidence()
    assert confidence.shape == (3, M)
    assert confidence.dtype == torch.float32
    assert bool(((confidence > 0) & (confidence <= 1)).all())
    changed = 0
    for t in range(M):
        other = torch.cat((first[:, :t], torch.rand(3, M - t, generator=generator)), 1)
        after = propose(runner, cache, situation, other)
        assert torch.equal(after.tokens[:, :t], before.tokens[:, :t])
        torch.testing.assert_close(after.confidence()[:, : t + 1], confidence[:, : t + 1])
        changed += int((after.tokens[:, t:] != before.tokens[:, t:]).sum())
    assert changed > M, "the draws did not differ, so nothing was tested"


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "dspark"])
@torch.inference_mode()
def test_without_a_head_it_is_the_top_probability(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, kind: str
) -> None:
    runner = make_drafter(tiny_target, kind, noise=0.5).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    sampled = propose(runner, cache, situation, torch.rand(3, M, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(sampled.confidence(), sampled.q_probs.amax(-1))  # at temperature 1 it is q's own
    greedy = propose(runner, cache, situation, None)
    # A tiny temperature makes the draw the argmax, and leaves the confidence what it is without temperature.
    nearly = propose(runner, cache, situation, torch.full((3, M), 0.5), temperature=1e-4)
    assert torch.equal(nearly.tokens, greedy.tokens)
    torch.testing.assert_close(nearly.confidence(), greedy.confidence())


@torch.inference_mode()
def test_a_shortened_draft_keeps_its_beginning(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    runner = make_drafter(tiny_target, "dspine").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    draft = propose(runner, cache, situation, torch.full((3, M), 0.3))
    short = draft.first(2)
    assert torch.equal(short.tokens, draft.tokens[:, :2])
    assert torch.equal(short.q_ids, draft.q_ids[:, :2])
    assert torch.equal(short.q_probs, draft.q_probs[:, :2])
    assert propose(runner, cache, situation, None).first(2).q_probs is None
