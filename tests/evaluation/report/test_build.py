"""The page and the figures beside it, from the committed results and from a small comparison."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dspine.errors import UserError
from dspine.evaluation.report.build import Built, build_report
from dspine.evaluation.report.style import PALETTE, new_axes, styled
from dspine.evaluation.report.svg import inline_svg

Make = Callable[..., Path]
VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Page(HTMLParser):
    """All elements with their attributes, ids, links, and the text of every table's rows."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = file.read_text(encoding="utf-8")
        self.feed(self.text)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def built(committed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_report(committed, tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def page(built: Built) -> Page:
    return Page(built.page)


def test_the_page_needs_no_other_file(page: Page) -> None:
    assert "http:" not in page.text
    assert "https:" not in page.text
    assert not {name for name, _ in page.elements} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "video",
        "audio",
        "base",
    }
    assert "@import" not in page.text
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    for _, attributes in page.elements:
        for name in ("href", "src", "xlink:href"):
            if name in attributes:
                assert attributes[name].removeprefix("#") in ids, attributes[name]
                assert attributes[name].startswith("#")
    for link in re.findall(r"url\(([^)]*)\)", page.text):
        assert link.removeprefix("#") in ids


def test_ids_are_unique(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_figure_is_described_and_lies_beside_the_page(page: Page, built: Built) -> None:
    figures = page.all("svg")
    assert len(figures) == len(built.figures) / 2 == 20
    for figure in figures:
        assert figure["role"] == "img"
        title, description = figure["aria-labelledby"].split()
        for tag, name in (("title", title), ("desc", description)):
            found = re.search(rf'<{tag} id="{re.escape(name)}">([^<]+)</{tag}>', page.text)
            assert found is not None
            assert len(found[1]) > 10
    for file in built.figures:
        assert file.stat().st_size > 2000
        if file.suffix == ".svg":
            assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        else:
            assert file.read_bytes().startswith(b"\x89PNG")


def test_every_number_of_the_results_is_in_a_table_with_its_source(page: Page) -> None:
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    assert ["DSpinewidth 8", "2.8732.77 to 2.98", "1.7871.62 to 1.98", "1.66111.56 to 1.77"] in rows
    assert next(row[:2] for row in rows if row[0] == "lead") == ["lead", "+22.1%1,3+20.2% to +24.0%, over DFlash"]
    conditional = next(row for row in rows if row[:2] == ["GSM8K", "DSpine3"])
    assert conditional[2:4] == ["67.6%of 5,372", "66.7%of 3,634"]
    speed = next(row for row in rows if row[0].startswith("DSpine15"))
    assert speed[2:7] == ["100160 tokens", "29.2", "61.2", "2.13x", "2.65"]
    assert any(row[0] == "smollm2-135m-dspine18" and row[2] == "2.865" for row in rows)


def test_every_source_is_told(page: Page) -> None:
    assert page.text.count("acceptance-gsm8k-dspine-t0.json") == 1
    sources = page.text[page.text.index('<ol class="sources">') :]
    items = re.findall(r"<li id=.*?</li>", sources, re.DOTALL)
    assert len(items) == 18
    assert all("· day " in item and "· revision " in item and "<code>" in item for item in items)


def test_all_rows_of_a_table_are_as_long_as_its_head(page: Page) -> None:
    for table in re.findall(r"<table>.*?</table>", page.text, re.DOTALL):
        lengths = {len(re.findall(r"<t[hd][ >]", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)}
        assert len(lengths) == 1, table[:200]


def test_settings_that_differ_have_figures_of_their_own(make_acceptance: Make, tmp_path: Path) -> None:
    files = [make_acceptance("a.json"), make_acceptance("b.json", prompts_sha256="abcdef0123456789")]
    built = build_report(files, tmp_path / "out")
    assert len(set(built.figures)) == len(built.figures) == 2 * 3 * 2


def test_sections_without_results_are_left_out(make_acceptance: Make, tmp_path: Path) -> None:
    built = build_report([make_acceptance("only.json")], tmp_path / "out")
    assert built.sections == ("Acceptance length", "Acceptance by position")
    page = Page(built.page)
    assert 'id="training"' not in page.text
    assert "lead" not in {row[0] for row in page.rows}


def test_a_comparison(comparison: Path, tmp_path: Path) -> None:
    built = build_report([comparison], tmp_path / "out")
    assert built.sections == ("Acceptance length", "Acceptance by position", "Training", "Comparisons")
    page = Page(built.page)
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    assert any(row[0] == "dspine-k4width 8" and row[1].startswith("2.50") for row in rows)
    assert any(row[:4] == ["DSpine5", "DSpine", "9.50", "3.002.90 to 3.10"] and row[-1] == "15.0%" for row in rows)
    assert any(row[:2] == ["EAGLE-3", "EAGLE-3"] or row[0].startswith("EAGLE-3") for row in rows)
    assert any(row[2:] == ["+50.0%", "DFlash"] for row in rows)


def test_names_from_files_cannot_inject_markup(make_acceptance: Make, tmp_path: Path) -> None:
    file = make_acceptance("a.json", drafter="<script>alert(1)</script>", target="<b>&", benchmark="../../x<i>")
    built = build_report([file], tmp_path / "out", title="a < b & c")
    text = built.page.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "<i>" not in text
    assert "a &lt; b &amp; c" in text
    assert all(figure.parent == tmp_path / "out" / "figures" for figure in built.figures)


def test_the_same_results_give_the_same_files(make_acceptance: Make, tmp_path: Path) -> None:
    one, two = (build_report([make_acceptance("a.json")], tmp_path / name) for name in ("one", "two"))
    assert one.page.read_bytes() == two.page.read_bytes()
    assert [file.read_bytes() for file in one.figures] == [file.read_bytes() for file in two.figures]


def test_a_file_is_no_folder_for_a_report(make_acceptance: Make, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="out is a file; give the folder"):
        build_report([make_acceptance("a.json")], tmp_path / "out")


def test_light_and_dark_schemes_name_the_same_colours() -> None:
    template = (resources.files("dspine.evaluation.report") / "page.html.jinja").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", template, re.DOTALL)
    )
    assert light.keys() == dark.keys()
    assert {name: light[name] for name in PALETTE} == PALETTE


def test_inlined_figures_take_the_colours_of_the_page() -> None:
    with styled():
        figure, axes = new_axes(2.0)
        axes.plot([0, 1], [0, 1], color=PALETTE["accent"])
        axes.set_title("a & b")
    svg = inline_svg(figure, "one", "title <1>", "what it shows")
    assert "var(--accent)" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg), "no colour is left as it is"
    assert "<style" not in svg
    assert "xmlns" not in svg
    assert '<title id="one-title">title &lt;1&gt;</title><desc id="one-desc">what it shows</desc>' in svg
    assert "font-family" not in svg
    ids = re.findall(r' id="([^"]+)"', svg)
    assert all(name.startswith("one-") for name in ids)
    assert {link[1:] for link in re.findall(r'href="([^"]+)"', svg)} <= set(ids)
