"""`dspine bench throughput`: tokens per second and latencies by concurrency, in this process or from running servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line, progress_bar, resumable, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.api import LLM
    from dspine.drafters.base import BlockDrafter
    from dspine.evaluation.load import Way
    from dspine.evaluation.throughput_report import Percentiles, ThroughputReport, ThroughputSettings

DEFAULT_LEVELS = "1,2,4,8,16,32"


def throughput(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 32,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Requests under way at once: a list of levels.")
    ] = DEFAULT_LEVELS,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", "-s", help="NAME=URL of an OpenAI-compatible server; give one for each way of decoding."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model that the servers serve.", show_default="the only one they list")] = "",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", "-d", help="A shipped drafter's name or NAME=FOLDER; one for each to compare.", show_default="auto"
        ),
    ] = None,
    width: options.WidthOption = "auto",
    chat: options.ChatOption = True,
    requests: Annotated[
        int, typer.Option(help="Requests of a level; 0 = as many as prompts, at least twice the concurrency.")
    ] = 0,
    repeats: options.RepeatsOption = 3,
    max_new_tokens: options.MaxNewTokensOption = 160,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    output: options.OutputFileOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Measure tokens per second, time to first token (TTFT) and per output token (TPOT) with many requests under way.

    Without --server: plain decoding and each --drafter, in this process's engine. With it: the servers named, the first
    being the one to compare with. Every repeat runs all of them in turn. With --output a finished level is kept: the same
    command goes on with the next. OPENAI_API_KEY is sent to servers if it is set.

    Examples:

      dspine bench throughput --prompts gsm8k.jsonl --drafter dspine --drafter dflash --output throughput.json

      dspine bench throughput --prompts gsm8k.jsonl --concurrency 1,8 --requests 16 --repeats 1 --max-new-tokens 64

      dspine bench throughput --prompts gsm8k.jsonl --server plain=http://localhost:8000/v1 --server dspine=http://localhost:8001/v1
    """
    options.check_output(output)
    levels = parse_levels(concurrency)
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    if requests < 0:
        raise UserError(f"requests = {requests}: give the number of requests of a level, or 0 for the default")
    if server and (drafter or not chat):
        raise UserError("servers are measured as they run, by chat completions: leave out --drafter and --no-chat")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.benchmarks import load_benchmark

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    ways: AbstractAsyncContextManager[Sequence[Way]]
    if server:
        from dspine.evaluation.load_server import connected

        turns = [conversation[0] for conversation in benchmark.conversations]
        servers = options.parse_named("--server", server)
        ways = connected(servers, turns, params, model=model, api_key=os.environ.get("OPENAI_API_KEY", ""))
        number, width = len(turns), "the server's"
    else:
        llm, drafters = load_drafters(options.parse_named("--drafter", drafter or ["auto"]), target, device, dtype)
        from dspine.evaluation.load import engine_ways

        encoded = options.encode_prompts(benchmark, llm, chat=chat, max_new_tokens=max_new_tokens)
        ways = nullcontext(engine_ways(llm.target, drafters, encoded, params, options.parse_width(width)))
        number = len(encoded)
    from dspine.evaluation.throughput_report import ThroughputSettings

    settings = ThroughputSettings(
        benchmark=benchmark.name,
        prompts=number,
        prompts_sha256=benchmark.sha256,
        requests=requests,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        width=width,
    )
    with resumable():
        report = asyncio.run(measure(ways, settings, levels, output))
    print_report(report)


async def measure(
    ways: AbstractAsyncContextManager[Sequence[Way]], settings: ThroughputSettings, levels: list[int], output: Path | None
) -> ThroughputReport:
    from dspine.evaluation.machine import machine_facts
    from dspine.evaluation.throughput import measure_throughput, planned_answers
    from dspine.evaluation.throughput_report import started_report

    async with ways as opened:
        settings = replace(settings, ways=tuple(way.facts for way in opened))
        started = started_report(settings, output, machine_facts(opened[0].device))
        with progress_bar("answers", planned_answers(started, levels)) as advance:
            return await measure_throughput(opened, started, levels, output, lambda: advance(1))


def parse_levels(text: str) -> list[int]:
    """Whole numbers from 1, a comma between them."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise UserError(f"concurrency {text!r} is no list of whole numbers from 1; give for example {DEFAULT_LEVELS}")
    return levels


def load_drafters(named: dict[str, str], target: str, device: str, dtype: str) -> tuple[LLM, dict[str, BlockDrafter]]:
    """The target, and its drafters by name; `auto` gets the name of the drafter that it found."""
    (first, value), *others = named.items()
    llm = options.load_llm(target, value, device, dtype, need_drafter=True)
    from dspine.api import find_drafter

    assert llm.drafter is not None
    drafters = {llm.drafter.config.drafter if first == "auto" else first: llm.drafter}
    for name, value in others:
        found = find_drafter(llm.target, value)
        if found is not None:
            drafters[name] = found
    return llm, drafters


def print_report(report: ThroughputReport) -> None:
    from rich.table import Table

    names = [way.name for way in report.ways]
    title = f"{report.benchmark}: at most {report.max_new_tokens} tokens an answer, {report.repeats} repeats"
    table = Table(title=title, title_justify="left")
    for column in (
        "at once",
        "way",
        "tok/s",
        "TTFT ms p50/95/99",
        "TPOT ms p50/95/99",
        "failed",
        *(f"over {name}" for name in names),
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    for level in report.levels:
        for way in level.ways:
            table.add_row(
                str(level.concurrency),
                way.name,
                f"{way.tok_per_s:.1f}",
                in_ms(way.ttft_s),
                in_ms(way.tpot_s),
                f"{sum(way.failures.values())}/{way.requests}",
                *(f"{way.speedup_over[name]:.2f}" if name in way.speedup_over else "" for name in names),
            )
        table.add_section()
    stdout_console().print(table)
    tell_what_disturbs(report)
    print_json_line(report.to_dict())


def in_ms(seconds: Percentiles | None) -> str:
    return "" if seconds is None else f"{1000 * seconds.p50:.0f}/{1000 * seconds.p95:.0f}/{1000 * seconds.p99:.0f}"


def tell_what_disturbs(report: ThroughputReport) -> None:
    """A note for what makes a level's numbers worth less: failures, refusals, prompts that were not computed."""
    for level in report.levels:
        for way in level.ways:
            at = f"{way.name} at {level.concurrency}"
            for reason, count in way.failures.items():
                note(f"{at}: {count} of {way.requests} requests failed ({reason})")
            if way.refusals:
                note(f"{at}: the server asked {way.refusals} times to come again later")
            if way.cached_tokens:
                note(f"{at}: {way.cached_tokens} prompt tokens came out of the server's prefix cache, so TTFT is too good")
