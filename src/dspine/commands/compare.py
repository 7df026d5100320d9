"""`dspine compare`: any set of drafters, trained and decoded under the same conditions, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspine.commands.console import note, stdout_console


def compare(
    plan: Annotated[str, typer.Argument(help="A YAML file, or a built-in one: six-drafters, six-drafters-gpu, ablations.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the comparison; resumed if it holds this plan.")],
    benchmarks: Annotated[
        Path, typer.Option("--benchmarks", "-b", help="Folder with the prompt files that the plan names (NAME.jsonl).")
    ],
    only: Annotated[list[str] | None, typer.Option(help="Do this row only. Repeatable: calls can share the work.")] = None,
    train_only: Annotated[bool, typer.Option(help="Train, and leave decoding to a later call.")] = False,
    stop_after: Annotated[float, typer.Option(help="Stop after so many minutes, everything saved; 0 = to the end.")] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = all.")] = 0,
) -> None:
    """Train drafters on identical data, anchors, order, steps and seed, decode them in one engine, and write one table.

    A killed comparison goes on where it was with the same command. OUTPUT gets table.md, table.csv, table.json and figures.

    Examples:

      dspine compare six-drafters -o runs/six -b benchmarks/prompts

      dspine compare six-drafters -o runs/six -b benchmarks/prompts --only dspine --threads 1

      dspine compare my-plan.yaml -o runs/mine -b prompts --stop-after 9
    """
    import torch

    from dspine.comparison.figures import draw_figures
    from dspine.comparison.plan import load_plan
    from dspine.comparison.run import run_comparison
    from dspine.comparison.table import markdown, write_tables

    if threads:
        torch.set_num_threads(threads)
    loaded = load_plan(plan)
    finished = run_comparison(
        loaded,
        output,
        benchmarks,
        only=tuple(only or ()),
        report=note,
        stop_after_s=60 * stop_after if stop_after > 0 else float("inf"),
        decode=not train_only,
    )
    lines = write_tables(loaded, output)
    draw_figures(loaded, lines, output)
    stdout_console().print(markdown(loaded, lines), soft_wrap=True, markup=False)
    if not finished:
        note("stopped before the end; the same command goes on")
