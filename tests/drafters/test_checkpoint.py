"""Draft checkpoints: a round trip, and one sentence for everything that can be wrong with one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine.drafters import checkpoint
from dspine.drafters.checkpoint import load_drafter, resolve, save_drafter, shipped_for
from dspine.errors import UserError
from dspine.targets.model import Target

KINDS = pytest.mark.parametrize("kind", ["dspine", "dflash"])


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def saved(tiny_target: Target, make_drafter: Any, tmp_path: Path) -> Path:
    save_drafter(make_drafter(tiny_target, "dspine"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def one_sentence(folder: Path, target: Target) -> str:
    with pytest.raises(UserError) as error:
        load_drafter(folder, target)
    assert "\n" not in str(error.value)
    return str(error.value)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("restricted", [False, True])
def test_round_trip(
    tiny_target: Target,
    make_drafter: Any,
    make_situation: Any,
    fill_cache: Any,
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    restricted: bool,
) -> None:
    ids = torch.arange(3, 250, 2) if restricted else None
    drafter = make_drafter(tiny_target, kind, draft_ids=ids, qk_norm=restricted)
    folder = tmp_path / "deep" / "checkpoint"
    save_drafter(drafter, folder, dtype)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]
    loaded = load_drafter(folder, tiny_target)
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, tensor in drafter.state_dict().items():
        expected = tensor if not tensor.is_floating_point() else tensor.to(dtype).float()
        assert torch.equal(loaded.state_dict()[name], expected), name
    with torch.inference_mode():
        situation, drafts = make_situation(tiny_target), []
        for d in (loaded, load_drafter(folder, tiny_target)):
            runner = d.runner(tiny_target)
            drafts.append(runner.propose(situation.tokens[:, 0], fill_cache(runner, situation), 7, torch.zeros(3), None).tokens)
    assert torch.equal(*drafts)


def test_neither_head_nor_codes_are_stored(tiny_target: Target, saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    assert not any(tiny_target.vocab_size in tensor.shape for tensor in state.values())


def test_saving_replaces_the_old_one(tiny_target: Target, make_drafter: Any, saved: Path) -> None:
    other = make_drafter(tiny_target, "dspine", seed=5)
    save_drafter(other, saved)
    assert torch.equal(load_drafter(saved, tiny_target).backbone.fc.weight, other.backbone.fc.weight)
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_folder_is_readable_by_others(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o755


def test_another_target(make_target: Any, saved: Path) -> None:
    message = one_sentence(saved, make_target("qwen3"))
    assert "tiny-llama with model_type = llama, but tiny-qwen3 has model_type = qwen3" in message


def test_same_family_other_weights(saved: Path, make_model: Any, tiny_tokenizer: Any) -> None:
    other = Target.wrap(make_model("llama", seed=1), tiny_tokenizer, "other-llama")
    assert "head_norms" in one_sentence(saved, other)


def test_another_chat_template(saved: Path, make_model: Any) -> None:
    class Untemplated:
        chat_template = None
        eos_token_id = 1

    plain = Target.wrap(make_model("llama"), Untemplated(), "plain")
    assert "chat_template_sha256" in one_sentence(saved, plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alignment": "next"}, "alignment = next is not a dspine drafter's, which has alignment = same"),
        (
            {"drafter": "eagle3", "num_layers": 1, "alignment": "next", "attention": "bidirectional", "options": {}},
            "attention = bidirectional is not a eagle3 drafter's, which has attention = causal",
        ),
        ({"block_size": 1}, "block_size: Input should be greater than or equal to 2"),
        ({"mask_token_id": 999}, "mask_token_id = 999, but tiny-llama's last token id is 259"),
        ({"target_layer_ids": [0, 7]}, "target_layer_ids = 7, but tiny-llama's last layer is 2"),
        ({"drafter": "medusa"}, "unknown drafter 'medusa'; choose one of: "),
        ({"num_layers": 4}, 'Missing key(s) in state_dict: "backbone.layers.3'),
        ({"qk_norm": False}, 'Unexpected key(s) in state_dict: "backbone.layers.0.self_attn.q_norm.weight"'),
        ({"intermediate_size": 48}, "size mismatch for backbone.layers.0.mlp.gate_proj.weight"),
        ({"options": {"transfer_rank": 11, "message_width": 7}}, "size mismatch for injection.readouts.0.weight"),
        ({"options": {"transfer_rank": 33}}, "transfer_rank = 33 exceeds hidden_size = 32"),
        ({"options": {"num_candidates": 0}}, "dspine drafter, option num_candidates: Input should be greater"),
        (
            {"options": {"transfer_rank": 12, "num_candidates": 261}},
            "num_candidates = 261, but there are only 260 tokens to draft from",
        ),
        (
            {"options": {"gru_width": 3}},
            "option gru_width: Extra inputs are not permitted (its options: transfer_rank, message_width",
        ),
        ({"draft_vocab_size": 20}, "0 draft token ids for a draft_vocab_size of 20"),
        ({"drafter": "dflash"}, "Unexpected key(s) in state_dict"),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_config_that_does_not_fit(tiny_target: Target, saved: Path, change: dict[str, Any], message: str) -> None:
    rewrite(saved, **change)
    assert message in one_sentence(saved, tiny_target)


def test_missing_parts(tiny_target: Target, saved: Path, tmp_path: Path) -> None:
    assert "has no config.json" in one_sentence(tmp_path / "nowhere", tiny_target)
    (saved / "model.safetensors").unlink()
    assert "model.safetensors is missing or damaged" in one_sentence(saved, tiny_target)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_weights(tiny_target: Target, saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is missing or damaged" in one_sentence(saved, tiny_target)


def test_draft_ids_outside_the_vocabulary(tiny_target: Target, make_drafter: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_drafter(make_drafter(tiny_target, "dflash", draft_ids=torch.tensor([3, 4, 5, 6, 7])), folder)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "draft_ids": torch.tensor([3, 4, 5, 6, 260], dtype=torch.int32)}, folder / "model.safetensors")
    assert "drafts token ids 3 to 260, but tiny-llama has 0 to 259" in one_sentence(folder, tiny_target)


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """A limit on the size of files stands for the full disk: writing fails in the middle."""
    old_handler, (soft, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)


@pytest.mark.parametrize("room", [0, 20_000])
def test_full_disk_leaves_nothing_half_written(tiny_target: Target, make_drafter: Any, saved: Path, room: int) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    assert len(before["model.safetensors"]) > room
    with files_of_at_most(room), pytest.raises(UserError) as error:
        save_drafter(make_drafter(tiny_target, "dspine", seed=7), saved)
    assert str(error.value).startswith(f"cannot write the checkpoint {saved} (")
    assert "\n" not in str(error.value)
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_interrupted_save_leaves_the_old_one(
    tiny_target: Target, make_drafter: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = (saved / "model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "replace_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(make_drafter(tiny_target, "dspine", seed=9), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_unwritable_place(tiny_target: Target, make_drafter: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save_drafter(make_drafter(tiny_target, "dflash"), tmp_path / "file" / "checkpoint")


def test_resolve(tiny_target: Target, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(saved), tiny_target) == saved
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(checkpoint, "shipped_folder", lambda: shipped)
    assert shipped_for(tiny_target, "dspine") is None
    with pytest.raises(UserError, match=r"no draft checkpoint 'dspine' for tiny-llama; .*shipped here: none"):
        resolve("dspine", tiny_target)
    shipped.mkdir()
    os.rename(saved, shipped / "tiny-llama-dspine")  # noqa: PTH104
    assert resolve("dspine", tiny_target) == shipped / "tiny-llama-dspine" == shipped_for(tiny_target, "dspine")
    with pytest.raises(UserError, match=r"no draft checkpoint 'dflash' .*shipped here: tiny-llama-dspine"):
        resolve("dflash", tiny_target)
