"""The six drafters of the built-in comparison on the bundled model, in its own sizes: greedy output is plain decoding's.

Each learns the very answers that are decoded afterwards for a few steps, so that drafts are accepted and refused alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspine.comparison.plan import load_plan, row_recipes
from dspine.decoding.engine import Engine
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.stats import DecodeStats
from dspine.targets.model import Target
from dspine.training.corpus import Answer
from dspine.training.recipe import Recipe
from dspine.training.sources import OnlineFeatures
from dspine.training.trainer import Trainer
from dspine.training.warm_start import new_drafter

pytestmark = pytest.mark.real

PROMPTS = Path(__file__).parents[2] / "data" / "smollm2-135m" / "synthesised.jsonl"
RECIPES = row_recipes(load_plan("six-drafters"))
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
STEPS = 25


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2-135m", device="cpu", keep_model=True)


@pytest.fixture(scope="module")
def encoded(target: Target) -> list[list[int]]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:60:10]
    return [target.encode_chat([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in lines]


@pytest.fixture(scope="module")
def plain(target: Target, encoded: list[list[int]]) -> list[list[int]]:
    return decode(Engine(target, max_rows=1), encoded)[0]


def decode(engine: Engine, encoded: list[list[int]]) -> tuple[list[list[int]], DecodeStats]:
    requests = [engine.submit(ids, GREEDY) for ids in encoded]
    engine.run()
    stats = DecodeStats()
    for request in requests:
        stats.merge(request.stats)
    return [request.output_ids for request in requests], stats


def short(recipe: Recipe) -> Recipe:
    """The recipe for a handful of steps on a handful of answers."""
    data = recipe.data.model_copy(update={"held_out": 1, "limit": 0})
    optimiser = recipe.optimiser.model_copy(update={"epochs": STEPS / 2, "learning_rate": 1e-3})
    return recipe.model_copy(update={"data": data, "optimiser": optimiser})


@pytest.mark.parametrize("row", RECIPES)
def test_greedy_output_is_plain_decodings(
    target: Target, encoded: list[list[int]], plain: list[list[int]], row: str, tmp_path: Path
) -> None:
    recipe = short(RECIPES[row])
    drafter = new_drafter(recipe, target, torch.tensor(sorted({token for output in plain for token in output})))
    answers = [Answer(("own", i), [*ids, *plain[i]], len(ids)) for i, ids in enumerate(encoded)]
    source = OnlineFeatures(answers, target, drafter.config.target_layer_ids, recipe.data.max_length)
    trainer = Trainer(recipe, target, drafter, source, tmp_path)
    for step in range(STEPS):
        trainer.train_step(step)
    outputs, stats = decode(Engine(target, drafter.runner(target), max_rows=4, width=drafter.config.max_width), encoded)
    assert outputs == plain
    assert 1.05 < stats.acceptance_length < drafter.config.max_width
