"""One training run from a recipe to a checkpoint: load, check, cache features, train, export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import save_drafter
from dspine.errors import UserError
from dspine.targets.model import Target
from dspine.training.corpus import Answer, load_answers
from dspine.training.features import FeatureStore, most_frequent_tokens, store_bytes
from dspine.training.recipe import Recipe
from dspine.training.reporting import Reporter, long_progress
from dspine.training.sources import OnlineFeatures, StoredFeatures, fill_store, target_states
from dspine.training.trainer import AnswerSource, HeldOut, Trainer
from dspine.training.warm_start import new_drafter

LOW_AGREEMENT = 0.5  # of greedy answers' tokens that the target itself would choose


@dataclass(frozen=True)
class TrainingRun:
    """What a finished run leaves: the checkpoint folder and its held-out result."""

    checkpoint: Path
    held_out: HeldOut
    steps: int


def run_training(
    recipe: Recipe,
    output: Path,
    *,
    export_dtype: torch.dtype = torch.bfloat16,
    quiet: bool = False,
    stop_after_s: float = math.inf,
) -> TrainingRun | None:
    """Train as `recipe` says into `output` (resuming what is there) and export `output`/checkpoint.

    Returns None when stopped after `stop_after_s` seconds of training, its state saved: the same call goes on.
    Raises UserError for answers, folders and settings that do not fit, before any training.
    """
    trainer, console = prepare_training(recipe, output, quiet=quiet)
    output.mkdir(parents=True, exist_ok=True)
    active = trainer.accelerator.is_main_process
    with Reporter(output, console, trainer.total_steps, trainer.step, active=active) as reporter:
        held_out = trainer.run(reporter.on_step, reporter.on_eval, stop_after_s)
    if held_out is None:
        console.print(f"stopped at step {trainer.step} of {trainer.total_steps}; the same command goes on from there")
        return None
    checkpoint = output / "checkpoint"
    if active:
        export(trainer.drafter, held_out, checkpoint, export_dtype)
    console.print(f"held-out acceptance length {held_out.acceptance_length:.3f}; checkpoint: {checkpoint}")
    return TrainingRun(checkpoint, held_out, trainer.step)


def prepare_training(recipe: Recipe, output: Path, *, quiet: bool = False) -> tuple[Trainer, Console]:
    """Everything up to the first step: the target read, features cached, the trainer resumed. See `run_training`."""
    process = PartialState(cpu=not torch.cuda.is_available())
    console = Console(stderr=True, quiet=quiet or not process.is_main_process)
    target = Target.load(recipe.target, dtype=_target_dtype(recipe), keep_model=recipe.model.start == "target_layers")
    answers = load_answers([Path(a) for a in recipe.data.answers], [Path(recipe.data.prompts or ".")], target)
    answers = [a for a in answers if a.prompt_length < min(len(a.ids), recipe.data.max_length) - 1]
    if not answers:
        raise UserError(
            f"no usable answers in {', '.join(recipe.data.answers)}: every one is empty or longer than {recipe.data.max_length}"
        )
    answers = evenly_spread(answers, recipe.data.limit or len(answers))
    size = recipe.model.draft_vocab_size
    draft_ids = most_frequent_tokens([(a.ids, a.prompt_length) for a in answers], size) if size else None
    drafter = new_drafter(recipe, target, draft_ids)
    target.model = None  # the warm start has read it
    warn_of_misfit(answers, target, console)
    with process.main_process_first():  # one process fills a feature cache, the others find it filled
        source = _source(recipe, target, drafter, answers, console)
    trainer = Trainer(recipe, target, drafter, source, output)
    resumed = trainer.resume()
    _announce(trainer, recipe, len(answers), resumed, console)
    return trainer, console


def evenly_spread(answers: Sequence[Answer], count: int) -> list[Answer]:
    """`count` of the answers at equal distances (all where there are no more): every file keeps its share."""
    count = min(count, len(answers))
    return [answers[i * len(answers) // count] for i in range(count)]


def export(drafter: BlockDrafter, held_out: HeldOut, folder: Path, dtype: torch.dtype) -> None:
    """Save the drafter with its held-out acceptance, which the automatic width starts from."""
    expected = tuple(round(rate, 4) for rate in held_out.slot_accuracy)
    drafter.config = drafter.config.model_copy(update={"expected_acceptance": expected})
    save_drafter(drafter, folder, dtype)


def warn_of_misfit(answers: Sequence[Answer], target: Target, console: Console) -> None:
    """Early warning: answers that the target would not have written make a drafter of somebody else."""
    agreement = answer_agreement(answers[:: max(1, len(answers) // 4)][:4], target)
    if agreement < LOW_AGREEMENT:
        console.print(
            f"[yellow]warning:[/] {target.name} would itself choose only {agreement:.0%} of these answers' tokens; were they "
            "written by another model or under another chat template? `dspine data regenerate` makes answers that fit"
        )


def answer_agreement(answers: Sequence[Answer], target: Target) -> float:
    """Share of response tokens that are the target's own argmax."""
    hits = total = 0
    for answer in answers:
        ids = torch.tensor(answer.ids)
        _, hidden = target_states(target, ids[:-1], (0,))
        start = answer.prompt_length - 1
        chosen = target.logits(hidden[start:]).argmax(-1).cpu()
        hits += int((chosen == ids[start + 1 :]).sum())
        total += chosen.shape[0]
    return hits / max(1, total)


def _source(recipe: Recipe, target: Target, drafter: BlockDrafter, answers: Sequence[Answer], console: Console) -> AnswerSource:
    ids, d = drafter.config.target_layer_ids, target.hidden_size
    if recipe.data.features == "online":
        return OnlineFeatures(answers, target, ids, recipe.data.max_length)
    folder = Path(recipe.data.cache)
    facts: dict[str, Any] = {"target": drafter.config.target.model_dump(exclude={"name"}), "layer_ids": list(ids)}
    store = FeatureStore(folder, facts, len(ids), d)
    tokens = sum(min(len(a.ids), recipe.data.max_length) for a in answers)
    console.print(f"features of {len(answers)} answers: {store_bytes(tokens, len(ids), d) / 1e9:.2f} GB in {folder}")
    with long_progress(console) as progress:
        task = progress.add_task("features", total=len(answers))
        fill_store(store, answers, target, ids, recipe.data.max_length, lambda: progress.advance(task))
    return StoredFeatures(store, answers)


def _announce(trainer: Trainer, recipe: Recipe, answers: int, resumed: bool, console: Console) -> None:
    options = recipe.optimiser
    millions = trainer.drafter.extra_state()["parameters"] / 1e6
    console.print(
        f"{recipe.drafter} for {recipe.target}: {millions:.1f} M parameters, {answers} answers, "
        f"{trainer.total_steps} steps of {options.sequences_per_step} x {options.anchors_per_sequence} anchors"
        + (f", resumed at step {trainer.step}" if resumed else "")
    )


def _target_dtype(recipe: Recipe) -> str:
    return "auto" if recipe.dtype == "auto" or not torch.cuda.is_available() else recipe.dtype
