"""The frame of all commands: help that teaches and comes at once, errors as one line, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dspine
from dspine.commands import main as main_module
from dspine.commands.main import run
from dspine.errors import UserError

COMMANDS = (
    "generate",
    "bench speed",
    "bench batch",
    "bench breakdown",
    "bench throughput",
    "eval acceptance",
    "data",
    "train",
    "report",
    "info",
    "drafters",
)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit code of a run whose app raises `error`."""

    def app(arguments: list[str], standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", app)
    return run([])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_examples(command: str, cli) -> None:  # type: ignore[no-untyped-def]
    outcome = cli(*command.split(), "--help")
    assert outcome.code == 0
    assert f"dspine {command}" in outcome.out or command == "data"
    assert "Example" in outcome.out or command == "data"


@pytest.mark.parametrize("command", [[], ["bench"], ["eval"]])
def test_a_group_alone_shows_its_help(command: list[str], cli) -> None:  # type: ignore[no-untyped-def]
    outcome = cli(*command)
    assert "Usage:" in outcome.out
    assert (outcome.code, outcome.err) == (0, "")


def test_the_version_is_told(cli) -> None:  # type: ignore[no-untyped-def]
    assert cli("--version").out == f"dspine {dspine.__version__}\n"


def test_the_command_line_starts_without_torch() -> None:
    code = "import dspine.commands.main, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["generate", "--top-k", "many"], "Invalid value for '--top-k'"),
        (["bench", "speed"], "Missing option '--prompts'"),
        (["generate", "--no-such-option"], "No such option: --no-such-option"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(arguments: list[str], message: str, cli) -> None:  # type: ignore[no-untyped-def]
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.error.startswith(message)
    assert outcome.error.endswith("--help`)")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("width = 99: too much\nof it"), 2, "error: width = 99: too much of it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device", "/tmp/x"), 1, "error: /tmp/x: No space left on device\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (OSError("something odd"), 1, "error: something odd\n"),
        (MemoryError(), 1, "error: out of memory; use a smaller model, fewer rows or shorter answers\n"),
    ],
)
def test_expected_failures_are_one_line(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(monkeypatch, error) == code
    assert capsys.readouterr().err == message


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(monkeypatch, ZeroDivisionError())


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """As in `dspine info | head -0`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dspine.commands.main", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) in (0, 1)
    process.stderr.close()
