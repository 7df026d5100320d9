"""Run a comparison: train every row on the same batches, decode all in one engine, resume wherever it was stopped.

OUTPUT/plan.json                     what is compared; another plan is refused
OUTPUT/rows/NAME/training            as `dspine train` leaves it
OUTPUT/rows/NAME/BENCHMARK-T0.json   acceptance, as `dspine eval acceptance` writes it
OUTPUT/rows/NAME/speed.json          tok/s and the parts of a round, as `dspine bench speed` prints them
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dspine.api import LLM
from dspine.comparison.plan import Plan, row_recipes
from dspine.decoding.sampling import SamplingParams
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import load_drafter
from dspine.drafters.registry import drafter_class
from dspine.errors import UserError
from dspine.evaluation.acceptance import measure_acceptance
from dspine.evaluation.benchmarks import Benchmark, first_turns, load_benchmark
from dspine.evaluation.breakdown import measure_breakdown
from dspine.evaluation.resume import result_name
from dspine.evaluation.speed import measure_speed
from dspine.files import write_text
from dspine.targets.model import Target
from dspine.training.recipe import Recipe
from dspine.training.run import prepare_training, run_training
from dspine.training.warm_start import drafter_config

CALIBRATION_STEPS = 12
SPEED, BREAKDOWN = "speed.json", "breakdown.json"
Report = Callable[[str], None]


def run_comparison(
    plan: Plan, output: Path, benchmarks: Path, *, only: tuple[str, ...] = (), report: Report = lambda line: None,
    stop_after_s: float = float("inf"), decode: bool = True,
) -> bool:  # fmt: skip
    """Do what is still to do; True when nothing is left. `only` names the rows of this call (all by default), so that several
    calls may share the work; `report` is told one line for every step taken.

    Raises UserError for plans, folders and rows that do not fit, before any training.
    """
    unknown = [name for name in only if name not in plan.rows]
    if unknown:
        raise UserError(f"{unknown[0]!r} is no row of this comparison; rows are {', '.join(plan.rows)}")
    recipes = row_recipes(plan)
    prompts = [load_benchmark(benchmarks / f"{name}.jsonl", plan.decode.limit) for name in plan.decode.benchmarks]
    target = Target.load(recipes[plan.reference].target)
    check_rows(recipes, plan, target)
    claim(output, plan)
    rows = [name for name in plan.rows if not only or name in only]
    deadline = time.perf_counter() + stop_after_s
    if plan.equal == "wall_clock":
        recipes = equal_time(recipes, plan, output, report)
    for name in dict.fromkeys(plan.weights_of(row) for row in rows):
        if checkpoint_of(output, name).is_dir():
            continue
        report(f"training {name}")
        run = run_training(recipes[name], output / "rows" / name / "training", stop_after_s=deadline - time.perf_counter())
        if run is None:
            return False
    if not decode:
        return True
    for name in rows:
        if time.perf_counter() > deadline:
            return False
        decode_row(plan, name, output, target, prompts, report)
    return True


def check_rows(recipes: dict[str, Recipe], plan: Plan, target: Target) -> None:
    """Build every row's drafter without memory, to refuse what is impossible, and what is not comparable, at once."""
    lengths: dict[str, int] = {}
    for name, recipe in recipes.items():
        size = recipe.model.draft_vocab_size
        config = drafter_config(recipe, target, size)
        config.check(target)
        with torch.device("meta"):
            drafter_class(recipe.drafter)(config, torch.arange(size) if size else None)
        lengths[name] = config.num_draft_tokens
    ours = lengths[plan.reference]
    for name, length in lengths.items():
        if length != ours:
            raise UserError(
                f"row {name} drafts {length} tokens, {plan.reference} {ours}; acceptance lengths compare only at the same number "
                "(an anchor-first drafter's block_size is one less than another's)"
            )
    for name, row in plan.rows.items():
        if row.width > ours + 1:
            raise UserError(f"row {name} verifies {row.width} tokens per round, but its drafter drafts {ours}")
        if row.options:
            recipe = recipes[row.trained_as]
            drafter_class(recipe.drafter).Options.read(recipe.drafter, {**recipe.model.options, **row.options})


def claim(output: Path, plan: Plan) -> None:
    """Make `output` this plan's folder; raises UserError where it is another's."""
    described, ours = output / "plan.json", json.loads(plan.model_dump_json())
    if not described.is_file():
        if output.exists() and any(output.iterdir()):
            raise UserError(f"{output} is not empty and holds no comparison; choose another folder")
        output.mkdir(parents=True, exist_ok=True)
        write_text(described, json.dumps(ours, indent=2) + "\n")
        return
    theirs = json.loads(described.read_text(encoding="utf-8"))
    for field in sorted(ours.keys() | theirs.keys()):
        if ours.get(field) != theirs.get(field):
            raise UserError(f"{output} holds a comparison with other {field}; choose another folder, or the plan it was made by")


def checkpoint_of(output: Path, row: str) -> Path:
    return output / "rows" / row / "training" / "checkpoint"


def equal_time(recipes: dict[str, Recipe], plan: Plan, output: Path, report: Report) -> dict[str, Recipe]:
    """Recipes whose epochs take the reference's time: a few steps of each are timed once, and the result kept."""
    file = output / "step_seconds.json"
    seconds: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, recipe in recipes.items():
        if name not in seconds:
            report(f"timing steps of {name}")
            seconds[name] = _step_seconds(recipe, output / "rows" / name / "timing")
            write_text(file, json.dumps(seconds, indent=2) + "\n")
    scaled = {}
    for name, recipe in recipes.items():
        epochs = recipe.optimiser.epochs * seconds[plan.reference] / seconds[name]
        scaled[name] = recipe.model_copy(update={"optimiser": recipe.optimiser.model_copy(update={"epochs": epochs})})
    return scaled


def _step_seconds(recipe: Recipe, folder: Path) -> float:
    trainer, _ = prepare_training(recipe, folder, quiet=True)
    times = []
    for step in range(CALIBRATION_STEPS):
        started = time.perf_counter()
        trainer.train_step(step)
        times.append(time.perf_counter() - started)
    return statistics.median(times[CALIBRATION_STEPS // 3 :])


def decode_row(
    plan: Plan, name: str, output: Path, target: Target, benchmarks: list[Benchmark], report: Report
) -> None:  # fmt: skip
    """Every benchmark at every temperature, then the speed; what has a result already is left as it is."""
    row, settings = plan.rows[name], plan.decode
    folder = output / "rows" / name
    folder.mkdir(parents=True, exist_ok=True)
    drafter: BlockDrafter | None = None
    for benchmark in benchmarks:
        for temperature in settings.temperatures:
            file = result_file(folder, benchmark.name, temperature)
            if file.is_file():
                continue
            drafter = drafter or _drafter(output, plan, name, target)
            report(f"decoding {benchmark.name} at T={temperature:g} with {name}")
            llm = LLM(target, drafter, max_rows=settings.batch, width=row.width or drafter.config.max_width)
            params = SamplingParams(temperature=temperature, max_new_tokens=settings.max_new_tokens, seed=settings.seed)
            measure_acceptance(llm, benchmark, params).write(file)
    if settings.speed_prompts and not (folder / SPEED).is_file():
        drafter = drafter or _drafter(output, plan, name, target)
        report(f"timing {name}")
        time_row(plan, name, folder, LLM(target, drafter, width=row.width or drafter.config.max_width), benchmarks[0])


def time_row(plan: Plan, name: str, folder: Path, llm: LLM, benchmark: Benchmark) -> None:
    """The speed of a few prompts, one by one, and where a round's time goes."""
    settings = plan.decode
    params = SamplingParams(max_new_tokens=settings.max_new_tokens)
    few = Benchmark(benchmark.name, benchmark.conversations[: settings.speed_prompts])
    encoded, _ = first_turns(few, llm.target, chat=True, max_new_tokens=settings.max_new_tokens)
    write_text(folder / BREAKDOWN, json.dumps(measure_breakdown(llm, encoded, params).to_dict(), indent=2) + "\n")
    write_text(folder / SPEED, json.dumps(measure_speed(llm, encoded, params).to_dict(), indent=2) + "\n")


def result_file(folder: Path, benchmark: str, temperature: float) -> Path:
    return folder / result_name(benchmark, temperature)


def _drafter(output: Path, plan: Plan, name: str, target: Target) -> BlockDrafter:
    """The row's drafter, its decoding options changed where the row says so."""
    options = plan.rows[name].options
    checkpoint = checkpoint_of(output, plan.weights_of(name))
    if not checkpoint.is_dir():
        raise UserError(f"row {name} needs the weights of {plan.weights_of(name)}, which are not trained yet")
    return load_drafter(checkpoint, target, options=options)
