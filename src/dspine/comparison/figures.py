"""Pictures of a comparison: acceptance lengths with their intervals and by draft position; of many rows, their differences."""

from __future__ import annotations

from pathlib import Path

from dspine.comparison.plan import Plan
from dspine.comparison.table import Line, against_reference
from dspine.evaluation.plotting import colour, prepare_matplotlib, save_figure

MOST_COLOURS = 8
BETTER, WORSE = 3, 5


def draw_figures(plan: Plan, lines: list[Line], output: Path) -> list[Path]:
    """Write OUTPUT/acceptance-T*.svg and OUTPUT/positions-T*.svg for every temperature that has results; where there are more
    rows than can be told apart by colour, OUTPUT/differences-T*.svg instead."""
    prepare_matplotlib()
    files = []
    for temperature in plan.decode.temperatures:
        shown = [line for line in lines if any(t == temperature for _, t in line.results)]
        if len(shown) > MOST_COLOURS:
            files.append(_differences(plan, shown, temperature, output / f"differences-T{temperature:g}.svg"))
        elif shown:
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


def _differences(plan: Plan, lines: list[Line], temperature: float, file: Path) -> Path:
    """One bar a row: by how much its acceptance length differs from the reference's."""
    from matplotlib import pyplot as plt

    values = against_reference(plan, lines)
    rows = [line.name for line in lines if line.name != plan.reference and (line.name, temperature) in values]
    figure, axes = plt.subplots(figsize=(6.4, 0.8 + 0.26 * len(rows)))
    percents = [100 * values[name, temperature] for name in rows]
    bars = axes.barh(range(len(rows)), percents, 0.7, color=[colour(WORSE if percent < 0 else BETTER) for percent in percents])
    axes.bar_label(bars, fmt="%+.1f", fontsize=8, padding=2)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"acceptance length against {plan.reference}, %, T = {temperature:g}")
    axes.set_title(f"mean of {', '.join(plan.decode.benchmarks)}", fontsize=10)
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
