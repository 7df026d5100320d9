"""What SGLang finds after loading its plugins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from dspine_sglang.draft_config import ARCHITECTURE, drafter_kind
from dspine_sglang.plugin import HOOKED, check_hooks
from dspine_sglang.request_checks import request_refusal
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_config

from dspine.errors import UserError

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


def test_the_algorithm_is_registered() -> None:
    algorithm = SpeculativeAlgorithm.from_string("dspine")
    assert algorithm.name == "DSPINE"
    assert algorithm.supports_overlap


def test_it_answers_as_dflash_does() -> None:
    """Every question that the scheduler may put to a built-in algorithm, and none is left to CustomSpecAlgo's "no"."""
    ours, dflash = SpeculativeAlgorithm.from_string("DSPINE"), SpeculativeAlgorithm.DFLASH
    questions = [
        name
        for name, member in vars(SpeculativeAlgorithm).items()
        if name.startswith(("is_", "supports_", "has_", "need_", "carries_")) and callable(member)
    ]
    assert {"need_topk", "carries_draft_hidden_states", "is_dflash", "has_draft_kv"} <= set(questions)
    assert {name: getattr(ours, name)() for name in questions} == {name: getattr(dflash, name)() for name in questions}


def test_all_hooks_are_applied() -> None:
    check_hooks()


def test_a_hook_that_sglang_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {HOOKED[0]})
    with pytest.raises(UserError, match=f"did not let the plugin hook {HOOKED[0]}"):
        check_hooks()


def test_sglang_reads_a_dspine_checkpoint(dspine_checkpoint: Path) -> None:
    config = get_config(str(dspine_checkpoint), trust_remote_code=False)
    assert config.architectures == [ARCHITECTURE]
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (576, 3, 3)
    assert config.is_causal
    assert config.dflash_config["target_layer_ids"] == [1, 8, 14, 20, 27]


def test_and_other_models_as_before(target_folder: Path) -> None:
    assert get_config(str(target_folder), trust_remote_code=False).model_type == "llama"
    assert drafter_kind(str(target_folder)) is None
    assert drafter_kind("some-hub/name") is None


@pytest.mark.parametrize(("name", "value"), [("frequency_penalty", 0.5), ("repetition_penalty", 1.2), ("min_new_tokens", 4)])
def test_requests_that_would_not_be_exact_are_refused(name: str, value: float) -> None:
    def request(**params: float) -> SimpleNamespace:
        return SimpleNamespace(sampling_params=SimpleNamespace(**{**NEUTRAL, **params}), return_sampling_mask=False)

    assert request_refusal(request()) is None
    assert f"{name}={value}" in str(request_refusal(request(**{name: value})))
