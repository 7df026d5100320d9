"""Turn a loaded transformers model of a known family into the lean decoder; say so when it is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dspine.kernels.linear import GatedLinear, PackedLinear
from dspine.modules.decoder import DecoderSpec, DecoderStack, LayerWeights, fold_norm, head_norms, pack_qkv
from dspine.modules.norm import rms_norm
from dspine.modules.rope import Rope

LEAN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def build_lean_stack(model: nn.Module, config: Any, release: bool) -> tuple[DecoderStack, Callable[[Tensor], Tensor]] | None:
    """The lean decoder and final norm of `model`, or None when its family or a setting is not covered.

    `release` frees each layer's original weights as soon as they are packed (only for a model nobody else holds).
    """
    activation = _activation(config) if config.model_type in LEAN_FAMILIES else None
    if activation is None:
        return None
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    rotary = decoder.rotary_emb
    if getattr(rotary, "rope_type", "default") not in _STATIC_ROPE:
        return None
    gemma = config.model_type.startswith("gemma")
    offset = 1.0 if gemma else 0.0
    first = decoder.layers[0].self_attn
    dtype = first.q_proj.weight.dtype
    spec = DecoderSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        norm_eps=config.rms_norm_eps,
        attention_scale=float(first.scaling),
        attention_softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        sliding_windows=_sliding_windows(config),
    )
    rope = Rope(rotary.inv_freq, float(rotary.attention_scaling), dtype)
    if 2 * rope.inv_freq.shape[0] != spec.head_dim:  # partial rotary
        return None
    layers = []
    for block in decoder.layers:
        layers.append(_pack_layer(block, spec, rope, offset, post_norms=config.model_type == "gemma2", activation=activation))
        if release:
            block.to("meta")
    final_weight = _norm_weight(decoder.norm, offset)

    def final_norm(x: Tensor) -> Tensor:
        return rms_norm(x, final_weight, spec.norm_eps)

    return DecoderStack(spec, rope, layers), final_norm


def _pack_layer(block: Any, spec: DecoderSpec, rope: Rope, offset: float, post_norms: bool, activation: str) -> LayerWeights:
    attention, mlp = block.self_attn, block.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    biases = None if q.bias is None else (q.bias.detach(), k.bias.detach(), v.bias.detach())
    gate, up = mlp.gate_proj, mlp.up_proj
    mlp_norm = block.pre_feedforward_layernorm if post_norms else block.post_attention_layernorm
    input_norm, (wq, wk, wv) = fold_norm(_norm_weight(block.input_layernorm, offset), q.weight, k.weight, v.weight)
    mlp_norm, (gate_weight, up_weight) = fold_norm(_norm_weight(mlp_norm, offset), gate.weight, up.weight)
    return LayerWeights(
        input_norm=input_norm,
        qkv=pack_qkv(wq, wk, wv, spec, rope, biases),
        output=PackedLinear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=mlp_norm,
        gate_up=GatedLinear(gate_weight, up_weight, activation, None if gate.bias is None else (gate.bias, up.bias)),
        down=PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias),
        head_norms=head_norms(_norm_weight(attention.q_norm, 0.0), _norm_weight(attention.k_norm, 0.0), spec, rope)
        if hasattr(attention, "q_norm")
        else None,
        post_attention_norm=_norm_weight(block.post_attention_layernorm, offset) if post_norms else None,
        post_mlp_norm=_norm_weight(block.post_feedforward_layernorm, offset) if post_norms else None,
    )


def _norm_weight(norm: Any, offset: float) -> Tensor:
    return norm.weight.detach() + offset if offset else norm.weight.detach().clone()


def _activation(config: Any) -> str | None:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    # Gemma 1 checkpoints say "gelu" and mean the tanh form.
    return "gelu_tanh" if config.model_type == "gemma" and name == "gelu" else _ACTIVATIONS.get(name)


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
