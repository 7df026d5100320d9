"""Every refusal, without an engine: each is one sentence with the offending value and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from dspine.drafters.config import DrafterConfig, TargetFacts
from dspine.errors import UserError
from dspine.integrations.vllm_export import DSPINE_ARCHITECTURE, exported_shapes, huggingface_config
from dspine_vllm.checks import Launch, check_launch, check_tensors, read_config, supports
from dspine_vllm.target import VllmTarget

GOOD: dict[str, Any] = {"vllm_version": "0.32.0", "num_speculative_tokens": 5}


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_a_block_causal_drafter_drafts_any_width(make_config: Any, tokens: int) -> None:
    check_launch(make_config("dspine"), Launch(**{**GOOD, "num_speculative_tokens": tokens}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vllm_version": "0.31.2"}, "runs with vLLM 0.32, not 0.31.2"),
        ({"vllm_version": "0.320.0"}, "runs with vLLM 0.32, not 0.320.0"),
        ({"method": "draft_model"}, 'speculative method \'draft_model\'; use {"method": "dflash"}'),
        ({"method": "eagle3"}, "speculative method 'eagle3'"),
        ({"v2_model_runner": True}, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2: dspine's drafters run on one device"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size = 4"),
        ({"varies_num_speculative_tokens": True}, "leave num_speculative_tokens_per_batch_size away"),
        ({"num_speculative_tokens": 6}, "num_speculative_tokens = 6: this drafter drafts 1 to 5 tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens = 0"),
    ],
)
def test_a_wrong_start_is_refused(make_config: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_launch(make_config("dspine"), Launch(**{**GOOD, **changed}))
    assert message in str(refusal.value)


@pytest.mark.parametrize("drafter", ["dflash", "dspine"])
def test_a_bidirectional_drafter_drafts_its_whole_block(make_config: Any, drafter: str) -> None:
    config = make_config(drafter, attention="bidirectional")
    check_launch(config, Launch(**GOOD))
    with pytest.raises(UserError, match="drafts exactly 5 tokens"):
        check_launch(config, Launch(**{**GOOD, "num_speculative_tokens": 4}))


def test_releases_are_told_apart() -> None:
    assert [supports(version) for version in ("0.32.0", "0.32.1+cpu", "0.33.0", "0.3.2", "1.32.0")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_exports_own_config_is_read(make_config: Any) -> None:
    config = make_config("dspine")
    assert read_config(exported(config), "dspine") == config


def test_another_checkpoint_is_refused(make_config: Any) -> None:
    with pytest.raises(UserError, match="was not written by `dspine export --engine vllm`"):
        read_config(Qwen3Config(), "dspine")
    with pytest.raises(UserError, match="an architecture of dflash drafters, but describes a dspine drafter"):
        read_config(exported(make_config("dspine")), "dflash")
    damaged = exported(make_config("dspine"))
    damaged.dspine["format_version"] = 2
    with pytest.raises(UserError, match=r"does not fit this release of dspine \(format_version: "):
        read_config(damaged, "dspine")


@pytest.mark.parametrize("drafter", ["dflash", "dspine"])
@pytest.mark.parametrize("vocabulary", [0, 20])
def test_exactly_the_drafters_tensors_are_taken(make_config: Any, drafter: str, vocabulary: int) -> None:
    config = make_config(drafter, draft_vocab_size=vocabulary)
    tensors = {name: torch.zeros(shape) for name, shape in exported_shapes(config).items()}
    check_tensors(config, tensors)
    for name in tensors:
        with pytest.raises(UserError, match=rf"lacks {name} \(1 tensors missing, 0 unknown\)"):
            check_tensors(config, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(UserError, match=r"holds layers\.9\.extra\.weight, which a"):
        check_tensors(config, {**tensors, "layers.9.extra.weight": torch.zeros(1)})
    with pytest.raises(UserError, match=r"norm.weight has shape \(31,\), not \(32,\)"):
        check_tensors(config, {**tensors, "norm.weight": torch.zeros(31)})


def test_the_running_target_is_held_against_the_drafters(make_config: Any) -> None:
    engine_target(torch.ones(100, 32) / 32**0.5).check(drafter_for_llama(make_config))
    with pytest.raises(UserError, match="was trained for tiny with head_norms"):
        engine_target(torch.ones(100, 32)).check(drafter_for_llama(make_config))


def test_padding_rows_of_the_head_are_cut_off() -> None:
    assert engine_target(torch.ones(128, 32)).head_weight.shape == (100, 32)


@pytest.mark.parametrize("weight", [None, torch.ones(100, 8, dtype=torch.int8)])
def test_a_head_that_cannot_be_read_is_refused(weight: torch.Tensor | None) -> None:
    with pytest.raises(UserError, match="the LM head of tiny is quantised or packed"):
        engine_target(weight)


def exported(config: DrafterConfig) -> Qwen3Config:
    return Qwen3Config(**huggingface_config(config, DSPINE_ARCHITECTURE, 512))


def drafter_for_llama(make_config: Any) -> DrafterConfig:
    facts = make_config().target
    return make_config(target=TargetFacts(**{**facts.model_dump(), "head_norms": [1.0] * 8}))


def engine_target(weight: torch.Tensor | None) -> VllmTarget:
    model, head = nn.Module(), nn.Module()
    head.register_parameter("weight", None if weight is None else nn.Parameter(weight, requires_grad=False))
    model.lm_head = head
    text = LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=3, rms_norm_eps=1e-5, rope_theta=1e4)
    settings = SimpleNamespace(
        model="tiny", hf_text_config=text, skip_tokenizer_init=True, get_vocab_size=lambda: 100, get_hidden_size=lambda: 32,
        get_total_num_hidden_layers=lambda: 3,
    )  # fmt: skip
    return VllmTarget.of(model, settings)
