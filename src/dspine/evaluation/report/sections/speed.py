"""Tokens per second as `dspine bench` measured them, one prompt at a time and in batches."""

from __future__ import annotations

from dspine.evaluation.batch_speed import BatchReport
from dspine.evaluation.report.page import MISSING, Block, Cell, Fact, Section, Table
from dspine.evaluation.report.results import Result, Results
from dspine.evaluation.report.style import REFERENCE, display
from dspine.evaluation.speed import SpeedReport

TEXT = (
    "Tokens per second of one answer after the other, prefill included: medians over prompts. Plain and speculative "
    "decoding took turns in one process. Speed-up is the median over prompts of the ratio of the two."
)


def speed_section(results: Results) -> Section | None:
    speeds, batches = results.of(SpeedReport), results.of(BatchReport)
    tables = (*((_speed_table(speeds),) if speeds else ()), *((_batch_table(batches),) if batches else ()))
    if not tables:
        return None
    return Section("speed", "Speed", TEXT, (Block("", tables=tables),), _facts(speeds))


def _speed_table(speeds: list[Result[SpeedReport]]) -> Table:
    heads = [
        "drafter",
        "target",
        "prompts",
        "plain tok/s",
        "drafted tok/s",
        "speed-up",
        "τ",
        "identical",
        "plain first token (ms)",
    ]
    heads += ["drafted first token (ms)", "round (ms)", "matrix products", "transformers tok/s", "over transformers"]
    rows = []
    for result in speeds:
        r = result.data
        identical = {True: "yes", False: "no", None: "sampled"}[r.identical]
        rows.append(
            (
                Cell(display(result.row or r.drafter), f"width {r.width}", (result.source.number,)),
                Cell(r.target, f"T = {r.temperature:g}"),
                Cell(str(r.prompts), f"{r.max_new_tokens} tokens"),
                Cell(f"{r.plain_tok_per_s:.1f}"),
                Cell(f"{r.spec_tok_per_s:.1f}", strong=True),
                Cell(f"{r.speedup:.2f}x"),
                Cell(f"{r.acceptance_length:.2f}"),
                Cell(identical),
                Cell(f"{1000 * r.plain_ttft_s:.0f}"),
                Cell(f"{1000 * r.spec_ttft_s:.0f}"),
                Cell(f"{r.round_ms:.1f}"),
                Cell(MISSING if r.matrix_product_share is None else f"{r.matrix_product_share:.0%}"),
                Cell(MISSING if r.transformers_tok_per_s is None else f"{r.transformers_tok_per_s:.1f}"),
                Cell(MISSING if r.speedup_over_transformers is None else f"{r.speedup_over_transformers:.2f}x"),
            )
        )
    return Table("One prompt at a time", tuple(map(Cell, heads)), tuple(rows), labels=2)


def _batch_table(batches: list[Result[BatchReport]]) -> Table:
    heads = ["target", "prompts at once", "new tokens", "plain tok/s", "transformers tok/s", "ratio", "identical answers"]
    rows = []
    for result in batches:
        r = result.data
        texts = [str(r.batch), str(r.max_new_tokens), f"{r.plain_tok_per_s:.1f}", f"{r.transformers_tok_per_s:.1f}"]
        texts += [f"{r.ratio:.2f}x", f"{r.identical_share:.0%}"]
        rows.append((Cell(r.target, sources=(result.source.number,)), *map(Cell, texts)))
    return Table("Plain decoding of a batch against transformers' generate", tuple(map(Cell, heads)), tuple(rows))


def _facts(speeds: list[Result[SpeedReport]]) -> tuple[Fact, ...]:
    """The speed-up of the DSpine run with the most prompts, at the automatic width if there are several."""
    ours = [result for result in speeds if result.data.drafter == REFERENCE and not result.collection]
    if not ours:
        return ()
    largest = max(ours, key=lambda result: (result.data.prompts, result.data.width == "auto"))
    r, source = largest.data, (largest.source.number,)
    speed = f"{r.spec_tok_per_s:.1f} against {r.plain_tok_per_s:.1f} tokens/s of plain decoding, {r.prompts} prompts"
    facts = [Fact(f"{r.speedup:.2f}x", speed, source)]
    if r.identical:
        facts.append(Fact("identical", f"output of all {r.prompts} prompts, token for token", source))
    return tuple(facts)
