"""Draft checkpoints: a folder with config.json (shape and conventions) and model.safetensors (weights, draft vocabulary)."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dspine.drafters.base import BlockDrafter
from dspine.drafters.config import DrafterConfig
from dspine.drafters.registry import DRAFTERS, drafter_class
from dspine.errors import UserError
from dspine.targets.model import Target

WEIGHTS = "model.safetensors"


def save_drafter(drafter: BlockDrafter, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the checkpoint folder by one rename; an existing one is replaced only once the new one is complete.

    Raises UserError when it cannot be written (no space, no permission); nothing half-written stays.
    """
    state = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else torch.int32).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise UserError(f"cannot write the checkpoint {folder} ({error})") from error
    try:
        save_file(state, work / WEIGHTS, {"format": "pt"})
        (work / WEIGHTS).chmod(0o644)  # safetensors creates it for the owner alone
        (work / "config.json").write_text(drafter.config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        replace_folder(work, folder)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(f"cannot write the checkpoint {folder} ({error}); free some disk space and save again") from error
        raise


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`. A kill between the two renames leaves the old one whole, as .NAME-old-PID."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}-old-{os.getpid()}")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    else:
        new.rename(folder)
    folder.chmod(0o755)


def load_drafter(folder: Path, target: Target, *, options: Mapping[str, int | float | bool | str] | None = None) -> BlockDrafter:
    """Load a checkpoint for `target`. Raises UserError for a damaged one and for one that does not fit.

    `options` change the drafter's own where they only matter in decoding (the number of candidates, say).
    """
    config = DrafterConfig.read(folder)
    if options:
        config = config.model_copy(update={"options": {**config.options, **options}})
    cls = drafter_class(config.drafter)
    config.check(target)
    file = folder / WEIGHTS
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is missing or damaged ({str(error).partition(chr(10))[0]}); copy the checkpoint again"
        ) from error
    ids = state.get("draft_ids", torch.zeros(0))
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise UserError(
            f"{file} drafts token ids {int(ids.min())} to {int(ids.max())}, but {target.name} has 0 to {target.vocab_size - 1}"
        )
    try:
        drafter = cls(config, ids if ids.numel() else None)
        drafter.load_state_dict({k: v.long() if k == "draft_ids" else v.float() for k, v in state.items()})
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:
        detail = str(error).splitlines()
        raise UserError(f"{file} does not match its config.json ({detail[min(1, len(detail) - 1)].strip()})") from error
    drafter.bind(target)
    drafter.folder = folder
    return drafter.eval().requires_grad_(False)


def drafter_sha256(drafter: BlockDrafter) -> str:
    """First 16 hex digits over its config (options as loaded) and its weights, wherever these come from."""
    digest = hashlib.sha256(drafter.config.model_dump_json().encode())
    for name, parameter in sorted(drafter.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def parameters_by_part(folder: Path) -> tuple[dict[str, int], str]:
    """Parameters by part and their type, from the header of the weights: no tensor is read."""
    parts: dict[str, int] = {}
    dtypes: set[str] = set()
    try:
        with safe_open(folder / WEIGHTS, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                entry = weights.get_slice(name)
                if name == "draft_ids":
                    continue
                part = _part(name)
                parts[part] = parts.get(part, 0) + math.prod(entry.get_shape())
                dtypes.add(str(entry.get_dtype()))
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder / WEIGHTS} is missing or damaged ({reason}); copy the checkpoint again") from error
    return parts, ", ".join(sorted(dtypes))


def _part(name: str) -> str:
    """backbone.layers.3.mlp.up_proj.weight -> backbone layers; injection.readouts.0.weight -> injection readouts."""
    first, _, rest = name.partition(".")
    return f"{first} {rest.split('.')[0]}" if rest else first


def shipped_folder() -> Path:
    """Where the shipped checkpoints are: beside the package when installed, in the repository in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "checkpoints"
    return inside if inside.is_dir() else package.parents[1] / "checkpoints"


def shipped_for(target: Target, drafter: str) -> Path | None:
    """The shipped checkpoint of a drafter that fits `target`, whatever name it was loaded by; None where there is none."""
    for folder in sorted(shipped_folder().glob(f"*-{drafter}")):
        if not (folder / "config.json").is_file():
            continue
        config = DrafterConfig.read(folder)
        if config.drafter == drafter and config.target.mismatch(target) is None:
            return folder
    return None


def resolve(name: str, target: Target) -> Path:
    """A checkpoint folder by path, or by a drafter's name ("dspine") among those shipped for `target`."""
    path = Path(name)
    if path.is_dir():
        return path
    shipped = shipped_for(target, name) if name in DRAFTERS else None
    if shipped is not None:
        return shipped
    have = sorted(p.name for p in shipped_folder().glob("*") if (p / "config.json").is_file())
    raise UserError(
        f"no draft checkpoint {name!r} for {target.name}; give a checkpoint folder, or a drafter shipped here: "
        f"{', '.join(have) or 'none'}"
    )
