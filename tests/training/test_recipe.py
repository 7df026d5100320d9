"""Recipes: files, built-in names, bases, overrides, and one sentence for each mistake."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml

from dspine.drafters.dspine import DSpineOptions
from dspine.errors import UserError
from dspine.training.recipe import Recipe, load_recipe

MINIMAL = {"target": "some/model", "model": {"mask_token_id": 5}, "data": {"answers": ["a.jsonl"]}}
BUILT_IN = sorted(p.name[:-5] for p in (resources.files("dspine") / "recipes").iterdir() if p.name.endswith(".yaml"))


def write(path: Path, data: object) -> str:
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return write(tmp_path / "minimal.yaml", MINIMAL)


def sentence(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_recipe(name, list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_the_papers(minimal: str) -> None:
    recipe = load_recipe(minimal)
    model, loss, optimiser = recipe.model, recipe.loss, recipe.optimiser
    assert (recipe.drafter, model.block_size, model.num_layers) == ("dspine", 16, 5)
    assert DSpineOptions.read("dspine", model.options) == DSpineOptions(transfer_rank=1024, message_width=512, num_candidates=16)
    assert (model.attention, model.start) == ("causal", "random")
    assert (loss.alpha, loss.beta, loss.gamma, loss.refined_shared_normaliser) == (0.1, 0.5, 7.0, False)
    assert (loss.curriculum_start, loss.curriculum_hold, loss.curriculum_end) == (0.5, 1 / 6, 1 / 3)
    assert (optimiser.learning_rate, optimiser.warmup_fraction, optimiser.clip, optimiser.weight_decay) == (6e-4, 0.04, 1.0, 0.0)
    assert (optimiser.epochs, optimiser.sequences_per_step, optimiser.anchors_per_sequence) == (6.0, 112, 512)
    assert recipe.data.max_length == 3072


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes_are_valid(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.model.attention == ("bidirectional" if recipe.drafter == "dflash" else "causal")
    if name.startswith("qwen3"):
        defaults = Recipe.model_validate(MINIMAL)
        assert recipe.loss == defaults.loss
        assert recipe.optimiser.model_copy(update={"micro_batch": 0}) == defaults.optimiser


def test_matched_dflash_differs_in_the_drafter_only() -> None:
    changes = {"drafter": "dspine", "model": load_recipe("smollm2-135m").model}
    assert load_recipe("smollm2-135m-dflash").model_copy(update=changes) == load_recipe("smollm2-135m")


@pytest.mark.parametrize("overrides", [["drafter=dflash"], ["drafter=dflash", "model.options.x=3"], ["model.options.x=3"]])
def test_options_belong_to_their_drafter(overrides: list[str]) -> None:
    options = load_recipe("qwen3-8b", overrides).model.options
    assert options.get("x") == (3 if len(overrides) == 2 or "x" in overrides[0] else None)
    assert ("transfer_rank" in options) == (overrides[0] != "drafter=dflash")
    assert load_recipe("smollm2-135m-dflash").model.options == {}


def test_base_is_overlaid(tmp_path: Path, minimal: str) -> None:
    name = write(tmp_path / "derived.yaml", {"base": minimal, "model": {"num_layers": 3}, "seed": 4})
    recipe = load_recipe(name)
    assert (recipe.target, recipe.seed) == ("some/model", 4)
    assert (recipe.model.num_layers, recipe.model.mask_token_id) == (3, 5)


def test_base_of_itself(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    write(first, {"base": str(second)})
    write(second, {"base": str(first)})
    assert "is based on itself" in sentence(str(first))


def test_overrides(minimal: str) -> None:
    recipe = load_recipe(
        minimal, ["loss.alpha=1", "optimiser.learning_rate=3e-4", "data.answers=[x, y]", "seed=7", "optimiser.betas=[0.9, 0.95]"]
    )
    assert (recipe.loss.alpha, recipe.optimiser.learning_rate, recipe.seed) == (1.0, 3e-4, 7)
    assert (recipe.data.answers, recipe.optimiser.betas) == (("x", "y"), (0.9, 0.95))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.alpha=1.5", "loss.alpha: Input should be less than or equal to 1 (got 1.5)"),
        ("loss.alfa=1", "loss.alfa: Extra inputs are not permitted"),
        ("loss.beta=.nan", "loss.beta: "),
        ("loss.gamma=0", "loss.gamma: "),
        ("optimiser.learning_rate=.inf", "optimiser.learning_rate: "),
        ("optimiser.sequences_per_step=0", "optimiser.sequences_per_step: "),
        ("model.block_size=1", "model.block_size: "),
        ("model.start=scratch", "model.start: "),
        ("model.mask_token_id=", "model.mask_token_id: "),
        ("data.features=cache", "features: cache needs data.cache"),
        ("loss.curriculum_end=0.1", "loss.curriculum_end must not be before loss.curriculum_hold"),
        ("loss.alpha", "'loss.alpha' is not of the form section.key=value"),
        ("loss.alpha.x.y=1", "loss.alpha: Input should be a valid number"),
        ("target.x=1", "target is a value, not a section"),
        ("loss.alpha=[1", "'loss.alpha=[1': the value is no valid YAML"),
    ],
)
def test_mistakes_name_the_field(minimal: str, override: str, message: str) -> None:
    assert message in sentence(minimal, override)


def test_missing_field(tmp_path: Path) -> None:
    assert "model.mask_token_id: Field required" in sentence(write(tmp_path / "r.yaml", {**MINIMAL, "model": {}}))


def test_unknown_name() -> None:
    message = sentence("qwen3-800b")
    assert "no recipe 'qwen3-800b'" in message
    assert "smollm2-135m" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is no valid YAML"),
        (b"", "is empty or no mapping"),
        (b"- 1", "is empty or no mapping"),
        (b"a: \xff\xfe", "UTF-8"),
    ],
)
def test_damaged_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    assert message in sentence(str(file))
