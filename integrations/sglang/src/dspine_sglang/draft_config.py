"""A dspine checkpoint's config.json as the transformers config that SGLang asks of every model.

SGLang reads draft configs through `get_config`; `plugin` puts `read_draft_config` before it. dspine's own file has no
`model_type`, and transformers would guess one from the folder's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from dspine.drafters.config import DrafterConfig
from dspine.integrations.engine_model import qwen3_fields

ARCHITECTURE = "DSpineDraftModel"
# A drafter has no length of its own: the engine gives it the target's, and refuses one that is longer than this.
_NO_LIMIT = 1 << 24


class DSpineDraftConfig(PretrainedConfig):
    """`dspine` holds the checkpoint's config.json; the rest is what SGLang's DFlash code reads."""

    model_type = "dspine_draft"


def drafter_kind(path: str) -> str | None:
    """Which drafter a local checkpoint folder holds ("dspine", "dflash", ...); None where it is no dspine checkpoint."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    kind = fields.get("drafter") if "format_version" in fields else None
    return kind if isinstance(kind, str) else None


def read_draft_config(folder: Path) -> DSpineDraftConfig:
    """The config of a checkpoint folder. Raises UserError where its config.json is damaged."""
    config = DrafterConfig.read(folder)
    return DSpineDraftConfig(
        architectures=[ARCHITECTURE],
        dspine=config.model_dump(mode="json"),
        **qwen3_fields(config, _NO_LIMIT),
        is_causal=config.attention == "causal",
        num_target_layers=config.target.num_layers,
        dflash_config={"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id},
    )


def get_config(original: Callable[..., Any], model: str, *arguments: Any, **options: Any) -> Any:
    """Stands around SGLang's `get_config`: dspine's folders are read here, everything else as before."""
    if drafter_kind(str(model)) == "dspine":
        return read_draft_config(Path(model))
    return original(model, *arguments, **options)
