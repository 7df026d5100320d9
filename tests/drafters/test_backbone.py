"""The packed training backbone against one block, one head and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.drafters import backbone as backbone_module
from dspine.drafters.backbone import Backbone, ContextBatch, rope_frequencies
from dspine.modules.decoder import Around, Mix
from dspine.targets.model import Target

IDENTITY = Around(attention=lambda normed: (normed, lambda y: y), mlp=lambda normed: (normed, lambda y: y))


def slow_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def slow_rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[0])
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def mixers(layer: int) -> Around:
    """Unlike in every layer and sublayer; mixes the block's slots, and its way out depends on what came in."""

    def mix(scale: float) -> Mix:
        return lambda normed: (scale * normed + normed.flip(-2), lambda y: y.roll(1, -2) - normed.tanh() * y)

    return Around(attention=mix(0.3 + layer), mlp=mix(0.7 - layer))


def slow_states(
    backbone: Backbone, block: Tensor, features: Tensor, around: Callable[[int], Around] = lambda layer: IDENTITY
) -> Tensor:
    """One block [B, d] after the context features [n, taps * d]: queries from the block, keys and values of both."""
    config = backbone.config
    eps, e, groups = config.rms_norm_eps, config.head_dim, config.num_heads // config.num_kv_heads
    context = [slow_norm(backbone.fc.weight @ f, backbone.hidden_norm.weight, eps) for f in features]
    n, x = len(context), list(block)
    for i, layer in enumerate(backbone.draft_layers()):
        attention: Any = layer.self_attn
        mixed, after = around(i).attention(torch.stack([slow_norm(u, layer.input_layernorm.weight, eps) for u in x]))
        normed, attended = list(mixed), []

        def head(projection: Any, norm: Any, vector: Tensor, h: int, position: int | None, e: int = e) -> Tensor:
            y = projection.weight[h * e : (h + 1) * e] @ vector
            if config.qk_norm and norm is not None:
                y = slow_norm(y, norm.weight, eps)
            return y if position is None else slow_rotate(y, position, config.rope_theta)

        for t in range(len(x)):
            last = t if config.attention == "causal" else len(x) - 1
            sources = [*context, *normed[: last + 1]]
            outputs = []
            for h in range(config.num_heads):
                k = h // groups
                query = head(attention.q_proj, attention.q_norm, normed[t], h, n + t)
                scores = torch.stack(
                    [query @ head(attention.k_proj, attention.k_norm, s, k, j) / math.sqrt(e) for j, s in enumerate(sources)]
                )
                weights = torch.exp(scores - scores.max())
                values = torch.stack([head(attention.v_proj, None, s, k, None) for s in sources])
                outputs.append((weights / weights.sum()) @ values)
            attended.append(attention.o_proj.weight @ torch.cat(outputs))
        x = [u + y for u, y in zip(x, after(torch.stack(attended)), strict=True)]
        mixed, after = around(i).mlp(torch.stack([slow_norm(u, layer.post_attention_layernorm.weight, eps) for u in x]))
        passed = []
        for y in mixed:
            gate = layer.mlp.gate_proj.weight @ y
            passed.append(layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ y)))
        x = [u + y for u, y in zip(x, after(torch.stack(passed)), strict=True)]
    return torch.stack(x)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_states_of_packed_blocks(
    tiny_target: Target, make_drafter: Any, make_situation: Any, attention: str, qk_norm: bool
) -> None:
    drafter = make_drafter(tiny_target, "dflash", attention=attention, qk_norm=qk_norm, num_layers=2)
    situation = make_situation(tiny_target, (4, 6), block_size=3)
    block = torch.randn(2, 3, tiny_target.hidden_size, generator=torch.Generator().manual_seed(1))
    got = drafter.backbone(block, situation.packed())
    for row in range(2):
        expected = slow_states(drafter.backbone, block[row], situation.features[row])
        torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_what_stands_around_the_sublayers(tiny_target: Target, make_drafter: Any, make_situation: Any, attention: str) -> None:
    """It sees the block, each block alone, and not the context: the slow version never hands it any."""
    backbone = make_drafter(tiny_target, "dflash", attention=attention, num_layers=2).backbone
    situation = make_situation(tiny_target, (4, 6), block_size=3)
    block = torch.randn(2, 3, tiny_target.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = backbone(block, situation.packed())
    assert torch.equal(backbone(block, situation.packed(), around=[IDENTITY] * 2), plain)
    got = backbone(block, situation.packed(), around=[mixers(0), mixers(1)])
    for row in range(2):
        expected = slow_states(backbone, block[row], situation.features[row], mixers)
        torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-4)
    assert (got - plain).abs().max() > 0.1


def test_many_anchors_of_one_sequence(tiny_target: Target, make_drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do not see each other, whether or not they share an attention call."""
    backbone = make_drafter(tiny_target, "dflash").backbone
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 2 * tiny_target.hidden_size, generator=generator)
    anchors = torch.tensor([1, 2, 7, 7, 19])
    block = torch.randn(5, 4, tiny_target.hidden_size, generator=generator)

    def context(chosen: Tensor) -> ContextBatch:
        zeros = torch.zeros(20).long()
        return ContextBatch(features=features, positions=torch.arange(20), sequences=zeros, next_tokens=zeros, anchors=chosen)

    together = backbone(block, context(anchors))
    alone = torch.cat([backbone(block[i : i + 1], context(anchors[i : i + 1])) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(backbone_module, "_ANCHORS_PER_PART", 2)
    torch.testing.assert_close(backbone(block, context(anchors)), alone, rtol=1e-4, atol=1e-5)


def test_attention_parts_hold_one_sequence_each() -> None:
    context = ContextBatch(
        features=torch.zeros(7, 1),
        positions=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        sequences=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        next_tokens=torch.zeros(7).long(),
        anchors=torch.tensor([3, 4, 6]),
    )
    first, second = context.parts(2, causal=True, dtype=torch.float32)
    assert (first.blocks, first.context) == (slice(0, 1), slice(0, 3))
    assert (second.blocks, second.context) == (slice(1, 3), slice(4, 6))
    assert first.mask.exp().int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert second.mask.exp().int().tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_products_and_the_fused_kernel_attend_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 8, generator=generator, requires_grad=True) for n in (6, 9, 9)]
    mask = torch.zeros(6, 9).masked_fill_(torch.rand(6, 9, generator=generator) < 0.3, float("-inf"))
    out = backbone_module.attend(inputs[0], inputs[1], inputs[2], mask)
    q, k, v = (x[None] for x in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])[0]
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=generator)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, weights), torch.autograd.grad(expected, inputs, weights))


def test_features_at_and_after_the_anchor_are_not_used(tiny_target: Target, make_drafter: Any, make_situation: Any) -> None:
    backbone = make_drafter(tiny_target, "dflash").backbone
    context = make_situation(tiny_target).packed()
    block = torch.randn(3, 8, tiny_target.hidden_size)
    before = backbone(block, context)
    for anchor in context.anchors:
        context.features[anchor : anchor + 3] = 1e4
    assert torch.equal(backbone(block, context), before)
    context.features[context.anchors - 1] += 1
    assert not torch.allclose(backbone(block, context), before)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_whether_a_slot_depends_on_later_ones(
    tiny_target: Target, make_drafter: Any, make_situation: Any, attention: str
) -> None:
    backbone = make_drafter(tiny_target, "dflash", attention=attention).backbone
    context = make_situation(tiny_target).packed()
    block = torch.randn(3, 8, tiny_target.hidden_size)
    before = backbone(block, context)
    changed = block.clone()
    changed[:, 5:] += 1
    after = backbone(changed, context)
    same = torch.isclose(after, before, rtol=1e-5, atol=1e-6).all(-1).all(0).tolist()
    assert same == [attention == "causal"] * 5 + [False] * 3


def test_after_layer_replaces_each_layers_output(tiny_target: Target, make_drafter: Any, make_situation: Any) -> None:
    backbone = make_drafter(tiny_target, "dflash").backbone
    context, seen = make_situation(tiny_target).packed(), []

    def after(layer: int, x: Tensor) -> Tensor:
        seen.append(layer)
        return x * 0 if layer == 2 else x

    assert backbone(torch.randn(3, 8, tiny_target.hidden_size), context, after).abs().max() == 0
    assert seen == [0, 1, 2]


def test_every_parameter_learns(tiny_target: Target, make_drafter: Any, make_situation: Any) -> None:
    backbone = make_drafter(tiny_target, "dflash").backbone
    backbone.norm(backbone(torch.randn(3, 8, tiny_target.hidden_size), make_situation(tiny_target).packed())).pow(
        3
    ).sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_initialise_is_small_and_normal(tiny_target: Target, make_drafter: Any) -> None:
    backbone = make_drafter(tiny_target, "dflash", noise=0.0).backbone
    assert float(backbone.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert (backbone.norm.weight == 1).all()


def test_rope_frequencies(tiny_target: Target, make_config: Any) -> None:
    config = make_config(tiny_target, head_dim=6, rope_theta=1000.0)
    torch.testing.assert_close(rope_frequencies(config, "cpu"), torch.tensor([1.0, 0.1, 0.01]))
