"""What another engine is told about a drafter, and a drafter about the engine's target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspine.drafters.config import DrafterConfig


@dataclass(kw_only=True)
class EngineTarget:
    """An engine's target as `DrafterConfig.check` and the transfer space see it (drafters.config.DescribedTarget)."""

    name: str
    config: Any  # the text model's transformers config
    tokenizer: Any
    hidden_size: int
    num_layers: int
    vocab_size: int
    head_weight: Tensor  # [v, d], without the engine's padding rows


def qwen3_fields(config: DrafterConfig, max_length: int) -> dict[str, Any]:
    """A drafter's backbone in the fields of a transformers config that engines' DFlash models read: those of a Qwen3 model of
    `max_length` positions, whose layers a block drafter's are."""
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": max_length,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": config.target.vocab_size,
        "block_size": config.block_size,
    }
