"""`dspine bench speed`: tokens per second, plain against speculative, one prompt at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import print_json_line, progress_bar, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.evaluation.speed import SpeedReport


def speed(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 20,
    max_new_tokens: options.MaxNewTokensOption = 160,
    width: options.WidthOption = "auto",
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    repeats: options.RepeatsOption = 1,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    reference: Annotated[
        bool, typer.Option("--reference", help="Time transformers' own generate on the same weights too.")
    ] = False,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Compare plain and speculative decoding: every prompt by each in turn, in one process; medians over prompts.

    First turns only. The last line of stdout is one JSON object with the numbers and the machine they were measured on.

    Examples:

      dspine bench speed --prompts gsm8k.jsonl --limit 20

      dspine bench speed --prompts gsm8k.jsonl --limit 100 --repeats 3 --reference

      dspine bench speed --prompts gsm8k.jsonl --width 6 --drafter ./runs/dspine/checkpoint
    """
    if repeats < 1:
        raise UserError(f"repeats = {repeats}: at least 1 is needed")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.benchmarks import load_benchmark
    from dspine.evaluation.speed import measure_speed
    from dspine.evaluation.timing import transformers_decode

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    llm = options.load_llm(
        target, drafter, device, dtype, width=options.parse_width(width), need_drafter=True, keep_model=reference
    )
    encoded = options.encode_prompts(benchmark, llm, chat=chat, max_new_tokens=max_new_tokens)
    with progress_bar(f"timing {benchmark.name}", len(encoded) * repeats) as advance:
        decode = transformers_decode(llm.target.model) if reference else None
        report = measure_speed(llm, encoded, params, repeats=repeats, reference=decode, on_progress=advance)
    print_report(report)


def print_report(report: SpeedReport) -> None:
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
    console.print(f"a round verifies {report.mean_width:.2f} slots and takes {report.round_ms:.1f} ms: {shares}")
    if report.matrix_product_share is not None:
        console.print(f"matrix products of target and drafter: {report.matrix_product_share:.0%} of the rounds")
    print_json_line(report.to_dict())
