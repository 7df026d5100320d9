"""A draft checkpoint's tensors against what its config says they are: SGLang's loaders pass over what they do not know."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dspine.drafters.config import DrafterConfig
from dspine.drafters.dspine import DSpine
from dspine.errors import UserError


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError where a tensor is missing, unknown or of another shape."""
    ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DSpine(config, ids).state_dict().items()}
    if not config.draft_vocab_size:
        del expected["draft_ids"]  # empty, and older checkpoints leave it away
    misshapen = {name for name in expected.keys() & tensors.keys() if tensors[name].shape != expected[name]}
    for problem, names in (
        ("lacks", expected.keys() - tensors.keys()),
        ("has an unknown tensor", tensors.keys() - expected.keys() - {"draft_ids"}),
        ("has another shape of", misshapen),
    ):
        if names:
            raise UserError(f"the draft checkpoint {problem} {min(names)}; copy it again")


def poison(module: nn.Module) -> None:
    """Fill every parameter with NaN, to see afterwards which ones were loaded."""
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))


def check_loaded(module: nn.Module) -> None:
    """Raise UserError where a parameter still is what `poison` left."""
    for name, parameter in module.named_parameters():
        if bool(parameter.isnan().any()):
            raise UserError(f"SGLang's DFlash layers did not take {name} from the draft checkpoint, or it is NaN there")
