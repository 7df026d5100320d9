"""`dspine eval`: what a drafter is worth, apart from the machine it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line, progress_bar, show_help_without_command, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.evaluation.acceptance import AcceptanceReport

app = typer.Typer(invoke_without_command=True)


@app.callback()
def group(context: typer.Context) -> None:
    """Measure drafters."""
    show_help_without_command(context)


@app.command()
def acceptance(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 0,
    max_new_tokens: options.MaxNewTokensOption = 256,
    width: Annotated[
        str, typer.Option("--width", "-w", help="Slots verified per round: full (the drafter's block), auto, or a number.")
    ] = "full",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Conversations decoded at once.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the whole report as JSON here.", show_default=False)
    ] = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Measure the acceptance length (tau) and the acceptance of every draft position.

    Later turns go on from the answers just generated. The last line of stdout is one JSON object.

    Examples:

      dspine eval acceptance --prompts gsm8k.jsonl --limit 100 --max-new-tokens 160

      dspine eval acceptance --prompts mt-bench.jsonl --temperature 1 --seed 1

      dspine eval acceptance --prompts gsm8k.jsonl --drafter dflash --output dflash-gsm8k.json
    """
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"cannot write {output}: it is a folder or its folder does not exist")
    if batch < 1:
        raise UserError(f"batch = {batch}: at least 1 conversation must be decoded at a time")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.acceptance import measure_acceptance
    from dspine.evaluation.benchmarks import load_benchmark

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    slots = "full" if width == "full" else options.parse_width(width)
    llm = options.load_llm(target, drafter, device, dtype, width=slots, max_rows=batch, need_drafter=True)
    with progress_bar(f"decoding {benchmark.name}", len(benchmark.conversations)) as advance:
        report = measure_acceptance(llm, benchmark, params, chat=chat, on_progress=advance)
    if output is not None:
        report.write(output)
    print_report(report)


def print_report(report: AcceptanceReport) -> None:
    from rich.table import Table

    console = stdout_console()
    low, high = report.acceptance_length_ci95
    if report.skipped_turns:
        note(f"skipped {report.skipped_turns} turns that leave no room for {report.max_new_tokens} new tokens in the context")
    title = f"{report.drafter} on {report.benchmark}: {report.prompts} prompts, {report.tokens} tokens, {report.rounds} rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("draft position")
    table.add_column("accepted", justify="right")
    table.add_column("accepted, given all before", justify="right")
    for position, shares in enumerate(zip(report.acceptance_by_position, report.conditional_acceptance, strict=True), 1):
        table.add_row(str(position), *(f"{share:.1%}" for share in shares))
    console.print(table)
    console.print(f"acceptance length (tau) {report.acceptance_length:.3f}, 95 % interval over prompts {low:.3f} to {high:.3f}")
    print_json_line(report.summary())
