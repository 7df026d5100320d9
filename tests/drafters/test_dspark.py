"""DSpark: training losses, drafting and confidences against slow, serial versions of their equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters.base import LossSettings
from dspine.drafters.dspark import DSpark
from dspine.errors import UserError
from dspine.targets.model import Target

KINDS = pytest.mark.parametrize("kind", ["vanilla", "gated", "recurrent"])


def head_rows(drafter: DSpark, target: Target) -> tuple[Tensor, list[int]]:
    """(head [v', d], token ids) of what the drafter may propose."""
    ids = drafter.draft_ids.tolist() or list(range(target.vocab_size))
    return target.head_weight[ids], ids


def slow_state(drafter: DSpark, hidden: Tensor, read: list[int]) -> Tensor:
    """s_t of h_t [d] after `read` = x_0 .. x_t."""
    markov, e = drafter.markov, drafter.markov.embedding.weight[read]
    if drafter.options.markov == "vanilla":
        return e[-1]
    if drafter.options.markov == "gated":
        assert markov.gate_hidden is not None
        assert markov.gate_token is not None
        g = torch.cat((markov.gate_hidden.weight, markov.gate_token.weight), 1)  # [r, d + r]
        return e[-1] * torch.sigmoid(g @ torch.cat((hidden, e[-1])) + markov.gate_hidden.bias)
    assert markov.recurrence is not None
    state = torch.zeros(e.shape[1])
    for x in e:
        state = torch.tanh(x + markov.recurrence.weight @ state)
    return state


def slow_logits(drafter: DSpark, target: Target, hidden: Tensor, read: list[int]) -> tuple[Tensor, Tensor]:
    """(base, final) logits [v'] of the slot with state h [d] after `read` = x_0 .. x_t."""
    rows, _ = head_rows(drafter, target)
    base = rows @ hidden
    if target.softcap is not None:
        base = target.softcap * torch.tanh(base / target.softcap)
    return base, base + drafter.markov_bias.weight @ slow_state(drafter, hidden, read)


def slow_confidence(drafter: DSpark, hidden: Tensor, previous: int) -> Tensor:
    seen = torch.cat((hidden, drafter.markov.embedding.weight[previous]))
    return torch.sigmoid(drafter.confidence.weight[0] @ seen + drafter.confidence.bias[0])


def hidden_states(drafter: DSpark, target: Target, situation: Any) -> Tensor:
    """h [rows, B, d] of the training module."""
    block = drafter.block_inputs(situation.tokens, target)
    return drafter.backbone.norm(drafter.backbone(block, situation.packed()))


def some_ids(target: Target, every: int) -> Tensor | None:
    return None if every == 1 else torch.arange(1, target.vocab_size, every)


@KINDS
@pytest.mark.parametrize(("alpha", "every", "attention"), [(1.0, 1, "bidirectional"), (0.3, 3, "causal")])
def test_loss_slot_by_slot(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any,
    kind: str, alpha: float, every: int, attention: str,
) -> None:  # fmt: skip
    shape = {"attention": attention, "draft_ids": some_ids(tiny_target, every), "block_size": 5}
    drafter = make_drafter(tiny_target, "dspark", markov=kind, confidence_loss=0.6, **shape)
    situation = make_situation(tiny_target, block_size=6)
    supervised = torch.ones(3, 5)
    supervised[1, 3:] = 0
    batch = make_batch(situation, tiny_target, supervised)
    settings = LossSettings(alpha=alpha, gamma=4.0)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), settings)
    hidden = hidden_states(drafter, tiny_target, situation)
    rows, ids = head_rows(drafter, tiny_target)
    ce = l1 = bce = torch.zeros(())
    known = total = 0.0
    for a in range(3):
        tokens = batch.tokens[a].tolist()
        for t in range(5):
            p = torch.softmax(rows @ batch.teacher[a, t], -1)
            _, logits = slow_logits(drafter, tiny_target, hidden[a, t], tokens[: t + 1])
            row = ids.index(tokens[t + 1]) if tokens[t + 1] in ids else -1
            assert bool(losses.correct[a, t]) == (int(logits.argmax()) == row)
            if not supervised[a, t]:
                continue
            w = math.exp(-t / 4.0)
            total += w
            known += w * (row >= 0)
            log_q = logits - logits.exp().sum().log()
            ce = ce - (w * log_q[row] if row >= 0 else 0)
            l1 = l1 + w * (log_q.exp() - p).abs().sum()
            accepted = float(torch.minimum(log_q.exp(), p).sum().detach())  # = 1 - |q - p|_1 / 2
            c = slow_confidence(drafter, hidden[a, t], tokens[t])
            bce = bce - w * (accepted * c.log() + (1 - accepted) * (1 - c).log())
    assert known < total if every > 1 else known == total
    expected = alpha * ce / known + 0.6 * bce / total + ((1 - alpha) * l1 / total if alpha < 1 else 0)
    loss = losses.loss(losses.sums(), beta=0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    parameters = dict(drafter.named_parameters())
    fast = torch.autograd.grad(loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, x, y in zip(parameters, fast, slow, strict=True):
        assert y.abs().max() > 0, name
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5, msg=name)


@KINDS
@torch.inference_mode()
def test_starts_as_the_plain_backbone(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, kind: str
) -> None:
    drafter = make_drafter(tiny_target, "dspark", markov=kind, noise=0.0)
    situation = make_situation(tiny_target)
    runner = drafter.runner(tiny_target)
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, torch.zeros(3), None)
    expected = hidden_states(drafter, tiny_target, situation) @ tiny_target.head_weight.t()
    assert torch.equal(draft.tokens, expected.argmax(-1))
    assert torch.equal(draft.confidence(), torch.full((3, 8), 0.5))


@KINDS
@pytest.mark.parametrize(("every", "attention"), [(1, "bidirectional"), (4, "causal")])
@torch.inference_mode()
def test_greedy_drafting_is_the_serial_walk(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, kind: str, every: int, attention: str
) -> None:
    ids = some_ids(tiny_target, every)
    drafter = make_drafter(tiny_target, "dspark", markov=kind, attention=attention, draft_ids=ids, noise=0.8)
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
            torch.testing.assert_close(
                draft.confidence()[row, t], slow_confidence(drafter, hidden[row, t], chosen[-1]), rtol=1e-3, atol=1e-5
            )
            changed += int(base.argmax()) != int(final.argmax())
            chosen.append(tokens_of[int(final.argmax())])
        assert draft.tokens[row].tolist() == chosen[1:]
    assert changed > 3  # not a test of the base output in disguise
    assert draft.confidence().std() > 0.1


@pytest.mark.parametrize(
    ("family", "kind", "every"),
    [("llama", "vanilla", 1), ("llama", "gated", 4), ("llama", "recurrent", 1), ("gemma2", "gated", 1)],
)
@torch.inference_mode()
def test_sampling_keeps_the_q_it_sampled_from(
    make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any, family: str, kind: str, every: int
) -> None:
    """q is over the whole draft vocabulary, given the chosen predecessors; Gemma 2 caps its logits."""
    target = make_target(family)
    drafter = make_drafter(target, "dspark", markov=kind, draft_ids=some_ids(target, every))
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
            confidence = slow_confidence(drafter, hidden[row, t], read[-1])
            torch.testing.assert_close(draft.confidence()[row, t], confidence, rtol=1e-3, atol=1e-5)
            if temperatures[row] == 0:
                place = int(logits.argmax())
            else:
                q = torch.softmax(logits / temperatures[row], -1)
                torch.testing.assert_close(draft.q_probs[row, t], q, rtol=1e-3, atol=1e-5)
                place = int((draft.q_probs[row, t].cumsum(-1) <= uniforms[row, t]).sum())
            assert int(draft.tokens[row, t]) == tokens_of[place]
            read.append(tokens_of[place])
    torch.testing.assert_close(draft.q_probs.sum(-1), torch.ones(3, 8))


@KINDS
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, attention: str, kind: str
) -> None:
    runner = make_drafter(tiny_target, "dspark", markov=kind, attention=attention).runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    temperatures, uniforms = torch.tensor([0.0, 1.0, 1.0]), torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    wide = runner.propose(situation.tokens[:, 0], cache, 8, temperatures, uniforms)
    for m in (1, 3):
        narrow = runner.propose(situation.tokens[:, 0], cache, m, temperatures, uniforms[:, :m])
        assert torch.equal(narrow.tokens, wide.tokens[:, :m])
        torch.testing.assert_close(narrow.confidence(), wide.confidence()[:, :m])


def test_impossible_choices_are_refused(tiny_target: Target, make_drafter: Any) -> None:
    with pytest.raises(UserError, match="alignment = same is not a dspark drafter's, which has alignment = next"):
        make_drafter(tiny_target, "dspark", alignment="same")
    with pytest.raises(UserError, match="dspark drafter, option markov: Input should be 'vanilla', 'gated' or 'recurrent'"):
        make_drafter(tiny_target, "dspark", markov="hidden")
