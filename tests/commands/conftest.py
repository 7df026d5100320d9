"""The command line on a tiny model in a temporary folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspine.commands.main import run
from dspine.drafters.base import BlockDrafter
from dspine.drafters.checkpoint import save_drafter
from dspine.targets.model import Target


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error, without its beginning."""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, "errors are one line"
        return self.err[len("error: ") : -1]

    @property
    def data(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        return dict(json.loads(self.out.splitlines()[-1]))


@dataclass(frozen=True)
class Folders:
    """A saved tiny Llama, drafters for it, and a file of prompts."""

    target: Path
    dspine: Path
    dflash: Path
    prompts: Path

    @property
    def options(self) -> list[str]:
        return ["--target", str(self.target), "--drafter", str(self.dspine)]

    @property
    def fixed(self) -> list[str]:
        """The same with a width that no timing chooses."""
        return [*self.options, "--width", "4"]


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("generate", "text", stdin=b"...")` runs the command line in this process."""

    def call(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_target: Target,
    make_drafter: Callable[..., BlockDrafter],
) -> Folders:
    root = tmp_path_factory.mktemp("commands")
    made = Folders(root / "target", root / "dspine", root / "dflash", root / "prompts.jsonl")
    make_model("llama").save_pretrained(made.target)
    tiny_tokenizer.save_pretrained(made.target)
    for name, folder in (("dspine", made.dspine), ("dflash", made.dflash)):
        save_drafter(make_drafter(tiny_target, name, expected_acceptance=(0.5, 0.25)), folder)
    turns = [["first question", "and then?"], ["second question"], ["third question", "more"]]
    made.prompts.write_text("".join(json.dumps({"turns": t}) + "\n" for t in turns), encoding="utf-8")
    return made
