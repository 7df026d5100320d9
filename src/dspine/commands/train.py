"""`dspine train`: a recipe in, a draft checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or a built-in one: smollm2-135m, smollm2-135m-dflash, qwen3-8b, qwen3-4b.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for state, curves and the checkpoint; resumed if it has a state.")
    ],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: section.key=value. Repeatable.")] = None,
    stop_after: Annotated[
        float, typer.Option(help="Stop after so many minutes of training, state saved; 0 = train to the end.")
    ] = 0.0,
    threads: Annotated[
        int, typer.Option(help="CPU threads; 0 = all. With other work on the machine, 1 avoids waiting threads.")
    ] = 0,
) -> None:
    """Train a drafter for a target.

    The run stops and goes on as often as you like: the same command resumes it, bit-exact on a CPU. TensorBoard curves are in
    OUTPUT/tensorboard, the finished checkpoint in OUTPUT/checkpoint.

    Examples:

      dspine train smollm2-135m -o runs/dspine

      dspine train smollm2-135m -o runs/short --set optimiser.epochs=1

      accelerate launch -m dspine.commands.main train qwen3-8b -o runs/qwen3-8b --set data.answers='[answers.jsonl.gz]'
    """
    import math

    import torch

    from dspine.training.recipe import load_recipe
    from dspine.training.run import run_training

    if threads:
        torch.set_num_threads(threads)
    run_training(load_recipe(recipe, overrides), output, stop_after_s=60 * stop_after if stop_after > 0 else math.inf)
