"""The page as data: sections of figures and tables whose cells name their sources; and how it becomes one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from dspine.evaluation.report.provenance import Source
from dspine.evaluation.report.svg import inline_svg

MISSING = "\N{EN DASH}"  # a cell without a number


@dataclass(frozen=True)
class Cell:
    """One cell: its text, smaller text below it (an interval, say), and the numbers of its sources."""

    text: str
    small: str = ""
    sources: tuple[int, ...] = ()
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below heads. The first `labels` columns are words, all others right-aligned numbers."""

    caption: str
    heads: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    labels: int = 1
    folded: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure: `name` is its file's, `description` tells in words what it shows, for those who do not see it."""

    name: str
    title: str
    description: str
    figure: Figure

    @property
    def svg(self) -> Markup:
        return Markup(inline_svg(self.figure, self.name, self.title, self.description))


@dataclass(frozen=True)
class Block:
    """Figures side by side under a small heading, then tables with every number that is in them."""

    heading: str
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Fact:
    """A number for the top of the page."""

    value: str
    label: str
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Section:
    """A chapter of the page; `text` says what is measured and how to read it."""

    id: str
    title: str
    text: str
    blocks: tuple[Block, ...]
    facts: tuple[Fact, ...] = field(default=())

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        return tuple(drawing for block in self.blocks for drawing in block.drawings)


def render_page(title: str, sections: Iterable[Section], sources: Iterable[Source], made_by: str) -> str:
    """The page as one HTML text that needs no other file."""
    return _template().render(title=title, sections=[*sections], sources=[*sources], made_by=made_by)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((resources.files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
