"""The feature store: what is appended comes back, killed runs leave nothing behind, other targets are refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine.errors import UserError
from dspine.training.features import FeatureStore, most_frequent_tokens, store_bytes

TAPS, WIDTH = 2, 3
FACTS = {"target": {"name": "tiny", "vocab_size": 260}, "layer_ids": [0, 1]}


def open_store(folder: Path) -> FeatureStore:
    return FeatureStore(folder, FACTS, TAPS, WIDTH)


def sequence(number: int) -> tuple[dict[str, object], Tensor, Tensor]:
    """Entry, taps [n, taps * d] and hidden [n, d] of a sequence of its own length."""
    n = 3 + number
    entry = {"ref": ["set", number], "p": 2, "ids": list(range(number, number + n + 1))}
    base = torch.arange(n * TAPS * WIDTH).view(n, -1).float()
    return entry, base + 100 * number, base[:, :WIDTH] - 50 * number


def fill(store: FeatureStore, numbers: range) -> None:
    for number in numbers:
        store.append(*sequence(number))


def assert_holds(store: FeatureStore, numbers: range) -> None:
    assert len(store) == len(numbers)
    for number in numbers:
        entry, taps, hidden = sequence(number)
        answer = store[number]
        assert answer.tokens.tolist() == entry["ids"]
        assert answer.prompt_length == 2
        torch.testing.assert_close(answer.features, taps)  # small whole numbers are exact in float16
        torch.testing.assert_close(answer.teacher, hidden)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_append_and_read_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert len(store) == 0
    fill(store, range(3))
    assert_holds(store, range(3))
    assert_holds(open_store(tmp_path / "store"), range(3))


def test_size_is_known_before_it_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(4))
    written = sum((tmp_path / name).stat().st_size for name in ("taps.f16", "hidden.f16"))
    tokens = sum(sequence(number)[1].shape[0] for number in range(4))
    assert written == store_bytes(tokens, TAPS, WIDTH) == tokens * 3 * 3 * 2


def test_values_are_rounded_to_float16_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    taps, hidden = torch.randn(5, TAPS * WIDTH), torch.randn(5, WIDTH)
    store.append({"ref": ["set", 0], "p": 1, "ids": [1] * 6}, taps, hidden)
    assert torch.equal(store[0].features, taps.half().float())
    assert torch.equal(store[0].teacher, hidden.half().float())
    assert store[0].features.dtype == torch.float32


@pytest.mark.parametrize(
    "torn",
    ["inside taps", "inside hidden", "before index", "inside index", "index without newline"],
)
def test_killed_run_goes_on_to_the_same_store(tmp_path: Path, torn: str) -> None:
    whole = open_store(tmp_path / "whole")
    fill(whole, range(3))
    killed = open_store(tmp_path / "killed")
    fill(killed, range(2))
    entry, taps, hidden = sequence(2)
    taps_bytes, hidden_bytes = taps.half().numpy().tobytes(), hidden.half().numpy().tobytes()
    line = (json.dumps({**entry, "n": taps.shape[0]}) + "\n").encode()
    written = {
        "inside taps": (taps_bytes[:7], b"", b""),
        "inside hidden": (taps_bytes, hidden_bytes[:5], b""),
        "before index": (taps_bytes, hidden_bytes, b""),
        "inside index": (taps_bytes, hidden_bytes, line[:10]),
        "index without newline": (taps_bytes, hidden_bytes, line[:-1]),
    }[torn]
    for name, data in zip(("taps.f16", "hidden.f16", "index.jsonl"), written, strict=True):
        with (tmp_path / "killed" / name).open("ab") as stream:
            stream.write(data)
    resumed = open_store(tmp_path / "killed")
    assert_holds(resumed, range(2))
    fill(resumed, range(2, 3))
    assert_holds(resumed, range(3))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_lost_data_is_reported(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(2))
    file = tmp_path / "hidden.f16"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shorter than its index says; delete"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "facts",
    [{"target": {"name": "other", "vocab_size": 260}, "layer_ids": [0, 1]}, {**FACTS, "layer_ids": [0, 2]}],
)
def test_other_targets_and_taps_are_refused(tmp_path: Path, facts: dict[str, object]) -> None:
    fill(open_store(tmp_path), range(1))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"holds features with (target|layer_ids) = .*, not .*; choose another"):
        FeatureStore(tmp_path, facts, TAPS, WIDTH)
    assert contents(tmp_path) == before
    assert_holds(open_store(tmp_path), range(1))


def test_most_frequent_tokens_counts_responses_only() -> None:
    answers = [([9, 9, 9, 5, 5, 7], 3), ([9, 7, 3], 1)]
    assert most_frequent_tokens(answers, 2).tolist() == [5, 7]
    assert most_frequent_tokens(answers, 1).tolist() == [5]  # equal counts: the lower id
    assert most_frequent_tokens(answers, 100).tolist() == [3, 5, 7]


def test_a_torn_description_is_one_sentence(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(1))
    (tmp_path / "store.json").write_text('{"target": ')
    with pytest.raises(UserError, match="is damaged; delete"):
        open_store(tmp_path)


def test_activations_beyond_float16_are_clamped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    taps, hidden = torch.full((3, store.widths["taps.f16"]), 1e6), torch.full((3, store.widths["hidden.f16"]), -1e6)
    store.append({"ref": ["huge", 0], "p": 1, "ids": [1, 2, 3, 4]}, taps, hidden)
    assert torch.isfinite(store[-1].features).all()
    assert store[-1].features.max() == 65504.0
    assert store[-1].teacher.min() == -65504.0


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    fill(store, range(2))
    before = contents(tmp_path)
    real_open = Path.open

    def full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.name == "hidden.f16" and mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match="free disk space"):
        fill(store, range(2, 3))
    monkeypatch.undo()
    open_store(tmp_path)  # cuts what the failed append left
    assert contents(tmp_path) == before
