"""The comparison's one table: a line a row, as Markdown, CSV and JSON, from the result files alone."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from dspine.comparison.plan import Plan
from dspine.comparison.run import BREAKDOWN, SPEED, checkpoint_of, result_file
from dspine.drafters.checkpoint import parameters_by_part
from dspine.files import write_text
from dspine.stages import Stage

PARTS: dict[str, tuple[Stage, ...]] = {
    "draft": ("draft_backbone", "injection", "head"),
    "select": ("transition_cache", "selection"),
    "verify": ("verification", "acceptance"),
}
Cell = str | float | int | None


@dataclass(frozen=True)
class Result:
    """tau of one row on one benchmark at one temperature, with its 95 % interval over prompts."""

    acceptance_length: float
    low: float
    high: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """What is known about one row; results are keyed by (benchmark, temperature)."""

    name: str
    drafter: str
    parameters: int
    held_out: float  # teacher-forced acceptance length at the end of training
    results: dict[tuple[str, float], Result] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    part_ms: dict[str, float] = field(default_factory=dict)  # of a round: draft, select, verify


def read_lines(plan: Plan, output: Path) -> list[Line]:
    """The rows that are trained so far, with the results they have."""
    lines = []
    for name in plan.rows:
        checkpoint = checkpoint_of(output, plan.weights_of(name))
        if not checkpoint.is_dir():
            continue
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        folder = output / "rows" / name
        line = Line(name, config["drafter"], sum(parameters_by_part(checkpoint)[0].values()), _held_out(config))
        for benchmark, temperature in plan.measured:
            file = result_file(folder, benchmark, temperature)
            if file.is_file():
                data = json.loads(file.read_text(encoding="utf-8"))
                low, high = data["acceptance_length_ci95"]
                positions = tuple(data["acceptance_by_position"])
                line.results[benchmark, temperature] = Result(data["acceptance_length"], low, high, positions)
        if (folder / SPEED).is_file():
            line.speed.update(json.loads((folder / SPEED).read_text(encoding="utf-8")))
        if (folder / BREAKDOWN).is_file():
            line.part_ms.update(_parts(json.loads((folder / BREAKDOWN).read_text(encoding="utf-8"))))
        lines.append(line)
    return lines


def _parts(breakdown: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a round's parts, several stages each."""
    stages = {stage["stage"]: stage["round_ms"] for stage in breakdown["stages"]}
    return {part: sum(stages.get(name, 0.0) for name in names) for part, names in PARTS.items()}


def _held_out(config: dict[str, Any]) -> float:
    """The held-out acceptance length that the checkpoint's slot accuracies multiply up to."""
    return 1 + sum(accumulate(config["expected_acceptance"], mul))


def against_reference(plan: Plan, lines: list[Line]) -> dict[tuple[str, float], float]:
    """{(row, T): by how much the row's tau differs from the reference's, the mean of both rows' common benchmarks}."""
    reference = next((line for line in lines if line.name == plan.reference), None)
    found: dict[tuple[str, float], float] = {}
    for line in lines:
        for t in plan.decode.temperatures:
            common = [key for key in line.results if reference and key in reference.results and key[1] == t]
            if reference and common:
                ours, theirs = (sum(of.results[key].acceptance_length for key in common) for of in (line, reference))
                found[line.name, t] = ours / theirs - 1
    return found


def gains(plan: Plan, lines: list[Line]) -> dict[tuple[str, float], tuple[float, str]]:
    """By how much the reference beats the strongest row of another drafter: {(benchmark, T): (gain, its name)}."""
    reference = next((line for line in lines if line.name == plan.reference), None)
    found: dict[tuple[str, float], tuple[float, str]] = {}
    if reference is None:
        return found
    for key, ours in reference.results.items():
        others = [(line.results[key].acceptance_length, line.name) for line in lines if _rival(line, reference, key)]
        if others:
            best, name = max(others)
            found[key] = (ours.acceptance_length / best - 1, name)
    return found


def _rival(line: Line, reference: Line, key: tuple[str, float]) -> bool:
    return line.drafter != reference.drafter and key in line.results


def columns(plan: Plan, lines: list[Line]) -> tuple[list[str], list[list[Cell]]]:
    """Heads and cells of the table; a result not there yet is None."""
    keys = plan.measured
    heads = ["row", "drafter", "parameters (M)", "held-out"]
    for benchmark, t in keys:
        heads += [f"{benchmark} T={t:g}", f"{benchmark} T={t:g} low", f"{benchmark} T={t:g} high"]
    heads += ["tok/s", "speedup", "round (ms)", *(f"{part} (ms)" for part in PARTS)]
    body: list[list[Cell]] = []
    for line in lines:
        cells: list[Cell] = [line.name, line.drafter, round(line.parameters / 1e6, 2), line.held_out]
        for key in keys:
            result = line.results.get(key)
            cells += [None] * 3 if result is None else [result.acceptance_length, result.low, result.high]
        cells += [line.speed.get(name) for name in ("spec_tok_per_s", "speedup", "round_ms")]
        cells += [line.part_ms.get(part) for part in PARTS]
        body.append(cells)
    return heads, body


def markdown(plan: Plan, lines: list[Line]) -> str:
    """The table for reading: tau with its interval in one cell, the strongest of each column in bold, the gain below."""
    keys = plan.measured
    best = {key: max((line.results[key].acceptance_length for line in lines if key in line.results), default=0.0) for key in keys}
    differences = against_reference(plan, lines)
    compared = [f"vs {plan.reference} T={t:g}" for t in plan.decode.temperatures]
    heads = ["row", "drafter", "M", "held-out", *(f"{b} T={t:g}" for b, t in keys), *compared]
    timed = [line for line in lines if line.speed]
    heads += ["tok/s", *(f"{part} (ms)" for part in PARTS)] if timed else []
    out = ["| " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * (len(heads) - 2)]
    for line in lines:
        cells = [line.name, line.drafter, f"{line.parameters / 1e6:.1f}", f"{line.held_out:.2f}"]
        for key in keys:
            result = line.results.get(key)
            if result is None:
                cells.append("")
                continue
            tau = f"{result.acceptance_length:.2f}"
            tau = f"**{tau}**" if result.acceptance_length == best[key] else tau
            cells.append(f"{tau} ({result.low:.2f}-{result.high:.2f})")
        shown = (differences.get((line.name, t)) for t in plan.decode.temperatures)
        cells += ["" if difference is None else f"{difference:+.1%}" for difference in shown]
        if timed:
            cells.append(f"{line.speed['spec_tok_per_s']:.0f}" if line.speed else "")
            cells += [f"{line.part_ms[part]:.1f}" if line.part_ms else "" for part in PARTS]
        out.append("| " + " | ".join(cells) + " |")
    for (benchmark, t), (gain, rival) in gains(plan, lines).items():
        out.append(f"\n{plan.reference} against the strongest other drafter on {benchmark} at T={t:g} ({rival}): {gain:+.1%}")
    return "\n".join(out) + "\n"


def write_tables(plan: Plan, output: Path) -> list[Line]:
    """Write OUTPUT/table.md, .csv and .json from what is there; returns the lines."""
    lines = read_lines(plan, output)
    heads, body = columns(plan, lines)
    write_text(output / "table.md", markdown(plan, lines))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([heads, *body])
    write_text(output / "table.csv", text.getvalue())
    rows = [dict(zip(heads, cells, strict=True)) for cells in body]
    gain = [{"benchmark": b, "temperature": t, "gain": g, "rival": r} for (b, t), (g, r) in gains(plan, lines).items()]
    write_text(output / "table.json", json.dumps({"rows": rows, "gains": gain}, indent=2) + "\n")
    return lines
