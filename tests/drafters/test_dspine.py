"""DSpine: training losses and drafting against slow, serial versions of their definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import LossSettings, TrainingBatch
from dspine.drafters.dspine import DSpine
from dspine.targets.model import Target

from .slow_dspine import code_of, head_rows, one_block, refined_state, serial_draft, slow_block


@dataclass
class Sums:
    """Weighted sums of every loss of section 7."""

    ce: Any = 0.0
    l1: Any = 0.0
    refined_ce: Any = 0.0
    refined_l1: Any = 0.0
    alignment: Any = 0.0
    known: float = 0.0
    all: float = 0.0
    hit: float = 0.0
    mass: float = 0.0


def slow_sums(
    drafter: DSpine, target: Target, batch: TrainingBatch, settings: LossSettings, forced_layers: int
) -> tuple[Sums, list[list[bool]]]:
    s = Sums()
    correct: list[list[bool]] = []
    rows, ids = head_rows(drafter, target)
    for a in range(batch.tokens.shape[0]):
        forced = bool(batch.draws[a] < settings.forced_probability)
        tokens = batch.tokens[a]
        block = slow_block(drafter, target, one_block(batch.context, a), tokens, forced, forced_layers)
        correct.append([])
        for t in range(1, tokens.shape[0]):
            logits = rows @ drafter.backbone.norm(block.states[t])
            log_q = logits - logits.exp().sum().log()
            p = torch.softmax(rows @ batch.teacher[a, t - 1], -1)
            candidates = sorted(range(len(ids)), key=lambda j: -float(logits.detach()[j]))[: drafter.options.num_candidates]
            scores = rows[candidates] @ refined_state(drafter, block, t, int(tokens[t - 1]))
            log_r = scores - scores.exp().sum().log()
            y = int(tokens[t])
            correct[-1].append(ids[candidates[int(scores.argmax())]] == y)
            if not batch.supervised[a, t - 1]:
                continue
            w = math.exp(-(t - 1) / settings.gamma)
            label_code = code_of(drafter, y)
            for layer in range(drafter.config.num_layers):
                e = block.readouts[layer][t]
                s.alignment += w * (1 - (e @ label_code) / (e.norm() * label_code.norm()))
            s.all += w
            s.l1 += w * (log_q.exp() - p).abs().sum()
            p_candidates = p[candidates]
            if p_candidates.sum() > 1e-4:
                s.refined_l1 += w * (log_r.exp() - p_candidates / p_candidates.sum()).abs().sum()
                s.mass += w
            if y not in ids:
                continue
            s.ce -= w * log_q[ids.index(y)]
            s.known += w
            if ids.index(y) in candidates:
                s.refined_ce -= w * log_r[candidates.index(ids.index(y))]
                s.hit += w
    return s, correct


def settings_of(**changes: Any) -> LossSettings:
    return LossSettings(**{"alpha": 0.3, "gamma": 4.0, **changes})


@pytest.mark.parametrize(
    ("settings", "every", "layers"),
    [
        (settings_of(), 1, 3),
        (settings_of(alpha=1.0), 1, 3),
        (settings_of(forced_probability=0.5), 1, 5),
        (settings_of(forced_probability=0.5), 1, 2),
        (settings_of(forced_probability=0.5), 3, 3),
        (settings_of(refined_shared_normaliser=True), 1, 3),
    ],
    ids=["plain", "ce-only", "curriculum-5-layers", "curriculum-2-layers", "draft-vocabulary", "older-normaliser"],
)
def test_losses_of_section_7(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, settings: LossSettings, every: int, layers: int
) -> None:
    ids = None if every == 1 else torch.arange(0, tiny_target.vocab_size, every)
    drafter = make_drafter(tiny_target, "dspine", draft_ids=ids, num_layers=layers, block_size=6, num_candidates=40)
    situation = make_situation(tiny_target, block_size=6)
    supervised = torch.ones(3, 5)
    supervised[1, 3:] = 0
    batch = make_batch(situation, tiny_target, supervised)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), settings)
    s, correct = slow_sums(drafter, tiny_target, batch, settings, forced_layers=min(3, layers - 1))
    assert 0 < s.hit < s.known  # some labels are candidates, some are not
    alpha = settings.alpha
    hit, mass = (s.known, s.known) if settings.refined_shared_normaliser else (s.hit, s.mass)
    distribution = alpha * (s.ce / s.known + s.refined_ce / hit)
    if alpha < 1:
        distribution = distribution + (1 - alpha) * (s.l1 / s.all + s.refined_l1 / mass)
    beta = 0.4
    expected = distribution + beta * float(s.ce.detach()) / s.known * s.alignment / s.all
    loss = losses.loss(losses.sums(), beta)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert losses.correct.tolist() == correct
    parameters = dict(drafter.named_parameters())
    fast = torch.autograd.grad(loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_gated_l1_leaves_out_candidates_without_target_mass(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any
) -> None:
    """A teacher that is certain of tokens outside the draft's few candidates: the refined L1 has nothing to teach."""
    drafter = make_drafter(tiny_target, "dspine", num_candidates=1)
    batch = make_batch(make_situation(tiny_target), tiny_target)
    head = drafter.head(tiny_target)
    sure = TrainingBatch(
        context=batch.context, tokens=batch.tokens, supervised=batch.supervised, teacher=batch.teacher * 60, draws=batch.draws
    )
    losses = drafter.block_losses(sure, tiny_target, head, settings_of())
    s, _ = slow_sums(drafter, tiny_target, sure, settings_of(), 2)
    assert s.mass < s.all
    assert float(losses.distribution[3].weight) == pytest.approx(s.mass)


def test_starts_as_the_block_causal_dflash(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    dspine = make_drafter(tiny_target, "dspine", noise=0.0)
    dflash = make_drafter(tiny_target, "dflash", noise=0.0)
    situation = make_situation(tiny_target)
    block, context = dspine.block_inputs(situation.tokens, tiny_target), situation.packed()
    anchor_codes = dspine.space.codes[situation.tokens[:, 0]]
    injected = dspine.backbone(block, context, lambda layer, u: dspine.injection(layer, u, anchor_codes))
    dflash.backbone.load_state_dict(dspine.backbone.state_dict())
    plain = dflash.backbone(block, context)
    rows = tiny_target.head_weight
    torch.testing.assert_close(
        dspine.backbone.norm(injected) @ rows.t(), dflash.backbone.norm(plain) @ rows.t(), rtol=0, atol=1e-6
    )
    with torch.inference_mode():
        greedy = torch.zeros(3)
        drafts = []
        for drafter in (dspine, dflash):
            runner = drafter.runner(tiny_target)
            drafts.append(runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 7, greedy, None).tokens)
    assert torch.equal(*drafts)


@pytest.mark.parametrize("every", [1, 4])
@torch.inference_mode()
def test_transition_cache_is_serial_refinement(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, every: int
) -> None:
    ids = None if every == 1 else torch.arange(1, tiny_target.vocab_size, every)
    drafter = make_drafter(tiny_target, "dspine", block_size=16, draft_ids=ids, noise=0.4)
    runner = drafter.runner(tiny_target)
    situation = make_situation(tiny_target, (9, 14, 5, 11, 8, 20), block_size=16)
    anchors = situation.tokens[:, 0]
    cache = fill_cache(runner, situation)
    draft = runner.propose(anchors, cache, 15, torch.zeros(6), None)
    assert draft.q_probs is None
    context = situation.packed()
    expected = [serial_draft(drafter, tiny_target, one_block(context, row), int(anchors[row]), 16) for row in range(6)]
    assert draft.tokens.tolist() == expected
    # Not a test of the ordinary argmax in disguise: refinement changed some choices.
    candidates, _, _ = runner.transition_cache(anchors, cache, 15)
    ordinary = runner._draft_head.token_of(candidates[..., 0])
    assert torch.equal(draft.tokens[:, 0], ordinary[:, 0])
    assert 0.05 < float((draft.tokens != ordinary).float().mean()) < 1


@torch.inference_mode()
def test_transition_cache_holds_every_pair(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    drafter = make_drafter(tiny_target, "dspine")
    runner = drafter.runner(tiny_target)
    situation = make_situation(tiny_target, (9,))
    anchors = situation.tokens[:, 0]
    candidates, first, transitions = runner.transition_cache(anchors, fill_cache(runner, situation), 7)
    block = slow_block(drafter, tiny_target, situation.packed(), situation.tokens[0])
    for t in range(2, 8):
        for i, predecessor in enumerate(candidates[0, t - 2].tolist()):
            scores = tiny_target.head_weight[candidates[0, t - 1]] @ refined_state(drafter, block, t, predecessor)
            torch.testing.assert_close(transitions[0, t - 2, i], scores, rtol=1e-4, atol=1e-4)
    # Slot 1's predecessor was the anchor already: refining it again changes nothing.
    ordinary = tiny_target.head_weight[candidates[0, 0]] @ drafter.backbone.norm(block.states[1])
    refined = tiny_target.head_weight[candidates[0, 0]] @ refined_state(drafter, block, 1, int(anchors[0]))
    torch.testing.assert_close(first[0], ordinary, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(refined, ordinary, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_runner_states_are_the_training_modules(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    for changes in ({}, {"qk_norm": False}, {"num_kv_heads": 4}, {"num_layers": 1}):
        drafter = make_drafter(tiny_target, "dspine", **changes)
        situation = make_situation(tiny_target)
        codes = drafter.space.codes[situation.tokens[:, 0]]
        block = drafter.block_inputs(situation.tokens, tiny_target)
        kept: list[Tensor] = []

        def inject(layer: int, u: Tensor, drafter: Any = drafter, codes: Tensor = codes, kept: list[Tensor] = kept) -> Tensor:
            kept.append(u)
            return drafter.injection(layer, u, codes)

        expected = drafter.backbone(block, situation.packed(), inject)
        runner = drafter.runner(tiny_target)
        u, _, states = runner._block(situation.tokens[:, 0], fill_cache(runner, situation), 8)
        torch.testing.assert_close(u, kept[-1][:, 1:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, expected[:, 1:], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    """Trained at B = 16, run at any width: also with sampling, from the same uniforms."""
    runner = make_drafter(tiny_target, "dspine", block_size=16).runner(tiny_target)
    situation = make_situation(tiny_target, block_size=16)
    cache = fill_cache(runner, situation)
    anchors = situation.tokens[:, 0]
    uniforms = torch.rand(3, 15, generator=torch.Generator().manual_seed(4))
    for temperatures, numbers in ((torch.zeros(3), None), (torch.tensor([0.0, 0.7, 1.3]), uniforms)):
        wide = runner.propose(anchors, cache, 15, temperatures, numbers)
        for width in (2, 4, 8):
            narrow = runner.propose(anchors, cache, width - 1, temperatures, numbers)
            assert torch.equal(narrow.tokens, wide.tokens[:, : width - 1])
            if narrow.q_probs is not None and wide.q_probs is not None:
                torch.testing.assert_close(narrow.q_probs, wide.q_probs[:, : width - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slot", [1, 4, 7])
def test_a_slot_ignores_every_later_slot(tiny_target: Target, make_drafter: Any, make_situation: Any, slot: int) -> None:
    drafter = make_drafter(tiny_target, "dspine")
    situation = make_situation(tiny_target)
    context, codes = situation.packed(), drafter.space.codes[situation.tokens[:, 0]]
    block = drafter.block_inputs(situation.tokens, tiny_target)

    def run(x: Tensor) -> Tensor:
        return drafter.backbone(x, context, lambda layer, u: drafter.injection(layer, u, codes))

    changed = block.clone()
    changed[:, slot:] += 0.5
    same = torch.isclose(run(changed), run(block), rtol=1e-5, atol=1e-6).all(-1)
    assert same.tolist() == [[True] * slot + [False] * (8 - slot)] * 3


@torch.inference_mode()
def test_sampling_keeps_the_q_it_sampled_from(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    """q is the transition row of the chosen predecessor, tempered, on that slot's own candidates."""
    runner = make_drafter(tiny_target, "dspine").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    anchors, temperatures = situation.tokens[:, 0], torch.tensor([0.5, 1.0, 2.0])
    uniforms = torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    draft = runner.propose(anchors, cache, 7, temperatures, uniforms)
    candidates, first, transitions = runner.transition_cache(anchors, cache, 7)
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    assert torch.equal(draft.q_ids, candidates)
    for row in range(3):
        scores = first[row]
        for t in range(7):
            if t:
                scores = transitions[row, t - 1, candidates[row, t - 1].tolist().index(int(draft.tokens[row, t - 1]))]
            q = torch.softmax(scores / temperatures[row], -1)
            torch.testing.assert_close(draft.q_probs[row, t], q)
            place = int((q.cumsum(-1) <= uniforms[row, t]).sum())
            assert draft.tokens[row, t] == candidates[row, t, place]


@torch.inference_mode()
def test_one_candidate_is_the_ordinary_argmax(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    runner = make_drafter(tiny_target, "dspine", num_candidates=1).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    _, _, states = runner._block(situation.tokens[:, 0], cache, 8)
    expected = tiny_target.logits(runner.final_norm(states)).argmax(-1)
    assert torch.equal(runner.propose(situation.tokens[:, 0], cache, 7, torch.zeros(3), None).tokens, expected)
