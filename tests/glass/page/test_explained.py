"""Token effects, the prediction breakdown, the composition and the findings, seen in Chromium."""

import re

import numpy as np
import pytest
from pages import (
    expect_map,
    expect_text,
    explain,
    focus_map_cell,
    make_explained,
    move_pointer_away,
    read_back,
    read_cell_tooltip,
    snapshot,
    write_snapshot,
)
from playwright.sync_api import expect

from glass.page import write as page


@pytest.mark.slow
def test_token_effects_are_shown_beside_attention(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    assert tab.is_checked("#attention-pattern")
    expect_map(tab, heads="L0H0")
    tab.check("#token-effect")
    expect_map(tab, kind="token-effect", step=20)
    assert tab.locator("#map-note").is_visible()
    assert tab.locator("#weighting").is_hidden() and tab.locator("#average").is_hidden()
    for query, key in ((14, 3), (9, 8), (5, 0)):
        focus_map_cell(tab, query, key, 16)
        shown_query, shown_key, text = read_cell_tooltip(tab)
        assert (shown_query, shown_key) == (query, key)
        assert text.startswith(signed(held["token_effect"][query, key]))
        kl = f"{np.float16(held['token_effect_kl'][query, key]):.2f}"
        assert kl in tab.locator("#tip div").last.inner_text()
    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_map(tab, kind="token-effect", step=0)
    focus_map_cell(tab, 14, 3, 16)
    assert read_cell_tooltip(tab)[2].startswith(signed(explain(step=0)["token_effect"][14, 3]))
    tab.check("#attention-pattern")
    focus_map_cell(tab, 14, 3, 16)
    assert "±" in read_cell_tooltip(tab)[2]
    tab.check("#token-effect")
    tab.locator("#text .token").nth(14).click()
    listed = tab.locator("#lists .helped li").count()
    assert listed == min(8, (held["token_effect"][14, :14] > 0).sum())
    tab.locator("#text .token").last.click()  # no next token
    expect(tab.locator("#lists li")).to_have_count(0)
    assert tab.inner_text("#lists")
    expect(tab.locator("#breakdown [data-part=lens]")).to_have_count(0)
    expect(tab.locator("#breakdown [data-part=direct]")).to_be_visible()


def test_the_page_states_the_emergence_intervals_of_the_findings(tmp_path):
    content, _ = read_back(page.write_page(make_explained(tmp_path / "run")))
    interval = content["emergenceIntervals"]["emerged/induction/L0H0"]
    finding = content["findings"][0]
    assert finding["heads"] == ["L0H0"]
    assert interval in finding["text"] and interval in " ".join(finding["details"])


def signed(x: float) -> str:
    return f"{'+' if x > 0 else '−'}{abs(np.float16(x)):.2f}"


@pytest.mark.slow
def test_pointing_at_a_token_shows_its_prediction_and_token_effects(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    tab.check("#token-effect")
    tab.locator("#text .token").nth(9).hover()
    effects = held["token_effect"][9, :10]
    best, worst = int(effects.argmax()), int(effects.argmin())
    assert f"·w{best} {best}" in tab.locator("#lists .helped li").first.inner_text()
    assert f"·w{worst} {worst}" in tab.locator("#lists .hurt li").first.inner_text()
    shade = tab.locator("#text .token").nth(best).evaluate("span => span.style.background")
    assert "--positive" in shade
    shade = tab.locator("#text .token").nth(worst).evaluate("span => span.style.background")
    assert "--negative" in shade
    chips = tab.locator("#expected .chance").all_inner_texts()
    assert [chip.split("\n")[0] for chip in chips] == [
        f"·n{i}" for i in held["predicted_ids"][9]
    ] + ["·w10"]
    assert chips[0].endswith(f"{held['predicted_probs'][9, 0]:.3f}")
    assert tab.locator("#expected .real").all_inner_texts() == [chips[-1]]
    says = tab.inner_text("#expected p")
    assert "·w10" in says and f"{np.float16(held['logit_lens'][-1, 9]):.4g}"[:5] in says
    assert f"·w{best} {signed(effects[best])}" in says
    tab.locator("#text .token").nth(15).hover()
    assert tab.locator("#expected .chance").count() == 5
    assert tab.locator("#expected .real").count() == 0  # the text ends here


@pytest.mark.slow
def test_the_tokens_of_a_long_text_that_are_not_explained_show_nothing(open_page, tmp_path):
    run, held = make_explained(tmp_path / "run"), explain(step=20)
    for name in ("token_effect", "token_effect_kl"):
        held[name][:6] = held[name][:, :6] = np.nan
    held["head_effect"][:] = held["logit_lens"][:, :6] = np.nan
    held["predicted_ids"][:6] = -1
    write_snapshot(run, snapshot(step=20) | held)
    tab = open_page(page.write_page(run))
    tab.check("#token-effect")
    assert "10 of 16" in tab.inner_text("#map-title")
    tab.locator("#text .token").nth(3).click()
    assert tab.locator("#expected .chance").count() == 0
    assert tab.locator("#lists li").count() == 0
    assert not tab.is_visible("#breakdown")
    tab.locator("#text .token").nth(9).click()
    effects = held["token_effect"][9, 6:10]
    assert tab.locator("#lists .helped li").count() == (effects > 0).sum()
    assert tab.locator("#expected .chance").count() > 4
    assert tab.locator("#breakdown [data-part=effects] canvas").count() == 0  # no head effects


@pytest.mark.slow
def test_the_prediction_breakdown_adds_up(open_page, tmp_path):
    tab, held = open_page(page.write_page(make_explained(tmp_path / "run"))), explain(step=20)
    move_pointer_away(tab)
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.locator("#text .token").nth(5).click()
    expect_text(tab, "#breakdown-title", "·w5 5")
    breakdown = tab.inner_text("#breakdown")
    for k, name in enumerate(("embedding", "block 0", "block 1")):
        assert re.search(
            rf"{name}\s+{float(np.float16(held['logit_lens'][k, 5])):.4g}"[:20], breakdown
        )
    direct = held["logit_attribution"][:, 5].astype(np.float16).astype(float)  # (12, 6)
    assert signed(direct[:, 0].sum()) in tab.inner_text("#breakdown [data-part=direct] p")
    best = int(np.abs(direct[:, 0]).argmax())
    name = (
        "embedding",
        *(f"L{at}{h}" for at in (0, 1) for h in ("H0", "H1", "H2", "H3", " MLP")),
        "biases",
    )[best]
    line = tab.locator("#breakdown [data-part=direct] li").first.inner_text()
    assert line.startswith(name) and signed(direct[best, 0]) in line
    assert "L1H2" in tab.inner_text("#breakdown [data-part=promoted]")
    for k, id in enumerate(held["promoted_and_suppressed_ids"][1, 2, 5]):
        direction = "promoted" if k < 3 else "suppressed"
        side = tab.inner_text(f"#breakdown [data-direction={direction}]")
        assert f"·n{id}" in side
    tab.locator("#expected .chance").nth(1).click()  # of the second likeliest
    id = held["predicted_ids"][5, 1]
    expect_text(tab, "#breakdown [data-part=direct] h4", f"·n{id}")
    assert signed(direct[:, 2].sum()) in tab.inner_text("#breakdown [data-part=direct] p")
    grid = tab.locator("#breakdown canvas")
    move_pointer_away(tab)
    grid.focus()
    tab.keyboard.press("ArrowRight")
    assert f"without L1H1\n{signed(held['head_effect'][1, 1, 5])} nats" in tab.inner_text("#tip")


@pytest.mark.slow
def test_the_composition_follows_the_slider(open_page, tmp_path):
    tab = open_page(page.write_page(make_explained(tmp_path / "run")))
    lines = tab.locator("#composition .composition-line")
    assert lines.count() == 1  # neither small shares nor those within two errors are drawn
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
    expect_map(tab, heads="L0H0")
    assert tab.locator("#chart-gain svg").is_visible()
