"""`dspine report`: one page with everything that result files say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspine.commands.console import note, waiting


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files, or folders with them; named files must be results.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for index.html and figures/.")] = Path("report"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "Speculative decoding: results",
) -> None:
    """Make one HTML page, with figures, from what `eval`, `bench`, `study`, `compare` and `train` have written.

    The page opens offline on any device, and names the source of every number. OUTPUT/figures has each figure as SVG and PNG.
    Kinds of results that are missing leave their section out. Prints the page's path.

    Examples:

      dspine report benchmarks/results/2026-11-30 checkpoints --output report

      dspine report runs/six --title "Six drafters"

      dspine report dspine-gsm8k.json dflash-gsm8k.json
    """
    with waiting("drawing"):
        from dspine.evaluation.report.build import build_report

        built = build_report(results, output, title=title)
    for warning in built.warnings:
        note(warning)
    note(f"{', '.join(built.sections)}; {len(built.figures)} figure files")
    print(built.page)
