"""The chat page in a real browser: `make browser`. Playwright drives the system's own chromium, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dspine.api import LLM

pytestmark = pytest.mark.browser

SCREENS = [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")]
OVERFLOWING = """
[...document.body.querySelectorAll("*")]
  .filter(e => { const r = e.getBoundingClientRect(); return r.width > 1 && (r.right > innerWidth + 1 || r.left < -1); })
  .map(e => e.tagName + "#" + e.id)
"""


@pytest.fixture
def expect(browser: Any) -> Any:
    """`expect(locator).to_have_text(...)` waits for it."""
    from playwright.sync_api import expect as made

    made.set_options(timeout=20_000)
    return made


@pytest.fixture
def complaints() -> list[str]:
    """What a page asked of others than its server, and what went wrong in it."""
    return []


@pytest.fixture
def page(browser: Any, server: Any, complaints: list[str]) -> Iterator[Any]:
    context = browser.new_context()
    opened = context.new_page()
    opened.on("request", lambda request: note_foreign(request.url, server.url, complaints))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(server.url)
    yield opened
    context.close()
    server.wait_until_idle()


def note_foreign(url: str, home: str, complaints: list[str]) -> None:
    if not url.startswith((home, "data:")):
        complaints.append(url)


def say(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def set_longest(page: Any, tokens: int) -> None:
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Longest answer, tokens").fill(str(tokens))


def test_an_answer_streams_in_with_colours_and_figures(page: Any, llm: LLM, expect: Any, complaints: list[str]) -> None:
    result = llm.generate("hello there", chat=True, max_new_tokens=40)
    set_longest(page, 40)
    say(page, "hello there")
    expect(page.get_by_role("status")).to_contain_text("Cut at" if result.finish_reason == "length" else "Done")
    answer = page.locator("article.assistant")
    assert answer.evaluate("e => e.textContent") == result.text
    colour = "e => getComputedStyle(e).color"
    own = answer.locator(".own").first.evaluate(colour)
    assert own == page.locator("#legend .own").evaluate(colour) != page.locator("#legend .accepted").evaluate(colour)
    assert bool(answer.locator(".accepted").count()) == any(result.accepted)
    expect(page.locator("#tokens")).to_have_text(str(len(result.token_ids)))
    expect(page.locator("#tau")).to_have_text(f"{result.stats.acceptance_length:.2f}")
    assert float(page.locator("#speed").inner_text()) > 0
    expect(page.locator("#model")).to_have_text("tiny")
    # Colours can be turned off, and the conversation goes on.
    page.get_by_label("Show drafted tokens").uncheck()
    assert answer.locator(".own").first.evaluate(colour) != own
    say(page, "and?")
    expect(page.locator("article.assistant")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert complaints == []


def test_escape_stops_an_answer(page: Any, server: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch, expect: Any) -> None:
    monkeypatch.setattr(llm.target, "eos_token_ids", frozenset())
    set_longest(page, 480)
    say(page, "a long one")
    expect(page.locator("article.assistant")).not_to_be_empty()  # tokens may come before the first whole character
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    server.wait_until_idle()
    assert page.locator("article.assistant").evaluate("e => e.textContent")


def test_everything_is_reached_by_the_keyboard_and_has_a_name(page: Any) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt", "one can write at once"
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] == "SUMMARY":
            page.keyboard.press("Enter")
    controls = ["send", "clear", "SUMMARY", "temperature", "max-tokens", "colours", "key"]
    assert [name for name in reached if name in controls] == controls
    nameless = "[...document.querySelectorAll('input, textarea, button')].filter(e => !e.labels?.length && !e.textContent)"
    assert page.evaluate(f"{nameless}.length") == 0


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_reads_well_on_every_screen(browser: Any, server: Any, width: int, scheme: str, expect: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": 640}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    set_longest(page, 30)
    say(page, "w" * 200)
    expect(page.locator("article.assistant span").first).to_be_attached()
    assert page.evaluate(OVERFLOWING) == []
    ground, text = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    brightness = [sum(int(part) for part in colour[4:-1].split(",")) for colour in (ground, text)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    assert abs(brightness[0] - brightness[1]) > 450
    assert page.locator("#send").bounding_box()["height"] >= 44, "a finger hits it"
    context.close()
    server.wait_until_idle()


def test_a_wrong_key_is_asked_for(browser: Any, serve: Any, expect: Any) -> None:
    with serve(api_key="secret") as guarded:
        context = browser.new_context()
        page = context.new_page()
        page.goto(guarded.url)
        expect(page.get_by_role("status")).to_have_text("the API key is missing or wrong")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").press("Tab")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.get_by_role("status")).to_have_text("")
        say(page, "hello")
        expect(page.locator("article.assistant span").first).to_be_attached()
        context.close()
        guarded.wait_until_idle()
