"""What all figures share: matplotlib without a display, colours, and files that are the same for the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspine.errors import UserError

COLOURS = ("#9aa5b1", "#7b8794", "#5a9bd4", "#3f8f6b", "#c78a2c", "#b3423a", "#7d5ba6", "#4a4a4a")


def prepare_matplotlib() -> None:
    """Set matplotlib up; raises UserError where it is not installed. Call it before long work that ends in a figure."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("figures need matplotlib; install dspine[report]") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "dspine"  # the same results give the same file


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def save_figure(figure: Any, *files: Path) -> None:
    """Write the figure in the formats that the files' names end in, and forget it."""
    from matplotlib import pyplot as plt

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    for file in files:
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, bbox_inches="tight", dpi=160, metadata=metadata)
    plt.close(figure)
