"""A page that follows its run, an address for every selection, the page of a prompt; in Chromium,
opened from disk."""

import pytest
from conftest import wait_until
from pages import (
    expect_map,
    expect_text,
    make_run,
    move_pointer_away,
    read_cell_tooltip,
    snapshot,
    value_within_error,
    write_prompt,
)

from glass.page import write as page
from run.run_dir import RunDir

HEAD = "[role=radio][aria-label='layer 1, head 2']"


@pytest.mark.slow
def test_a_page_follows_its_run_and_keeps_the_selection(open_page, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 10), max_steps=20)
    tab = open_page(page.write_page(RunDir(run)))
    expect_text(tab, "#alive", "step 10 of 20")
    tab.click(HEAD)
    tab.click("#text .token >> nth=5")
    tab.click("#theme")
    theme = tab.evaluate("document.documentElement.dataset.theme")
    move_pointer_away(tab)
    tab.evaluate("scrollTo(0, 300)")
    assert tab.inner_text("#step-now") == "step 10"
    make_run(run, steps=(0, 10, 16), max_steps=20)
    page.write_page(RunDir(run))
    expect_text(tab, "#step-now", "step 16")
    expect_map(tab, heads="L1H2", step=16)
    assert tab.locator("#text .token.lit").get_attribute("aria-label").startswith("token 5:")
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    wait_until(tab, "scrollY === 300")

    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_text(tab, "#step-now", "step 0")
    make_run(run, steps=(0, 10, 16, 20))
    page.write_page(RunDir(run))
    expect_text(tab, "#alive", "finished")
    expect_text(tab, "#step-now", "step 0")  # an older step stays selected


@pytest.mark.slow
def test_the_address_restores_the_selection(open_page, tmp_path):
    path = page.write_page(RunDir(make_run(tmp_path / "run")))
    tab = open_page(path)
    tab.click(HEAD)
    tab.focus("#step")
    tab.keyboard.press("ArrowLeft")
    tab.click("#text .token >> nth=7")
    tab.check("#weighted")
    tab.select_option("#probe", "1")
    tab.wait_for_selector("#large[data-probe=repeated]")
    tab.click("#text .token >> nth=4")
    address = "#head=L1H2&step=10&token=4&weights=value&probe=repeated"
    wait_until(tab, f"location.hash === '{address}'")
    other = open_page(path)
    other.goto(path.as_uri() + address)
    other.reload()
    expect_map(other, heads="L1H2", step=10)  # comes with the maps
    assert other.inner_text("#step-now") == "step 10"
    assert other.inner_text("#map-caption") == tab.inner_text("#map-caption")
    assert other.locator("#text .token.lit").get_attribute("aria-label").startswith("token 4:")
    assert other.is_checked("#weighted")
    other.evaluate("location.hash = '#head=L0H3&step=0&heads=average'")
    expect_map(other, heads="L0", step=0)
    assert other.get_attribute("[role=radio][tabindex='0']", "aria-label") == "layer 0, head 3"


@pytest.mark.slow
def test_the_page_of_a_prompt_marks_generated_tokens_and_shows_scores(open_page, tmp_path):
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    scores = {f"heads/induction/{head}": 0.1 for head in heads}
    scores |= {"heads/induction/L1H2": 0.7, "heads/induction_se/L1H2": 0.03}
    words = [f" a long word {i}" for i in range(300)]
    path = write_prompt(
        tmp_path / "p.html",
        {"title": "“say</title>\n”", "promptTokens": 200, "scoredText": words[0]},
        snapshot(T=300, words=words),
        scores,
    )
    tab = open_page(path)
    assert "say</title>" in tab.title() and "say</title>" in tab.inner_text("h1")
    expect_map(tab, heads="L1H2")  # the strongest induction head
    assert words[0] in tab.inner_text("#more")  # the text on which the heads were scored
    assert "0.70 ± 0.03" in tab.inner_text("#head-scores .kind")
    last_of_prompt = tab.get_attribute("#text .token.lit", "aria-label")
    assert last_of_prompt.startswith("token 199:")
    border = tab.locator("#text .border")
    first_generated = border.evaluate("b => b.nextElementSibling.getAttribute('aria-label')")
    assert first_generated.startswith("token 200:")
    box = tab.locator("#map canvas").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.9)
    lit, text = (tab.locator(part).bounding_box() for part in ("#text .token.lit", "#text"))
    assert text["y"] <= lit["y"] and lit["y"] + lit["height"] <= text["y"] + text["height"]
    assert tab.evaluate("scrollY") == 0 and tab.locator("#text").evaluate("t => t.scrollTop") > 0
    move_pointer_away(tab)
    tab.focus("#zoom-map canvas")
    tab.keyboard.press("ArrowDown")
    query, key, value = read_cell_tooltip(tab)
    assert value_within_error(value) == snapshot(T=300)["text"][1, 2, query, key]
