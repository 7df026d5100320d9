"""A checkpoint is either loaded whole or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dspine_sglang.loading import check_loaded, check_tensors, poison
from safetensors.torch import load_file
from torch import Tensor, nn

from dspine.drafters.config import DrafterConfig
from dspine.errors import UserError


@pytest.fixture(scope="module")
def tensors(dspine_checkpoint: Path) -> dict[str, Tensor]:
    return load_file(dspine_checkpoint / "model.safetensors")


@pytest.fixture
def config(dspine_checkpoint: Path) -> DrafterConfig:
    return DrafterConfig.read(dspine_checkpoint)


def test_the_shipped_checkpoint_is_whole(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    check_tensors(config, tensors)


@pytest.mark.parametrize("name", ["backbone.fc.weight", "injection.writes.2.weight", "draft_ids"])
def test_a_missing_tensor(name: str, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=f"lacks {name}"):
        check_tensors(config, {key: tensor for key, tensor in tensors.items() if key != name})


def test_an_unknown_tensor(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match="unknown tensor markov_head"):
        check_tensors(config, {**tensors, "markov_head.weight": torch.zeros(1)})


def test_a_tensor_of_another_shape(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=r"another shape of backbone\.fc\.weight"):
        check_tensors(config, {**tensors, "backbone.fc.weight": tensors["backbone.fc.weight"][:, 1:]})


def test_a_parameter_that_was_passed_over() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    poison(module)
    module["a"].load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(UserError, match=r"did not take b\.weight"):
        check_loaded(module)
    module["b"].load_state_dict(nn.Linear(2, 2).state_dict())
    check_loaded(module)
