"""The training loop: resumable, bit-exact on a CPU after a kill, on one process or many through accelerate.

Every step's data, anchors and curriculum draws depend only on (seed, step), so a checkpoint is parameters, optimizer
state and a step number.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dspine.drafters.base import BlockDrafter, LossSettings, TrainingBatch, mean_ce
from dspine.errors import UserError
from dspine.modules.losses import DraftHead
from dspine.targets.model import Target
from dspine.training.accelerator import new_accelerator
from dspine.training.batches import ANSWERS, HELD_OUT, build_batch, held_out_split, step_generator, step_order, to_device
from dspine.training.curriculum import alignment_weight, ce_fraction, learning_rate_scale, true_predecessor_probability
from dspine.training.features import AnswerFeatures
from dspine.training.recipe import Recipe

EVALUATION_ANCHORS = 16  # per held-out answer, the same ones every time
_FREE_TO_CHANGE = ("eval_every", "save_every", "optimiser.micro_batch")  # between stopping and resuming: they change no result


class AnswerSource(Protocol):
    """Answered prompts with the target's features, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> AnswerFeatures: ...

    def prompt(self, index: int) -> Sequence[int]: ...


@dataclass(frozen=True)
class HeldOut:
    """Teacher-forced results on unseen answers: `slot_accuracy` [M] is P(slot right | all before it right)."""

    acceptance_length: float
    slot_accuracy: tuple[float, ...]


class Trainer:
    """Train `drafter` for `target` on `source`. `held_out` indices are never trained on."""

    def __init__(self, recipe: Recipe, target: Target, drafter: BlockDrafter, source: AnswerSource, folder: Path) -> None:
        self.recipe, self.target, self.source, self.folder = recipe, target, source, folder
        self.accelerator = new_accelerator(recipe.dtype, target.device)
        data, processes, per_step = recipe.data, self.accelerator.num_processes, recipe.optimiser.sequences_per_step
        if per_step < processes:
            raise UserError(
                f"steps of {per_step} sequences cannot be shared by {processes} processes; raise optimiser.sequences_per_step"
            )
        share = -(-per_step // processes)
        self._micro_batch = min(recipe.optimiser.micro_batch or share, share)
        self._in_parts = self._micro_batch < share
        if len(source) < data.held_out + per_step:
            raise UserError(f"{len(source)} answers are too few to hold out {data.held_out} and train in steps of {per_step}")
        self.held_out, self.training = held_out_split([source.prompt(i) for i in range(len(source))], data.held_out)
        steps_per_epoch = len(self.training) // per_step
        self.total_steps = max(1, math.ceil(recipe.optimiser.epochs * steps_per_epoch))
        self.drafter = drafter.to(self.accelerator.device)
        optimiser = torch.optim.AdamW(
            drafter.parameters(), lr=recipe.optimiser.learning_rate, betas=recipe.optimiser.betas,
            weight_decay=recipe.optimiser.weight_decay, fused=True,
        )  # fmt: skip
        self.model, self.optimiser = self.accelerator.prepare(self.drafter, optimiser)
        self.head: DraftHead = drafter.head(target)
        self.step = 0

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[int, dict[str, float]], None],
        on_eval: Callable[[int, HeldOut], None],
        stop_after_s: float = math.inf,
    ) -> HeldOut | None:
        """Train to the end, reporting each step's numbers; returns the last held-out result.

        After `stop_after_s` seconds the state is saved and None returned: the next run goes on from there.
        """
        begun = time.perf_counter()
        while self.step < self.total_steps:
            if self._agree(time.perf_counter() - begun > stop_after_s):
                self.save()
                return None
            started = time.perf_counter()
            metrics = self.train_step(self.step)
            metrics["step_s"] = time.perf_counter() - started
            self.step += 1
            on_step(self.step, metrics)
            last = self.step == self.total_steps
            if self.step % self.recipe.save_every == 0 or last:
                self.save()
            if self.step % self.recipe.eval_every == 0 and not last:
                on_eval(self.step, self.evaluate())
        result = self.evaluate()
        on_eval(self.step, result)
        return result

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step; returns its numbers."""
        settings = self.loss_settings(step)
        scale = learning_rate_scale(step, self.total_steps, self.recipe.optimiser.warmup_fraction)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.optimiser.learning_rate * scale
        batches = list(self._micro_batches(step))
        beta = alignment_weight(step, self.total_steps, self.recipe.optimiser.warmup_fraction, self.recipe.loss.beta)
        # Every mean is over the whole step: where it is worked off in parts, a pass without gradients finds their sums.
        sums = self._sums_ahead(batches, settings) if self._in_parts else None
        metrics = torch.zeros(4, device=self.accelerator.device)  # blocks, loss, right at slot 1, labels at slot 1
        for number, part in enumerate(batches):
            batch = self._on_device(part)
            with self._gradient_sync(last=number == len(batches) - 1):
                with self.accelerator.autocast():
                    losses = self.model(batch, self.target, self.head, settings)
                sums = self._add_up(losses.sums()) if sums is None else sums
                loss = losses.loss(sums, beta)
                self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
            first = batch.supervised[:, 0]
            metrics += torch.stack(
                (first.new_tensor(len(first)), loss.detach(), (losses.correct[:, 0] * first).sum(), first.sum())
            )
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.optimiser.clip))
        blocks, loss_value, right, labels = self._add_up(metrics).tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            raise UserError(
                f"training diverged at step {step}: loss {loss_value}, gradient norm {norm}; the last saved state is untouched: "
                "lower optimiser.learning_rate, or look for infinite values in the features"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        assert sums is not None
        return {
            "anchors": blocks,
            "loss": loss_value,
            "ce": float(mean_ce(sums)),
            "correct_first": right / max(1.0, labels),
            "gradient_norm": norm,
            "learning_rate": self.recipe.optimiser.learning_rate * scale,
        }

    def loss_settings(self, step: int) -> LossSettings:
        loss = self.recipe.loss
        return LossSettings(
            alpha=ce_fraction(step, self.total_steps, loss.alpha, loss.ce_only_until),
            gamma=loss.gamma,
            forced_probability=true_predecessor_probability(
                step, self.total_steps, loss.curriculum_start, loss.curriculum_hold, loss.curriculum_end
            ),
            refined_shared_normaliser=loss.refined_shared_normaliser,
            layer_supervision=loss.layer_supervision,
            distance=loss.distance,
            position_weights=loss.position_weights,
            dpace_smoothing=loss.dpace_smoothing,
            progress=step / self.total_steps,
        )

    def _micro_batches(self, step: int) -> Iterator[TrainingBatch]:
        """This process's share of the step. An answer's anchors do not depend on the sharing."""
        order = step_order(len(self.training), self.recipe.optimiser.sequences_per_step, self.recipe.seed, step)
        mine = list(enumerate(order))[self.accelerator.process_index :: self.accelerator.num_processes]
        for i in range(0, len(mine), self._micro_batch):
            part = mine[i : i + self._micro_batch]
            generators = [step_generator(self.recipe.seed, step, ANSWERS + j) for j, _ in part]
            answers = [self.source[self.training[answer]] for _, answer in part]
            options = self.recipe.optimiser
            batch = build_batch(answers, self.drafter.config.max_width, options.anchors_per_sequence, generators)
            # All parts of a step are held until it is done: not on an accelerator.
            yield to_device(batch, torch.device("cpu")) if self._in_parts else batch

    @torch.no_grad()
    def _sums_ahead(self, batches: Sequence[TrainingBatch], settings: LossSettings) -> Tensor:
        with self.accelerator.autocast():
            parts = [
                self.drafter.block_losses(self._on_device(batch), self.target, self.head, settings).sums() for batch in batches
            ]
        return self._add_up(torch.stack(parts).sum(0))

    def _on_device(self, batch: TrainingBatch) -> TrainingBatch:
        return to_device(batch, self.accelerator.device)

    def _add_up(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return self.accelerator.reduce(value, reduction="sum") if self.accelerator.num_processes > 1 else value

    def _agree(self, stop: bool) -> bool:
        """Whether any process wants to stop: all stop at the same step."""
        if self.accelerator.num_processes == 1:
            return stop
        return bool(self._add_up(torch.tensor(float(stop), device=self.accelerator.device)) > 0)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Processes exchange gradients once a step, after the last micro-batch."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    # -- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> HeldOut:
        """Teacher-forced acceptance length on the held-out answers: true predecessors, the draft's greedy choice."""
        self.model.eval()
        correct, supervised = [], []
        for index in self.held_out:
            generator = step_generator(self.recipe.seed, index, HELD_OUT)
            batch = self._on_device(
                build_batch([self.source[index]], self.drafter.config.max_width, EVALUATION_ANCHORS, [generator])
            )
            with self._evaluation_precision():
                losses = self.drafter.block_losses(batch, self.target, self.head, LossSettings(alpha=1.0))
            correct.append(losses.correct.float() * batch.supervised)
            supervised.append(batch.supervised)
        self.model.train()
        return held_out_result(torch.cat(correct), torch.cat(supervised))

    def _evaluation_precision(self) -> AbstractContextManager[None]:
        """The precision the drafter will run in: the target's. Mixed precision in training does not blur a measurement."""
        return nullcontext() if self.target.dtype == torch.float32 else self.accelerator.autocast()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def state_file(self) -> Path:
        return self.folder / "state.pt"

    def save(self) -> None:
        """Write the resume state. It is one file put in place by one rename: a kill at any moment leaves a whole one."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        work = self.state_file.with_suffix(".tmp")
        state = {
            "step": self.step,
            "recipe": self.recipe.model_dump(mode="json"),
            "num_answers": len(self.source),
            "drafter": self.drafter.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        try:
            with work.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            work.replace(self.state_file)
        except (OSError, RuntimeError) as error:
            work.unlink(missing_ok=True)
            raise UserError(
                f"cannot write {self.state_file} ({error}); free some disk space and run the same command again"
            ) from error

    def resume(self) -> bool:
        """Continue from the folder's state, if it has one. Raises UserError when it belongs to another recipe or corpus."""
        if not self.state_file.is_file():
            return False
        try:
            state: dict[str, Any] = torch.load(self.state_file, map_location=self.accelerator.device, weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            raise UserError(f"{self.state_file} is damaged; delete it to start again") from error
        self._check_same_run(state)
        self.drafter.load_state_dict(state["drafter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = int(state["step"])
        return True

    def _check_same_run(self, state: dict[str, Any]) -> None:
        theirs, ours = _flat(state["recipe"]), _flat(self.recipe.model_dump(mode="json"))
        # The held-out split and the schedules follow from the number of answers.
        theirs["the number of answers"], ours["the number of answers"] = state["num_answers"], len(self.source)
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in _FREE_TO_CHANGE and ours.get(key) != theirs.get(key):
                raise UserError(
                    f"{self.folder} was trained with {key} = {theirs.get(key)}, this run has {ours.get(key)}; "
                    "choose another output folder"
                )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss": {"alpha": 1}} as {"loss.alpha": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def held_out_result(correct: Tensor, supervised: Tensor) -> HeldOut:
    """Acceptance length and conditional slot accuracies from correct and supervised [a, M] (0 or 1).

    An anchor whose answer ends inside the block would count as refused there, so each slot's rate is taken over the
    blocks that still have a label at that slot, and the length is 1 + sum of the cumulative products of those rates.
    """
    rates: list[float] = []
    length, survival = 1.0, 1.0
    for t in range(correct.shape[1]):
        before = correct[:, :t].prod(-1) * supervised[:, t]
        count = float(before.sum())
        rates.append(float((before * correct[:, t]).sum()) / count if count else 0.0)
        survival *= rates[-1]
        length += survival
    return HeldOut(length, tuple(rates))
