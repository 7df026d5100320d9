"""EAGLE-3: its chain of steps in training, drafting and the engine, against one entry, one head and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspine.decoding.engine import Engine
from dspine.decoding.request import Request
from dspine.decoding.sampling import SamplingParams
from dspine.drafters import backbone as backbone_module
from dspine.drafters.backbone import ContextBatch
from dspine.drafters.base import Draft, LossSettings, TrainingBatch
from dspine.drafters.config import TargetFacts
from dspine.drafters.eagle3 import Eagle3, EagleCache
from dspine.errors import UserError
from dspine.modules.kv_cache import KVCache
from dspine.targets.model import Target
from dspine.training.warm_start import copy_target_layers


def slow_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def slow_rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[0] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
    first, second = x[:half], x[half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))


class SlowLayer:
    """The layer over one sequence: entries of a feature and the token after it, one after the other."""

    def __init__(self, drafter: Eagle3, target: Target) -> None:
        self.drafter, self.target, self.config = drafter, target, drafter.config
        self.layer: Any = drafter.backbone.layers[0]
        self.keys: list[list[Tensor]] = []  # per entry and head
        self.values: list[list[Tensor]] = []

    def head(self, projection: Any, norm: Any, y: Tensor, h: int) -> Tensor:
        e = self.config.head_dim
        x = projection.weight[h * e : (h + 1) * e] @ y
        return x if norm is None or isinstance(norm, nn.Identity) else slow_norm(x, norm.weight, self.config.rms_norm_eps)

    def enter(self, feature: Tensor, token: int) -> Tensor:
        """Store the next entry's keys and values; returns its input."""
        eps, attention = self.config.rms_norm_eps, self.layer.self_attn
        embedded = self.target.embed(torch.tensor([token]))[0]
        y = torch.cat(
            (
                slow_norm(embedded, self.layer.input_layernorm.weight, eps),
                slow_norm(feature, self.drafter.backbone.hidden_norm.weight, eps),
            )
        )
        heads, position = range(self.config.num_kv_heads), len(self.keys)
        keys = [self.head(attention.k_proj, attention.k_norm, y, h) for h in heads]
        self.keys.append([slow_rotate(k, position, self.config.rope_theta) for k in keys])
        self.values.append([self.head(attention.v_proj, None, y, h) for h in heads])
        return y

    def state(self, feature: Tensor, token: int) -> Tensor:
        """Enter, and see all entries so far."""
        y, attention, mlp, out = self.enter(feature, token), self.layer.self_attn, self.layer.mlp, []
        for h in range(self.config.num_heads):
            group = h // (self.config.num_heads // self.config.num_kv_heads)
            q = self.head(attention.q_proj, attention.q_norm, y, h)
            q = slow_rotate(q, len(self.keys) - 1, self.config.rope_theta)
            weights = torch.stack([q @ k[group] / math.sqrt(self.config.head_dim) for k in self.keys]).exp()
            out.append(sum(w * v[group] for w, v in zip(weights / weights.sum(), self.values, strict=True)))
        x = feature + attention.o_proj.weight @ torch.cat(out)
        n = slow_norm(x, self.layer.post_attention_layernorm.weight, self.config.rms_norm_eps)
        gate = mlp.gate_proj.weight @ n
        return x + mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (mlp.up_proj.weight @ n))


def slow_logits(
    drafter: Eagle3, target: Target, features: Tensor, following: Tensor, steps: int, choose: Callable[[int, Tensor], int]
) -> list[Tensor]:
    """Logits over the draft vocabulary of each step after features [n, taps * d], whose next tokens end with the anchor.
    `choose(j, logits)` names the token that step j + 1 reads."""
    layer, fc = SlowLayer(drafter, target), drafter.backbone.fc.weight
    for feature, token in zip(features[:-1], following[:-1].tolist(), strict=True):
        layer.enter(fc @ feature, token)
    state, token, found = fc @ features[-1], int(following[-1]), []
    rows = target.head_weight[drafter.draft_ids] if drafter.draft_ids.numel() else target.head_weight
    for j in range(steps):
        state = layer.state(state, token)
        logits = rows @ slow_norm(state, drafter.backbone.norm.weight, drafter.config.rms_norm_eps)
        found.append(logits if target.softcap is None else target.softcap * torch.tanh(logits / target.softcap))
        token = choose(j, found[-1])
    return found


def slow_greedy(drafter: Eagle3, target: Target, features: Tensor, following: Tensor, steps: int) -> list[int]:
    tokens: list[int] = []

    def choose(_: int, logits: Tensor) -> int:
        best = int(logits.argmax())
        tokens.append(int(drafter.draft_ids[best]) if drafter.draft_ids.numel() else best)
        return tokens[-1]

    slow_logits(drafter, target, features, following, steps, choose)
    return tokens


def some_ids(target: Target, every: int) -> Tensor | None:
    return None if every == 1 else torch.arange(1, target.vocab_size, every)


# --- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "every", "qk_norm"), [(1.0, 1, True), (0.3, 3, False)])
def test_loss_step_by_step(
    tiny_target: Target, make_drafter: Any, make_situation: Any, make_batch: Any, alpha: float, every: int, qk_norm: bool
) -> None:
    """The values, and every parameter's gradient through the whole chain."""
    ids = some_ids(tiny_target, every)
    drafter = make_drafter(tiny_target, "eagle3", draft_ids=ids, qk_norm=qk_norm, block_size=5, step_decay=0.6)
    situation = make_situation(tiny_target, block_size=6)
    supervised = torch.ones(3, 5)
    supervised[1, 3:] = 0
    batch = make_batch(situation, tiny_target, supervised)
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), LossSettings(alpha=alpha, gamma=4.0))
    assert losses.alignment is None
    known_ids = list(range(tiny_target.vocab_size)) if ids is None else ids.tolist()
    rows = tiny_target.head_weight[known_ids]
    ce = l1 = torch.zeros(())
    known = total = 0.0
    for a in range(3):
        true = batch.tokens[a].tolist()

        def truth(j: int, _: Tensor, true: Sequence[int] = true) -> int:
            return true[j + 1]

        for j, logits in enumerate(slow_logits(drafter, tiny_target, situation.features[a], situation.next_tokens[a], 5, truth)):
            log_q = logits - logits.exp().sum().log()
            p = torch.softmax(rows @ batch.teacher[a, j], -1)
            row = known_ids.index(true[j + 1]) if true[j + 1] in known_ids else -1
            assert bool(losses.correct[a, j]) == (int(log_q.argmax()) == row)
            if not supervised[a, j]:
                continue
            w = 0.6**j
            total += w
            known += w * (row >= 0)
            ce = ce - (w * log_q[row] if row >= 0 else 0)
            l1 = l1 + w * (log_q.exp() - p).abs().sum()
    assert known < total if every > 1 else known == total
    expected = alpha * ce / known + ((1 - alpha) * l1 / total if alpha < 1 else 0)
    loss = losses.loss(losses.sums(), beta=0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    parameters = dict(drafter.named_parameters())
    fast = torch.autograd.grad(loss, list(parameters.values()))
    slow = torch.autograd.grad(expected, list(parameters.values()))
    for name, x, y in zip(parameters, fast, slow, strict=True):
        assert y.abs().max() > 0, name
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()), msg=name)


def packed(lengths: Sequence[int], anchors: Tensor, width: int, generator: torch.Generator) -> ContextBatch:
    total = sum(lengths)
    return ContextBatch(
        features=torch.randn(total, width, generator=generator),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        sequences=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        next_tokens=torch.randint(4, 250, (total,), generator=generator),
        anchors=anchors,
    )


def test_blocks_do_not_see_each_other(tiny_target: Target, make_drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a sequence, sequences end to end, blocks that share an attention call or not: all as if alone."""
    backbone = make_drafter(tiny_target, "eagle3").backbone
    generator = torch.Generator().manual_seed(0)
    anchors = torch.tensor([1, 2, 7, 7, 19, 20 + 1, 20 + 8])
    context = packed((20, 10), anchors, 2 * tiny_target.hidden_size, generator)
    tokens = torch.randn(7, 4, tiny_target.hidden_size, generator=generator)
    following = tiny_target.embed(context.next_tokens)
    together = backbone(tokens, following, context)
    for i in range(7):
        own = context.sequences == context.sequences[anchors[i]]
        alone = ContextBatch(
            features=context.features[own],
            positions=context.positions[own],
            sequences=context.sequences[own],
            next_tokens=context.next_tokens[own],
            anchors=context.positions[anchors[i : i + 1]],
        )
        expected = backbone(tokens[i : i + 1], following[own], alone)
        torch.testing.assert_close(together[i : i + 1], expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(backbone_module, "_ANCHORS_PER_PART", 2)
    torch.testing.assert_close(backbone(tokens, following, context), together, rtol=1e-4, atol=1e-5)


def test_a_batch_without_anchors_teaches_nothing(tiny_target: Target, make_drafter: Any) -> None:
    """Its stand-in block is at index 0, where no context comes before (training.batches)."""
    drafter = make_drafter(tiny_target, "eagle3", block_size=4)
    d, generator = tiny_target.hidden_size, torch.Generator().manual_seed(0)
    batch = TrainingBatch(
        context=packed((6,), torch.tensor([0]), 2 * d, generator),
        tokens=torch.tensor([[9, 8, 7, 6, 5]]),
        supervised=torch.zeros(1, 4),
        teacher=torch.randn(1, 4, d, generator=generator),
        draws=torch.ones(1),
    )
    losses = drafter.block_losses(batch, tiny_target, drafter.head(tiny_target), LossSettings())
    loss = losses.loss(losses.sums(), 0.0)
    assert float(loss.detach()) == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, list(drafter.parameters())))


@torch.inference_mode()
def test_start_from_the_targets_last_layer(tiny_target: Target, make_drafter: Any) -> None:
    """With the input of the target's last layer tapped, step 0 is that layer, blind only to the embedding."""
    facts = TargetFacts.of(tiny_target)
    shape = {"head_dim": 8, "intermediate_size": 48, "rope_theta": facts.rope_theta, "rms_norm_eps": facts.rms_norm_eps}
    drafter = make_drafter(tiny_target, "eagle3", target_layer_ids=(0, tiny_target.num_layers - 2), qk_norm=False, **shape)
    copy_target_layers(drafter, tiny_target)
    ids = torch.tensor([[9, 40, 7, 123, 55, 8, 77, 30]])
    out = tiny_target.forward(ids, tiny_target.new_cache(1, 8), drafter.config.target_layer_ids)
    assert out.features is not None
    context = ContextBatch(
        features=out.features[0],
        positions=torch.arange(8),
        sequences=torch.zeros(8).long(),
        next_tokens=ids[0].roll(-1),
        anchors=torch.tensor([1, 5, 7]),
    )
    states = drafter.backbone(
        tiny_target.embed(ids[0, context.anchors])[:, None], tiny_target.embed(context.next_tokens), context
    )
    expected = out.hidden[0, context.anchors - 1]
    torch.testing.assert_close(drafter.backbone.norm(states[:, 0]), expected, rtol=1e-4, atol=1e-4)


def test_impossible_choices_are_refused(tiny_target: Target, make_drafter: Any) -> None:
    with pytest.raises(UserError, match="num_layers = 2, but an eagle3 drafter is a single layer; set num_layers to 1"):
        make_drafter(tiny_target, "eagle3", num_layers=2)
    with pytest.raises(UserError, match="attention = bidirectional is not a eagle3 drafter's, which has attention = causal"):
        make_drafter(tiny_target, "eagle3", attention="bidirectional")
    with pytest.raises(UserError, match="alignment = same is not a eagle3 drafter's, which has alignment = next"):
        make_drafter(tiny_target, "eagle3", alignment="same")
    with pytest.raises(UserError, match="eagle3 drafter, option step_decay: Input should be greater than 0"):
        make_drafter(tiny_target, "eagle3", step_decay=0.0)


# --- drafting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "every", "changes"),
    [("llama", 1, {}), ("llama", 4, {"qk_norm": False, "num_kv_heads": 4}), ("gemma2", 1, {"num_kv_heads": 1})],
)
@torch.inference_mode()
def test_greedy_drafting_is_serial_drafting(
    make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any, family: str, every: int, changes: dict[str, Any]
) -> None:
    """Rows of unlike lengths (one of a single token), and rows in step; Gemma 2 scales embeddings and caps logits."""
    target = make_target(family)
    drafter = make_drafter(target, "eagle3", draft_ids=some_ids(target, every), **changes)
    runner = drafter.runner(target)
    for lengths in ((9, 14, 1, 20), (6, 6)):
        situation = make_situation(target, lengths)
        draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, torch.zeros(len(lengths)), None)
        assert draft.q_ids is None
        assert draft.q_probs is None
        for row, (features, following) in enumerate(zip(situation.features, situation.next_tokens, strict=True)):
            assert draft.tokens[row].tolist() == slow_greedy(drafter, target, features, following, 8)


@pytest.mark.parametrize(("family", "every"), [("llama", 1), ("llama", 4), ("gemma2", 1)])
@torch.inference_mode()
def test_sampling_keeps_the_q_it_sampled_from(
    make_target: Any, make_drafter: Any, make_situation: Any, fill_cache: Any, family: str, every: int
) -> None:
    """q is over the whole draft vocabulary, given the tokens drawn before; a greedy row may stand among sampled ones."""
    target = make_target(family)
    drafter = make_drafter(target, "eagle3", draft_ids=some_ids(target, every))
    tokens_of = drafter.draft_ids.tolist() or list(range(target.vocab_size))
    situation = make_situation(target)
    runner = drafter.runner(target)
    temperatures, uniforms = torch.tensor([2.5, 0.0, 6.0]), torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
    draft = runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 8, temperatures, uniforms)
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    assert draft.q_ids.tolist() == [[tokens_of] * 8] * 3
    torch.testing.assert_close(draft.q_probs.sum(-1), torch.ones(3, 8))
    best = 0
    for row in range(3):
        drawn = draft.tokens[row].tolist()

        def as_drawn(j: int, _: Tensor, drawn: Sequence[int] = drawn) -> int:
            return drawn[j]

        steps = slow_logits(drafter, target, situation.features[row], situation.next_tokens[row], 8, as_drawn)
        for j, logits in enumerate(steps):
            place = int(logits.argmax())
            if temperatures[row] > 0:
                q = torch.softmax(logits / temperatures[row], -1)
                torch.testing.assert_close(draft.q_probs[row, j], q, rtol=2e-3, atol=1e-5)
                best += drawn[j] == tokens_of[place]
                place = int((draft.q_probs[row, j].cumsum(-1) <= uniforms[row, j]).sum())
            assert drawn[j] == tokens_of[place]
    assert best < 16  # drawn, not chosen


@torch.inference_mode()
def test_a_narrow_draft_is_the_start_of_the_wide_one(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    runner = make_drafter(tiny_target, "eagle3").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache, anchors = fill_cache(runner, situation), situation.tokens[:, 0]
    temperatures, uniforms = torch.tensor([0.0, 3.0, 3.0]), torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    wide = runner.propose(anchors, cache, 8, temperatures, uniforms)
    assert wide.q_probs is not None
    for m in (1, 3):
        narrow = runner.propose(anchors, cache, m, temperatures, uniforms[:, :m])
        assert torch.equal(narrow.tokens, wide.tokens[:, :m])
        assert narrow.q_probs is not None
        torch.testing.assert_close(narrow.q_probs, wide.q_probs[:, :m])


# --- the cache ---------------------------------------------------------------------------------------------------------


def assert_same_entries(ours: EagleCache, row: int, theirs: EagleCache, n: int) -> None:
    """Row `row` of ours holds what row 0 of theirs does, n entries."""
    torch.testing.assert_close(ours.data[0][row, :, :n], theirs.data[0][0, :, :n], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.features[row, :n], theirs.features[0, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("piece", [1, 4])
@torch.inference_mode()
def test_context_in_pieces_with_drafts_between(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any, piece: int
) -> None:
    """Neither garbage behind a row's length nor an earlier draft's entries reach a later draft."""
    runner = make_drafter(tiny_target, "eagle3").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache, anchors = fill_cache(runner, situation, piece), situation.tokens[:, 0]
    runner.propose(situation.tokens[:, 1], cache, 8, torch.zeros(3), None)
    together = runner.propose(anchors, cache, 8, torch.zeros(3), None).tokens
    assert torch.equal(cache.lengths, torch.tensor([9, 14, 5]))
    assert torch.equal(runner.propose(anchors[:2], cache, 8, torch.zeros(2), None).tokens, together[:2])
    for row in range(3):
        alone = fill_cache(runner, situation.row(row))
        # The last entry was drafted from, once with another anchor: it is as it was again.
        assert torch.equal(runner.propose(anchors[row : row + 1], alone, 8, torch.zeros(1), None).tokens[0], together[row])
        assert_same_entries(cache, row, alone, int(cache.lengths[row]))


@torch.inference_mode()
def test_rows_of_the_cache_move_grow_and_share_memory(
    tiny_target: Target, make_drafter: Any, make_situation: Any, fill_cache: Any
) -> None:
    runner = make_drafter(tiny_target, "eagle3").runner(tiny_target)
    situation = make_situation(tiny_target)
    cache = fill_cache(runner, situation)
    bytes_before, capacity = cache.memory_bytes(), cache.capacity
    cache.reserve(3 * capacity)
    assert cache.features.shape == (3, 3 * capacity, tiny_target.hidden_size)
    assert cache.memory_bytes() == 3 * bytes_before
    assert bytes_before > sum(t.numel() * 4 for t in cache.data) // 3
    for row in range(3):
        assert_same_entries(cache, row, fill_cache(runner, situation.row(row)), int(cache.lengths[row]))
    drafts = runner.propose(situation.tokens[:, 0], cache, 8, torch.zeros(3), None).tokens
    view = cache.row(1)
    assert torch.equal(runner.propose(situation.tokens[1:2, 0], view, 8, torch.zeros(1), None).tokens, drafts[1:2])
    view.features[0, 0] = 7.0
    view.lengths += 1
    assert (cache.features[1, 0] == 7).all()
    assert cache.lengths.tolist() == [9, 15, 5]
    cache.move_row(2, 0)
    assert torch.equal(runner.propose(situation.tokens[2:, 0], cache, 8, torch.zeros(1), None).tokens, drafts[2:])


# --- the engine --------------------------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + 11 * j) % 250 + 5 for j in range(1 + 2 * i)] for i in range(6)]
ANSWER_LENGTHS = (9, 30, 12, 25, 1, 18)


class Watched:
    """A runner whose proposals are kept. With `answers` the first length % 6 tokens of a proposal are put right afterwards:
    an untrained drafter hardly ever is, and every number of accepted tokens shall happen."""

    def __init__(self, runner: Any, answers: Sequence[list[int]] = ()) -> None:
        self.config, self._runner = runner.config, runner
        self._next = {(i, text[i]): text[i + 1 :] for text in answers for i in range(len(text))}
        self.engine: Engine | None = None
        self.seen: list[tuple[list[int], list[int]]] = []  # (prompt and answer so far, the anchor last; proposal)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return self._runner.new_cache(rows, capacity)

    def extend(self, features: Tensor, next_tokens: Tensor, cache: KVCache) -> None:
        self._runner.extend(features, next_tokens, cache)

    def propose(
        self, anchors: Tensor, cache: KVCache, num_draft_tokens: int, temperatures: Tensor, uniforms: Tensor | None
    ) -> Draft:
        tokens = self._runner.propose(anchors, cache, num_draft_tokens, temperatures, uniforms).tokens
        assert self.engine is not None
        for row, request in enumerate(self.engine._live):
            text = request.prompt_ids + request.output_ids
            self.seen.append((text, tokens[row].tolist()))
            assert int(cache.lengths[row]) == len(text) - 1
            right = self._next.get((len(text) - 1, text[-1]), [])[: min(len(text) % 6, num_draft_tokens)]
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.long)
        return Draft(tokens)


def start(target: Target, runner: Watched | None, max_rows: int) -> tuple[Engine, list[Request]]:
    engine = Engine(target, runner, max_rows=max_rows, width=1 if runner is None else runner.config.max_width)
    if runner is not None:
        runner.engine = engine
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=n, ignore_eos=True))
        for prompt, n in zip(PROMPTS, ANSWER_LENGTHS, strict=True)
    ]
    return engine, requests


@pytest.fixture(scope="module")
def answers(tiny_target: Target) -> list[list[int]]:
    """Prompt and answer of plain decoding, each alone."""
    engine, requests = start(tiny_target, None, 1)
    engine.run()
    return [request.prompt_ids + request.output_ids for request in requests]


@pytest.mark.parametrize(("helped", "every"), [(False, 1), (True, 1), (True, 4)])
def test_the_engine_proposes_what_serial_drafting_does(
    tiny_target: Target, make_drafter: Any, answers: list[list[int]], helped: bool, every: int
) -> None:
    """Requests join, leave and move between rows; the output is plain decoding's, every proposal the slow one's."""
    drafter = make_drafter(tiny_target, "eagle3", block_size=6, draft_ids=some_ids(tiny_target, every))
    watched = Watched(drafter.runner(tiny_target), answers if helped else ())
    engine, requests = start(tiny_target, watched, 3)
    engine.run()
    assert [request.prompt_ids + request.output_ids for request in requests] == answers
    with torch.inference_mode():
        for text, proposal in watched.seen[::3] if not helped else watched.seen:
            taps = drafter.config.target_layer_ids
            out = tiny_target.forward(torch.tensor([text[:-1]]), tiny_target.new_cache(1, len(text)), taps)
            assert out.features is not None
            following = torch.tensor(text[1:])
            assert proposal == slow_greedy(drafter, tiny_target, out.features[0], following, len(proposal)), text
    rounds = len(watched.seen)
    assert rounds < 40 if helped else rounds > 60


def test_caches_after_every_round_are_those_of_a_fresh_prefill(
    tiny_target: Target, make_drafter: Any, answers: list[list[int]]
) -> None:
    runner = make_drafter(tiny_target, "eagle3", block_size=6).runner(tiny_target)
    engine, requests = start(tiny_target, Watched(runner, answers), 3)
    rows_of: dict[int, set[int]] = {request.id: set() for request in requests}
    while engine.has_work:
        engine.step()
        assert isinstance(engine._draft_cache, EagleCache)
        for row, request in enumerate(engine._live):
            rows_of[request.id].add(row)
            text = request.prompt_ids + request.output_ids
            out = tiny_target.forward(torch.tensor([text[:-1]]), tiny_target.new_cache(1, 64), runner.config.target_layer_ids)
            assert out.features is not None
            fresh = runner.new_cache(1, 64)
            with torch.inference_mode():
                runner.extend(out.features, torch.tensor([text[1:]]), fresh)
            assert int(engine._draft_cache.lengths[row]) == len(text) - 1
            assert_same_entries(engine._draft_cache, row, fresh, len(text) - 1)
    assert any(len(rows) > 1 for rows in rows_of.values())  # some have moved
