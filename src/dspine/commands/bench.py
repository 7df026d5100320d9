"""`dspine bench`: what the machine makes of it. Its commands, a file each."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dspine.commands.bench_batch import batch
from dspine.commands.bench_breakdown import breakdown
from dspine.commands.bench_speed import speed
from dspine.commands.bench_throughput import throughput
from dspine.commands.console import show_help_without_command


class SpeedByDefault(TyperGroup):
    """`dspine bench --prompts FILE` is `dspine bench speed --prompts FILE`: most people want that one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        parsed: list[str] = super().parse_args(ctx, ["speed", *args] if options else args)
        return parsed


app = typer.Typer(invoke_without_command=True, cls=SpeedByDefault)


@app.callback()
def group(context: typer.Context) -> None:
    """Measure speed on this machine. Options without a command are those of `speed`."""
    show_help_without_command(context)


app.command()(speed)
app.command()(batch)
app.command()(breakdown)
app.command()(throughput)
