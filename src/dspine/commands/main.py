"""The command line: one app, and errors as one line each.

Nothing here imports torch: `dspine --help` answers at once, each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dspine import __version__
from dspine.commands import bench, evaluate, study
from dspine.commands.calibrate import calibrate
from dspine.commands.compare import compare
from dspine.commands.console import note, print_error, show_help_without_command
from dspine.commands.data import app as data_app
from dspine.commands.export import export
from dspine.commands.generate import generate
from dspine.commands.info import drafters, info
from dspine.commands.report import report
from dspine.commands.serve import serve
from dspine.commands.train import train
from dspine.errors import UserError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
# typer keeps a copy of click or uses the real one, by its version; both derive BadParameter from this.
_ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="dspine",
    invoke_without_command=True,  # the callback then shows the help
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dspine {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make a language model decode faster with a parallel drafter; the output stays exactly the model's.

    Start here:

      dspine generate --chat --compare "Why is the sky blue?"

    Every command teaches its own use: dspine COMMAND --help.
    """
    show_help_without_command(context)


app.command()(generate)
app.command()(serve)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")
app.add_typer(study.app, name="study")
app.add_typer(data_app, name="data")
app.command()(train)
app.command()(calibrate)
app.command()(compare)
app.command()(export)
app.command()(report)
app.command()(info)
app.command()(drafters)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; every expected failure is one line on stderr. Returns the exit code."""
    try:
        code = app(list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        print_error(str(error))
        return EXIT_USAGE
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its help is the message, or printed already
            print(error, end="")
        else:
            print_error(_usage_message(error))
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_FAILURE
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else (error.strerror or str(error))
        print_error(what)
        return EXIT_FAILURE
    except MemoryError:
        print_error("out of memory; use a smaller model, fewer rows or shorter answers")
        return EXIT_FAILURE
    if code == EXIT_INTERRUPTED:
        note("interrupted")
    return code if isinstance(code, int) else 0


def _usage_message(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dspine"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{message.rstrip('.')} (see `{command} --help`)"


def _silence_stdout() -> None:
    """Whoever read our output has gone: what is still buffered must not raise again on the way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The `dspine` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end the run.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # before transformers is imported
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
