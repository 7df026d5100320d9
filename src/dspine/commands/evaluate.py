"""`dspine eval`: what a drafter is worth, apart from the machine it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line, progress_bar, show_help_without_command, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.api import LLM
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.acceptance import AcceptanceReport, Meter
    from dspine.evaluation.quality import QualityReport

app = typer.Typer(invoke_without_command=True)

BenchmarkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--benchmark",
        "-B",
        help="gsm8k, math500, humaneval, mbpp, livecodebench, mt-bench, arena-hard-v2, or all. Repeatable.",
        show_default=False,
    ),
]
PromptFilesOption = Annotated[
    list[Path] | None,
    typer.Option("--prompts", "-p", help='Own prompts, one {"turns": ["..."]} per line. Repeatable.', show_default=False),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with the benchmarks (NAME.jsonl, .jsonl.gz, .parquet).", show_default="the hub"),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Commit of the benchmark's data set on the hub.", show_default="the pinned one")
]
WidthOption = Annotated[
    str, typer.Option("--width", "-w", help="Slots verified per round: full (the drafter's block), auto, or a number.")
]
TemperaturesOption = Annotated[list[float] | None, typer.Option("--temperature", "-T", help="Repeatable.", show_default="0")]
ThinkingOption = Annotated[
    bool | None, typer.Option(help="The chat template's thinking mode.", show_default="as the template has it")
]
BatchOption = Annotated[int, typer.Option("--batch", "-b", help="Conversations decoded at once.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder for NAME-T0.json, NAME-T1.json, ...; or, for one result, a .json file.",
        show_default=False,
    ),
]


@app.callback()
def group(context: typer.Context) -> None:
    """Measure drafters."""
    show_help_without_command(context)


@app.command()
def acceptance(
    benchmark: BenchmarkOption = None,
    prompts: PromptFilesOption = None,
    data: DataOption = None,
    revision: RevisionOption = None,
    limit: options.LimitOption = 0,
    max_new_tokens: options.MaxNewTokensOption = 256,
    width: WidthOption = "full",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    thinking: ThinkingOption = None,
    temperature: TemperaturesOption = None,
    seed: options.SeedOption = 0,
    batch: BatchOption = 8,
    output: OutputOption = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Measure this server instead: the base URL of an OpenAI-compatible API.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help="The model that the server serves.", show_default=False)] = "",
    sglang: Annotated[bool, typer.Option("--sglang", help="The server is SGLang; --target names its tokenizer.")] = False,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Measure the acceptance length (tau) and the acceptance of every draft position.

    Later turns go on from the answers just generated. Every result ends in one JSON object on a line of its own. With --output a
    result that is there already is not measured again, and one that was interrupted goes on.

    A server has to be idle otherwise: what it counted before and after an answer must be that answer's. Its key is read from
    OPENAI_API_KEY; --drafter is then a name for the results.

    Examples:

      dspine eval acceptance --benchmark gsm8k --limit 100 --max-new-tokens 160

      dspine eval acceptance -B all -T 0 -T 1 --data prompts --output results/dspine

      dspine eval acceptance --prompts mine.jsonl --drafter dflash --output dflash-mine.json

      dspine eval acceptance -B gsm8k --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-8B --drafter eagle3
    """
    from dspine.evaluation.acceptance import EngineMeter, measure
    from dspine.evaluation.benchmarks import load_benchmarks
    from dspine.evaluation.resume import result_files

    sampling = _sampling(temperature, max_new_tokens, seed)
    found = load_benchmarks(benchmark or [], prompts or [], folder=data, revision=revision, limit=options.parse_limit(limit))
    files = result_files(output, [b.name for b in found], [p.temperature for p in sampling])
    meter: Meter
    if endpoint is not None:
        meter = _server(endpoint, model, sglang, target, drafter, thinking)
    else:
        meter = EngineMeter(_load(target, drafter, device, dtype, width, batch), chat, thinking)
    for one in found:
        for params in sampling:
            title = f"decoding {one.name} at T={params.temperature:g}"
            with progress_bar(title, len(one.conversations)) as advance:
                file = files.get((one.name, params.temperature))
                report = measure(meter, one, params, file=file, on_result=partial(_advance, advance))
            print_acceptance(report)


def _advance(advance: Callable[[int], None], result: object) -> None:
    advance(1)


def _sampling(temperatures: list[float] | None, max_new_tokens: int, seed: int | None) -> list[SamplingParams]:
    from dspine.decoding.sampling import SamplingParams

    return [SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed) for t in temperatures or [0.0]]


def _load(target: str, drafter: str, device: str, dtype: str, width: str, batch: int) -> LLM:
    if batch < 1:
        raise UserError(f"batch = {batch}: at least 1 conversation must be decoded at a time")
    slots = "full" if width == "full" else options.parse_width(width)
    return options.load_llm(target, drafter, device, dtype, width=slots, max_rows=batch, need_drafter=True)


def _server(url: str, model: str, sglang: bool, target: str, drafter: str, thinking: bool | None) -> Meter:
    from dspine.endpoint import ChatEndpoint
    from dspine.evaluation.served import OpenAIServer, ServerMeter, SGLangServer
    from dspine.targets.chat import ChatFormat

    endpoint = ChatEndpoint(url=url, model=model, api_key=os.environ.get("OPENAI_API_KEY", ""))
    server = SGLangServer(endpoint, ChatFormat.load(target)) if sglang else OpenAIServer(endpoint)
    return ServerMeter(server, "server" if drafter == "auto" else drafter, thinking)


@app.command()
def quality(
    benchmark: BenchmarkOption = None,
    prompts: PromptFilesOption = None,
    data: DataOption = None,
    revision: RevisionOption = None,
    limit: options.LimitOption = 0,
    max_new_tokens: options.MaxNewTokensOption = 512,
    width: WidthOption = "full",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    thinking: ThinkingOption = None,
    temperature: TemperaturesOption = None,
    seed: options.SeedOption = 0,
    batch: BatchOption = 8,
    output: OutputOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Show that speed costs no quality: texts and scores with and without the drafter.

    Greedy texts are compared token for token, which needs no reference answers. GSM8K and MATH-500 are scored by their final
    answer, HumanEval and MBPP by pass@1, where the benchmark's file or the hub has the references; the programs that the model
    wrote run in a process of their own with limits on time and memory, without a network where the system allows it.

    Examples:

      dspine eval quality --benchmark humaneval --output results/quality

      dspine eval quality -B gsm8k -B math500 --limit 200 --max-new-tokens 1024

      dspine eval quality --prompts mine.jsonl --max-new-tokens 160
    """
    from dspine.evaluation.benchmarks import load_benchmarks
    from dspine.evaluation.quality import measure_quality
    from dspine.evaluation.resume import result_files

    sampling = _sampling(temperature, max_new_tokens, seed)
    found = load_benchmarks(
        benchmark or [], prompts or [], folder=data, revision=revision, limit=options.parse_limit(limit), graded=True
    )
    files = result_files(output, [b.name for b in found], [p.temperature for p in sampling])
    llm = _load(target, drafter, device, dtype, width, batch)
    for one in found:
        if not one.references:
            note(f"{one.name} comes without references here: only the texts are compared, nothing is scored")
        for params in sampling:
            with progress_bar(f"decoding {one.name} both ways at T={params.temperature:g}", len(one.conversations)) as advance:
                report = measure_quality(
                    llm,
                    one,
                    params,
                    chat=chat,
                    thinking=thinking,
                    file=files.get((one.name, params.temperature)),
                    on_result=partial(_advance, advance),
                )
            print_quality(report)


def print_acceptance(report: AcceptanceReport) -> None:
    from rich.table import Table

    console = stdout_console()
    low, high = report.acceptance_length_ci95
    if report.skipped_turns:
        note(f"skipped {report.skipped_turns} turns that leave no room for {report.max_new_tokens} new tokens in the context")
    title = (
        f"{report.drafter} on {report.benchmark} at T={report.temperature:g}: {report.prompts} prompts, {report.tokens} tokens, "
        f"{report.rounds} rounds"
    )
    if report.acceptance_by_position:
        table = Table(title=title, title_justify="left")
        table.add_column("draft position")
        table.add_column("accepted", justify="right")
        table.add_column("accepted, given all before", justify="right")
        for position, shares in enumerate(zip(report.acceptance_by_position, report.conditional_acceptance, strict=True), 1):
            table.add_row(str(position), *(f"{share:.1%}" for share in shares))
        console.print(table)
    else:
        console.print(f"{title} (the server does not tell positions)")
    console.print(f"acceptance length (tau) {report.acceptance_length:.3f}, 95 % interval over prompts {low:.3f} to {high:.3f}")
    print_json_line(report.summary())


def print_quality(report: QualityReport) -> None:
    console = stdout_console()
    if report.skipped_turns:
        note(f"skipped {report.skipped_turns} turns that leave no room for {report.max_new_tokens} new tokens in the context")
    title = f"{report.drafter} on {report.benchmark} at T={report.temperature:g}"
    console.print(f"{title}: {report.identical} of {report.compared} conversations identical, token for token")
    if report.plain_score is not None and report.spec_score is not None and report.score_difference_ci95 is not None:
        low, high = report.score_difference_ci95
        console.print(
            f"score over {report.graded} prompts: {report.plain_score:.1%} plain, {report.spec_score:.1%} with the drafter; "
            f"95 % interval of the difference {low:+.1%} to {high:+.1%}"
        )
    print_json_line(report.summary())
