"""New drafters for every kind of target, and the start from the target's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dspine.drafters.backbone import ContextBatch
from dspine.drafters.checkpoint import save_drafter
from dspine.drafters.config import default_layer_ids
from dspine.drafters.registry import DRAFTERS
from dspine.errors import UserError
from dspine.targets.model import Target
from dspine.training.recipe import Recipe
from dspine.training.warm_start import new_drafter

from .toy import tiny_options


def recipe(drafter: str = "dspine", **model: Any) -> Recipe:
    shape: dict[str, Any] = {
        "mask_token_id": 2,
        "num_layers": 1 if drafter == "eagle3" else 2,
        "block_size": 4,
        "taps": 2,
        "options": tiny_options(drafter),
    }
    return Recipe.model_validate(
        {"target": "tiny", "drafter": drafter, "model": {**shape, **model}, "data": {"answers": ["x"]}, "seed": 3}
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_for_every_family(make_target: Any, family: str, drafter: str) -> None:
    target = make_target(family)
    made = new_drafter(recipe(drafter), target, None)
    config = made.config
    config.check(target)
    assert config.hidden_size == target.hidden_size
    assert config.target_layer_ids == default_layer_ids(target.num_layers, 2)
    assert config.rope_theta > 0
    with torch.inference_mode():
        runner = made.runner(target)
        cache = runner.new_cache(1, 16)
        features = target.forward(torch.tensor([[5, 6, 7]]), target.new_cache(1, 3), config.target_layer_ids).features
        assert features is not None
        runner.extend(features, torch.tensor([[6, 7, 8]]), cache)
        cache.lengths += 3
        tokens = runner.propose(torch.tensor([8]), cache, 3, torch.zeros(1), None).tokens
    assert tokens.shape == (1, 3)


def test_shape_is_the_targets(make_target: Any) -> None:
    config = new_drafter(recipe(num_layers=1, attention="causal"), make_target("qwen3"), torch.arange(50)).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 16, 48)
    assert (config.num_layers, config.block_size, config.draft_vocab_size) == (1, 4, 50)
    assert config.target.model_type == "qwen3"


def test_same_seed_same_drafter(tiny_target: Target) -> None:
    first, second = (new_drafter(recipe(), tiny_target, None).state_dict() for _ in range(2))
    other = new_drafter(recipe().model_copy(update={"seed": 4}), tiny_target, None).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["backbone.fc.weight"], other["backbone.fc.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"transfer_rank": 33}}, "transfer_rank = 33 exceeds hidden_size = 32"),
        ({"mask_token_id": 260}, "mask_token_id = 260, but tiny-llama's last token id is 259"),
        ({"options": {"transfer_rank": 8, "num_candidates": 300}}, "num_candidates = 300"),
        ({"options": {"rank": 3}}, "option rank: Extra inputs are not permitted (its options: transfer_rank, "),
        ({"options": {"transfer_rank": 8, "inject_from": 9}}, "inject_from = 9, but the drafter has only "),
        ({"start": "target_layers"}, "start: target_layers needs qk_norm: False, as tiny-llama has it"),
        ({"start": "target_layers", "qk_norm": False, "num_layers": 4}, "cannot fill 4 layers from tiny-llama's 3"),
    ],
)
def test_recipe_that_does_not_fit_the_target(tiny_target: Target, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        new_drafter(recipe(**change), tiny_target, None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_layers_of_another_kind_are_not_copied(make_target: Any, family: str) -> None:
    with pytest.raises(
        UserError, match=f"start: target_layers fits .*qwen3 models, tiny-{family} is a {family}; use start: random"
    ):
        new_drafter(recipe(start="target_layers", qk_norm=False), make_target(family), None)


@pytest.mark.parametrize(("family", "qk_norm"), [("llama", False), ("mistral", False), ("qwen3", True)])
def test_copied_layers_are_the_targets(make_target: Any, family: str, qk_norm: bool) -> None:
    """With all layers copied, a causal block without context is the target itself on the block's tokens."""
    target = make_target(family)
    backbone = new_drafter(recipe(start="target_layers", qk_norm=qk_norm, num_layers=3), target, None).backbone
    tokens = torch.tensor([[9, 40, 7, 123, 55, 8]])
    context = ContextBatch(
        features=torch.randn(2, 2 * target.hidden_size),
        positions=torch.arange(2),
        sequences=torch.zeros(2).long(),
        next_tokens=torch.zeros(2).long(),
        anchors=torch.tensor([0]),
    )
    with torch.inference_mode():
        expected = target.forward(tokens, target.new_cache(1, 6)).hidden
        got = backbone.norm(backbone(target.embed(tokens), context))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_copied_last_layers_and_the_deepest_tap(tiny_target: Target, make_model: Any) -> None:
    backbone = new_drafter(recipe(start="target_layers", qk_norm=False), tiny_target, None).backbone
    state = make_model("llama").state_dict()
    for mine, theirs in ((0, 1), (1, 2)):  # two of three layers: the last two
        for name, parameter in backbone.layers[mine].named_parameters():
            assert torch.equal(parameter, state[f"model.layers.{theirs}.{name}"]), name
    assert torch.equal(backbone.norm.weight, state["model.norm.weight"])
    norms = [state[f"model.layers.{i}.input_layernorm.weight"] for i in (1, 2)]
    torch.testing.assert_close(backbone.hidden_norm.weight.detach(), (norms[0] + norms[1]) / 2)
    taps: Tensor = torch.randn(5, 64)
    torch.testing.assert_close(backbone.fc(taps), taps[:, 32:])


def test_copies_are_not_shared(tiny_target: Target) -> None:
    model = tiny_target.model
    before = model.state_dict()["model.layers.2.mlp.up_proj.weight"].clone()
    drafter = new_drafter(recipe(start="target_layers", qk_norm=False), tiny_target, None)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    assert torch.equal(model.state_dict()["model.layers.2.mlp.up_proj.weight"], before)


def test_going_on_from_a_checkpoint(tiny_target: Target, tmp_path: Path) -> None:
    first = new_drafter(recipe(draft_vocab_size=8), tiny_target, torch.arange(8))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.normal_()
    save_drafter(first, tmp_path / "first")
    start = {"start": "checkpoint", "checkpoint": str(tmp_path / "first")}
    second = new_drafter(recipe(**start), tiny_target, torch.arange(20, 50))
    for (name, ours), theirs in zip(second.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.requires_grad
    assert second.draft_ids.tolist() == list(range(20, 50))


def test_token_weights_fit_one_vocabulary(tiny_target: Target, tmp_path: Path) -> None:
    shape = {"options": {"selector_rank": 4, "num_candidates": 3, "conv_groups_of": 4}}
    save_drafter(new_drafter(recipe("dflash2", **shape), tiny_target, torch.arange(8)), tmp_path / "first")
    again = recipe("dflash2", start="checkpoint", checkpoint=str(tmp_path / "first"), **shape)
    new_drafter(again, tiny_target, torch.arange(8))
    with pytest.raises(UserError, match="has weights for 8 tokens to draft, the recipe's corpus chooses 8, not all the same"):
        new_drafter(again, tiny_target, torch.arange(1, 9))


def test_a_checkpoint_of_another_shape_is_no_start(tiny_target: Target, tmp_path: Path) -> None:
    save_drafter(new_drafter(recipe(), tiny_target, None), tmp_path / "first")
    changed = recipe(start="checkpoint", checkpoint=str(tmp_path / "first"), num_layers=3)
    with pytest.raises(UserError, match=r"num_layers = 2, the recipe 3"):
        new_drafter(changed, tiny_target, None)


@pytest.mark.parametrize("model", [{"start": "checkpoint"}, {"checkpoint": "x"}])
def test_start_and_checkpoint_belong_together(model: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="belong together"):
        recipe(**model)
