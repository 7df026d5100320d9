"""`dspine data` as a program: kill -9 and Ctrl-C in the middle, the same file afterwards, and what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dspine.commands.data import app
from dspine.errors import UserError
from dspine.journal import partial_file, read_rows

from .interrupts import heed_interrupts

TEXTS = [f"prompt number {i}" for i in range(40)]
# The program, a little slowed, so that there is a middle in which to stop it.
SLOW = """
import time
from dspine.commands.data import app
from dspine.decoding.engine import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.02), step(self))[1]
app()
"""


@pytest.fixture(scope="module")
def target_folder(
    make_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A tiny random model that writes words and ends them now and then."""
    model: Any = make_model("phi")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        model.lm_head.bias.fill_(-30)
        model.lm_head.bias[torch.tensor(tiny_tokenizer("abcdefgh")["input_ids"])] = 0.0
        model.lm_head.bias[tiny_tokenizer(" ")["input_ids"][0]] = 1.5
        model.lm_head.bias[1] = -0.5
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    return file


def command(name: str, output: Path, target: str, *more: str) -> list[str]:
    return [name, "--output", str(output), "--target", target, "--device", "cpu", *more]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(caught.value)


def stop_in_the_middle(arguments: list[str], partial: Path, rows: int, number: signal.Signals) -> tuple[int, str]:
    """Run the program until its journal holds `rows` more rows, send it a signal; exit code and stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before = partial.read_bytes().count(b"\n") if partial.exists() else 1
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not partial.exists() or partial.read_bytes().count(b"\n") < before + rows:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_regenerate_survives_kill_and_interrupt(tmp_path: Path, target_folder: str, prompt_file: Path) -> None:
    options = ["--prompts", str(prompt_file), "--max-new-tokens", "16", "--batch", "3", "--temperature", "0.9"]
    run(*command("regenerate", tmp_path / "whole.jsonl.gz", target_folder, *options))
    output = tmp_path / "a.jsonl.gz"
    arguments = command("regenerate", output, target_folder, *options)
    code, _ = stop_in_the_middle(arguments, partial_file(output), 8, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not output.exists()
    code, errors = stop_in_the_middle(arguments, partial_file(output), 8, signal.SIGINT)
    assert code == 130
    assert errors.endswith("interrupted; give the same command again to continue\n")
    assert "Traceback" not in errors
    assert not output.exists()
    kept = len(read_rows(partial_file(output))) - 1
    assert 16 <= kept < len(TEXTS)
    assert f"40 answers ({len(TEXTS) - kept} new)" in run(*arguments)
    assert output.read_bytes() == (tmp_path / "whole.jsonl.gz").read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"set.jsonl", "a.jsonl.gz", "whole.jsonl.gz"}


def test_synthesize_survives_a_kill(tmp_path: Path, target_folder: str) -> None:
    options = ["--count", "12", "--kinds", "math,code", "--max-new-tokens", "40", "--batch", "4"]
    run(*command("synthesize", tmp_path / "whole.jsonl", target_folder, *options))
    output = tmp_path / "p.jsonl"
    arguments = command("synthesize", output, target_folder, *options)
    code, _ = stop_in_the_middle(arguments, partial_file(output), 10, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not output.exists()
    assert "12 prompts (6 math, 6 code) of " in run(*arguments)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert "12 prompts already; nothing to do" in run(*arguments)
    assert "is there already; choose another" in fails(*arguments, "--count", "13")


def test_regenerate_reports_what_it_left_out(tmp_path: Path, target_folder: str) -> None:
    prompts = tmp_path / "set.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("a", "a", "b" * 50, "c")))
    arguments = command("regenerate", tmp_path / "a.jsonl", target_folder, "--prompts", str(prompts), "--max-new-tokens", "4")
    result = CliRunner().invoke(app, [*arguments, "--max-prompt-tokens", "40"], catch_exceptions=False)
    size = (tmp_path / "a.jsonl").stat().st_size
    assert result.stdout == f"{tmp_path / 'a.jsonl'}: 2 answers (2 new), {size / 1e3:.1f} kB\n"
    assert "left out: 1 duplicates, 1 too long, 0 refused; " in result.stderr
    assert "\r" not in result.stderr  # no progress bar where there is no terminal
    assert run(*arguments, "--limit", "1").startswith(f"{tmp_path / 'a.jsonl'}: 2 answers (0 new)")


def test_unreadable_input(tmp_path: Path, target_folder: str, prompt_file: Path) -> None:
    output = tmp_path / "a.jsonl"
    missing = command("regenerate", output, target_folder, "--prompts", str(tmp_path / "none.jsonl"))
    assert fails(*missing) == f"no such file: {tmp_path / 'none.jsonl'}"
    prompt_file.write_bytes(b'{"turns": ["\xff"]}\n')
    arguments = command("regenerate", output, target_folder, "--prompts", str(prompt_file))
    assert "is not UTF-8 (byte 12)" in fails(*arguments)
    assert "limit = -1" in fails(*arguments, "--limit", "-1")
    assert "give its server with --endpoint" in fails(*arguments, "--model", "m")
    prompt_file.write_text('{"turns": ["a"]}\n')
    assert "give --model" in fails(*arguments, "--endpoint", "http://127.0.0.1:9/v1")
    assert "is no http address" in fails(*arguments, "--endpoint", "nowhere", "--model", "m")
    assert "unknown kind of prompt 'poems'" in fails(*command("synthesize", output, target_folder, "--kinds", "poems"))
    assert {file.name for file in tmp_path.iterdir()} == {"set.jsonl"}


def test_served_answers_need_no_weights(
    tmp_path: Path, target_folder: str, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an endpoint, tokenizer and config are enough; the key comes from the environment."""
    from dspine.endpoint import ChatEndpoint, Completion

    asked: list[tuple[str, str]] = []

    def complete(self: ChatEndpoint, user_text: str, **options: object) -> Completion:
        asked.append((self.api_key, user_text))
        return Completion(user_text.upper(), finished=True)

    light = tmp_path / "light"
    light.mkdir()
    for file in Path(target_folder).iterdir():
        if file.suffix == ".json":
            (light / file.name).write_bytes(file.read_bytes())
    (light / "chat_template.jinja").write_bytes((Path(target_folder) / "chat_template.jinja").read_bytes())
    monkeypatch.setattr(ChatEndpoint, "complete", complete)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    output = tmp_path / "a.jsonl"
    served = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "tiny"]
    run(*command("regenerate", output, str(light), "--prompts", str(prompt_file), "--limit", "3", *served))
    assert sorted(asked) == [("secret", text) for text in TEXTS[:3]]
    header, *answers = read_rows(output)
    assert header["header"]["source"] == {"kind": "endpoint", "model": "tiny", "url": "http://127.0.0.1:9/v1"}
    assert len(answers) == 3
