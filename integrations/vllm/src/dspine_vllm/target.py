"""The engine's target as dspine's checks and its transfer space see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError
from dspine.integrations.engine_model import EngineTarget


@dataclass(kw_only=True)
class VllmTarget(EngineTarget):
    """vLLM's target; `tokenizer` is None where vLLM has none."""

    @classmethod
    def of(cls, model: nn.Module, model_config: ModelConfig) -> VllmTarget:
        """Describe a loaded target. Raises UserError where its LM head cannot be read."""
        vocab_size = model_config.get_vocab_size()
        head: Any = model.get_submodule("lm_head")
        weight = dict(head.named_parameters()).get("weight")
        if weight is None or not weight.is_floating_point() or weight.shape[0] < vocab_size:
            raise UserError(
                f"the LM head of {model_config.model} is quantised or packed, and a drafter of dspine reads it; "
                "use a target whose head is kept in 16 or 32 bits"
            )
        return cls(
            name=model_config.model,
            config=model_config.hf_text_config,
            tokenizer=None if model_config.skip_tokenizer_init else cached_tokenizer_from_config(model_config),
            hidden_size=model_config.get_hidden_size(),
            num_layers=model_config.get_total_num_hidden_layers(),
            vocab_size=vocab_size,
            head_weight=weight.detach()[:vocab_size],
        )

    def check(self, config: DrafterConfig) -> None:
        """Raise UserError where a drafter was trained for another target. Without a tokenizer its template is not compared."""
        if self.tokenizer is None:
            facts = config.target.model_copy(update={"chat_template_sha256": ""})
            config = config.model_copy(update={"target": facts})
        config.check(self)
