"""`dspine calibrate`: make a drafter's confidence mean something, so that `--width confidence` may rely on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, print_json_line, progress_bar, stdout_console
from dspine.errors import UserError

if TYPE_CHECKING:
    from dspine.evaluation.calibration import CalibrationReport


def calibrate(
    prompts: options.PromptsOption,
    limit: options.LimitOption = 100,
    max_new_tokens: options.MaxNewTokensOption = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-T", help="Fit a map for this temperature; repeatable.", show_default="0 and 1"),
    ] = None,
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    chat: options.ChatOption = True,
    seed: options.SeedOption = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Prompts decoded at once.")] = 8,
    output: options.OutputFileOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """Fit how often the target accepts a token to how sure the drafter is of it: calibration.json in the checkpoint.

    `--width confidence` then verifies as many tokens of each draft as pay on this machine. Use prompts like those to come, that
    the drafter was not trained on, and never those that it is measured with. Every fourth prompt only judges: the table says
    how far off the probabilities of its tokens are, before and after. The last line of stdout is one JSON object.

    Examples:

      dspine calibrate --prompts prompts.jsonl --limit 200

      dspine calibrate --prompts prompts.jsonl --drafter ./runs/dspine/checkpoint --temperature 0

      dspine bench speed --prompts gsm8k.jsonl --width confidence
    """
    options.check_output(output)
    if batch < 1:
        raise UserError(f"batch = {batch}: at least 1 prompt must be decoded at a time")
    from dspine.decoding.sampling import SamplingParams
    from dspine.evaluation.benchmarks import load_benchmark
    from dspine.evaluation.calibration import calibrate as fit

    temperatures = temperature or [0.0, 1.0]
    for t in temperatures:
        SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed)  # refuses what is impossible before any work
    benchmark = load_benchmark(prompts, options.parse_limit(limit))
    llm = options.load_llm(target, drafter, device, dtype, max_rows=batch, need_drafter=True)
    encoded = options.encode_prompts(benchmark, llm, chat=chat, max_new_tokens=max_new_tokens)
    with progress_bar(f"decoding {benchmark.name}", len(encoded) * len(temperatures)) as advance:
        report = fit(
            llm, encoded, benchmark.name, temperatures=temperatures, max_new_tokens=max_new_tokens, seed=seed or 0,
            on_progress=advance,
        )  # fmt: skip
    if output is not None:
        report.write(output)
    assert llm.drafter is not None and llm.drafter.folder is not None
    file = report.calibration.write(llm.drafter.folder)
    print_report(report)
    note(f"wrote {file}")


def print_report(report: CalibrationReport) -> None:
    from rich.table import Table

    title = f"{report.drafter} on {report.prompts}: {report.num_prompts} prompts, a quarter of them held out"
    table = Table(title=title, title_justify="left")
    for column in ("T", "probability of", "predictions", "ECE before", "after", "Brier before", "after", "skill before", "after"):
        table.add_column(column, justify="left" if column == "probability of" else "right")
    for t in report.temperatures:
        for what, before, after in (
            ("a token, all before it accepted", t.before.acceptance, t.after.acceptance),
            ("a token and all before it", t.before.survival, t.after.survival),
        ):
            numbers = (before.ece, after.ece, before.brier, after.brier, before.skill, after.skill)
            table.add_row(f"{t.temperature:g}", what, str(before.count), *(f"{n:.3f}" for n in numbers))
    stdout_console().print(table)
    print_json_line(report.to_dict())
