"""The shipped drafter changed in what a drafter may have, to be loaded by both engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspine.drafters.config import DrafterConfig

Tensors = dict[str, Tensor]


def with_norms_and_whole_vocabulary(config: DrafterConfig, tensors: Tensors) -> dict[str, Any]:
    """Norms of queries and keys, and every token to draft from."""
    for layer, name in itertools.product(range(config.num_layers), ("q_norm", "k_norm")):
        tensors[f"backbone.layers.{layer}.self_attn.{name}.weight"] = torch.linspace(1.0, 2.0, config.head_dim)
    tensors["draft_ids"] = tensors["draft_ids"][:0]
    return {"qk_norm": True, "draft_vocab_size": 0}


def bidirectional(config: DrafterConfig, tensors: Tensors) -> dict[str, Any]:
    return {"attention": "bidirectional"}


def unrefined(config: DrafterConfig, tensors: Tensors) -> dict[str, Any]:
    return {"options": {**config.options, "refine": False, "num_candidates": 4}}


def injected_late(config: DrafterConfig, tensors: Tensors) -> dict[str, Any]:
    """From the second layer on, in a transfer space that is not whitened."""
    for layer in range(1, config.num_layers):
        tensors[f"injection.writes.{layer - 1}.weight"] = tensors[f"injection.writes.{layer}.weight"]
    del tensors[f"injection.writes.{config.num_layers - 1}.weight"]
    return {"options": {**config.options, "inject_from": 2, "whitened": False}}


Change = Callable[[DrafterConfig, Tensors], dict[str, Any]]
CHANGES: tuple[Change, ...] = (with_norms_and_whole_vocabulary, bidirectional, unrefined, injected_late)


def changed_checkpoint(shipped: Path, folder: Path, change: Change) -> Path:
    """`shipped` with `change` made to it, written to `folder`."""
    tensors = load_file(shipped / "model.safetensors")
    config = DrafterConfig.read(shipped)
    updated = config.model_copy(update=change(config, tensors))
    (folder / "config.json").write_text(updated.model_dump_json(), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
