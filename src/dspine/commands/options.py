"""The options that several commands take, worded once, and what their values become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dspine.commands.console import note, waiting
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.api import LLM
    from dspine.evaluation.benchmarks import Benchmark

DEFAULT_TARGET = "smollm2-135m"

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="The model to speed up: hub id, folder, .gguf file or smollm2-135m.")
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto (the shipped one), none, a shipped one's name (dspine, dflash), or a folder.",
    ),
]
WidthOption = Annotated[
    str,
    typer.Option(
        "--width",
        "-w",
        help="Slots verified per round, the anchor included; auto: what measured costs favour; confidence: the same for every "
        "draft by how sure the drafter is (see dspine calibrate).",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option(help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16.")]
PromptsOption = Annotated[
    Path, typer.Option("--prompts", "-p", help='Prompts, one {"turns": ["..."]} per line (JSON lines).', show_default=False)
]
LimitOption = Annotated[int, typer.Option("--limit", "-l", help="Use the first N prompts; 0 = all.")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")]
ChatOption = Annotated[
    bool, typer.Option(help="Prompts are user turns in the model's chat template, or plain text to go on with.")
]
OutputFileOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the whole result as JSON here.", show_default=False)
]
RepeatsOption = Annotated[int, typer.Option("--repeats", "-r", help="Time everything N times.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", "-T", help="0 = greedy, the most likely token each time.")]
TopKOption = Annotated[int, typer.Option(help="Sample among the K likeliest tokens; 0 = off.")]
TopPOption = Annotated[float, typer.Option(help="Sample among the likeliest tokens that make up this probability; 1 = off.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens less likely than this times the likeliest; 0 = off.")]
RepetitionPenaltyOption = Annotated[float, typer.Option(help="Above 1: tokens that occurred before become less likely; 1 = off.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same text (when sampling).", show_default="random")]


def parse_width(text: str) -> int | Literal["auto", "confidence"]:
    """ "auto", "confidence" or a whole number; the engine checks its range."""
    if text == "auto":
        return "auto"
    if text == "confidence":
        return "confidence"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"width {text!r} is neither 'auto', 'confidence' nor a whole number") from None


def parse_limit(limit: int) -> int | None:
    if limit < 0:
        raise UserError(f"limit = {limit}: give the number of prompts to use, or 0 for all of them")
    return limit or None


def parse_named(option: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE of each text that `option` was given; a VALUE that is a name itself needs none. Raises UserError."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if "/" in name:
            raise UserError(f"{option} {text} has no name to tell it by; give {option} NAME={text}")
        if name in named:
            raise UserError(f"two are called {name}; give them names: {option} NAME={value or name}")
        named[name] = value if equals else name
    return named


def check_output(output: Path | None) -> None:
    """Raise UserError now where a result could not be written later."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"cannot write {output}: it is a folder or its folder does not exist")


@contextmanager
def loading(target: str) -> Iterator[None]:
    """Say that a target is being loaded; a download shows transformers' own progress instead."""
    if target == DEFAULT_TARGET or Path(target).exists():
        with waiting(f"loading {target}"):
            yield
    else:
        yield


def load_llm(
    target: str,
    drafter: str,
    device: str,
    dtype: str,
    *,
    width: int | Literal["auto", "confidence", "full"] = "auto",
    max_rows: int = 1,
    need_drafter: bool = False,
    keep_model: bool = False,
) -> LLM:
    """Load a target and its drafter as the options say.

    width "full" is the drafter's whole block; `keep_model` keeps the transformers model beside the packed one.
    """
    with loading(target):
        from dspine.api import LLM, find_drafter
        from dspine.targets.model import Target

        loaded = Target.load(target, device=None if device == "auto" else device, dtype=dtype, keep_model=keep_model)
        found = find_drafter(loaded, None if drafter == "none" else drafter)
        if width == "full":
            width = found.config.max_width if found is not None else 1
        llm = LLM(loaded, found, max_rows=max_rows, width=width)
    if found is None and need_drafter:
        raise UserError(
            f"no drafter ships for {target}, and none was named; give --drafter FOLDER (`dspine info` lists what ships)"
        )
    if width == "confidence" and found is not None and llm.calibration is None:
        note("this drafter is not calibrated, so the whole block is verified; see `dspine calibrate`")
    if found is None and drafter == "auto":
        note(f"no drafter ships for {target}: decoding without one (train your own with `dspine train`)")
    return llm


def encode_prompts(benchmark: Benchmark, llm: LLM, *, chat: bool, max_new_tokens: int) -> list[list[int]]:
    """Token ids of a benchmark's first turns; those that leave no room for an answer are left out, and that is said."""
    from dspine.evaluation.benchmarks import first_turns

    prompts, skipped = first_turns(benchmark, llm.target, chat=chat, max_new_tokens=max_new_tokens)
    if skipped:
        note(f"skipped {skipped} prompts that leave no room for {max_new_tokens} new tokens in the context")
    return prompts
