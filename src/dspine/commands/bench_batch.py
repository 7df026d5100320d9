"""`dspine bench batch`: plain decoding of many prompts at once, against transformers' `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import print_json_line, progress_bar, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.evaluation.batch_speed import BatchReport


def batch(
    prompts: options.PromptsOption,
    rows: Annotated[int, typer.Option("--rows", help="Prompts decoded at once: the first N of the file.")] = 32,
    max_new_tokens: options.MaxNewTokensOption = 160,
    target: options.TargetOption = options.DEFAULT_TARGET,
    chat: options.ChatOption = True,
    repeats: options.RepeatsOption = 1,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Compare plain batched decoding with transformers' generate on the same weights and prompts, both greedy.

    Both write exactly --max-new-tokens for every prompt. The last line of stdout is one JSON object.

    Examples:

      dspine bench batch --prompts gsm8k.jsonl --rows 32 --max-new-tokens 64
    """
    if rows < 1:
        raise UserError(f"rows = {rows}: at least 1 prompt must be decoded at a time")
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    from dspine.evaluation.batch_speed import measure_batch
    from dspine.evaluation.benchmarks import load_benchmark

    benchmark = load_benchmark(prompts, rows)
    llm = options.load_llm(target, "none", device, dtype, keep_model=True)
    encoded = options.encode_prompts(benchmark, llm, chat=chat, max_new_tokens=max_new_tokens)
    if len(encoded) < rows:
        raise UserError(f"a batch of {rows} needs as many prompts, but {benchmark.name} has {len(encoded)} that fit")
    with progress_bar(f"timing batches of {rows}", repeats) as advance:
        report = measure_batch(
            llm, llm.target.model, encoded, max_new_tokens=max_new_tokens, repeats=repeats, on_progress=advance
        )
    print_report(report)


def print_report(report: BatchReport) -> None:
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
