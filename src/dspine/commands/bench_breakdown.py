"""`dspine bench breakdown`: one round split into its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import print_json_line, progress_bar, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.evaluation.breakdown import BreakdownReport


def breakdown(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 10,
    max_new_tokens: options.MaxNewTokensOption = 160,
    width: options.WidthOption = "auto",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Prompts decoded at once.")] = 1,
    output: options.OutputFileOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Split a round into draft backbone, injection, head, transition cache, selection, verification, acceptance and the rest.

    Times exclude each other and are told per round and per generated token: by the processor's clock, or by events of the GPU.
    Parts that a drafter does not have are left out. If they do not add up to the rounds within 3 %, the exit code is not 0.

    Examples:

      dspine bench breakdown --prompts gsm8k.jsonl

      dspine bench breakdown --prompts gsm8k.jsonl --drafter dflash --width 8 --output dflash.json

      dspine bench breakdown --prompts gsm8k.jsonl --batch 8 --limit 32
    """
    options.check_output(output)
    if batch < 1:
        raise UserError(f"batch = {batch}: at least 1 prompt must be decoded at a time")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.benchmarks import load_benchmark
    from dspine.evaluation.breakdown import measure_breakdown

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    llm = options.load_llm(target, drafter, device, dtype, width=options.parse_width(width), max_rows=batch)
    encoded = options.encode_prompts(benchmark, llm, chat=chat, max_new_tokens=max_new_tokens)
    with progress_bar(f"decoding {benchmark.name}", len(encoded)) as advance:
        report = measure_breakdown(llm, encoded, params, on_progress=advance)
    if output is not None:
        report.write(output)
    print_report(report)
    report.check_sum()


def print_report(report: BreakdownReport) -> None:
    from rich.table import Table

    console = stdout_console()
    title = f"{report.target} + {report.drafter}: {report.rounds} rounds, {report.tokens} tokens, {report.batch} at once"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "ms per round", "ms per token", "share"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for part in report.stages:
        table.add_row(part.stage.replace("_", " "), f"{part.round_ms:.3f}", f"{part.token_ms:.3f}", f"{part.share:.1%}")
    table.add_section()
    table.add_row("whole round", f"{report.round_ms:.3f}", f"{report.token_ms:.3f}", f"{1 / (1 - report.residual_share):.1%}")
    console.print(table)
    console.print(
        f"not in any stage: {report.residual_share:.2%} of the round; recording made rounds {report.recording_share:+.1%} slower"
    )
    console.print(f"acceptance length (tau) {report.acceptance_length:.2f}, timed by {report.clock}")
    print_json_line(report.to_dict())
