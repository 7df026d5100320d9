"""Studied drafting is the runner's own drafting; contexts are mixed, continued and copied as they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.backbone import Backbone, ContextBatch
from dspine.drafters.base import BlockDrafter
from dspine.drafters.dflash2 import DFlash2
from dspine.errors import UserError
from dspine.evaluation.studies.blocks import StudiedDrafter
from dspine.targets.model import Target
from dspine.training.anchors import block_tokens
from dspine.training.corpus import Answer
from dspine.training.sources import target_states

M = 7
Study = Callable[..., StudiedDrafter]


def direct_draft(drafter: BlockDrafter, target: Target, ids: list[int], num_draft_tokens: int) -> list[int]:
    """What a fresh runner drafts after `ids`, the last of which is the anchor."""
    tokens = torch.tensor(ids)
    features, _ = target_states(target, tokens[:-1], drafter.config.target_layer_ids)
    runner = drafter.runner(target)
    cache = runner.new_cache(1, 4)
    runner.extend(features[None], tokens[None, 1:], cache)
    cache.lengths += len(ids) - 1
    return runner.propose(tokens[-1:], cache, num_draft_tokens, torch.zeros(1), None).tokens[0].tolist()


def test_blocks_of_one_answer_are_what_decoding_drafts(
    kind: str, study: Study, answer: Answer, anchors: Tensor, tiny_target: Target
) -> None:
    studied = study(kind, block_size=8 if kind not in {"domino", "dspark"} else 7)
    assert studied.num_draft_tokens == M
    truth = studied.read(answer)
    for m in (M, 2):
        drafted = studied.draft(truth.tokens[anchors], truth.context.until(anchors), m)
        for row, anchor in enumerate(anchors.tolist()):
            assert drafted.tokens[row].tolist() == direct_draft(studied.drafter, tiny_target, answer.ids[: anchor + 1], m)


def test_nothing_is_written_into_a_context(study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study("dspine")
    truth = studied.read(answer)
    before = [layer.clone() for layer in truth.context.layers]
    tokens, context = truth.tokens[anchors], truth.context.until(anchors)
    first = studied.draft(tokens, context, M)
    studied.continued(truth, anchors, tokens[:, None].expand(-1, 3), tokens)
    second = studied.draft(tokens, context, M)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.states, second.states)
    assert all(torch.equal(a, b) for a, b in zip(before, truth.context.layers, strict=True))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "domino", "dspark"])
def test_states_are_the_layers_outputs(kind: str, study: Study, answer: Answer, anchors: Tensor, tiny_target: Target) -> None:
    """As the trainable backbone gives them for the same blocks."""
    studied = study(kind)
    m, drafter = studied.num_draft_tokens, studied.drafter
    assert isinstance(drafter.backbone, Backbone)
    tokens = torch.tensor(answer.ids)
    features, _ = target_states(tiny_target, tokens[:-1], drafter.config.target_layer_ids)
    places = torch.arange(len(tokens) - 1)
    context = ContextBatch(features=features, positions=places, sequences=places * 0, next_tokens=tokens[1:], anchors=anchors)
    expected: list[Tensor] = []

    def record(layer: int, x: Tensor) -> Tensor:
        expected.append(x[:, -m:] if drafter.config.alignment == "same" else x[:, :m])
        return x

    around = drafter.around() if isinstance(drafter, DFlash2) else ()
    drafter.backbone(drafter.block_inputs(tokens[anchors, None], tiny_target), context, record, around)
    truth = studied.read(answer)
    drafted = studied.draft(tokens[anchors], truth.context.until(anchors), m)
    torch.testing.assert_close(drafted.states, torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_dspines_states_are_taken_after_the_injection(study: Study, answer: Answer, anchors: Tensor, tiny_target: Target) -> None:
    studied = study("dspine")
    truth, m = studied.read(answer), studied.num_draft_tokens
    drafted = studied.draft(truth.tokens[anchors], truth.context.until(anchors), m)
    assert drafted.states.shape == (3, 3, m, tiny_target.hidden_size)
    head = studied.drafter.head(tiny_target)
    best = head.logits(studied.drafter.backbone.norm(drafted.states[-1])).argmax(-1)
    assert torch.equal(best[:, 0], drafted.tokens[:, 0])  # its predecessor is the anchor: refined already
    with torch.no_grad():
        for write in studied.drafter.get_submodule("injection.writes").parameters():
            write.zero_()
    without = StudiedDrafter(studied.drafter, tiny_target)
    plain = without.draft(truth.tokens[anchors], truth.context.until(anchors), m)
    assert not torch.allclose(plain.states[0], drafted.states[0], atol=1e-2)


def test_the_same_tokens_continue_to_the_same_context(study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study("dspine")
    truth = studied.read(answer)
    true = block_tokens(truth.tokens, anchors, 8)
    again = studied.continued(truth, anchors, true[:, 1:4], true[:, 4])
    assert again.lengths.tolist() == (anchors + 4).tolist()
    for layer, (ours, theirs) in enumerate(zip(again.layers, truth.context.layers, strict=True)):
        for row, length in enumerate(again.lengths.tolist()):
            torch.testing.assert_close(ours[row, :, :length], theirs[0, :, :length], msg=f"layer {layer}", rtol=1e-4, atol=1e-4)
    none = studied.continued(truth, anchors, true[:, 1:1], true[:, 1])
    assert none.lengths.tolist() == (anchors + 1).tolist()


def test_layers_are_taken_by_their_number(study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study("dspine")
    truth = studied.read(answer)
    ours, theirs = (
        truth.context.until(anchors + 1),
        studied.continued(truth, anchors - 1, truth.tokens[anchors, None] - 1, anchors),
    )
    mixed = ours.with_layers(theirs, (1, 3))
    assert [mixed.layers[i] is theirs.layers[i] for i in range(3)] == [True, False, True]
    assert mixed.layers[1] is ours.layers[1]


def test_the_true_anchors_keys_and_values_everywhere_are_the_true_anchor(study: Study, answer: Answer, anchors: Tensor) -> None:
    """In DFlash the other slots know the anchor by its keys and values alone."""
    studied = study("dflash")
    truth = studied.read(answer)
    right, context = truth.tokens[anchors], truth.context.until(anchors)
    wrong = (right + 11) % studied.target.vocab_size
    of_right, of_wrong = studied.draft(right, context, M), studied.draft(wrong, context, M)
    assert not torch.allclose(of_right.states, of_wrong.states, atol=1e-2)
    kv = dict(enumerate(of_right.anchor_kv, 1))
    replaced = studied.draft(wrong, context, M, kv)
    torch.testing.assert_close(replaced.states, of_right.states, rtol=1e-4, atol=1e-4)
    # One layer alone is neither the one nor the other, and only what comes from that layer on can differ.
    last = studied.draft(wrong, context, M, {3: kv[3]})
    assert torch.equal(last.states[:2], of_wrong.states[:2])
    assert not torch.allclose(last.states[2], of_wrong.states[2], atol=1e-3)
    assert not torch.allclose(last.states[2], of_right.states[2], atol=1e-3)


def test_the_own_keys_and_values_change_nothing(kind: str, study: Study, answer: Answer, anchors: Tensor) -> None:
    studied = study(kind)
    truth = studied.read(answer)
    plain = studied.draft(truth.tokens[anchors], truth.context.until(anchors), M)
    kv = dict(enumerate(plain.anchor_kv, 1))
    again = studied.draft(truth.tokens[anchors], truth.context.until(anchors), M, kv)
    assert torch.equal(plain.tokens, again.tokens)
    assert torch.equal(plain.states, again.states)


def test_a_drafter_without_the_block_backbone_is_refused(tiny_target: Target, make_drafter: Any) -> None:
    with pytest.raises(UserError, match="eagle3 drafts token by token on a backbone of its own"):
        StudiedDrafter(make_drafter(tiny_target, "eagle3"), tiny_target)
