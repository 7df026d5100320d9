"""How all figures look: small enough to be read on a phone, one accent for DSpine, muted hues for the others.

Every colour has a name; `svg` turns the names into CSS variables, so that an inlined figure follows the page's light or
dark scheme while the files beside the page keep the colours below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    from dspine.errors import UserError

    raise UserError("figures need matplotlib; install dspine[report]") from error

REFERENCE = "dspine"
WIDTH_IN = 3.6
TITLE_SIZE = 9.5
PALETTE = {  # light scheme; page.html.jinja has the dark one under the same names
    "paper": "#fffffe",
    "ink": "#1f2429",
    "muted": "#5f6a75",
    "rule": "#dde1e5",
    "accent": "#0b7268",
    "accent-soft": "#7dbab2",
    "s1": "#8a949e",
    "s2": "#8d7fa8",
    "s3": "#a98a5f",
    "s4": "#6f93b5",
    "s5": "#a8757f",
    "s6": "#7f9a76",
}
SERIES = {"dflash": "s1", "domino": "s2", "dspark": "s3", "dflash2": "s4", "eagle3": "s5"}
DISPLAY = {
    "dspine": "DSpine", "dflash": "DFlash", "domino": "Domino", "dspark": "DSpark", "dflash2": "DFlash2", "eagle3": "EAGLE-3",
    "gsm8k": "GSM8K", "humaneval": "HumanEval", "mt-bench": "MT-Bench", "mbpp": "MBPP", "math500": "MATH-500",
    "livecodebench": "LiveCodeBench", "arena-hard-v2": "Arena-Hard v2",
}  # fmt: skip
MARKERS = {"dspine": "o", "dflash": "s", "domino": "^", "dspark": "D", "dflash2": "v", "eagle3": "P"}


def display(name: str) -> str:
    """A drafter's or benchmark's name as people write it; any other name as it is."""
    return DISPLAY.get(name, name)


def colour(drafter: str, variant: bool = False) -> str:
    """A drafter's colour, the same in every figure; `variant` marks another row with the same drafter."""
    if drafter == REFERENCE:
        return PALETTE["accent-soft" if variant else "accent"]
    return PALETTE[SERIES.get(drafter, "s6")]


@contextmanager
def styled() -> Iterator[None]:
    """matplotlib's settings for drawing and saving; the same figures give the same files."""
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it is read aloud, searched and set in the page's own font
        "svg.hashsalt": "dspine",
        "font.size": 8.5,
        "axes.titlesize": TITLE_SIZE,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": PALETTE["rule"],
        "axes.labelcolor": PALETTE["muted"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": PALETTE["rule"],
        "grid.linewidth": 0.6,
        "text.color": PALETTE["ink"],
        "xtick.color": PALETTE["muted"],
        "ytick.color": PALETTE["muted"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "figure.facecolor": PALETTE["paper"],
        "axes.facecolor": PALETTE["paper"],
        "savefig.facecolor": PALETTE["paper"],
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.4,
        "lines.markersize": 3.5,
    }
    with mpl.rc_context(settings):
        yield


def new_axes(height_in: float) -> tuple[Figure, Axes]:
    """A figure of the page's width with one pair of axes."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def legend_above(figure: Figure, axes: Axes, title: str) -> None:
    """The title, and below it a legend, three names a line; none for a single line, which the title names."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        axes.set_title(title)
        return
    legend = figure.legend(
        handles, labels, loc="outside upper left", ncols=3, handlelength=1.6, columnspacing=1.2, title=title, alignment="left",
        title_fontproperties={"size": TITLE_SIZE, "weight": "bold"}, borderpad=0.1,
    )  # fmt: skip
    legend.get_title().set_color(PALETTE["ink"])


def slug(*parts: str) -> str:
    """A file name from the parts that are not empty: lower case, letters, digits, - and _."""
    text = "-".join(part for part in parts if part).lower()
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)
