"""A comparison as one typed, validated YAML file: which drafters, trained how, decoded on what.

    recipe: smollm2-135m            # the training recipe that every row shares
    set: {optimiser: {epochs: 2}}   # what all rows change in it
    reference: dspine               # the row whose gain over the strongest other drafter is stated
    rows:
      dflash: {train: {drafter: dflash, model: {attention: bidirectional}}}
      dspine: {}
      dspine-k4: {trained_as: dspine, options: {num_candidates: 4}}   # the same weights, decoded differently
    decode: {benchmarks: [gsm8k, humaneval], limit: 32, temperatures: [0, 1]}

Rows share data, anchors, order, steps and seed, since all of these follow from the shared recipe. A row that changes any
of them, or drafts another number of tokens than the others, is refused: it would compare something else.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from dspine.errors import UserError
from dspine.training.recipe import Recipe, Section, overlay, read_recipe, validate_recipe

SHARED = ("target", "seed", "data", "optimiser")  # what rows may not differ in


class Row(Section):
    """One row of the table: a drafter trained for it, or another row's weights decoded differently."""

    train: dict[str, Any] = Field({}, description="changes to the shared recipe")
    trained_as: str = Field("", description="use this row's weights instead of training")
    options: dict[str, int | float | bool | str] = Field(
        {}, description="drafter options to change for decoding; needs trained_as"
    )
    width: int = Field(0, ge=0, description="tokens verified per round; 0 = the drafter's whole block")

    @model_validator(mode="after")
    def _check(self) -> Row:
        if self.trained_as and self.train:
            raise ValueError("a row is trained (train) or uses another row's weights (trained_as), not both")
        if self.options and not self.trained_as:
            raise ValueError("options change another row's decoding and need trained_as; a trained row sets train.model.options")
        return self


class DecodeSection(Section):
    benchmarks: tuple[str, ...] = Field(min_length=1, description="names of prompt files in the benchmark folder, without .jsonl")
    limit: int = Field(32, ge=1, description="prompts of each benchmark")
    max_new_tokens: int = Field(128, ge=1)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch: int = Field(8, ge=1, description="conversations decoded at once")
    seed: int = 0
    speed_prompts: int = Field(4, ge=0, description="prompts of the first benchmark timed one by one; 0 = none")


class Plan(Section):
    recipe: str
    set: dict[str, Any] = Field({}, description="changes to the recipe that all rows share")
    equal: Literal["steps", "wall_clock"] = Field(
        "steps",
        description="wall_clock: every drafter gets the steps that fit into the reference's training time here",
    )
    reference: str
    rows: dict[str, Row] = Field(min_length=2)
    decode: DecodeSection

    @model_validator(mode="after")
    def _check(self) -> Plan:
        if self.reference not in self.rows:
            raise ValueError(f"reference {self.reference!r} is no row; rows are {', '.join(self.rows)}")
        for name, row in self.rows.items():
            if row.trained_as and (row.trained_as not in self.rows or self.rows[row.trained_as].trained_as):
                raise ValueError(f"row {name}: trained_as {row.trained_as!r} is no trained row")
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"row {name!r}: names become folders; use letters, digits, - and _")
        if self.rows[self.reference].trained_as:
            raise ValueError(f"the reference {self.reference!r} must be a trained row")
        return self

    @property
    def trained(self) -> list[str]:
        return [name for name, row in self.rows.items() if not row.trained_as]

    @property
    def measured(self) -> list[tuple[str, float]]:
        """(benchmark, temperature) of every result that a row gets."""
        return [(benchmark, t) for benchmark in self.decode.benchmarks for t in self.decode.temperatures]

    def weights_of(self, name: str) -> str:
        """The trained row whose weights `name` decodes with."""
        return self.rows[name].trained_as or name


def load_plan(name: str) -> Plan:
    """Read a plan by file path or built-in name. Raises UserError naming the first field that is wrong."""
    path = Path(name)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        folder = resources.files("dspine") / "comparison" / "plans"
        built_in = folder / f"{name}.yaml"
        if not built_in.is_file():
            known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".yaml"))
            raise UserError(f"no comparison {name!r}; give a YAML file or one of: {', '.join(known)}")
        text = built_in.read_text(encoding="utf-8")
    try:
        return Plan.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError(f"comparison {name} is no valid YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "plan"
        raise UserError(f"comparison {name}: {where}: {first['msg']}") from error


def row_recipes(plan: Plan) -> dict[str, Recipe]:
    """The training recipe of every trained row. Raises UserError for rows that would not be comparable."""
    shared = overlay(read_recipe(plan.recipe), plan.set)
    recipes = {name: validate_recipe(overlay(shared, plan.rows[name].train), f"of row {name}") for name in plan.trained}
    reference = recipes[plan.reference]
    for name, recipe in recipes.items():
        for field in SHARED:
            ours, theirs = getattr(recipe, field), getattr(reference, field)
            if ours != theirs:
                raise UserError(f"row {name} changes {field}, which all rows share; change it for all under `set`")
    return recipes
