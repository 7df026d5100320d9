"""`dspine generate`: one prompt in, the target's own text out, faster."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine.commands import options
from dspine.commands.console import note, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Generator

    from dspine.api import LLM, GenerationResult, StreamChunk
    from dspine.decoding.sampling import SamplingParams

WARM_UP_TOKENS = 12


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it and --file, stdin is read.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a UTF-8 file.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", "-c", help="The prompt is a user's turn: answer it as the chat model.")] = False,
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    max_new_tokens: options.MaxNewTokensOption = 256,
    temperature: options.TemperatureOption = 0.0,
    top_k: options.TopKOption = 0,
    top_p: options.TopPOption = 1.0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionPenaltyOption = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.", show_default=False)] = None,
    seed: options.SeedOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens whatever the model says.")] = False,
    width: options.WidthOption = "auto",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes, or all at the end.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too and show both speeds.")] = False,
    repeats: Annotated[int, typer.Option(help="With --compare: time each N times and show medians.")] = 1,
    show_acceptance: Annotated[
        bool, typer.Option("--show-acceptance", help="Colour what was drafted and what the target wrote itself.")
    ] = False,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Generate text. The output is exactly the target's; the drafter only makes it come faster.

    Examples:

      dspine generate --chat "Why is the sky blue?"

      dspine generate --chat --compare --max-new-tokens 128 "Explain recursion to a child."

      dspine generate --chat --show-acceptance "Write a Python function that reverses a list."

      dspine generate --temperature 0.8 --top-p 0.95 --seed 7 "Once upon a time"

      cat notes.txt | dspine generate --chat --target ./my-model --drafter ./my-drafter
    """
    text = read_prompt(prompt, file)
    from dspine.decoding.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens, stop=tuple(stop or ()), seed=seed, ignore_eos=ignore_eos,
    )  # fmt: skip
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    llm = options.load_llm(target, drafter, device, dtype, width=options.parse_width(width), need_drafter=compare)
    job = Job(llm, text, chat, params)
    if not compare:
        result = print_answer(job, stream, show_acceptance)
        note(summary(result, drafted=llm.drafter is not None))
        return
    for speculative in (False, True):  # first calls allocate memory, choose kernels and measure the costs of widths
        job.decode(speculative, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens))
    speculated = [print_answer(job, stream, show_acceptance)]
    plain = [job.decode(False)]
    for _ in range(repeats - 1):
        speculated.append(job.decode(True))
        plain.append(job.decode(False))
    print_comparison(plain, speculated, params.is_greedy)


@dataclass(frozen=True)
class Job:
    """One prompt and how to answer it."""

    llm: LLM
    text: str
    chat: bool
    params: SamplingParams

    def decode(self, speculative: bool, **changes: Any) -> GenerationResult:
        return self.llm.generate(self.text, chat=self.chat, speculative=speculative, **{**asdict(self.params), **changes})

    def stream(self) -> Generator[StreamChunk, None, None]:
        return self.llm.stream(self.text, chat=self.chat, **asdict(self.params))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or stdin; UserError when there is none or it is no UTF-8 text."""
    if prompt is not None and file is not None:
        raise UserError("both a prompt and --file are given; choose one")
    if prompt is not None:
        text, source = prompt, "the prompt"
        if any("\ud800" <= character <= "\udfff" for character in text):  # how Python keeps argument bytes that are not UTF-8
            raise UserError("the prompt is not UTF-8 text; convert it first")
    elif file is not None:
        source = str(file)
        try:
            text = _decode(file.read_bytes(), source)
        except OSError as error:
            raise UserError(f"cannot read the prompt from {file}: {error.strerror}") from error
    elif sys.stdin.isatty():
        raise UserError('no prompt: give one (dspine generate "..."), a file (--file FILE), or pipe text in')
    else:
        source = "stdin"
        text = _decode(sys.stdin.buffer.read(), source)
    if not text.strip():
        raise UserError(f"{source} is empty; give some text")
    return text


def _decode(data: bytes, source: str) -> str:
    """Text of a file or a pipe, without the line break that ends it."""
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text (byte {error.start}); convert it first") from error


def print_answer(job: Job, stream: bool, show_acceptance: bool) -> GenerationResult:
    """Decode and print. Leaving early (Ctrl-C) cancels the request and ends the line."""
    view = None
    if show_acceptance:
        from dspine.commands.acceptance_view import AcceptanceView

        view = AcceptanceView(job.llm.target.tokenizer, job.params.stop, stdout_console())
    result = None
    with closing(job.stream()) as chunks:
        try:
            for chunk in chunks:
                result = chunk.result
                if stream and view is not None:
                    view.push(chunk.token_ids, chunk.accepted)
                elif stream:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            raise
    assert result is not None, "the last chunk carries the result"
    if view is not None:
        if not stream:
            view.push(result.token_ids, result.accepted)
        view.finish()
    else:
        print("" if stream else result.text, flush=True)
    return result


def summary(result: GenerationResult, drafted: bool) -> str:
    """What one answer cost, in a line."""
    stats = result.stats
    parts = [f"{len(result.token_ids)} tokens", f"{stats.rounds} rounds"]
    if drafted:
        parts.append(f"tau {stats.acceptance_length:.2f}")
    parts += [f"{result.tok_per_s:.1f} tok/s", f"first token after {result.ttft_s:.2f} s"]
    if result.finish_reason == "length":
        parts.append("cut at its longest length")
    return ", ".join(parts)


def print_comparison(plain: list[GenerationResult], speculated: list[GenerationResult], greedy: bool) -> None:
    """The table of --compare; speeds are medians over the repeats."""
    from rich.table import Table

    table = Table(title="plain decoding and dspine, same model, same process", title_justify="left")
    for column in ("", "tokens", "rounds", "tau", "tok/s", "first token"):
        table.add_column(column, justify="left" if column == "" else "right")
    speeds = []
    for name, results in (("plain", plain), ("dspine", speculated)):
        stats = results[0].stats
        speeds.append(median(result.tok_per_s for result in results))
        ttft_s = median(result.ttft_s for result in results)
        counts = (str(len(results[0].token_ids)), str(stats.rounds), f"{stats.acceptance_length:.2f}")
        table.add_row(name, *counts, f"{speeds[-1]:.1f}", f"{ttft_s:.2f} s")
    console = stdout_console()
    console.print()
    console.print(table)
    console.print(f"{speeds[1] / speeds[0]:.2f}x the speed of plain decoding; {_identity(plain, speculated, greedy)}")


def _identity(plain: list[GenerationResult], speculated: list[GenerationResult], greedy: bool) -> str:
    if not greedy:
        return "identical output is not expected: sampled text differs from run to run, its distribution is the same"
    same = all(result.token_ids == plain[0].token_ids for result in (*plain, *speculated))
    return f"output token-identical: {'yes' if same else 'NO'}"
