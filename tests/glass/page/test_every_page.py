"""What holds for every page: nothing in its data is run, it fits its window, all of it is reached
by the keyboard, it is light or dark. In Chromium, from files."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import soak
from pages import (
    HOSTILE,
    explain,
    fail_job,
    make_explained,
    make_job,
    of_heads,
    read_back,
    snapshot,
    write_prompt,
)

from glass.heads.say.findings import Finding
from glass.page import write as page
from run.run_dir import RunDir
from sweeps.page import write_sweep_page
from sweeps.ranking import Ranking
from sweeps.runs import read_sweep

NAME = "<img src=x onerror=window.hacked=1>"
TYPED = [text for text in HOSTILE if text != "\ud800"]  # what can be typed


def of_run(folder: Path, words: list[str] | None) -> Path:
    run = make_explained(
        folder / NAME,
        words=words,
        samples=words and ["".join(words)] * 3,
        name=HOSTILE[0] if words else "tiny",
    )
    return page.write_page(RunDir(run))


def of_prompt(folder: Path, words: list[str] | None) -> Path:
    held = snapshot(words=words) | explain(words=words)
    tokens = (words or ["a", "\n"]) * 200
    losses = {"summary": NAME, "tokens": tokens, "losses": [k % 7 for k in range(len(tokens))]}
    losses |= {"tokenCount": 10**6, "window": 8, "vocabSize": 50}
    facts = {"title": NAME, "promptTokens": 9, "losses": losses}
    scores = of_heads(["induction"], 2, 4, lambda: 0.1)
    facts["findings"] = [Finding(NAME, NAME, [NAME], [])._asdict()]
    return write_prompt(folder / "prompt.html", facts, held, scores)


def of_sweep(folder: Path, words: list[str] | None) -> Path:
    key, values = ("data.path", TYPED[::3]) if words else ("model.n_kv_head", ["1", "2", "4"])
    for k, value in enumerate(values):
        run = make_job(folder / NAME, {key: value}, 2 + k / 10, words=words)
        if words and k % 2 == 0:
            fail_job(run, value)
    return write_sweep_page(folder / NAME, Ranking(read_sweep(folder / NAME)))


@pytest.mark.parametrize("write", [of_run, of_prompt, of_sweep])
def test_data_cannot_leave_its_element(tmp_path, write: Callable):
    path = write(tmp_path, HOSTILE)
    text, (content, blobs) = path.read_bytes(), read_back(path)
    worker = text.count(b'id="worker"')
    assert text.count(b"<script") == 3 + worker + len(blobs)
    data = re.search(rb'id="data">(.*?)</script>', text, re.S)[1]
    assert data.isascii() and not re.search(rb"[<>&\0]", data)
    assert b"default-src 'none'" in text and NAME in str(content)


@pytest.mark.slow
@pytest.mark.parametrize("write", [of_run, soak(of_sweep), soak(of_prompt)])
def test_hostile_text_is_shown_and_not_run(open_page, tmp_path, write: Callable):
    tab = open_page(write(tmp_path, HOSTILE))
    for canvas in tab.locator("canvas[tabindex]").all():
        canvas.dispatch_event("focus")
    for mark in tab.locator("#text .token, .chip, summary, tbody tr, option").all():
        mark.dispatch_event("pointerenter")
        mark.dispatch_event("click")
    if tab.locator("#token-effect").is_visible():
        tab.check("#token-effect")
    assert tab.evaluate("window.hacked") is None and tab.locator("main img").count() == 0
    assert NAME in tab.inner_text("body")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.slow
@pytest.mark.parametrize("write", [of_run, soak(of_prompt), soak(of_sweep)])
@pytest.mark.parametrize("width", [360, soak(2560)])
def test_the_page_fits_the_window(open_page, tmp_path, write: Callable, width):
    tab = open_page(write(tmp_path, None), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    button = tab.locator("#theme").bounding_box()
    for part in tab.locator("h1, header p").all():
        box = part.bounding_box()
        is_beside = box["x"] + box["width"] <= button["x"]
        assert is_beside or box["y"] >= button["y"] + button["height"]
    for part in tab.locator("main canvas, main svg, main pre, main input, main select").all():
        if part.is_visible() and not part.evaluate("part => part.closest('.heads-grid, .scroll')"):
            box = part.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1


# What is colored by its data, or marked as selected, and how it looks.
MEANINGFUL = """[style*='--c'], [style*='--w'], [style*='--share'], [style*='background'],
    [aria-checked=true], [aria-pressed=true], .lit, .mark, .ramp, .group, .real, .bars .negative,
    .has-weights, .maps-only, .differs, .key"""
APPEARANCE = """selectors => [...document.querySelectorAll(selectors)].map(element => {
  const parts = ["", "::before", "::after"].map(part => getComputedStyle(element, part));
  const looks = parts.filter(({ content }) => content !== "none").map(style => {
    const hasColor = !/, 0\\)$/.test(style.backgroundColor);
    const hasBorder = parseFloat(style.borderTopWidth) > 0;
    return [hasColor && style.backgroundColor, style.backgroundImage, style.boxShadow,
      hasBorder && style.borderTopColor];
  });
  return [element.tagName, element.className, JSON.stringify(looks)];
})"""


@pytest.mark.slow
@pytest.mark.parametrize("write", [of_run, of_prompt, of_sweep])
def test_colors_with_a_meaning_and_marks_remain_in_high_contrast(open_page, tmp_path, write):
    tab = open_page(write(tmp_path, None), color_scheme="light", forced_colors="none")
    for selector in ("#map canvas", "#text .token", ".chance", "tbody tr", ".chip"):
        if tab.locator(selector).count():
            tab.locator(selector).first.dispatch_event("pointerenter")
            tab.locator(selector).first.dispatch_event("focus")
    expected = tab.evaluate(APPEARANCE, MEANINGFUL)
    tab.emulate_media(forced_colors="active")
    assert len(expected) > 10 and tab.evaluate(APPEARANCE, MEANINGFUL) == expected


RUN_ORDER = """theme headline numbers play step text expected map heads-grid probe
    attention-pattern raw average breakdown scores more-scores trajectory emergence chart-loss
    sample-before sample-step config"""
SWEEP_ORDER = """theme command copy table settings chips curve-0 curve-1 shown against figure-chart
    head-induction"""


@pytest.mark.slow
@pytest.mark.parametrize(("write", "order"), [(of_run, RUN_ORDER), soak(of_sweep, SWEEP_ORDER)])
def test_the_keyboard_reaches_everything(open_page, tmp_path, write: Callable, order: str):
    tab, reached = open_page(write(tmp_path, None)), []
    for _ in range(65):
        tab.keyboard.press("Tab")
        part = tab.evaluate("document.activeElement.closest('[id]')?.id ?? ''")
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or not part
        reached.append(part)
    places = [reached.index(part) for part in order.split()]
    assert places == sorted(places)
