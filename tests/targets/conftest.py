"""A tiny Llama as a GGUF file, written from a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., PreTrainedModel]
WriteGguf = Callable[..., Path]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's Llama stores the two rotary halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, quantised: bool = False) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(tokenizer.get_vocab(), key=lambda token: int(tokenizer.get_vocab()[token]))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_scores([0.0] * len(tokens))  # no merges: an empty list cannot be written
    writer.add_bos_token_id(1)  # older readers insist on one
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(str(tokenizer.chat_template))
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = _interleaved(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = _interleaved(weight, config.num_key_value_heads)
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf(tiny_tokenizer: PreTrainedTokenizerFast) -> WriteGguf:
    """`write_gguf(model, path, quantised=False)` writes a Llama with the tiny tokenizer."""

    def write(model: PreTrainedModel, path: Path, quantised: bool = False) -> Path:
        return _write_gguf(model, tiny_tokenizer, path, quantised)

    return write
