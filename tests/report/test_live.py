"""A page that follows its run, has an address for what is looked at, and shows the maps first. In
Chromium, from files."""

import re

import numpy as np
import pytest
from conftest import wait_until
from pages import PROMPTED, aside, expect_text, make_run, read_tip, snapshot, told

from report import page

HEAD = "[role=radio][aria-label='layer 1, head 2']"


@pytest.mark.slow
def test_a_page_takes_over_the_newer_one_and_keeps_what_is_looked_at(open_page, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 10), max_steps=20)
    tab = open_page(page.write_page(run))
    expect_text(tab, "#alive", "running")
    tab.click(HEAD)
    tab.click("#text .token >> nth=5")
    tab.click("#theme")
    theme = tab.evaluate("document.documentElement.dataset.theme")
    aside(tab)
    tab.evaluate("scrollTo(0, 300)")
    assert tab.inner_text("#step-now") == "step 10"
    make_run(run, steps=(0, 10, 16), max_steps=20)
    page.write_page(run)
    expect_text(tab, "#step-now", "step 16", timeout=20_000)  # the newest was looked at, and is
    expect_text(tab, "#map-title", "L1H2 after 16 steps")
    assert tab.locator("#text .token.lit").get_attribute("aria-label") == "token 5"
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    wait_until(tab, "scrollY === 300")

    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_text(tab, "#step-now", "step 0")
    make_run(run, steps=(0, 10, 16, 20))
    page.write_page(run)
    expect_text(tab, "#alive", "finished", timeout=20_000)
    assert tab.inner_text("#step-now") == "step 0"  # an older one stays
    tab.evaluate("window.same = true")
    tab.wait_for_timeout(2500)
    assert tab.evaluate("window.same")  # a run that has ended is not looked after


@pytest.mark.slow
def test_every_view_has_an_address(open_page, tmp_path):
    path = page.write_page(make_run(tmp_path / "run"))
    tab = open_page(path)
    tab.click(HEAD)
    tab.focus("#step")
    tab.keyboard.press("ArrowLeft")
    tab.click("#text .token >> nth=7")
    tab.check("#weighted")
    tab.select_option("#probe", label="random tokens, repeated after 8")
    tab.click("#text .token >> nth=4")
    tab.wait_for_timeout(400)
    address = tab.evaluate("location.hash")
    assert address == "#head=L1H2&step=10&token=4&weights=value&on=repeated"
    other = open_page(path)
    other.goto(path.as_uri() + address)
    other.reload()
    expect_text(other, "#map-title", tab.inner_text("#map-title"))  # comes with the maps
    assert other.inner_text("#step-now") == "step 10"
    assert other.inner_text("#seen") == tab.inner_text("#seen")
    assert other.locator("#text .token.lit").get_attribute("aria-label") == "token 4"
    assert other.is_checked("#weighted")
    other.evaluate("location.hash = '#head=L0H3&step=0&heads=average'")
    expect_text(other, "#map-title", "Layer 0, the average of its 4 heads, after 0 steps")
    assert other.get_attribute("[role=radio][tabindex='0']", "aria-label") == "layer 0, head 3"


@pytest.mark.slow
def test_a_prompts_page_has_its_border_and_scores(open_page, tmp_path):
    rng = np.random.default_rng(0)
    scores = {
        f"heads/{name}/L{layer}H{head}": float(rng.random()) / 9
        for layer in range(2)
        for head in range(4)
        for name in ("previous_token", "induction")
    }
    scores |= {"heads/induction/L1H2": 0.7, "heads/induction_se/L1H2": 0.03}
    words = [f" a long word {i}" for i in range(300)]
    path = page.attention_page(
        snapshot(T=300, words=words),
        "“say</title>\n”",
        tmp_path / "p.html",
        PROMPTED,
        scores,
        prompted=200,
    )
    tab = open_page(path)
    assert "say</title>" in tab.title() and "say</title>" in tab.inner_text("h1")
    assert "L1H2" in tab.inner_text("#map-title")  # the head that tells most
    assert "induction 0.70 ± 0.03" in tab.inner_text("#seen")
    shown = tab.locator("#scores figure").evaluate_all("all => all.map(f => f.dataset.score)")
    assert shown == ["previous_token", "induction"]
    border = tab.locator("#text .border")
    assert "generated" in border.inner_text()
    assert border.evaluate("b => b.nextElementSibling.getAttribute('aria-label')") == "token 200"
    box = tab.locator("#map canvas").bounding_box()
    down = tab.evaluate("scrollY")
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.9)
    lit, text = (tab.locator(part).bounding_box() for part in ("#text .token.lit", "#text"))
    assert text["y"] <= lit["y"] and lit["y"] + lit["height"] <= text["y"] + text["height"]
    assert tab.evaluate("scrollY") == down and tab.locator("#text").evaluate("t => t.scrollTop") > 0
    assert re.match(r"Tokens 2\d\d to 2\d\d on tokens \d+ to", tab.inner_text("#zoom-title"))
    aside(tab)
    tab.focus("#zoom-map canvas")
    tab.keyboard.press("ArrowDown")
    query, key, value = read_tip(tab)
    assert told(value) == snapshot(T=300)["text"][1, 2, query, key]
