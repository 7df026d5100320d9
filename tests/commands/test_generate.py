"""`dspine generate` on a tiny model: what it prints where, and every input it must refuse."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import dspine
from dspine.api import LLM
from dspine.commands.generate import read_prompt
from dspine.errors import UserError

from .interrupts import heed_interrupts

PROMPT = "The quick brown fox"
SHORT = ("--max-new-tokens", "20")


@pytest.fixture(scope="module")
def expected(folders: Any) -> Callable[..., str]:
    """The text the Python API gives."""
    llm = dspine.load(str(folders.target), drafter=None)
    return lambda prompt=PROMPT, **options: llm.generate(prompt, **{"max_new_tokens": 20, **options}).text


# --- where the prompt comes from -------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
@pytest.mark.parametrize("drafter", ["dspine", "dflash", "none"])
def test_the_answer_goes_to_stdout_and_its_cost_to_stderr(
    drafter: str, streaming: str, cli: Any, folders: Any, expected: Callable[..., str]
) -> None:
    folder = {"dspine": folders.dspine, "dflash": folders.dflash, "none": "none"}[drafter]
    width = () if drafter == "none" else ("--width", "4")
    outcome = cli("generate", PROMPT, "--target", folders.target, "--drafter", folder, *width, streaming, *SHORT)
    assert (outcome.code, outcome.out) == (0, expected() + "\n")
    assert outcome.err.count("\n") == 1
    assert " tokens, " in outcome.err
    assert " tok/s, first token after " in outcome.err
    assert ("tau" in outcome.err) == (drafter != "none")


def test_the_prompt_may_come_from_a_file_or_stdin(cli: Any, folders: Any, tmp_path: Path, expected: Callable[..., str]) -> None:
    prompt = "Zwölf Boxkämpfer\njagen"
    (tmp_path / "prompt.txt").write_text(prompt + "\r\n", encoding="utf-8")
    from_file = cli("generate", "--file", tmp_path / "prompt.txt", *folders.fixed, *SHORT)
    from_stdin = cli("generate", *folders.fixed, *SHORT, stdin=(prompt + "\n").encode())
    assert from_file.out == from_stdin.out == expected(prompt) + "\n"


def test_chat_uses_the_template(cli: Any, folders: Any, expected: Callable[..., str]) -> None:
    assert cli("generate", "--chat", PROMPT, *folders.fixed, *SHORT).out == expected(chat=True) + "\n"


def test_sampling_options_are_handed_on(cli: Any, folders: Any) -> None:
    llm = dspine.load(str(folders.target), drafter=folders.dspine, width=4)
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    text = llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True, stop=("never", "nowhere"), **options).text
    outcome = cli("generate", PROMPT, *folders.fixed, *SHORT, *flags, "--ignore-eos", "--stop", "never", "--stop", "nowhere")
    assert outcome.out == text + "\n"


def test_a_stop_string_ends_the_text(cli: Any, folders: Any, expected: Callable[..., str]) -> None:
    text = expected()
    assert cli("generate", PROMPT, *folders.fixed, *SHORT, "--stop", text[3:5]).out == text[: text.index(text[3:5])] + "\n"


def test_without_a_shipped_drafter_the_target_decodes_plainly(cli: Any, folders: Any, expected: Callable[..., str]) -> None:
    outcome = cli("generate", PROMPT, "--target", folders.target, *SHORT)
    assert outcome.out == expected() + "\n"
    assert outcome.err.startswith(f"no drafter ships for {folders.target}: decoding without one")


# --- what it shows ---------------------------------------------------------------------------------------------------


def test_compare_shows_both_speeds_and_that_nothing_changed(cli: Any, folders: Any, expected: Callable[..., str]) -> None:
    outcome = cli("generate", PROMPT, *folders.fixed, *SHORT, "--compare", "--repeats", "2")
    assert outcome.code == 0
    assert outcome.out.startswith(expected() + "\n")
    rows = {line.split()[1]: line.split() for line in outcome.out.splitlines() if line.startswith("│")}
    assert rows["plain"][3] == rows["dspine"][3], "as many tokens"
    assert rows["plain"][7] == "1.00", "plain decoding's tau"
    assert float(rows["dspine"][9]) > 0
    assert "x the speed of plain decoding; output token-identical: yes" in outcome.out


def test_compare_owns_up_to_a_difference(cli: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LLM.generate

    def wrong(self: LLM, prompt: Any, **options: Any) -> Any:
        result = real(self, prompt, **options)
        if not options["speculative"]:
            result.token_ids[-1] += 1
        return result

    monkeypatch.setattr(LLM, "generate", wrong)
    assert "output token-identical: NO" in cli("generate", PROMPT, *folders.fixed, *SHORT, "--compare").out


def test_compare_does_not_expect_sampled_texts_to_agree(cli: Any, folders: Any) -> None:
    outcome = cli("generate", PROMPT, *folders.fixed, *SHORT, "--compare", "--temperature", "1", "--seed", "1")
    assert "identical output is not expected: sampled text differs" in outcome.out


@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
def test_acceptance_is_marked_without_colours_too(streaming: str, cli: Any, folders: Any, expected: Callable[..., str]) -> None:
    outcome = cli("generate", PROMPT, *folders.fixed, *SHORT, "--show-acceptance", streaming)
    text, legend = outcome.out.rstrip("\n").rsplit("\n", 1)
    assert text.replace("[", "").replace("]", "") == expected().replace("[", "").replace("]", "")
    assert text.count("[") > 5
    result = dspine.load(str(folders.target), drafter=folders.dspine, width=4).generate(PROMPT, max_new_tokens=20)
    accepted = sum(result.accepted)
    assert legend == f"drafted and accepted {accepted}, [the target's own] {len(result.token_ids) - accepted} tokens"


def test_acceptance_is_coloured_where_there_are_colours(cli: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = cli("generate", PROMPT, *folders.fixed, *SHORT, "--show-acceptance").out
    assert "\x1b[1;33m" in out
    assert "\x1b[32mdrafted and accepted" in out
    assert "[the target's own]" not in out


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["   "], "the prompt is empty; give some text"),
        (["\udcff bytes"], "the prompt is not UTF-8 text; convert it first"),
        (["x" * 600], "the prompt has 600 tokens, but {target} holds 512 with the answer; shorten it"),
        (["x", "--file", "{prompts}"], "both a prompt and --file are given; choose one"),
        (["--file", "{target}"], "cannot read the prompt from {target}: Is a directory"),
        (["--file", "no-such-file"], "cannot read the prompt from no-such-file: No such file or directory"),
        (["x", "--temperature", "-1"], "temperature=-1.0 is out of range; give 0 (greedy) to 100"),
        (["x", "--temperature", "nan"], "temperature=nan is out of range"),
        (["x", "--top-p", "0"], "top_p=0.0 is out of range"),
        (["x", "--top-k", "-3"], "top_k=-3 is out of range"),
        (["x", "--min-p", "2"], "min_p=2.0 is out of range"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty=0.0 is out of range"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens=0 is out of range"),
        (["x", "--stop", ""], "stop=('',) holds an empty string"),
        (["x", "--width", "99"], "width = 99: give 'auto', 'confidence' or a whole number from 1 (plain) to 6 (the drafter's"),
        (["x", "--width", "wide"], "width 'wide' is neither 'auto', 'confidence' nor a whole number"),
        (["x", "--repeats", "0"], "repeats = 0: at least 1 is needed"),
        (["x", "--dtype", "float8"], "unknown dtype 'float8'; choose one of auto, float32, bfloat16, float16"),
        (["x", "--target", "no-such-model"], "cannot load target 'no-such-model' ("),
        (["x", "--target", "none.gguf"], "no such GGUF file: none.gguf"),
        (["x", "--drafter", "no-such-drafter"], "no draft checkpoint 'no-such-drafter' for {target}; give a checkpoint folder"),
        (["x", "--compare", "--drafter", "none"], "no drafter ships for {target}, and none was named; give --drafter FOLDER"),
        (["x", "--drafter", "{target}"], "{target}/config.json is no draft checkpoint config ("),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], message: str, cli: Any, folders: Any) -> None:
    names = {"{target}": str(folders.target), "{prompts}": str(folders.prompts)}
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
        message = message.replace(name, value)
    outcome = cli("generate", *folders.fixed, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error.startswith(message)


def test_files_and_pipes_that_are_no_text_are_refused(cli: Any, folders: Any, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"\n")
    latin, empty = (cli("generate", "--file", tmp_path / name, *folders.fixed) for name in ("latin", "empty"))
    assert latin.error == f"{tmp_path / 'latin'} is not UTF-8 text (byte 3); convert it first"
    assert empty.error == f"{tmp_path / 'empty'} is empty; give some text"
    assert cli("generate", *folders.fixed, stdin=b"\xff\xfe").error == "stdin is not UTF-8 text (byte 0); convert it first"
    assert cli("generate", *folders.fixed).error == "stdin is empty; give some text"


def test_without_a_prompt_at_a_terminal_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(UserError, match="no prompt: give one"):
        read_prompt(None, None)


def test_a_drafter_of_another_target_is_refused_by_name(
    cli: Any, folders: Any, tmp_path: Path, make_model: Callable[..., PreTrainedModel]
) -> None:
    shutil.copytree(folders.target, tmp_path / "other")
    make_model("llama", num_hidden_layers=4).save_pretrained(tmp_path / "other")
    outcome = cli("generate", "x", "--target", tmp_path / "other", "--drafter", folders.dspine)
    assert outcome.error.startswith("this drafter was trained for tiny-llama with num_layers = 3, but ")
    assert "has num_layers = 4; use the drafter's own target, or train a drafter for this one" in outcome.error


@pytest.mark.parametrize("damage", ["truncated", "missing", "shapes"])
def test_a_damaged_checkpoint_is_refused(damage: str, cli: Any, folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(folders.dspine, folder)
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    else:
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"transfer_rank": 6', '"transfer_rank": 7'))
    outcome = cli("generate", "x", "--target", folders.target, "--drafter", folder)
    assert outcome.code == 2
    wrong = "does not match its config.json" if damage == "shapes" else "is missing or damaged"
    assert outcome.error.startswith(f"{weights} {wrong}")


def test_a_truncated_target_is_refused(cli: Any, folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(folders.target, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert cli("generate", "x", "--target", folder).error.startswith(f"cannot load target '{folder}' (")


def test_ctrl_c_in_the_middle_ends_it_at_once(folders: Any) -> None:
    """Streaming a long answer, interrupted once text has come."""
    command = [sys.executable, "-m", "dspine.commands.main", "generate", PROMPT, "--ignore-eos", "--max-new-tokens", "490"]
    process = subprocess.Popen(
        [*command, *folders.fixed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first
    assert process.returncode == 130
    assert err.decode().splitlines() == ["interrupted"]
    assert out.endswith(b"\n")
    assert time.monotonic() - started < 30
