"""A training run as one typed, validated YAML file. Defaults are the paper's recipe (specification, section 7)."""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspine.errors import UserError


class Section(BaseModel):
    """Frozen, and nothing that it does not name is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSection(Section):
    """The drafter's shape. Head counts, widths, RoPE base and norm epsilon are the target's own."""

    num_layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    attention: Literal["causal", "bidirectional"] = "causal"
    taps: int = Field(5, ge=1, description="tapped target layers")
    mask_token_id: int = Field(description="an embedding the target never uses in answers")
    qk_norm: bool = True
    options: dict[str, int | float | bool | str] = Field({}, description="what only the recipe's kind of drafter has")
    draft_vocab_size: int = Field(0, ge=0, description="propose only the N most frequent answer tokens; 0 = all")
    start: Literal["random", "target_layers", "checkpoint"] = Field(
        "random",
        description="target_layers: copy the target's last layers; checkpoint: go on from `checkpoint`, say on more data",
    )
    checkpoint: str = Field("", description="draft checkpoint folder to start from; needs start: checkpoint")


class LossSection(Section):
    alpha: float = Field(0.1, ge=0, le=1, description="alpha CE + (1 - alpha) L1")
    ce_only_until: float = Field(0.0, ge=0, le=1, description="plain cross-entropy for this fraction of training")
    beta: float = Field(0.5, ge=0, description="alignment weight after warm-up")
    gamma: float = Field(7.0, gt=0)
    curriculum_start: float = Field(0.5, ge=0, le=1)
    curriculum_hold: float = Field(1 / 6, ge=0, le=1)
    curriculum_end: float = Field(1 / 3, ge=0, le=1)
    refined_shared_normaliser: bool = False
    layer_supervision: Literal["cosine", "token_ce", "none"] = Field(
        "cosine", description="what beta weighs: the layers' angle to the token code, their own cross-entropy, or nothing"
    )
    distance: Literal["l1", "acceptance"] = Field(
        "l1", description="what 1 - alpha weighs; acceptance: minus the expected acceptance length itself"
    )
    position_weights: Literal["fixed", "dpace"] = Field(
        "fixed", description="fixed: exp(-(t - 1) / gamma); dpace: D-PACE, by what each position is worth to the drafter so far"
    )
    dpace_smoothing: float = Field(0.5, gt=0, le=1)


class OptimiserSection(Section):
    learning_rate: float = Field(6e-4, gt=0)
    warmup_fraction: float = Field(0.04, ge=0, le=1)
    clip: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    epochs: float = Field(6.0, gt=0)
    sequences_per_step: int = Field(112, ge=1, description="global batch")
    micro_batch: int = Field(0, ge=0, description="sequences at once per process; 0 = all of a step's")
    anchors_per_sequence: int = Field(512, ge=1)


class DataSection(Section):
    answers: tuple[str, ...] = Field(description="answer files written by `dspine data regenerate`")
    prompts: str = Field("", description="folder of the prompt files that the answers refer to")
    features: Literal["online", "cache"] = "online"
    cache: str = Field("", description="folder of the feature cache; needs features: cache")
    max_length: int = Field(3072, ge=8)
    held_out: int = Field(64, ge=1, description="answers kept for the held-out acceptance length")
    limit: int = Field(0, ge=0, description="train on this many of the answers, evenly spread over the files; 0 = all")


class Recipe(Section):
    target: str
    drafter: str = "dspine"
    model: ModelSection
    loss: LossSection = LossSection()
    optimiser: OptimiserSection = OptimiserSection()
    data: DataSection
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU, float32 on a CPU")
    eval_every: int = Field(500, ge=1)
    save_every: int = Field(500, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.data.features == "cache" and not self.data.cache:
            raise ValueError("features: cache needs data.cache, the folder to keep them in")
        if (self.model.start == "checkpoint") != bool(self.model.checkpoint):
            raise ValueError("model.start: checkpoint and model.checkpoint, the folder to start from, belong together")
        if self.loss.curriculum_end < self.loss.curriculum_hold:
            raise ValueError("loss.curriculum_end must not be before loss.curriculum_hold")
        return self


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by file path or built-in name; `overrides` are "section.key=value" strings.

    Raises UserError naming the first field that is wrong.
    """
    data = read_recipe(name)
    for item in overrides or []:
        drafter = data.get("drafter")
        _override(data, item)
        if data.get("drafter") != drafter:
            drop_options(data)
    return validate_recipe(data, name)


def validate_recipe(data: dict[str, object], name: str) -> Recipe:
    """The typed recipe of a mapping; raises UserError naming the first field that is wrong."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "recipe"
        raise UserError(f"recipe {name}: {where}: {first['msg']} (got {first.get('input')!r})") from error


def read_recipe(name: str, derived: tuple[str, ...] = ()) -> dict[str, object]:
    """A recipe's mapping, laid over its `base` recipe's if it names one; `derived` are the recipes based on this one."""
    if name in derived:
        raise UserError(f"recipe {name} is based on itself: {' -> '.join((*derived, name))}")
    try:
        data = yaml.safe_load(_text(name))
    except yaml.YAMLError as error:
        raise UserError(f"recipe {name} is no valid YAML: {str(error).splitlines()[0]}") from error
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"recipe {name} is no readable UTF-8 file ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"recipe {name} is empty or no mapping")
    base = data.pop("base", None)
    if base is None:
        return data
    return overlay(read_recipe(str(base), (*derived, name)), data)


def overlay(lower: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """`changes` laid over a recipe's mapping; another kind of drafter leaves the lower one's options behind."""
    lower = copy.deepcopy(lower)
    if changes.get("drafter", lower.get("drafter")) != lower.get("drafter"):
        drop_options(lower)
    return merge(lower, changes)


def drop_options(data: dict[str, object]) -> None:
    """Options are one kind of drafter's: a recipe changed to another kind does not keep them."""
    model = data.get("model")
    if isinstance(model, dict):
        model.pop("options", None)


def _text(name: str) -> str:
    path = Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    folder = resources.files("dspine") / "recipes"
    built_in = folder / f"{name}.yaml"
    if not built_in.is_file():
        known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".yaml"))
        raise UserError(f"no recipe {name!r}; give a YAML file or one of: {', '.join(known)}")
    return built_in.read_text(encoding="utf-8")


def merge(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _override(data: dict[str, object], item: str) -> None:
    key, separator, value = item.partition("=")
    if not separator:
        raise UserError(f"override {item!r} is not of the form section.key=value")
    *parents, leaf = key.split(".")
    node: dict[str, object] = data
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override {item!r}: {parent} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {item!r}: the value is no valid YAML") from error
