"""The packed runner computes what the training module computes, from a cache that grows in pieces and rows of unlike lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspine.drafters.dflash import DFlashRunner
from dspine.targets.model import Target

CONVENTIONS = [
    {"attention": attention, "qk_norm": qk_norm, "num_kv_heads": kv}
    for attention in ("causal", "bidirectional")
    for qk_norm in (True, False)
    for kv in (1, 2, 4)
]


@pytest.mark.parametrize("conventions", CONVENTIONS, ids=lambda c: "-".join(map(str, c.values())))
@torch.inference_mode()
def test_runner_is_the_training_module(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, conventions: dict[str, Any]
) -> None:
    drafter = make_drafter(tiny_target, "dflash", **conventions)
    situation = make_situation(tiny_target)
    expected = drafter.backbone(drafter.block_inputs(situation.tokens, tiny_target), situation.packed())
    runner = drafter.runner(tiny_target)
    got = runner.block_states(situation.tokens[:, 0], fill_cache(runner, situation), 8)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    logits = tiny_target.logits(drafter.backbone.norm(expected))
    torch.testing.assert_close(tiny_target.logits(runner.final_norm(got)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("piece", [1, 4])
@torch.inference_mode()
def test_context_in_pieces_and_rows_of_unlike_lengths(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str, piece: int
) -> None:
    runner = make_drafter(tiny_target, "dflash", attention=attention).runner(tiny_target)
    situation = make_situation(tiny_target)
    anchors = situation.tokens[:, 0]
    together = runner.block_states(anchors, fill_cache(runner, situation, piece), 8)
    for row in range(len(situation.features)):
        alone = runner.block_states(anchors[row : row + 1], fill_cache(runner, situation.row(row)), 8)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_drafting_leaves_the_context_as_it_was(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    """A block's own entries stay behind the rows' lengths: the next block does not see them."""
    runner = make_drafter(tiny_target, "dspine").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    anchors, temperatures = situation.tokens[:, 0], torch.zeros(3)
    first = runner.propose(anchors, cache, 7, temperatures, None).tokens
    runner.propose(situation.tokens[:, 1], cache, 7, temperatures, None)
    assert torch.equal(cache.lengths, torch.tensor([9, 14, 5]))
    assert torch.equal(runner.propose(anchors, cache, 7, temperatures, None).tokens, first)


@torch.inference_mode()
def test_first_rows_of_a_larger_cache(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    runner = make_drafter(tiny_target, "dspine").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    all_rows = runner.propose(situation.tokens[:, 0], cache, 7, torch.zeros(3), None).tokens
    two_rows = runner.propose(situation.tokens[:2, 0], cache, 7, torch.zeros(2), None).tokens
    assert torch.equal(two_rows, all_rows[:2])


@torch.inference_mode()
def test_scaled_embeddings_and_soft_caps(make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    """A Gemma 2 target scales its embeddings and caps its logits; the drafter inherits both."""
    target = make_target("gemma2")
    drafter = make_drafter(target, "dflash")
    situation = make_situation(target)
    embedded = drafter.block_inputs(situation.tokens, target)
    torch.testing.assert_close(embedded[:, 0], target.embedding[situation.tokens[:, 0]] * target.hidden_size**0.5)
    torch.testing.assert_close(embedded[:, 3], (target.embedding[2] * target.hidden_size**0.5).expand(3, -1))
    runner = drafter.runner(target)
    assert isinstance(runner, DFlashRunner)
    cache = fill_cache(runner, situation)
    expected = drafter.backbone(embedded, situation.packed())
    torch.testing.assert_close(runner.block_states(situation.tokens[:, 0], cache, 8), expected, rtol=1e-4, atol=1e-4)
    uniforms = torch.full((3, 7), 0.5)
    draft = runner.propose(situation.tokens[:, 0], cache, 7, torch.ones(3), uniforms)
    assert draft.q_probs is not None
    q = torch.softmax(target.logits(drafter.backbone.norm(expected[:, 1:])), -1)
    torch.testing.assert_close(draft.q_probs, q, rtol=1e-3, atol=1e-5)
