"""A draft checkpoint in the layout that vLLM's `dflash` method loads.

    export = export_checkpoint(Path("checkpoints/smollm2-135m-dspine"), Target.load("smollm2-135m"), Path("draft"))
    export.speculative_config  # {"method": "dflash", "model": "draft", "num_speculative_tokens": 7}

vLLM's `DFlashDraftModel` has a norm on queries and keys in every layer and no injection. A DFlash drafter with that norm needs
nothing but vLLM; the others name an architecture of the plugin `dspine-vllm` and carry their own config under "dspine".

What vLLM's layout says otherwise: the backbone's parameters have no prefix; the tapped layers' ids mean the same (vLLM adds the 1
itself); the draft vocabulary is `d2t` [v'], each token's id minus its row, beside the head's own rows [v', d].
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspine.drafters.checkpoint import WEIGHTS, load_drafter, replace_folder
from dspine.drafters.config import DrafterConfig
from dspine.drafters.registry import drafter_class
from dspine.errors import UserError
from dspine.integrations.engine_model import qwen3_fields
from dspine.targets.model import Target

# vLLM prepends "DFlash" to a draft architecture's name where it does not begin so.
VLLM_ARCHITECTURE = "DFlashDraftModel"
DFLASH_ARCHITECTURE = "DFlashWithoutQKNormDraftModel"
DSPINE_ARCHITECTURE = "DFlashDSpineDraftModel"
SECTION = "dspine"  # of the exported config.json: the checkpoint's own config
_BACKBONE = "backbone."


@dataclass(frozen=True)
class VllmExport:
    """An exported checkpoint and how to start vLLM with it."""

    folder: Path
    architecture: str
    num_speculative_tokens: int

    @property
    def needs_plugin(self) -> bool:
        return self.architecture != VLLM_ARCHITECTURE

    @property
    def speculative_config(self) -> dict[str, str | int]:
        """The value of vLLM's --speculative-config."""
        return {"method": "dflash", "model": str(self.folder), "num_speculative_tokens": self.num_speculative_tokens}


def architecture_of(config: DrafterConfig) -> str:
    """The architecture that runs a drafter in vLLM. Raises UserError, in one sentence, for what none can express."""
    if config.drafter not in ("dflash", "dspine"):
        raise UserError(f"a {config.drafter} drafter cannot be exported for vLLM: only dflash and dspine can")
    if config.target.model_type.startswith("gemma"):
        raise UserError(
            f"vLLM's dflash method neither scales a drafter's embeddings nor caps its logits as {config.target.model_type} does; "
            "run this drafter with dspine serve"
        )
    if config.drafter == "dspine":
        return DSPINE_ARCHITECTURE
    return VLLM_ARCHITECTURE if config.qk_norm else DFLASH_ARCHITECTURE


def export_checkpoint(checkpoint: Path, target: Target, folder: Path) -> VllmExport:
    """Write `checkpoint`, a drafter for `target`, to `folder` by one rename; an existing export there is replaced.

    Raises UserError for a drafter that does not fit its target, or that vLLM cannot express, and for a `folder` that is something
    else.
    """
    config = DrafterConfig.read(checkpoint)
    architecture = architecture_of(config)
    load_drafter(checkpoint, target)  # refuses a damaged one, and one for another target
    if folder.exists() and not _is_export(folder):
        raise UserError(f"{folder} exists and is no export of a drafter; choose another folder")
    tensors = exported_tensors(config, load_file(checkpoint / WEIGHTS), target.head_weight)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error})") from error
    try:
        save_file(tensors, work / WEIGHTS, {"format": "pt"})
        (work / WEIGHTS).chmod(0o644)
        text = json.dumps(huggingface_config(config, architecture, target.max_length), indent=2)
        (work / "config.json").write_text(text + "\n", encoding="utf-8")
        replace_folder(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return VllmExport(folder, architecture, config.num_draft_tokens)


def huggingface_config(config: DrafterConfig, architecture: str, max_length: int) -> dict[str, Any]:
    """config.json of an export: the Qwen3 fields and the `dflash_config` that vLLM's DFlash model reads."""
    exported: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        **qwen3_fields(config, max_length),
        "n_predict": config.num_draft_tokens,  # vLLM's num_speculative_tokens, where none is given
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "causal": config.attention == "causal",
            "use_aux_hidden_state": True,
        },
    }
    if config.drafter == "dflash" and config.draft_vocab_size:
        exported["draft_vocab_size"] = config.draft_vocab_size
    if architecture != VLLM_ARCHITECTURE:
        exported[SECTION] = config.model_dump(mode="json")
    return exported


def exported_tensors(config: DrafterConfig, state: dict[str, Tensor], head: Tensor) -> dict[str, Tensor]:
    """An export's tensors, of a checkpoint's `state` and the target's LM head [v, d]."""
    ids = state["draft_ids"].long()
    tensors = {name.removeprefix(_BACKBONE): tensor for name, tensor in state.items() if name != "draft_ids"}
    if ids.numel() and config.drafter == "dspine":
        tensors["draft_ids"] = ids
    elif ids.numel():
        tensors["d2t"] = ids - torch.arange(ids.shape[0])
        tensors["lm_head.weight"] = head[ids.to(head.device)].cpu()  # in the target's own type
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def exported_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `exported_tensors` makes: what a loader must find, no more and no less."""
    size = config.draft_vocab_size
    with torch.device("meta"):
        drafter = drafter_class(config.drafter)(config, torch.arange(size) if size else None)
    shapes = {
        name.removeprefix(_BACKBONE): tuple(tensor.shape) for name, tensor in drafter.state_dict().items() if name != "draft_ids"
    }
    if size and config.drafter == "dspine":
        shapes["draft_ids"] = (size,)
    elif size:
        shapes |= {"d2t": (size,), "lm_head.weight": (size, config.hidden_size)}
    return shapes


def _is_export(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "dflash_config" in config
