"""What predictions needed, the cards, the composition, the sentences: packed for the page, and seen
in Chromium."""

import re

import numpy as np
import pytest
from pages import (
    aside,
    expect_text,
    explain,
    focus_map,
    make_explained,
    read_tip,
)

from report import page


@pytest.mark.slow
def test_needs_are_shown_beside_attention(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    assert tab.is_checked("#looks") and "L0H0" in tab.inner_text("#map-title")
    tab.check("#needs")
    expect_text(tab, "#map-title", "What each prediction needed after 20 steps")
    assert tab.locator("#map-note").is_visible()  # of no one head
    assert tab.locator("#weighting").is_hidden() and tab.locator("#average").is_hidden()
    for query, key in ((14, 3), (9, 8), (5, 0)):
        focus_map(tab, query, key, 16)
        place_query, place_key, text = read_need(tab)
        assert (place_query, place_key) == (query, key)
        assert text.startswith(signed(held["token_effect"][query, key]))
        changed = f"changes by {np.float16(held['token_effect_kl'][query, key]):.2f} nats (KL)"
        assert changed in tab.inner_text("#tip")
    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_text(tab, "#map-title", "after 0 steps")
    focus_map(tab, 14, 3, 16)
    assert read_need(tab)[2].startswith(signed(explain(step=0)["token_effect"][14, 3]))
    tab.check("#looks")
    focus_map(tab, 14, 3, 16)
    assert "±" in read_tip(tab)[2]


def signed(x: float) -> str:
    return f"{'+' if x > 0 else '−'}{abs(np.float16(x)):.2f}"


def read_need(tab) -> tuple[int, int, str]:
    text = tab.inner_text("#tip")
    query, key = re.search(r"w?(\d+), with .* (\d+) hidden", text).groups()
    return int(query), int(key), text.split("\n")[1]


@pytest.mark.slow
def test_pointing_at_a_token_tells_what_was_expected_and_what_it_needed(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    tab.check("#needs")
    tab.locator("#text .token").nth(9).hover()
    needs = held["token_effect"][9, :10]
    best, worst = int(needs.argmax()), int(needs.argmin())
    assert f"·w{best} {best}" in tab.locator("#lists .needed li").first.inner_text()
    assert f"·w{worst} {worst}" in tab.locator("#lists .hindered li").first.inner_text()
    shade = tab.locator("#text .token").nth(best).evaluate("span => span.style.background")
    assert "--needed" in shade
    shade = tab.locator("#text .token").nth(worst).evaluate("span => span.style.background")
    assert "--hindered" in shade
    chips = tab.locator("#expected .chance").all_inner_texts()
    assert [chip.split("\n")[0] for chip in chips] == [
        f"·n{i}" for i in held["predicted_ids"][9]
    ] + ["·w10"]
    assert chips[0].endswith(f"{held['predicted_probs'][9, 0]:.3f}")
    assert tab.locator("#expected .real").all_inner_texts() == [chips[-1]]
    says = tab.inner_text("#expected p")
    assert f"·w10, has a loss of {np.float16(held['logit_lens'][-1, 9]):.4g}"[:24] in says
    assert f"Hidden, these raise it: ·w{best} {signed(needs[best])}" in says
    tab.locator("#text .token").nth(15).hover()
    assert "The text ends here" in tab.inner_text("#expected")


@pytest.mark.slow
def test_the_card_of_a_token_adds_up(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    aside(tab)
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.locator("#text .token").nth(5).click()
    expect_text(tab, "#card-title", "·w5 5")
    card = tab.inner_text("#card")
    for k, name in enumerate(("embedding", "block 0", "block 1")):
        assert re.search(rf"{name}\s+{float(np.float16(held['logit_lens'][k, 5])):.4g}"[:20], card)
    direct = held["logit_attribution"][:, 5].astype(np.float16).astype(float)  # (12, 6)
    assert signed(direct[:, 0].sum()) in tab.inner_text("#card [data-part=direct] p")
    best = int(np.abs(direct[:, 0]).argmax())
    name = (
        "embedding",
        *(f"L{at}{h}" for at in (0, 1) for h in ("H0", "H1", "H2", "H3", " MLP")),
        "biases",
    )[best]
    line = tab.locator("#card [data-part=direct] li").first.inner_text()
    assert line.startswith(name) and signed(direct[best, 0]) in line
    assert "L1H2" in tab.inner_text("#card [data-part=promoted]")
    for k, id in enumerate(held["promoted_and_suppressed_ids"][1, 2, 5]):
        direction = "promoted" if k < 3 else "suppressed"
        side = tab.inner_text(f"#card [data-direction={direction}]")
        assert f"·n{id}" in side
    tab.locator("#expected .chance").nth(1).click()  # of the second likeliest
    id = held["predicted_ids"][5, 1]
    expect_text(tab, "#card [data-part=direct] h4", f"·n{id}")
    assert signed(direct[:, 2].sum()) in tab.inner_text("#card [data-part=direct] p")
    grid = tab.locator("#card canvas")
    aside(tab)
    grid.focus()
    tab.keyboard.press("ArrowRight")
    assert f"without L1H1\n{signed(held['head_effect'][1, 1, 5])} nats" in tab.inner_text("#tip")


@pytest.mark.slow
def test_the_wiring_follows_the_slider(open_page, tmp_path):
    tab = open_page(page.write_page(make_explained(tmp_path / "run")))
    lines = tab.locator("#composition .composition-line")
    assert lines.count() == 1  # what is not clear of its error is not drawn
    wide = lines.evaluate("line => parseFloat(getComputedStyle(line).strokeWidth)")
    assert "80 ± 2%" in lines.get_attribute("aria-label")
    assert "50 ± 4%" in lines.get_attribute("aria-label")
    assert tab.locator("#composition .share").all_text_contents() == ["80%"]
    tab.focus("#step")
    tab.keyboard.press("ArrowLeft")
    expect_text(tab, "#composition h3", "at step 10")
    assert lines.evaluate("line => parseFloat(getComputedStyle(line).strokeWidth)") < wide
    tab.keyboard.press("ArrowLeft")
    expect_text(tab, "#composition h3", "at step 0")
    assert lines.count() == 0
    assert tab.inner_text("#headline").startswith("Induction head: L0H0")
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.click("#headline button")
    expect_text(tab, "#map-title", "L0H0")
    assert tab.locator("#chart-gain svg").is_visible()
