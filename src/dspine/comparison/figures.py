"""Pictures of a comparison: acceptance lengths with their intervals, and acceptance by draft position."""

from __future__ import annotations

from pathlib import Path

from dspine.comparison.plan import Plan
from dspine.comparison.table import Line
from dspine.evaluation.plotting import colour, prepare_matplotlib, save_figure


def draw_figures(plan: Plan, lines: list[Line], output: Path) -> list[Path]:
    """Write OUTPUT/acceptance-T*.svg and OUTPUT/positions-T*.svg for every temperature that has results."""
    prepare_matplotlib()
    files = []
    for temperature in plan.decode.temperatures:
        shown = [line for line in lines if any(t == temperature for _, t in line.results)]
        if shown:
            files.append(_acceptance_bars(plan, shown, temperature, output / f"acceptance-T{temperature:g}.svg"))
            files.append(_position_curves(plan, shown, temperature, output / f"positions-T{temperature:g}.svg"))
    return files


def _acceptance_bars(plan: Plan, lines: list[Line], temperature: float, file: Path) -> Path:
    from matplotlib import pyplot as plt

    benchmarks = plan.decode.benchmarks
    figure, axes = plt.subplots(figsize=(1.5 + 1.1 * len(benchmarks) * max(1.0, len(lines) / 5), 3.6))
    width = 0.8 / len(lines)
    for number, line in enumerate(lines):
        places, heights, errors = [], [], []
        for position, benchmark in enumerate(benchmarks):
            result = line.results.get((benchmark, temperature))
            if result is not None:
                places.append(position + (number - (len(lines) - 1) / 2) * width)
                heights.append(result.acceptance_length)
                errors.append((result.acceptance_length - result.low, result.high - result.acceptance_length))
        spread = list(zip(*errors, strict=True))
        axes.bar(places, heights, width * 0.92, yerr=spread, label=line.name, color=colour(number), error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_ylim(bottom=1.0)
    axes.set_ylabel("acceptance length")
    axes.set_title(f"T = {temperature:g}; bars: 95 % over prompts", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=min(len(lines), 6), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    save_figure(figure, file)
    return file


def _position_curves(plan: Plan, lines: list[Line], temperature: float, file: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    benchmark = plan.decode.benchmarks[0]
    for number, line in enumerate(lines):
        result = line.results.get((benchmark, temperature))
        if result is not None:
            positions = range(1, len(result.by_position) + 1)
            axes.plot(positions, result.by_position, marker="o", markersize=3, label=line.name, color=colour(number))
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted with all before it")
    axes.set_ylim(0, 1)
    axes.set_title(f"{benchmark}, T = {temperature:g}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, file)
    return file
