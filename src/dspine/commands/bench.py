"""`dspine bench`: tokens per second, plain against speculative, on a file of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line, progress_bar, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.api import LLM
    from dspine.evaluation.benchmarks import Benchmark
    from dspine.evaluation.speed import BatchReport, SpeedReport


def bench(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 20,
    max_new_tokens: options.MaxNewTokensOption = 160,
    width: options.WidthOption = "auto",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    repeats: Annotated[int, typer.Option("--repeats", "-r", help="Time every prompt N times.")] = 1,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    reference: Annotated[
        bool, typer.Option("--reference", help="Time transformers' own generate on the same weights too.")
    ] = False,
    batch: Annotated[
        int, typer.Option("--batch", "-b", help="Instead: plain decoding of N prompts at once against transformers; 0 = off.")
    ] = 0,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Measure speed: every prompt by every way of decoding in turn, in one process; medians over prompts and repeats.

    First turns only. The last line of stdout is one JSON object with the numbers and the machine they were measured on.

    Examples:

      dspine bench --prompts gsm8k.jsonl --limit 20

      dspine bench --prompts gsm8k.jsonl --limit 100 --repeats 3 --reference

      dspine bench --prompts gsm8k.jsonl --width 6 --drafter ./runs/dspine/checkpoint

      dspine bench --prompts gsm8k.jsonl --batch 32 --max-new-tokens 64
    """
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    if batch < 0:
        raise UserError(f"batch = {batch}: give the number of prompts to decode at once, or 0 to bench one at a time")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.benchmarks import load_benchmark

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    if batch and not params.is_greedy:
        raise UserError(f"temperature = {temperature}: batches are compared greedily; leave --temperature out")
    benchmark = load_benchmark(prompts, batch or options.parse_limit(limit))
    llm = options.load_llm(
        target,
        "none" if batch else drafter,
        device,
        dtype,
        width=options.parse_width(width),
        need_drafter=not batch,
        keep_model=reference or bool(batch),
    )
    if batch:
        print_batch_report(bench_batch(llm, benchmark, batch, params, chat, repeats))
    else:
        print_speed_report(bench_speed(llm, benchmark, params, chat, repeats, reference))


def bench_speed(llm: LLM, benchmark: Benchmark, params: Any, chat: bool, repeats: int, reference: bool) -> SpeedReport:
    from dspine.evaluation.speed import measure_speed, transformers_decode

    prompts = encode(llm, benchmark, params, chat)
    with progress_bar(f"timing {benchmark.name}", len(prompts) * repeats) as advance:
        decode = transformers_decode(llm.target.model) if reference else None
        return measure_speed(llm, prompts, params, repeats=repeats, reference=decode, on_progress=advance)


def bench_batch(llm: LLM, benchmark: Benchmark, batch: int, params: Any, chat: bool, repeats: int) -> BatchReport:
    from dspine.evaluation.speed import measure_batch

    prompts = encode(llm, benchmark, params, chat)
    if len(prompts) < batch:
        raise UserError(f"a batch of {batch} needs as many prompts, but {benchmark.name} has {len(prompts)} that fit")
    with progress_bar(f"timing batches of {batch}", repeats) as advance:
        return measure_batch(
            llm, llm.target.model, prompts, max_new_tokens=params.max_new_tokens, repeats=repeats, on_progress=advance
        )


def encode(llm: LLM, benchmark: Benchmark, params: Any, chat: bool) -> list[list[int]]:
    from dspine.evaluation.benchmarks import first_turns

    prompts, skipped = first_turns(benchmark, llm.target, chat=chat, max_new_tokens=params.max_new_tokens)
    if skipped:
        note(f"skipped {skipped} prompts that leave no room for {params.max_new_tokens} new tokens in the context")
    return prompts


def print_speed_report(report: SpeedReport) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(
        title=f"{report.target} + {report.drafter}: {report.prompts} prompts, {report.repeats} repeats", title_justify="left"
    )
    for column in ("", "tok/s", "first token", "speedup"):
        table.add_column(column, justify="left" if column == "" else "right")
    table.add_row("plain", f"{report.plain_tok_per_s:.1f}", f"{report.plain_ttft_s:.3f} s", "1.00")
    table.add_row("dspine", f"{report.spec_tok_per_s:.1f}", f"{report.spec_ttft_s:.3f} s", f"{report.speedup:.2f}")
    if report.transformers_tok_per_s is not None and report.plain_over_transformers is not None:
        table.add_row("transformers", f"{report.transformers_tok_per_s:.1f}", "", f"{1 / report.plain_over_transformers:.2f}")
    console.print(table)
    identical = {None: "not expected when sampling", True: "yes", False: "NO"}[report.identical]
    console.print(f"acceptance length (tau) {report.acceptance_length:.2f}, output token-identical to plain: {identical}")
    shares = f"draft {report.draft_share:.0%}, verify {report.verify_share:.0%}, other {report.other_share:.0%}"
    console.print(f"a round takes {report.round_ms:.1f} ms: {shares}")
    if report.matrix_product_share is not None:
        console.print(f"matrix products of target and drafter: {report.matrix_product_share:.0%} of the rounds")
    print_json_line(report.to_dict())


def print_batch_report(report: BatchReport) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(
        title=f"{report.target}: {report.batch} prompts at once, {report.max_new_tokens} tokens each", title_justify="left"
    )
    for column in ("", "tok/s", "speedup"):
        table.add_column(column, justify="left" if column == "" else "right")
    table.add_row("transformers", f"{report.transformers_tok_per_s:.1f}", "1.00")
    table.add_row("dspine, plain", f"{report.plain_tok_per_s:.1f}", f"{report.ratio:.2f}")
    console.print(table)
    console.print(f"answers identical to transformers': {report.identical_share:.0%}")
    print_json_line(report.to_dict())
