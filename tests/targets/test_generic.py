from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspine.errors import UserError
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[[str], Target]

TOKENS = torch.arange(4, 24)[None]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def small_model(model_type: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **{**SMALL, **settings})).eval()


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("phi3", {"sliding_window": 8}, "sliding-window or linear attention"),
        ("gemma3_text", {"head_dim": 8}, "sliding-window or linear attention"),
        ("mamba", {}, "sliding-window or linear attention|not supported"),
        ("granite", {"logits_scaling": 4.0}, "their logits differ here by"),
        ("cohere", {"logit_scale": 0.5}, "their logits differ here by"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "models of type bloom are not supported"),
        (
            "deepseek_v3",
            {
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "first_k_dense_replace": 1,
            },
            "compressed key/value caches|not supported",
        ),
    ],
)
def test_a_family_that_would_come_out_wrong_is_refused_in_one_sentence(
    model_type: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        Target.wrap(small_model(model_type, **settings), None, "odd one")
    assert "\n" not in str(caught.value)


def test_key_value_heads_are_read_off_the_attention_itself(make_target: MakeTarget) -> None:
    assert make_target("falcon").new_cache(1, 8).kv_heads == 1
    assert make_target("gpt_neox").new_cache(1, 8).kv_heads == 4  # its config knows no such number


def test_a_model_in_training_mode_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(UserError, match=r"call model\.eval\(\)"):
        Target.wrap(make_model("phi").train(), None)


def test_after_layer_may_replace_a_layers_output(generic_family: str, make_target: MakeTarget) -> None:
    stack = make_target(generic_family).stack
    tokens_embedded = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(3))

    def silence(layer: int, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if layer == 2 else x

    with torch.inference_mode():
        plain = stack.run(tokens_embedded, stack.new_cache(1, 8))
        silenced = stack.run(tokens_embedded, stack.new_cache(1, 8), silence)
    assert plain.std(1).min() > 0
    torch.testing.assert_close(silenced, silenced[:, :1].expand_as(silenced))


@torch.inference_mode()
def test_hooks_are_gone_even_after_an_error(make_model: MakeModel) -> None:
    model = make_model("phi")
    target = Target.wrap(model, None)

    def fail(layer: int, x: Tensor) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        target.stack.run(torch.zeros(1, 2, 32), target.new_cache(1, 8), fail)
    assert not any(module._forward_hooks for module in model.modules())
