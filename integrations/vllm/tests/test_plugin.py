"""What the plugin changes in vLLM, and that it changes nothing under a release that it was not made for."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
import vllm
from vllm import ModelRegistry
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker import gpu_model_runner

import dspine_vllm
from dspine.integrations.vllm_export import DFLASH_ARCHITECTURE, DSPINE_ARCHITECTURE
from dspine_vllm.dspine import DSpineForCausalLM
from dspine_vllm.proposer import DSpineProposer


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model_runner, "DFlashProposer", DFlashProposer)


def test_vllm_finds_the_plugin() -> None:
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "dspine"]
    assert found.load() is dspine_vllm.register


def test_registering_twice_is_registering_once() -> None:
    for _ in range(2):
        dspine_vllm.register()
        assert gpu_model_runner.DFlashProposer is DSpineProposer
    assert {DFLASH_ARCHITECTURE, DSPINE_ARCHITECTURE} <= set(ModelRegistry.get_supported_archs())


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    dspine_vllm.register()
    assert gpu_model_runner.DFlashProposer is DFlashProposer
    assert DSPINE_ARCHITECTURE in ModelRegistry.get_supported_archs()  # its own check then says what is wrong


def test_a_dspine_cannot_be_drafted_with_by_anything_else() -> None:
    with pytest.raises(RuntimeError, match="no logits of their own"):
        DSpineForCausalLM.compute_logits(object.__new__(DSpineForCausalLM), torch.zeros(1, 4))
