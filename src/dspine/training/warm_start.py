"""Where a drafter starts: at random, at its target's own last layers (for small budgets), or at an earlier checkpoint.

A drafter layer has a decoder layer's shape, so the target's last layers are a working start: context features come in
where those layers' inputs came in (`fc` begins as the deepest tap), and the final norm is the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import load_drafter
from dspine.drafters.config import DrafterConfig, TargetFacts, default_layer_ids
from dspine.drafters.registry import drafter_class
from dspine.errors import UserError
from dspine.targets.model import Target
from dspine.training.recipe import Recipe

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # their layers are a drafter layer (less the biases of Qwen2)


def new_drafter(recipe: Recipe, target: Target, draft_ids: Tensor | None) -> BlockDrafter:
    """A drafter of the recipe's shape for `target`, initialised; reproducible under the recipe's seed.

    Raises UserError where the recipe's shape does not fit the target.
    """
    torch.manual_seed(recipe.seed)
    try:
        config = drafter_config(recipe, target, 0 if draft_ids is None else draft_ids.shape[0])
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"the recipe's drafter is impossible for {target.name}: {first['msg']}") from error
    config.check(target)
    drafter = drafter_class(recipe.drafter)(config, draft_ids)
    drafter.initialise(target)
    if recipe.model.start == "target_layers":
        copy_target_layers(drafter, target)
    elif recipe.model.start == "checkpoint":
        copy_checkpoint(drafter, Path(recipe.model.checkpoint), target)
    return drafter


_MAY_DIFFER = {"target", "draft_vocab_size", "expected_acceptance", "thinking"}


def copy_checkpoint(drafter: BlockDrafter, folder: Path, target: Target) -> None:
    """Copy an earlier checkpoint's weights. The vocabulary to propose from stays `drafter`'s own, since its corpus chose it.

    Raises UserError naming both values where the shapes or conventions differ.
    """
    start = load_drafter(folder, target)
    theirs, ours = start.config.model_dump(exclude=_MAY_DIFFER), drafter.config.model_dump(exclude=_MAY_DIFFER)
    for field, value in ours.items():
        if theirs[field] != value:
            raise UserError(
                f"{folder} has {field} = {theirs[field]}, the recipe {value}; start from a checkpoint of the same shape"
            )
    if drafter.has_token_weights and not torch.equal(start.draft_ids, drafter.draft_ids):
        raise UserError(
            f"{folder} has weights for {start.config.vocabulary} tokens to draft, the recipe's corpus chooses "
            f"{drafter.config.vocabulary}, not all the same; start from a checkpoint of this corpus, or with draft_vocab_size: 0"
        )
    state = {name: tensor for name, tensor in start.state_dict().items() if name != "draft_ids"}
    drafter.load_state_dict(state, strict=False)


def drafter_config(recipe: Recipe, target: Target, draft_vocab_size: int) -> DrafterConfig:
    """The recipe's choices and the target's own shape; what its family does not state is as in a Llama of its size."""
    model, facts, config = recipe.model, TargetFacts.of(target), target.config
    cls = drafter_class(recipe.drafter)
    heads: int = config.num_attention_heads
    return DrafterConfig(
        drafter=recipe.drafter,
        target=facts,
        target_layer_ids=default_layer_ids(target.num_layers, model.taps),
        block_size=model.block_size,
        mask_token_id=model.mask_token_id,
        attention=model.attention,
        alignment=cls.alignments[0],
        num_layers=model.num_layers,
        hidden_size=target.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        rms_norm_eps=facts.rms_norm_eps or 1e-6,
        rope_theta=facts.rope_theta or 10_000.0,
        qk_norm=model.qk_norm,
        options=cls.Options.read(recipe.drafter, model.options).model_dump(),
        draft_vocab_size=draft_vocab_size,
    )


@torch.no_grad()
def copy_target_layers(drafter: BlockDrafter, target: Target) -> None:
    """Copy the target's last layers, final norm and deepest tap into the backbone (target loaded with keep_model)."""
    assert target.model is not None, "load the target with keep_model=True"
    family = target.config.model_type
    if family not in PLAIN_FAMILIES:  # other norms, activations or biases: the copied weights would mean something else
        raise UserError(
            f"start: target_layers fits {', '.join(PLAIN_FAMILIES)} models, {target.name} is a {family}; use start: random"
        )
    decoder: Any = target.model.get_decoder()
    backbone = drafter.backbone
    sources = list(decoder.layers)[-len(backbone.layers) :]
    if len(sources) < len(backbone.layers):
        raise UserError(f"start: target_layers cannot fill {len(backbone.layers)} layers from {target.name}'s {len(sources)}")
    if drafter.config.qk_norm != hasattr(sources[0].self_attn, "q_norm"):
        raise UserError(f"start: target_layers needs qk_norm: {not drafter.config.qk_norm}, as {target.name} has it")
    for source, layer in zip(sources, backbone.layers, strict=True):
        own = layer.state_dict()
        state = {name: _widened(tensor.float(), own[name]) for name, tensor in source.state_dict().items() if name in own}
        missing = layer.load_state_dict(state, strict=False).missing_keys
        if missing:
            raise UserError(
                f"start: target_layers does not fit {target.name}: its layers have no {missing[0]}; use start: random"
            )
    backbone.norm.weight.copy_(decoder.norm.weight)
    backbone.hidden_norm.weight.copy_(torch.stack([source.input_layernorm.weight for source in sources]).mean(0))
    d = drafter.config.hidden_size
    backbone.fc.weight.zero_()
    backbone.fc.weight[:, -d:].copy_(torch.eye(d))


def _widened(weight: Tensor, like: Tensor) -> Tensor:
    """`weight`, blind to what stands before the hidden state where `like` reads more (EAGLE-3: the token's embedding)."""
    return F.pad(weight, (like.shape[-1] - weight.shape[-1], 0))
