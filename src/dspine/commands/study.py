"""`dspine study`: the paper's three studies of what a draft layer knows and needs, on any block drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine.commands import options
from dspine.commands.console import note, progress_bar, show_help_without_command, stdout_console

if TYPE_CHECKING:
    from dspine.evaluation.studies.answers import AnswerSource
    from dspine.evaluation.studies.blocks import StudiedDrafter
    from dspine.evaluation.studies.predecessor import PredecessorResult
    from dspine.evaluation.studies.readout import ReadoutResult
    from dspine.evaluation.studies.results import BlockSettings, Share, StudyResult
    from dspine.evaluation.studies.timing import TimingResult
    from dspine.training.corpus import Answer

app = typer.Typer(invoke_without_command=True)

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder of the study; resumed if it holds this one.")]
AnswersOption = Annotated[
    Path | None,
    typer.Option(
        help="Greedy answers to --prompts (from `dspine data regenerate`), else they are generated.", show_default=False
    ),
]
BlocksOption = Annotated[int, typer.Option("--blocks", help="Blocks per answer, at random anchors.")]
LongestOption = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")]
SeedOption = Annotated[int, typer.Option(help="Same seed, same blocks.")]
BatchOption = Annotated[int, typer.Option("--batch", "-b", help="Prompts answered at once.")]


@app.callback()
def group(context: typer.Context) -> None:
    """Look into a frozen drafter: what its layers know, and when they need to know what.

    Truth is what the target answers greedily. The drafter may be any block drafter (dflash, dflash2, dspine, domino,
    dspark). Each study writes NAME.json, NAME.png and NAME.svg into its folder; given again, a stopped command goes on.
    """
    show_help_without_command(context)


@app.command()
def readout(
    prompts: options.PromptsOption,
    fit_prompts: Annotated[Path, typer.Option(help="Prompts to fit the probes to; none may be a test prompt.")],
    output: OutputOption,
    fit_answers: Annotated[
        Path | None, typer.Option(help="Greedy answers to --fit-prompts, else they are generated.", show_default=False)
    ] = None,
    fit_limit: Annotated[int, typer.Option(help="Prompts to fit to.")] = 500,
    select_limit: Annotated[int, typer.Option(help="Prompts after those, to choose each probe's epoch by.")] = 100,
    rank: Annotated[int, typer.Option(help="Rank of a probe.")] = 64,
    epochs: Annotated[int, typer.Option(help="Epochs of fitting.")] = 10,
    answers: AnswersOption = None,
    limit: options.LimitOption = 0,
    max_new_tokens: LongestOption = 1024,
    blocks: BlocksOption = 8,
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    seed: SeedOption = 0,
    batch: BatchOption = 16,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """How much of the true token can be read from each draft layer, by slot: a low-rank probe for every layer.

    Examples:

      dspine study readout -p gsm8k.jsonl --fit-prompts gsm8k-train-prompts.jsonl -o studies/readout

      dspine study readout -p gsm8k.jsonl -l 40 --fit-prompts train.jsonl --fit-limit 200 --select-limit 50 -d dflash -o out
    """
    from dspine.evaluation.studies.figures import draw_readout
    from dspine.evaluation.studies.probe import FitSettings
    from dspine.evaluation.studies.readout import FitAnswers, num_steps, study_readout

    fit = FitSettings(answers=fit_limit, selection_answers=select_limit, rank=rank, epochs=epochs, seed=seed)
    source = _source(prompts, answers, limit, max_new_tokens, batch)
    fit_source = _source(fit_prompts, fit_answers, fit_limit + select_limit, max_new_tokens, batch)
    studied, settings = _prepare(source, target, drafter, device, dtype, blocks, seed, output)
    to_fit, to_test = _collect(fit_source, studied, output), _collect(source, studied, output)
    parts = FitAnswers.split(to_fit, fit)
    with progress_bar("readout", num_steps(studied, parts, to_test, fit)) as advance:
        result = study_readout(studied, parts, to_test, settings, fit, output, advance)
    result.write(output / "readout.json")
    _print_readout(result)
    note(f"figures: {', '.join(map(str, draw_readout(result, output)))}")


@app.command()
def timing(
    prompts: options.PromptsOption,
    output: OutputOption,
    answers: AnswersOption = None,
    limit: options.LimitOption = 0,
    max_new_tokens: LongestOption = 1024,
    blocks: BlocksOption = 8,
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    seed: SeedOption = 0,
    batch: BatchOption = 16,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """When a draft layer needs to know the prefix: the gain from the true prefix's features in some of the layers.

    Examples:

      dspine study timing -p gsm8k.jsonl --limit 100 -o studies/timing

      dspine study timing -p gsm8k.jsonl -l 40 -n 160 --drafter dflash -o studies/timing-dflash
    """
    from dspine.evaluation.studies.figures import draw_timing
    from dspine.evaluation.studies.timing import study_timing

    source = _source(prompts, answers, limit, max_new_tokens, batch)
    studied, settings = _prepare(source, target, drafter, device, dtype, blocks, seed, output)
    found = _collect(source, studied, output)
    with progress_bar("timing", len(found)) as advance:
        result = study_timing(studied, found, settings, output, advance)
    result.write(output / "timing.json")
    _print_timing(result)
    note(f"figures: {', '.join(map(str, draw_timing(result, output)))}")


@app.command()
def predecessor(
    prompts: options.PromptsOption,
    output: OutputOption,
    answers: AnswersOption = None,
    limit: options.LimitOption = 0,
    max_new_tokens: LongestOption = 1024,
    blocks: BlocksOption = 8,
    target: options.TargetOption = options.DEFAULT_TARGET,
    drafter: options.DrafterOption = "auto",
    seed: SeedOption = 0,
    batch: BatchOption = 16,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
) -> None:
    """What the token just before a slot is worth, against all that is older, and in which layers.

    Examples:

      dspine study predecessor -p gsm8k.jsonl --limit 100 -o studies/predecessor

      dspine study predecessor -p gsm8k.jsonl -l 40 -n 160 --drafter dflash -o studies/predecessor-dflash
    """
    from dspine.evaluation.studies.figures import draw_predecessor
    from dspine.evaluation.studies.predecessor import study_predecessor

    source = _source(prompts, answers, limit, max_new_tokens, batch)
    studied, settings = _prepare(source, target, drafter, device, dtype, blocks, seed, output)
    found = _collect(source, studied, output)
    with progress_bar("predecessor", len(found)) as advance:
        result = study_predecessor(studied, found, settings, output, advance)
    result.write(output / "predecessor.json")
    _print_predecessor(result)
    note(f"figures: {', '.join(map(str, draw_predecessor(result, output)))}")


def _source(prompts: Path, answers: Path | None, limit: int, max_new_tokens: int, batch: int) -> AnswerSource:
    from dspine.evaluation.studies.answers import AnswerSource

    return AnswerSource(
        prompts=prompts, answers=answers, limit=options.parse_limit(limit), max_new_tokens=max_new_tokens, rows=batch
    )


def _prepare(
    source: AnswerSource, target: str, drafter: str, device: str, dtype: str, blocks: int, seed: int, output: Path
) -> tuple[StudiedDrafter, BlockSettings]:
    """Load what is studied; whatever can be wrong is said before anything long begins."""
    from dspine.evaluation.plotting import prepare_matplotlib
    from dspine.evaluation.studies.blocks import StudiedDrafter
    from dspine.evaluation.studies.results import BlockSettings

    prepare_matplotlib()
    settings = BlockSettings(
        prompts=source.prompts.stem, max_new_tokens=source.max_new_tokens, blocks_per_answer=blocks, seed=seed
    )
    llm = options.load_llm(target, drafter, device, dtype, need_drafter=True)
    assert llm.drafter is not None, "need_drafter"
    studied = StudiedDrafter(llm.drafter, llm.target)
    output.mkdir(parents=True, exist_ok=True)
    return studied, settings


def _collect(source: AnswerSource, studied: StudiedDrafter, output: Path) -> list[Answer]:
    from dspine.evaluation.studies.answers import collect_answers

    with progress_bar(f"answers to {source.prompts.stem}", source.count()) as advance:
        return collect_answers(source, studied.target, output, advance)


def _print_readout(result: ReadoutResult) -> None:
    heads = ["layer", *(f"slots {first}-{last}" for first, last in result.slot_groups)]
    body = [[str(layer.layer), *map(_percent, layer.groups)] for layer in result.layers]
    _print_table(result, heads, [*body, ["draft", *map(_percent, result.draft.groups)]])


def _print_timing(result: TimingResult) -> None:
    first, last = result.measured_slots
    heads = ["true prefix in", f"correct tokens, slots {first}-{last}", "gain", "gain where the predicted prefix is wrong"]
    body = [["no layer", f"{result.baseline_correct_tokens:.3f}", "", ""]]
    for one in result.schedules:
        name = f"layers {one.schedule.name}"
        body.append([name, f"{one.correct_tokens:.3f}", _percent(one.gain, "+.1%"), _percent(one.changed_gain, "+.1%")])
    _print_table(result, heads, body)


def _print_predecessor(result: PredecessorResult) -> None:
    heads = ["slot", "predicted, or layers with the true predecessor", "accuracy", "where it is wrong", "all true there"]
    body = []
    for slot in result.slots:
        for one in (*slot.content, *slot.timing):
            shares = (one.accuracy, one.accuracy_changed, one.truth_changed)
            body.append([str(slot.slot), one.name, *map(_percent, shares)])
    _print_table(result, heads, body)


def _percent(share: Share, form: str = ".1%") -> str:
    """The share with its interval."""
    if share.value is None or share.ci95 is None:
        return "-"
    low, high = share.ci95
    return f"{share.value:{form}} ({low:{form}} to {high:{form}})"


def _print_table(result: StudyResult, heads: list[str], body: list[list[str]]) -> None:
    from rich.table import Table

    what = f"{result.study}: {result.subject.drafter} on {result.settings.prompts}"
    table = Table(title=f"{what}, {result.answers} answers, {result.blocks} blocks", title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in body:
        table.add_row(*row)
    stdout_console().print(table)
