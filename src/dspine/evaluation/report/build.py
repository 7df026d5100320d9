"""From result files to a folder with index.html and the figures it shows as files of their own.

    built = build_report([Path("benchmarks/results/2026-11-30")], Path("report"))
    built.page  # report/index.html

OUTPUT/index.html        the page; it needs nothing but itself
OUTPUT/figures/NAME.svg  every figure, light scheme
OUTPUT/figures/NAME.png  the same, for slides and chats
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspine import __version__
from dspine.errors import UserError
from dspine.evaluation.machine import command_line, source_revision
from dspine.evaluation.report.page import Drawing, Section, render_page
from dspine.evaluation.report.results import Results, read_results
from dspine.evaluation.report.sections.acceptance import acceptance_section
from dspine.evaluation.report.sections.breakdown import breakdown_section
from dspine.evaluation.report.sections.comparison import comparison_section
from dspine.evaluation.report.sections.positions import positions_section
from dspine.evaluation.report.sections.predecessor import predecessor_section
from dspine.evaluation.report.sections.quality import quality_section
from dspine.evaluation.report.sections.readout import readout_section
from dspine.evaluation.report.sections.speed import speed_section
from dspine.evaluation.report.sections.throughput import throughput_section
from dspine.evaluation.report.sections.timing import timing_section
from dspine.evaluation.report.sections.training import training_section
from dspine.evaluation.report.style import styled
from dspine.evaluation.report.svg import save_svg
from dspine.files import write_text

TITLE = "Speculative decoding: results"
PNG_DPI = 200
SECTIONS: tuple[Callable[[Results], Section | None], ...] = (
    acceptance_section,
    positions_section,
    quality_section,
    speed_section,
    throughput_section,
    breakdown_section,
    readout_section,
    timing_section,
    predecessor_section,
    training_section,
    comparison_section,
)


@dataclass(frozen=True)
class Built:
    """What was written, and one line for every file that was left out."""

    page: Path
    figures: tuple[Path, ...]
    sections: tuple[str, ...]
    warnings: tuple[str, ...]


def build_report(
    paths: Sequence[Path], output: Path, *, title: str = TITLE, on_progress: Callable[[int], None] = lambda figures: None
) -> Built:
    """Read results, draw, and write the page last. `on_progress(1)` is told of every figure.

    Raises UserError where `output` is a file, or as `read_results` does.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; give the folder that the report is to be written to")
    results = read_results(paths)
    sections = [section for make in SECTIONS if (section := make(results)) is not None]
    figures = output / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for section in sections:
        for drawing in section.drawings:
            written += save_drawing(drawing, figures)
            on_progress(1)
    page = output / "index.html"
    write_text(page, render_page(title, sections, (result.source for result in results.all), _made_by()))
    return Built(page, tuple(written), tuple(section.title for section in sections), results.warnings)


def save_drawing(drawing: Drawing, folder: Path) -> list[Path]:
    """Write FOLDER/NAME.svg and FOLDER/NAME.png."""
    svg, png = folder / f"{drawing.name}.svg", folder / f"{drawing.name}.png"
    save_svg(drawing.figure, svg)
    with styled():
        drawing.figure.savefig(png, dpi=PNG_DPI, metadata={"Software": None})
    return [svg, png]


def _made_by() -> str:
    revision = source_revision()
    return f"{command_line(sys.argv)} (dspine {__version__}{f', revision {revision}' if revision else ''})"
