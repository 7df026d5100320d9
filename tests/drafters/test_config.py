"""A checkpoint's config: what it refuses, alone and beside a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspine.drafters.config import DrafterConfig, TargetFacts, default_layer_ids
from dspine.errors import UserError
from dspine.targets.model import Target


def test_default_layer_ids() -> None:
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)  # Qwen3-8B
    assert default_layer_ids(30) == (1, 8, 14, 20, 27)
    assert default_layer_ids(28, 3) == (1, 13, 25)
    assert default_layer_ids(28, 1) == (25,)


def test_facts_of_a_target(tiny_target: Target) -> None:
    facts = TargetFacts.of(tiny_target)
    assert (facts.name, facts.model_type, facts.hidden_size) == ("tiny-llama", "llama", 32)
    assert (facts.num_layers, facts.vocab_size) == (3, tiny_target.vocab_size)
    assert len(facts.chat_template_sha256) == 16
    assert facts.head_norms[0] == pytest.approx(float(tiny_target.head_weight[0].norm()), abs=1e-5)
    assert facts.head_norms[-1] == pytest.approx(float(tiny_target.head_weight[-1].norm()), abs=1e-5)
    facts.check(tiny_target)


OTHER_FACTS = [
    ("model_type", "qwen3"),
    ("hidden_size", 64),
    ("num_layers", 36),
    ("vocab_size", 151936),
    ("rope_theta", 1e6),
    ("rms_norm_eps", 1e-5),
    ("chat_template_sha256", "0123456789abcdef"),
    ("head_norms", [1.0] * 8),
]


@pytest.mark.parametrize(("field", "value"), OTHER_FACTS)
def test_each_fact_is_checked(tiny_target: Target, field: str, value: Any) -> None:
    facts = TargetFacts.of(tiny_target)
    actual = getattr(facts, field)
    with pytest.raises(UserError) as error:
        facts.model_copy(update={field: value, "name": "other"}).check(tiny_target)
    message = str(error.value)
    assert f"trained for other with {field} = {value}" in message
    assert f"tiny-llama has {field} = {actual}" in message
    assert "\n" not in message


def test_every_fact_but_the_name_is_covered_above() -> None:
    assert {field for field, _ in OTHER_FACTS} == set(TargetFacts.model_fields) - {"name"}


def test_another_name_or_dtype_of_the_same_target_fits(tiny_target: Target) -> None:
    facts = TargetFacts.of(tiny_target)
    facts.model_copy(update={"name": "a local copy"}).check(tiny_target)
    rounded = [float(torch.tensor(n, dtype=torch.bfloat16)) for n in facts.head_norms]
    assert rounded != facts.head_norms
    facts.model_copy(update={"head_norms": rounded, "rms_norm_eps": facts.rms_norm_eps * (1 + 1e-8)}).check(tiny_target)


def test_round_trip(tiny_target: Target, make_config: Any, tmp_path: Path) -> None:
    config = make_config(tiny_target, expected_acceptance=(0.5, 0.25), draft_vocab_size=9)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert DrafterConfig.read(tmp_path) == config
    assert config.num_draft_tokens == 7


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no draft checkpoint: it has no config\.json"):
        DrafterConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"surprise": 1}, "surprise"),
        ({"block_size": 1}, "block_size"),
        ({"attention": "sideways"}, "attention"),
        ({"alignment": "previous"}, "alignment"),
        ({"format_version": 2}, "format_version"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 3}, "num_heads = 4 is no multiple of num_kv_heads = 3"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"target": {"name": "x"}}, "target.model_type"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_config_names_the_field(
    tiny_target: Target, make_config: Any, tmp_path: Path, change: dict[str, Any], where: str
) -> None:
    data = {**make_config(tiny_target).model_dump(mode="json"), **change}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as error:
        DrafterConfig.read(tmp_path)
    assert "is no draft checkpoint config" in str(error.value)
    assert where in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}"], ids=["empty", "torn", "list", "not-utf8"])
def test_no_config_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config.json is no draft checkpoint config"):
        DrafterConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": (0, 3)}, "target_layer_ids = 3, but tiny-llama's last layer is 2"),
        ({"mask_token_id": 260}, "mask_token_id = 260, but tiny-llama's last token id is 259"),
        ({"draft_vocab_size": 261}, "draft_vocab_size = 261, but tiny-llama's vocabulary size is 260"),
        ({"hidden_size": 48}, "hidden_size = 48, but tiny-llama has 32"),
        ({"target_layer_ids": (-1, 2)}, "indices from 0"),
        ({"target_layer_ids": ()}, "indices from 0"),
        ({"mask_token_id": -1}, "indices from 0"),
    ],
)
def test_what_cannot_run_beside_the_target(tiny_target: Target, make_config: Any, change: dict[str, Any], message: str) -> None:
    make_config(tiny_target).check(tiny_target)
    with pytest.raises(UserError) as error:
        make_config(tiny_target, **change).check(tiny_target)
    assert message in str(error.value)


def test_the_targets_own_facts_are_checked_too(tiny_target: Target, make_target: Any, make_config: Any) -> None:
    with pytest.raises(UserError, match="model_type = llama, but tiny-mistral has model_type = mistral"):
        make_config(tiny_target).check(make_target("mistral"))
