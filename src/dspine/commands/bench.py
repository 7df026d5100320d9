"""`dspine bench`: what the machine makes of it. Its commands, a file each."""

from __future__ import annotations

import typer

from dspine.commands.bench_batch import batch
from dspine.commands.bench_breakdown import breakdown
from dspine.commands.bench_speed import speed
from dspine.commands.console import show_help_without_command

app = typer.Typer(invoke_without_command=True)


@app.callback()
def group(context: typer.Context) -> None:
    """Measure speed on this machine."""
    show_help_without_command(context)


app.command()(speed)
app.command()(batch)
app.command()(breakdown)
