"""Domino: training losses and drafting against slow, serial versions of their equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspine.drafters.base import Draft, LossSettings
from dspine.drafters.domino import Domino
from dspine.errors import UserError
from dspine.targets.model import Target


def head_rows(drafter: Domino, target: Target) -> tuple[Tensor, list[int]]:
    """(head [v', d], token ids) of what the drafter may propose."""
    ids = drafter.draft_ids.tolist() or list(range(target.vocab_size))
    return target.head_weight[ids], ids


def slow_gru(drafter: Domino, target: Target, tokens: list[int]) -> Tensor:
    """g after reading `tokens`, one gate after the other."""
    w, u = drafter.correction.input_gates.weight, drafter.correction.state_gates.weight
    g = u.shape[1]
    state = torch.zeros(g)
    for token in tokens:
        e = target.embed(torch.tensor(token))
        reset = torch.sigmoid(w[:g] @ e + u[:g] @ state)
        update = torch.sigmoid(w[g : 2 * g] @ e + u[g : 2 * g] @ state)
        new = torch.tanh(w[2 * g :] @ e + reset * (u[2 * g :] @ state))
        state = (1 - update) * new + update * state
    return state


def slow_logits(drafter: Domino, target: Target, hidden: Tensor, read: list[int]) -> tuple[Tensor, Tensor]:
    """(base, final) logits [v'] of the slot with state h [d] after `read` = x_0 .. x_t."""
    rows, _ = head_rows(drafter, target)
    base = rows @ hidden
    if target.softcap is not None:
        base = target.softcap * torch.tanh(base / target.softcap)
    if len(read) == 1:
        return base, base
    inner = drafter.correction.bottleneck.weight @ torch.cat((hidden, slow_gru(drafter, target, read)))
    return base, base + drafter.correction.out.weight @ (inner * torch.sigmoid(inner))


def hidden_states(drafter: Domino, target: Target, situation: Any) -> Tensor:
    """h [rows, B, d] of the training module."""
    block = drafter.block_inputs(situation.tokens, target)
    return drafter.backbone.norm(drafter.backbone(block, situation.packed()))


def some_ids(target: Target, every: int) -> Tensor | None:
    return None if every == 1 else torch.arange(1, target.vocab_size, every)


@torch.inference_mode()
def test_the_gru_is_the_usual_one_without_biases(tiny_target: Target, make_drafter: Any) -> None:
    drafter = make_drafter(tiny_target, "domino", noise=0.4)
    gru = nn.GRU(tiny_target.hidden_size, 9, bias=False, batch_first=True)
    correction = drafter.correction
    gru.load_state_dict({"weight_ih_l0": correction.input_gates.weight, "weight_hh_l0": correction.state_gates.weight})
    tokens = [5, 90, 17, 17, 201]
    states, _ = gru(tiny_target.embed(torch.tensor([tokens])))
    for t in range(5):
        torch.testing.assert_close(states[0, t], slow_gru(drafter, tiny_target, tokens[: t + 1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("alpha", "every", "attention"), [(1.0, 1, "causal"), (0.3, 1, "bidirectional"), (0.3, 3, "causal")])
def test_loss_slot_by_slot(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, alpha: float, every: int, attention: str
) -> None:
    drafter = make_drafter(tiny_target, "domino", attention=attention, draft_ids=some_ids(tiny_target, every), block_size=5)
    situation = make_situation(tiny_target, block_size=6)
    supervised = torch.ones(3, 5)
    supervised[1, 3:] = 0
    batch = make_batch(situation, tiny_target, supervised)
    settings = LossSettings(alpha=alpha, gamma=4.0, progress=0.25)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), settings)
    hidden = hidden_states(drafter, tiny_target, situation)
    rows, ids = head_rows(drafter, tiny_target)
    zero = torch.zeros(())
    ce, l1 = [zero, zero], [zero, zero]  # of the base and the final output
    known = total = 0.0
    for a in range(3):
        tokens = batch.tokens[a].tolist()
        for t in range(5):
            p = torch.softmax(rows @ batch.teacher[a, t], -1)
            outputs = slow_logits(drafter, tiny_target, hidden[a, t], tokens[: t + 1])
            row = ids.index(tokens[t + 1]) if tokens[t + 1] in ids else -1
            assert bool(losses.correct[a, t]) == (int(outputs[1].argmax()) == row)
            if not supervised[a, t]:
                continue
            w = math.exp(-t / 4.0)
            total += w
            known += w * (row >= 0)
            for i, logits in enumerate(outputs):
                log_q = logits - logits.exp().sum().log()
                l1[i] = l1[i] + w * (log_q.exp() - p).abs().sum()
                ce[i] = ce[i] - (w * log_q[row] if row >= 0 else 0)
    assert known < total if every > 1 else known == total
    base, final = (alpha * ce[i] / known + ((1 - alpha) * l1[i] / total if alpha < 1 else 0) for i in (0, 1))
    expected = 0.75 * base + 0.25 * final
    loss = losses.loss(losses.sums(), beta=0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.distribution[0].mean(), ce[0] / known, rtol=1e-4, atol=1e-5)  # CE_backbone
    parameters = dict(drafter.named_parameters())
    fast = torch.autograd.grad(loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, x, y in zip(parameters, fast, slow, strict=True):
        assert y.abs().max() > 0, name
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5, msg=name)


@torch.inference_mode()
def test_starts_as_the_plain_backbone(tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any) -> None:
    drafter = make_drafter(tiny_target, "domino", noise=0.0)
    situation = make_situation(tiny_target)
    runner = drafter.runner(tiny_target)
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, torch.zeros(3), None)
    expected = hidden_states(drafter, tiny_target, situation) @ tiny_target.head_weight.t()
    assert torch.equal(draft.tokens, expected.argmax(-1))


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@torch.inference_mode()
def test_greedy_drafting_is_the_serial_walk(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str, every: int
) -> None:
    ids = some_ids(tiny_target, every)
    drafter = make_drafter(tiny_target, "domino", attention=attention, draft_ids=ids, noise=0.4)
    situation = make_situation(tiny_target, (9, 14, 5, 20))
    runner = drafter.runner(tiny_target)
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, torch.zeros(4), None)
    assert draft.q_ids is None
    assert draft.q_probs is None
    hidden = hidden_states(drafter, tiny_target, situation)
    _, tokens_of = head_rows(drafter, tiny_target)
    changed = 0
    for row in range(4):
        chosen = [int(situation.tokens[row, 0])]
        for t in range(8):
            base, final = slow_logits(drafter, tiny_target, hidden[row, t], chosen)
            changed += int(base.argmax()) != int(final.argmax())
            chosen.append(tokens_of[int(final.argmax())])
        assert draft.tokens[row].tolist() == chosen[1:]
    assert changed > 3  # not a test of the base output in disguise


@pytest.mark.parametrize(("family", "every"), [("llama", 1), ("llama", 4), ("gemma2", 1)])
@torch.inference_mode()
def test_sampling_keeps_the_q_it_sampled_from(
    make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any, family: str, every: int
) -> None:
    """q is over the whole draft vocabulary, given the chosen predecessors; Gemma 2 scales embeddings and caps logits."""
    target = make_target(family)
    drafter = make_drafter(target, "domino", draft_ids=some_ids(target, every))
    situation = make_situation(target)
    runner = drafter.runner(target)
    temperatures, uniforms = torch.tensor([0.7, 0.0, 1.6]), torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, temperatures, uniforms)
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    hidden = hidden_states(drafter, target, situation)
    _, tokens_of = head_rows(drafter, target)
    assert draft.q_ids.tolist() == [[tokens_of] * 8] * 3
    for row in range(3):
        read = [int(situation.tokens[row, 0])]
        for t in range(8):
            _, logits = slow_logits(drafter, target, hidden[row, t], read)
            if temperatures[row] == 0:
                place = int(logits.argmax())
            else:
                q = torch.softmax(logits / temperatures[row], -1)
                torch.testing.assert_close(draft.q_probs[row, t], q, rtol=1e-3, atol=1e-5)
                place = int((draft.q_probs[row, t].cumsum(-1) <= uniforms[row, t]).sum())
            assert int(draft.tokens[row, t]) == tokens_of[place]
            read.append(tokens_of[place])
    torch.testing.assert_close(draft.q_probs.sum(-1), torch.ones(3, 8))


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str
) -> None:
    runner = make_drafter(tiny_target, "domino", attention=attention).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    temperatures, uniforms = torch.tensor([0.0, 1.0, 1.0]), torch.rand(3, 8, generator=torch.Generator().manual_seed(2))

    def draft(m: int) -> Draft:
        proposal: Draft = runner.propose(situation.tokens[:, 0], cache, m, temperatures, uniforms[:, :m])
        return proposal

    for m in (1, 3):
        assert torch.equal(draft(m).tokens, draft(8).tokens[:, :m])


def test_slots_that_predict_themselves_are_refused(tiny_target: Target, make_drafter: Any) -> None:
    with pytest.raises(UserError, match="alignment = same is not a domino drafter's, which has alignment = next"):
        make_drafter(tiny_target, "domino", alignment="same")
