from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspine.kernels.linear import GatedLinear, PackedLinear
from dspine.modules.decoder import Around, DecoderSpec, DecoderStack, LayerWeights, Mix, head_norms, pack_qkv
from dspine.modules.kv_cache import KVCache
from dspine.modules.rope import Rope

D, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 16, 4, 2, 6, 20, 2
INV_FREQ = 1.0 / 50.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
SPEC = DecoderSpec(hidden_size=D, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, norm_eps=1e-5)

Weights = list[dict[str, Tensor]]


def random_weights(seed: int = 0) -> Weights:
    """Plain weights of every layer, every optional part included."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (HEADS * HEAD_DIM, D),
        "k": (KV_HEADS * HEAD_DIM, D),
        "v": (KV_HEADS * HEAD_DIM, D),
        "o": (D, HEADS * HEAD_DIM),
        "gate": (INNER, D),
        "up": (INNER, D),
        "down": (D, INNER),
        "input_norm": (D,),
        "mlp_norm": (D,),
        "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
        "post_attention_norm": (D,),
        "post_mlp_norm": (D,),
    }
    return [{name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()} for _ in range(LAYERS)]


def build(
    spec: DecoderSpec, weights: Weights, *, qk_norm: bool = False, post_norms: bool = False, activation: str = "silu"
) -> DecoderStack:
    rope = Rope(INV_FREQ, 1.0, torch.float32)
    layers = [
        LayerWeights(
            input_norm=w["input_norm"],
            qkv=pack_qkv(w["q"], w["k"], w["v"], spec, rope),
            output=PackedLinear(w["o"]),
            mlp_norm=w["mlp_norm"],
            gate_up=GatedLinear(w["gate"], w["up"], activation),
            down=PackedLinear(w["down"]),
            head_norms=head_norms(w["q_norm"], w["k_norm"], spec, rope) if qk_norm else None,
            post_attention_norm=w["post_attention_norm"] if post_norms else None,
            post_mlp_norm=w["post_mlp_norm"] if post_norms else None,
        )
        for w in weights
    ]
    return DecoderStack(spec, rope, layers)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions.float()[:, None] * torch.cat((INV_FREQ, INV_FREQ))
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def mixers(layer: int) -> Around:
    """Unlike in every layer and sublayer; mixes the new tokens, and its way out depends on what came in."""

    def mix(scale: float) -> Mix:
        return lambda normed: (scale * normed + normed.flip(-2), lambda y: y.roll(1, -2) - normed.tanh() * y)

    return Around(attention=mix(0.3 + layer), mlp=mix(0.7 - layer))


IDENTITY = Around(attention=lambda normed: (normed, lambda y: y), mlp=lambda normed: (normed, lambda y: y))


def reference(
    x: Tensor,
    spec: DecoderSpec,
    weights: Weights,
    seen: Tensor,
    *,
    activation: str = "silu",
    qk_norm: bool = False,
    post_norms: bool = False,
    around: Callable[[int], Around] = lambda layer: IDENTITY,
) -> Tensor:
    """One row x [n, d] through the textbook decoder; `seen` [n, n] says which position may look where."""
    n = x.shape[0]

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(y, (y.shape[-1],), weight, spec.norm_eps)

    for layer, w in enumerate(weights):
        y, after = around(layer).attention(norm(x, w["input_norm"]))
        q, k, v = ((y @ w[name].T).view(n, -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
        if qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q, k = rotate(q, torch.arange(n)), rotate(k, torch.arange(n))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (spec.attention_scale or HEAD_DIM**-0.5)
        if spec.attention_softcap is not None:
            scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        y = after(mixed.transpose(0, 1).reshape(n, -1) @ w["o"].T)
        x = x + (norm(y, w["post_attention_norm"]) if post_norms else y)
        y, after = around(layer).mlp(norm(x, w["mlp_norm"]))
        gate = y @ w["gate"].T
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        y = after((gate * (y @ w["up"].T)) @ w["down"].T)
        x = x + (norm(y, w["post_mlp_norm"]) if post_norms else y)
    return x


def causal(n: int) -> Tensor:
    return torch.ones(n, n).tril().bool()


def inputs(rows: int, n: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, n, D, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("post_norms", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"attention_scale": 0.7}, {"attention_softcap": 1.5}],
    ids=["plain", "scale", "softcap"],
)
@torch.inference_mode()
def test_equals_the_textbook_decoder(settings: dict[str, Any], post_norms: bool, qk_norm: bool) -> None:
    spec, weights, x = dataclasses.replace(SPEC, **settings), random_weights(), inputs(2, 9)
    stack = build(spec, weights, qk_norm=qk_norm, post_norms=post_norms)
    found = stack.run(x, stack.new_cache(2, 16))
    for row in range(2):
        assert_same(found[row], reference(x[row], spec, weights, causal(9), qk_norm=qk_norm, post_norms=post_norms))


@torch.inference_mode()
def test_other_activation() -> None:
    weights, x = random_weights(), inputs(1, 9)
    stack = build(SPEC, weights, activation="gelu_tanh")
    found = stack.run(x, stack.new_cache(1, 16))[0]
    assert_same(found, reference(x[0], SPEC, weights, causal(9), activation="gelu_tanh"))


@pytest.mark.parametrize("softcap", [None, 2.0])
@torch.inference_mode()
def test_windows_may_differ_by_layer(softcap: float | None) -> None:
    spec = dataclasses.replace(SPEC, sliding_windows=(3, None), attention_softcap=softcap)
    weights, x = random_weights(), inputs(1, 9)
    stack = build(spec, weights)
    found = stack.run(x, stack.new_cache(1, 16))[0]
    band = causal(9) & ~causal(9).tril(-3)
    first = reference(x[0], spec, weights[:1], band)
    assert_same(found, reference(first, spec, weights[1:], causal(9)))


@torch.inference_mode()
def test_a_bidirectional_block_sees_its_context_and_all_of_itself() -> None:
    spec = dataclasses.replace(SPEC, bidirectional=True)
    weights, x = random_weights(), inputs(2, 10)
    stack = build(spec, weights)
    cache = stack.new_cache(2, 16)
    causal_stack = build(SPEC, weights)  # the same weights fill the context
    causal_stack.run(x[:, :6], cache)
    cache.lengths += torch.tensor([6, 4])
    for row, start in enumerate((6, 4)):
        block = stack.run(x[:, 6:], cache)[row]
        whole = torch.cat((x[row, :start], x[row, 6:]))
        seen = causal(start + 4)
        seen[start:, start:] = True
        assert_same(block, reference(whole, spec, weights, seen)[start:])


@torch.inference_mode()
def test_a_causal_slot_does_not_see_later_slots() -> None:
    stack, x = build(SPEC, random_weights()), inputs(1, 8)
    changed = x.clone()
    changed[:, 5:] += 1.0
    before, after = (stack.run(y, stack.new_cache(1, 8)) for y in (x, changed))
    assert_same(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 0.1


@torch.inference_mode()
def test_after_layer_sees_every_layer_and_may_replace_its_output() -> None:
    weights, x = random_weights(), inputs(1, 5)
    stack = build(SPEC, weights)
    calls: list[int] = []

    def double(layer: int, y: Tensor) -> Tensor:
        calls.append(layer)
        return 2 * y

    found = stack.run(x, stack.new_cache(1, 8), double)[0]
    first = 2 * reference(x[0], SPEC, weights[:1], causal(5))
    assert_same(found, 2 * reference(first, SPEC, weights[1:], causal(5)))
    assert calls == [0, 1]


@pytest.mark.parametrize("post_norms", [False, True])
@torch.inference_mode()
def test_what_stands_around_the_sublayers(post_norms: bool) -> None:
    weights, x = random_weights(), inputs(2, 6)
    stack = build(SPEC, weights, post_norms=post_norms)
    plain = stack.run(x, stack.new_cache(2, 8))
    for layer in stack.layers:
        layer.around = IDENTITY
    assert_same(stack.run(x, stack.new_cache(2, 8)), plain)
    for i, layer in enumerate(stack.layers):
        layer.around = mixers(i)
    found = stack.run(x, stack.new_cache(2, 8))
    for row in range(2):
        assert_same(found[row], reference(x[row], SPEC, weights, causal(6), post_norms=post_norms, around=mixers))
    assert (found - plain).abs().max() > 0.1


@torch.inference_mode()
def test_garbage_behind_a_rows_length_is_never_seen() -> None:
    stack, x = build(SPEC, random_weights()), inputs(2, 7)

    def run(fill: float) -> Tensor:
        cache: KVCache = stack.new_cache(2, 16)
        stack.run(x[:, :4], cache)
        cache.lengths += torch.tensor([4, 2])
        for data in cache.data:
            data[0, :, 4:], data[1, :, 2:] = fill, fill
        return stack.run(x[:, 4:], cache)

    assert_same(run(0.0), run(1e4))


@torch.inference_mode()
def test_the_input_is_not_written_to() -> None:
    stack, x = build(SPEC, random_weights(), post_norms=False), inputs(1, 3)
    before = x.clone()
    stack.run(x, stack.new_cache(1, 8))
    assert torch.equal(x, before)


def test_biases_follow_their_heads() -> None:
    rope = Rope(INV_FREQ, 1.0, torch.float32)
    w = random_weights()[0]
    biases = (torch.randn(HEADS * HEAD_DIM), torch.randn(KV_HEADS * HEAD_DIM), torch.randn(KV_HEADS * HEAD_DIM))
    x = inputs(1, 3)
    plain, shifted = (pack_qkv(w["q"], w["k"], w["v"], SPEC, rope, b)(x) for b in (None, biases))
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    q, k = (bias.view(-1, HEAD_DIM)[:, order].flatten() for bias in biases[:2])
    assert_same(shifted - plain, torch.cat((q, k, biases[2])).expand(1, 3, -1))
