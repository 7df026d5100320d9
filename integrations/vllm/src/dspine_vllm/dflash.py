"""vLLM's DFlash model for dspine's checkpoints: queries and keys without a norm where the checkpoint has none, and a loader that
accounts for every tensor.

The context's keys and values, the block's attention and the taps are vLLM's own code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3DecoderLayer, DFlashQwen3ForCausalLM, DFlashQwen3Model

from dspine_vllm.checks import Launch, check_launch, check_tensors, read_config
from dspine_vllm.target import VllmTarget


class NoNorm(nn.Module):
    """In the place of a norm on queries or keys: changes nothing. vLLM reads the other two attributes when it fuses the layers'
    key norms (which `DFlashModel` leaves out) and takes the context norm's epsilon from here."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.variance_epsilon = like.variance_epsilon
        self.register_buffer("weight", torch.ones_like(like.get_parameter("weight")), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class DFlashLayer(DFlashQwen3DecoderLayer):
    """vLLM's layer, with norms on queries and keys only where `config.dspine` says so."""

    def __init__(self, vllm_config: VllmConfig, *, config: Any, **options: Any) -> None:
        super().__init__(vllm_config, config=config, **options)
        if not config.dspine["qk_norm"]:
            attention = self.self_attn
            attention.q_norm, attention.k_norm = NoNorm(attention.q_norm), NoNorm(attention.k_norm)


class DFlashModel(DFlashQwen3Model):
    decoder_layer_cls = DFlashLayer

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        return super()._normalize_context_k(all_k) if self.config.dspine["qk_norm"] else all_k


class CheckedDFlash(DFlashQwen3ForCausalLM):
    """A drafter of dspine that refuses a wrong start, a wrong target and a wrong set of tensors."""

    model_cls = DFlashModel
    drafter: str

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        launch = Launch.of(vllm_config)
        config = read_config(vllm_config.speculative_config.draft_model_config.hf_config, self.drafter)
        check_launch(config, launch)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter_config = config
        self.num_draft_tokens = launch.num_speculative_tokens

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = dict(weights)
        check_tensors(self.drafter_config, tensors)
        super().load_weights(self.take_own_tensors(tensors).items())

    def take_own_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Load what vLLM's DFlash model does not know; returns the rest."""
        return tensors

    def bind(self, target: VllmTarget) -> None:
        """Hold the drafter against the loaded target. Raises UserError where it was trained for another."""
        target.check(self.drafter_config)


class DFlashWithoutQKNorm(CheckedDFlash):
    drafter = "dflash"
