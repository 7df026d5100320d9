"""The engine's target as the drafter sees it, and targets that a drafter cannot run beside. No engine: its objects by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspine_sglang.worker import SGLangTarget
from torch import Tensor, nn
from transformers import LlamaConfig

from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError

VOCABULARY, HIDDEN, PADDING = 100, 32, 28


def rows(weight: Tensor | None) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", None if weight is None else nn.Parameter(weight, requires_grad=False))
    return module


def dense() -> Tensor:
    return torch.arange(float((VOCABULARY + PADDING) * HIDDEN)).view(-1, HIDDEN)


def worker(head: Tensor | None, embedding: Tensor | None, model_type: str = "llama") -> Any:
    """A TpModelWorker's attributes that `SGLangTarget.of` reads."""
    text = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=3)
    text.model_type = model_type
    settings = SimpleNamespace(hf_text_config=text, model_path="models/tiny", vocab_size=VOCABULARY, hidden_size=HIDDEN)
    model = SimpleNamespace(lm_head=rows(head), get_input_embeddings=lambda: rows(embedding))
    return SimpleNamespace(model_runner=SimpleNamespace(model_config=settings, model=model), tokenizer=None)


def test_padding_rows_are_cut_off() -> None:
    target = SGLangTarget.of(worker(dense(), dense() + 1))
    assert (target.name, target.hidden_size, target.num_layers, target.vocab_size) == ("tiny", HIDDEN, 3, VOCABULARY)
    assert torch.equal(target.head_weight, dense()[:VOCABULARY])
    assert torch.equal(target.embedding, dense()[:VOCABULARY] + 1)


@pytest.mark.parametrize("weight", [None, torch.ones(VOCABULARY, HIDDEN, dtype=torch.int8)])
@pytest.mark.parametrize("what", ["LM head", "embedding"])
def test_quantised_rows_are_refused(what: str, weight: Tensor | None) -> None:
    head, embedding = (weight, dense()) if what == "LM head" else (dense(), weight)
    with pytest.raises(UserError, match=f"tiny: its {what} is quantized, but DSPINE reads single rows of it"):
        SGLangTarget.of(worker(head, embedding))


def test_gemma_is_refused() -> None:
    with pytest.raises(UserError, match="tiny: Gemma scales its embeddings"):
        SGLangTarget.of(worker(dense(), dense(), model_type="gemma2"))


def test_another_target_is_refused(dspine_checkpoint: Path) -> None:
    with pytest.raises(UserError, match="tiny"):
        DrafterConfig.read(dspine_checkpoint).check(SGLangTarget.of(worker(dense(), dense())))
