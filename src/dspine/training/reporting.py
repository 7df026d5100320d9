"""What a training run shows: a progress bar, console lines, TensorBoard curves, and `curve.jsonl` with the held-out results."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspine.errors import UserError
from dspine.training.trainer import HeldOut

SCALARS_EVERY = 10  # steps


def long_progress(console: Console) -> Progress:
    """A progress bar for a long job, silent where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


class Reporter:
    """Reports a run of `total` steps that starts at `completed`; silent (and writing nothing) unless `active`."""

    def __init__(self, folder: Path, console: Console, total: int, completed: int, active: bool) -> None:
        self.folder, self.console, self.active = folder, console, active
        self._progress = long_progress(console)
        self._task = self._progress.add_task("training", total=total, completed=completed)
        self._writer: Any = _tensorboard(folder / "tensorboard") if active else None

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if self._writer is not None:
            self._writer.close()

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._progress.update(self._task, completed=step, description=f"training, ce {metrics['ce']:.2f}")
        if self._writer is not None and step % SCALARS_EVERY == 0:
            for name, value in metrics.items():
                self._writer.add_scalar(f"train/{name}", value, step)

    def on_eval(self, step: int, result: HeldOut) -> None:
        self.console.print(
            f"step {step}: held-out acceptance length {result.acceptance_length:.3f}, slot 1 {result.slot_accuracy[0]:.3f}"
        )
        if self._writer is None:
            return
        self._writer.add_scalar("held_out/acceptance_length", result.acceptance_length, step)
        line = {"step": step, "acceptance_length": result.acceptance_length, "slot_accuracy": result.slot_accuracy}
        with (self.folder / "curve.jsonl").open("a", encoding="utf-8") as curve:
            curve.write(json.dumps(line) + "\n")


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("training curves need TensorBoard; install dspine[train]") from error
    return SummaryWriter(str(folder))
