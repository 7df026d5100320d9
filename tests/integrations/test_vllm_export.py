"""Exports for vLLM: the layout, told from vLLM's documents and source, without vLLM itself (integrations/vllm tests it there)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspine.drafters.checkpoint import save_drafter
from dspine.errors import UserError
from dspine.integrations.vllm_export import architecture_of, export_checkpoint, exported_shapes


@pytest.fixture
def exported(make_target: Any, make_drafter: Any, tmp_path: Path) -> Any:
    """Exports a drafter of a tiny target; returns the export, the drafter, its config.json and its tensors."""

    def export(name: str, family: str = "llama", **overrides: Any) -> Any:
        target = make_target(family)
        drafter = make_drafter(target, name, **overrides)
        save_drafter(drafter, tmp_path / "checkpoint")
        written = export_checkpoint(tmp_path / "checkpoint", target, tmp_path / "draft")
        config = json.loads((written.folder / "config.json").read_text(encoding="utf-8"))
        return written, drafter, config, load_file(written.folder / "model.safetensors")

    return export


def test_a_dflash_with_qk_norm_needs_vllm_alone(exported: Any) -> None:
    written, drafter, config, tensors = exported("dflash", qk_norm=True)
    assert not written.needs_plugin
    assert config["architectures"] == ["DFlashDraftModel"]
    assert "dspine" not in config
    assert config["dflash_config"] == {
        "mask_token_id": 0,
        "target_layer_ids": [0, 1],
        "causal": False,
        "use_aux_hidden_state": True,
    }
    assert config["n_predict"] == written.num_speculative_tokens == drafter.config.block_size - 1
    assert "draft_vocab_size" not in config
    assert torch.equal(tensors["layers.1.self_attn.q_norm.weight"], drafter.backbone.layers[1].self_attn.q_norm.weight)
    assert not any(name.startswith(("backbone", "lm_head", "embed")) for name in tensors)


def test_a_draft_vocabulary_becomes_offsets_and_head_rows(exported: Any, make_target: Any) -> None:
    ids = torch.arange(5, 105, 2)
    _, _, config, tensors = exported("dflash", draft_ids=ids)
    assert config["architectures"] == ["DFlashWithoutQKNormDraftModel"]
    assert config["draft_vocab_size"] == len(ids)
    assert torch.equal(tensors["d2t"] + torch.arange(len(ids)), ids)
    assert torch.equal(tensors["lm_head.weight"], make_target("llama").head_weight[ids])


def test_a_dspine_carries_its_config_and_its_injection(exported: Any) -> None:
    ids = torch.arange(5, 105, 2)
    written, drafter, config, tensors = exported("dspine", draft_ids=ids)
    assert written.needs_plugin
    assert config["architectures"] == ["DFlashDSpineDraftModel"]
    assert config["dflash_config"]["causal"] is True
    assert config["dspine"] == drafter.config.model_dump(mode="json")
    assert torch.equal(tensors["draft_ids"], ids)
    assert torch.equal(tensors["injection.message.weight"], drafter.injection.message.weight)
    assert "lm_head.weight" not in tensors
    assert written.speculative_config == {"method": "dflash", "model": str(written.folder), "num_speculative_tokens": 5}


@pytest.mark.parametrize("name", ["dflash", "dspine"])
@pytest.mark.parametrize("ids", [None, torch.arange(5, 105, 2)])
def test_the_expected_shapes_are_the_written_ones(exported: Any, name: str, ids: torch.Tensor | None) -> None:
    _, drafter, _, tensors = exported(name, draft_ids=ids)
    assert exported_shapes(drafter.config) == {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["dflash2", "domino", "dspark", "eagle3"])
def test_other_drafters_are_refused(make_target: Any, make_drafter: Any, name: str) -> None:
    with pytest.raises(UserError, match=f"a {name} drafter cannot be exported for vLLM"):
        architecture_of(make_drafter(make_target("llama"), name).config)


def test_scaled_embeddings_are_refused(exported: Any) -> None:
    with pytest.raises(UserError, match="neither scales a drafter's embeddings nor caps"):
        exported("dspine", family="gemma2")


def test_another_target_is_refused(exported: Any, make_target: Any, tmp_path: Path) -> None:
    written, *_ = exported("dspine")
    with pytest.raises(UserError, match="was trained for tiny-llama with model_type = llama"):
        export_checkpoint(tmp_path / "checkpoint", make_target("qwen3"), written.folder)


def test_an_export_is_replaced_and_nothing_else_is(exported: Any, make_target: Any, tmp_path: Path) -> None:
    written, *_ = exported("dspine")
    export_checkpoint(tmp_path / "checkpoint", make_target("llama"), written.folder)
    with pytest.raises(UserError, match="is no export of a drafter"):
        export_checkpoint(tmp_path / "checkpoint", make_target("llama"), tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "draft"]
