"""What all commands share about the terminal: notes, progress, the JSON line. Answers go to stdout, the rest to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 120  # columns of a table that no terminal limits


def stdout_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """One dim line on stderr."""
    stderr_console().print(Text(message, style="dim"))


def print_error(message: str) -> None:
    """One red line on stderr."""
    stderr_console().print(Text(f"error: {' '.join(message.split())}", style="red"))


def print_json_line(data: dict[str, Any]) -> None:
    """The last line of stdout, for programs."""
    print(json.dumps(data), flush=True)


@contextmanager
def waiting(message: str) -> Iterator[None]:
    """A spinner on stderr while something short runs; silent where stderr is no terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(message)):
        yield


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; call the value with the number of steps done. Silent where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C: say how to go on, exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted; give the same command again to continue")
        raise typer.Exit(130) from None


def show_help_without_command(context: typer.Context) -> None:
    """For the callback of a group: alone, it prints what the group can do."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
