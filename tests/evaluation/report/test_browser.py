"""The page in a real browser: `make browser`. Skipped where playwright or chromium is missing; no other check needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspine.evaluation.report.build import build_report

pytestmark = pytest.mark.browser

SCREENS = [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")]
# Elements that reach beyond the viewport, unless a region that scrolls by itself holds them.
OVERFLOWING = """
[...document.body.querySelectorAll("*")]
  .filter(e => !e.closest(".scroll table") && !e.closest("svg") && !e.closest(".skip"))
  .filter(e => { const r = e.getBoundingClientRect(); return r.width > 0 && (r.right > innerWidth + 1 || r.left < -1); })
  .map(e => e.tagName + "." + e.className)
"""
# Contrast of text and background by WCAG 2: (lighter + 0.05) / (darker + 0.05), both relative luminances.
CONTRAST = """
(([text, ground]) => {
  const light = name => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const channels = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
    probe.remove();
    const [r, g, b] = channels.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const [a, b] = [light(text), light(ground)];
  return Math.max(a, b) / Math.min(a, b);
})
"""


@pytest.fixture(scope="module")
def report(committed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(committed, tmp_path_factory.mktemp("report")).page


@pytest.fixture(scope="module", params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def shown(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[str]]]:
    """The page on one screen, everything unfolded; and what the browser asked for or complained of."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, events = context.new_page(), list[str]()
    page.on("request", lambda asked: events.append(f"request {asked.url}"))
    page.on("console", lambda message: events.append(f"console {message.text}"))
    page.on("pageerror", lambda error: events.append(f"error {error}"))
    page.goto(report.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    yield page, events
    context.close()


def test_nothing_is_asked_for_but_the_page(shown: tuple[Any, list[str]], report: Path) -> None:
    _, events = shown
    assert events == [f"request {report.as_uri()}"]


def test_the_page_never_scrolls_sideways(shown: tuple[Any, list[str]]) -> None:
    page, _ = shown
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OVERFLOWING) == []


def test_wide_tables_scroll_in_themselves_by_keyboard_too(shown: tuple[Any, list[str]]) -> None:
    page, _ = shown
    of_region = "e => [e.scrollWidth > e.clientWidth, e.tabIndex, e.getAttribute('aria-label')]"
    regions = page.evaluate(f"[...document.querySelectorAll('.scroll')].map({of_region})")
    assert all(index == 0 and label for _, index, label in regions)
    if page.viewport_size["width"] == 360:
        assert sum(wide for wide, _, _ in regions) > 3


def test_figures_fill_their_place_and_can_be_read(shown: tuple[Any, list[str]]) -> None:
    page, _ = shown
    sizes = page.evaluate("[...document.querySelectorAll('figure svg')].map(e => [e.clientWidth, e.clientHeight])")
    assert len(sizes) == 20
    assert all(width >= 250 and height >= 60 for width, height in sizes)
    letters = page.evaluate("[...document.querySelectorAll('figure svg text')].map(e => e.getBoundingClientRect().height)")
    assert min(letters) >= 9, "the height of a line of text, in CSS pixels"


def test_figures_have_names_for_screen_readers(shown: tuple[Any, list[str]]) -> None:
    page, _ = shown
    assert page.get_by_role("img", name="Acceptance length on GSM8K, T = 0").count() == 1
    assert page.get_by_role("region", name="Acceptance length at T = 0").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1


@pytest.mark.parametrize("text", ["ink", "muted", "accent"])
def test_text_stands_out_from_its_ground(text: str, shown: tuple[Any, list[str]]) -> None:
    """WCAG 2 AA asks for 4.5."""
    page, _ = shown
    assert min(page.evaluate(f"{CONTRAST}(['{text}', '{ground}'])") for ground in ("paper", "page")) >= 4.5


def test_colours_follow_the_scheme(browser: Any, report: Path) -> None:
    seen = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(report.as_uri())
        seen.add(page.evaluate("[getComputedStyle(document.body).backgroundColor, "
                               "getComputedStyle(document.querySelector('svg text')).fill].join()"))  # fmt: skip
        context.close()
    assert len(seen) == 2
