from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from dspine.targets.families import build_lean_stack
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[[str], Target]

TOKENS = torch.arange(4, 24)[None]


def test_the_known_families_take_the_lean_decoder(lean_family: str, make_target: MakeTarget) -> None:
    assert make_target(lean_family).is_lean


def test_other_families_take_their_own_forward(generic_family: str, make_target: MakeTarget) -> None:
    assert not make_target(generic_family).is_lean


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}, "max_position_embeddings": 16},
        ),
    ],
)
def test_a_setting_that_is_not_covered_takes_the_models_own_forward(
    family: str, settings: dict[str, object], make_model: MakeModel
) -> None:
    model = make_model(family, **{"sliding_window": None, "layer_types": None, **settings})
    assert build_lean_stack(model, model.config, release=False) is None


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_models_own_forward_serves_a_llama_with_another_activation(activation: str, make_model: MakeModel) -> None:
    model = make_model("llama", hidden_act=activation)
    target = Target.wrap(model, None)
    assert not target.is_lean
    with torch.inference_mode():
        expected = model(TOKENS).logits
    found = target.logits(target.forward(TOKENS, target.new_cache(1, 32)).hidden)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_release_frees_the_layers_and_keeps_what_is_shared(make_model: MakeModel) -> None:
    model = make_model("qwen2")
    built = build_lean_stack(model, model.config, release=True)
    assert built is not None
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert not model.get_input_embeddings().weight.is_meta
    stack, final_norm = built
    x = model.get_input_embeddings()(TOKENS).detach()
    with torch.inference_mode():
        hidden = final_norm(stack.run(x, stack.new_cache(1, 32)))
        expected = make_model("qwen2")(TOKENS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def test_only_sliding_layers_get_a_window(make_model: MakeModel) -> None:
    model = make_model("gemma2")
    built = build_lean_stack(model, model.config, release=False)
    assert built is not None
    assert built[0].spec.sliding_windows == (6, None, 6, None)
