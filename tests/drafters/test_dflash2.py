"""DFlash2: the convolutions, the selector, its loss and its drafting against versions with plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import LossSettings, TrainingBatch
from dspine.drafters.checkpoint import load_drafter, save_drafter
from dspine.drafters.dflash2 import DFlash2, DFlash2Options, TwoTapConvolution
from dspine.errors import UserError
from dspine.modules.decoder import Around, Mix
from dspine.targets.model import Target
from dspine.training.recipe import Recipe
from dspine.training.warm_start import new_drafter

BOTH_ATTENTIONS = pytest.mark.parametrize("attention", ["causal", "bidirectional"])


def slow_mix(convolution: Any) -> Mix:
    """The convolutions around a sublayer, one block, slot and channel group at a time."""
    base = convolution.base  # [2 (in, out), 2 (taps), d]
    groups = convolution.delta.weight.shape[0] // 4
    size = base.shape[-1] // groups

    def conv(which: int, x: Tensor, normed: Tensor) -> Tensor:
        blocks = []
        for a in range(x.shape[0]):
            slots = []
            for i in range(x.shape[1]):
                delta = convolution.delta.weight @ normed[a, i]  # [4 G]: convolution, then tap, then group
                pieces = []
                for g in range(groups):
                    channels = slice(g * size, (g + 1) * size)
                    piece = torch.zeros(size)
                    for tap in range(2):
                        if i - tap >= 0:
                            weight = base[which, tap, channels] + delta[(which * 2 + tap) * groups + g]
                            piece = piece + weight * x[a, i - tap, channels]
                    pieces.append(piece)
                slots.append(torch.cat(pieces))
            blocks.append(torch.stack(slots))
        return torch.stack(blocks)

    def mix(normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return conv(0, normed, normed), lambda y: conv(1, y, normed)

    return mix


def slow_hidden(drafter: DFlash2, target: Target, tokens: Tensor, context: Any) -> Tensor:
    """Final-normed states [a, B, d] with looped convolutions; only the anchors of tokens [a, B] are read."""
    around = [
        Around(attention=slow_mix(a), mlp=slow_mix(m)) for a, m in zip(drafter.around_attention, drafter.around_mlp, strict=True)
    ]
    states: Tensor = drafter.backbone(drafter.block_inputs(tokens, target), context, around=around)
    normed: Tensor = drafter.backbone.norm(states)
    return normed


def head_rows(drafter: DFlash2, target: Target) -> tuple[Tensor, list[int]]:
    """(head [v', d], token ids) of what the drafter may propose."""
    ids = drafter.draft_ids.tolist() or list(range(target.vocab_size))
    return target.head_weight[ids], ids


def capped(target: Target, logits: Tensor) -> Tensor:
    return logits if target.softcap is None else target.softcap * torch.tanh(logits / target.softcap)


def slow_score(drafter: DFlash2, target: Target, hidden: Tensor, predecessor: int, row: int) -> Tensor:
    """S_t(predecessor token, candidate head row) at one slot's final-normed state [d]."""
    selector = drafter.selector
    rows, _ = head_rows(drafter, target)
    read = selector.states.weight @ hidden
    gain = (selector.predecessors.weight[predecessor] * read * selector.candidates.weight[row]).sum()
    return capped(target, rows[row] @ hidden) + gain


def slow_candidates(drafter: DFlash2, target: Target, hidden: Tensor) -> list[int]:
    """Head rows of the K best base logits, best first."""
    logits = (head_rows(drafter, target)[0] @ hidden).detach().tolist()
    order = sorted(range(len(logits)), key=lambda j: -logits[j])
    return order[: drafter.options.num_candidates]


# -- convolution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "groups_of"), [(1, 4), (2, 12), (5, 3)])
def test_convolutions_of_every_slot_and_channel(slots: int, groups_of: int) -> None:
    torch.manual_seed(0)
    convolution = TwoTapConvolution(12, groups_of)
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.add_(torch.randn_like(parameter))
    normed, y = (torch.randn(2, slots, 12, requires_grad=True) for _ in range(2))
    results = []
    for mix in (convolution, slow_mix(convolution)):
        inside, after = mix(normed)
        results.append((inside, after(y)))
    inputs = [normed, y, *convolution.parameters()]
    weights = [torch.randn(2, slots, 12) for _ in range(2)]
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(result, inputs, weights) for result in results]
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@BOTH_ATTENTIONS
def test_starts_as_dflash(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, fill_cache: Any, attention: str
) -> None:
    dflash2 = make_drafter(tiny_target, "dflash2", noise=0.0, attention=attention)
    dflash = make_drafter(tiny_target, "dflash", noise=0.0, attention=attention)
    dflash.backbone.load_state_dict(dflash2.backbone.state_dict())
    situation = make_situation(tiny_target)
    batch, settings = make_batch(situation, tiny_target), LossSettings(alpha=0.3)
    ours, theirs = (d.block_losses(batch, tiny_target, d.head(tiny_target), settings) for d in (dflash2, dflash))
    for term, expected in zip(ours.distribution, theirs.distribution, strict=False):
        torch.testing.assert_close(term.total, expected.total, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours.correct, theirs.correct)
    with torch.inference_mode():
        drafts = []
        for drafter in (dflash2, dflash):
            runner = drafter.runner(tiny_target)
            drafts.append(runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 7, torch.zeros(3), None).tokens)
    assert torch.equal(*drafts)


@pytest.mark.parametrize("slot", [1, 4])
def test_a_causal_slot_ignores_every_later_slot(tiny_target: Target, make_drafter: Any, make_situation: Any, slot: int) -> None:
    drafter = make_drafter(tiny_target, "dflash2")
    situation = make_situation(tiny_target)
    block = drafter.block_inputs(situation.tokens, tiny_target)
    changed = block.clone()
    changed[:, slot:] += 0.5
    before, after = (drafter.backbone(x, situation.packed(), around=drafter.around()) for x in (block, changed))
    same = torch.isclose(before, after, rtol=1e-5, atol=1e-6).all(-1)
    assert same.tolist() == [[True] * slot + [False] * (8 - slot)] * 3


# -- loss -----------------------------------------------------------------------------------------------------------


def slow_loss(
    drafter: DFlash2, target: Target, batch: TrainingBatch, settings: LossSettings
) -> tuple[Tensor, list[list[bool]], tuple[int, int]]:
    """The loss, what counts as correct, and how many of the weighted labels are candidates, and not."""
    rows, ids = head_rows(drafter, target)
    hidden = slow_hidden(drafter, target, batch.tokens, batch.context)
    ce = l1 = selection = total = everything = torch.zeros(())
    correct: list[list[bool]] = []
    found = missing = 0
    for a in range(batch.tokens.shape[0]):
        correct.append([])
        for t in range(1, batch.tokens.shape[1]):
            token, predecessor = int(batch.tokens[a, t]), int(batch.tokens[a, t - 1])
            label = ids.index(token) if token in ids else -1
            candidates = slow_candidates(drafter, target, hidden[a, t])
            scores = [slow_score(drafter, target, hidden[a, t], predecessor, c) for c in candidates]
            correct[-1].append(candidates[max(range(len(scores)), key=lambda j: float(scores[j].detach()))] == label)
            if not batch.supervised[a, t - 1]:
                continue
            w = math.exp(-(t - 1) / settings.gamma)
            log_q = torch.log_softmax(capped(target, rows @ hidden[a, t]), -1)
            p = torch.softmax(capped(target, rows @ batch.teacher[a, t - 1]), -1)
            l1, everything = l1 + w * (log_q.exp() - p).abs().sum(), everything + w
            if label < 0:
                continue
            if label in candidates:
                found += 1
            else:
                missing += 1
                candidates[-1], scores[-1] = label, slow_score(drafter, target, hidden[a, t], predecessor, label)
            ce, total = ce - w * log_q[label], total + w
            selection = selection - w * torch.log_softmax(torch.stack(scores), -1)[candidates.index(label)]
    distance = (1 - settings.alpha) * l1 / everything if settings.alpha < 1 else 0
    return (settings.alpha * ce + selection) / total + distance, correct, (found, missing)


@pytest.mark.parametrize(
    ("alpha", "every", "attention", "family"),
    [(1.0, 1, "causal", "llama"), (0.3, 3, "bidirectional", "llama"), (0.3, 1, "causal", "gemma2")],
)
def test_loss_slot_by_slot(
    make_target: Any,
    make_drafter: Any,
    make_situation: Any,
    make_batch: Any,
    alpha: float,
    every: int,
    attention: str,
    family: str,
) -> None:
    target = make_target(family)
    ids = None if every == 1 else torch.arange(0, target.vocab_size, every)
    drafter = make_drafter(
        target, "dflash2", draft_ids=ids, attention=attention, num_layers=2, block_size=6, num_candidates=40, selector_rank=3
    )
    situation = make_situation(target, block_size=6)
    if ids is not None:  # half of the tokens in the draft vocabulary
        situation.tokens[:, 1::2] = situation.tokens[:, 1::2] // every * every
    supervised = torch.ones(3, 5)
    supervised[1, 3:] = 0
    batch = make_batch(situation, target, supervised)
    settings = LossSettings(alpha=alpha, gamma=4.0)
    losses = drafter.block_losses(batch, target, drafter.head(target), settings)
    assert losses.alignment is None
    expected, correct, (found, missing) = slow_loss(drafter, target, batch, settings)
    assert found > 0
    assert missing > 0
    loss = losses.loss(losses.sums(), beta=0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert losses.correct.tolist() == correct
    parameters = dict(drafter.named_parameters())
    fast = torch.autograd.grad(loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_correct_is_the_selectors_choice_among_the_real_candidates(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any
) -> None:
    """Labels that the selector chooses are correct; gold tokens that it had to be given never are, even as the only candidate."""
    drafter = make_drafter(tiny_target, "dflash2", block_size=6, noise=0.4)
    situation = make_situation(tiny_target, block_size=6)
    head, settings = drafter.head(tiny_target), LossSettings(alpha=1.0)
    with torch.no_grad():
        hidden = slow_hidden(drafter, tiny_target, situation.tokens, situation.packed())
        for a in range(3):
            for t in range(1, 6):
                candidates = slow_candidates(drafter, tiny_target, hidden[a, t])
                predecessor = int(situation.tokens[a, t - 1])
                scores = [slow_score(drafter, tiny_target, hidden[a, t], predecessor, c) for c in candidates]
                situation.tokens[a, t] = candidates[int(torch.stack(scores).argmax())]
        batch = make_batch(situation, tiny_target)
        assert drafter.block_losses(batch, tiny_target, head, settings).correct.all()
        single = make_drafter(tiny_target, "dflash2", block_size=6, noise=0.4, num_candidates=1)
        best = head.logits(hidden[:, 1:]).argmax(-1)
        right = single.block_losses(batch, tiny_target, head, settings).correct
        assert torch.equal(right, best == situation.tokens[:, 1:])
        assert not right.all()


# -- drafting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conventions",
    [{}, {"qk_norm": False}, {"num_kv_heads": 4, "num_layers": 1}, {"conv_groups_of": 32}, {"conv_groups_of": 1}],
    ids=lambda c: "-".join(map(str, c)) or "plain",
)
@BOTH_ATTENTIONS
@torch.inference_mode()
def test_runner_states_are_the_training_modules(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str, conventions: dict[str, Any]
) -> None:
    drafter = make_drafter(tiny_target, "dflash2", attention=attention, **conventions)
    situation = make_situation(tiny_target)
    block = drafter.block_inputs(situation.tokens, tiny_target)
    expected = drafter.backbone(block, situation.packed(), around=drafter.around())
    runner = drafter.runner(tiny_target)
    for piece in (1000, 4):
        got = runner.block_states(situation.tokens[:, 0], fill_cache(runner, situation, piece), 8)
        # Random convolutions blow the states up to 150; both versions are then 1e-3 off the same sums in fp64.
        torch.testing.assert_close(got / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=2e-5)


def serial_draft(drafter: DFlash2, target: Target, context: Any, anchor: int) -> list[int]:
    """Choose token after token, each by the selector's score after the one before it."""
    hidden = slow_hidden(drafter, target, torch.full((1, drafter.config.block_size), anchor), context)[0]
    _, ids = head_rows(drafter, target)
    chosen = [anchor]
    for state in hidden[1:]:
        candidates = slow_candidates(drafter, target, state)
        scores = torch.stack([slow_score(drafter, target, state, chosen[-1], c) for c in candidates])
        chosen.append(ids[candidates[int(scores.argmax())]])
    return chosen[1:]


@pytest.mark.parametrize(
    ("every", "attention", "family"), [(1, "causal", "llama"), (3, "bidirectional", "llama"), (1, "bidirectional", "gemma2")]
)
@torch.inference_mode()
def test_draft_is_the_serial_one(
    make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any, every: int, attention: str, family: str
) -> None:
    target = make_target(family)
    ids = None if every == 1 else torch.arange(1, target.vocab_size, every)
    drafter = make_drafter(target, "dflash2", attention=attention, draft_ids=ids, noise=0.4)
    runner = drafter.runner(target)
    situation = make_situation(target, (9, 14, 5, 11))
    anchors = situation.tokens[:, 0]
    cache = fill_cache(runner, situation)
    draft = runner.propose(anchors, cache, 7, torch.zeros(4), None)
    assert draft.q_probs is None
    context = situation.packed()
    for row in range(4):
        own = replace(context, anchors=context.anchors[row : row + 1])
        assert draft.tokens[row].tolist() == serial_draft(drafter, target, own, int(anchors[row]))
    # Not a test of the base logits' argmax in disguise: the selector changed some choices, at slot 1 too.
    base = runner.transition_cache(anchors, cache, 7)[0][..., 0]
    assert (draft.tokens != base).any(0)[0]
    assert not (draft.tokens != base).all()


@torch.inference_mode()
def test_transition_cache_holds_every_pair(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    ids = torch.arange(0, tiny_target.vocab_size, 2)
    drafter = make_drafter(tiny_target, "dflash2", draft_ids=ids)
    runner = drafter.runner(tiny_target)
    situation = make_situation(tiny_target, (9, 6))
    candidates, first, transitions = runner.transition_cache(situation.tokens[:, 0], fill_cache(runner, situation), 7)
    hidden = slow_hidden(drafter, tiny_target, situation.tokens, situation.packed())
    for row in range(2):
        for t in range(1, 8):
            rows = slow_candidates(drafter, tiny_target, hidden[row, t])
            assert candidates[row, t - 1].tolist() == ids[rows].tolist()
            before = [int(situation.tokens[row, 0])] if t == 1 else candidates[row, t - 2].tolist()
            for i, predecessor in enumerate(before):
                expected = torch.stack([slow_score(drafter, tiny_target, hidden[row, t], predecessor, c) for c in rows])
                found = first[row] if t == 1 else transitions[row, t - 2, i]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("every", [1, 4])
@torch.inference_mode()
def test_sampling_keeps_the_q_it_sampled_from(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, every: int
) -> None:
    """q is the tempered softmax of the candidates' scores after the token that was in fact chosen before them."""
    draft_ids = None if every == 1 else torch.arange(2, tiny_target.vocab_size, every)
    drafter = make_drafter(tiny_target, "dflash2", draft_ids=draft_ids)
    runner = drafter.runner(tiny_target)
    situation = make_situation(tiny_target)
    anchors, temperatures = situation.tokens[:, 0], torch.tensor([0.5, 0.0, 2.0])
    cache = fill_cache(runner, situation)
    uniforms = torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    draft = runner.propose(anchors, cache, 7, temperatures, uniforms)
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    torch.testing.assert_close(draft.q_probs.sum(-1), torch.ones(3, 7))
    hidden = slow_hidden(drafter, tiny_target, situation.tokens, situation.packed())
    _, ids = head_rows(drafter, tiny_target)
    for row in (0, 2):
        predecessor = int(anchors[row])
        for t in range(7):
            state = hidden[row, t + 1]
            rows = slow_candidates(drafter, tiny_target, state)
            assert draft.q_ids[row, t].tolist() == [ids[c] for c in rows]
            scores = torch.stack([slow_score(drafter, tiny_target, state, predecessor, c) for c in rows])
            q = torch.softmax(scores / temperatures[row], -1)
            torch.testing.assert_close(draft.q_probs[row, t], q, rtol=1e-3, atol=1e-5)
            place = int((draft.q_probs[row, t].cumsum(-1) <= uniforms[row, t]).sum())
            predecessor = int(draft.tokens[row, t])
            assert predecessor == draft.q_ids[row, t, place]
    assert torch.equal(draft.tokens[1], runner.propose(anchors, cache, 7, torch.zeros(3), None).tokens[1])


@BOTH_ATTENTIONS
@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str
) -> None:
    """Causal slots do not depend on the width; a bidirectional drafter always runs its trained width."""
    runner = make_drafter(tiny_target, "dflash2", attention=attention, block_size=16).runner(tiny_target)
    situation = make_situation(tiny_target, block_size=16)
    cache = fill_cache(runner, situation)
    anchors, uniforms = situation.tokens[:, 0], torch.rand(3, 15, generator=torch.Generator().manual_seed(4))
    for temperatures, numbers in ((torch.zeros(3), None), (torch.tensor([0.0, 0.7, 1.3]), uniforms)):
        wide = runner.propose(anchors, cache, 15, temperatures, numbers)
        for m in (1, 3, 7):
            narrow = runner.propose(anchors, cache, m, temperatures, numbers)
            assert torch.equal(narrow.tokens, wide.tokens[:, :m])
            if narrow.q_probs is not None and wide.q_probs is not None:
                torch.testing.assert_close(narrow.q_probs, wide.q_probs[:, :m], rtol=1e-4, atol=1e-5)


# -- shape, checkpoint and start ------------------------------------------------------------------------------------


def test_default_options() -> None:
    assert DFlash2Options().model_dump() == {"conv_groups_of": 16, "selector_rank": 256, "num_candidates": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_groups_of": 5}, "conv_groups_of = 5 does not divide hidden_size = 32; choose a divisor"),
        ({"conv_groups_of": 0}, "dflash2 drafter, option conv_groups_of: Input should be greater"),
        ({"num_candidates": 261}, "num_candidates = 261, but there are only 260 tokens to draft from"),
        ({"alignment": "next"}, "alignment = next is not a dflash2 drafter's"),
    ],
)
def test_impossible_shapes(tiny_target: Target, make_drafter: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        make_drafter(tiny_target, "dflash2", **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_checkpoint_round_trip(tiny_target: Target, make_drafter: Any, tmp_path: Path) -> None:
    drafter = make_drafter(tiny_target, "dflash2", draft_ids=torch.arange(3, 250, 2))
    save_drafter(drafter, tmp_path / "checkpoint")
    state = load_drafter(tmp_path / "checkpoint", tiny_target).state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in drafter.state_dict().items())
    shared = {name for name in state if name.startswith("backbone.")}
    assert shared == {name for name in make_drafter(tiny_target, "dflash").state_dict() if name.startswith("backbone.")}


def test_starts_from_the_targets_layers(make_target: Any) -> None:
    """With all layers copied and convolutions that start as the identity, the layers are the target's."""
    target = make_target("qwen3")
    options = {"conv_groups_of": 8, "selector_rank": 5, "num_candidates": 4}
    model = {"mask_token_id": 2, "num_layers": 3, "block_size": 4, "taps": 2, "options": options, "start": "target_layers"}
    recipe = Recipe.model_validate({"target": "tiny", "drafter": "dflash2", "model": model, "data": {"answers": ["x"]}})
    drafter = new_drafter(recipe, target, None)
    assert isinstance(drafter, DFlash2)
    assert target.model is not None
    for layer, source in zip(drafter.backbone.layers, target.model.get_decoder().layers, strict=True):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, source.state_dict()[name]), name
    x = torch.randn(2, 4, target.hidden_size)
    for around in drafter.around():
        for mix in (around.attention, around.mlp):
            inside, after = mix(x)
            assert torch.equal(inside, x)
            assert torch.equal(after(2 * x), 2 * x)
    assert drafter.selector.candidates.weight.abs().max() == 0
    assert 0 < drafter.selector.predecessors.weight.abs().max() < 0.2
