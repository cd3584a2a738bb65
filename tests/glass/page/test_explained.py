"""Token effects, the prediction breakdown, the composition and the findings, seen in Chromium."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import wait_until
from pages import (
    expect_map,
    expect_text,
    explain,
    focus_map_cell,
    make_explained,
    move_pointer_away,
    read_cell_tooltip,
    snapshot,
    write_snapshot,
)
from playwright.sync_api import expect

from glass.page import write as page
from run.run_dir import RunDir


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return page.write_page(RunDir(make_explained(tmp_path_factory.mktemp("explained") / "run")))


@pytest.fixture
def tab(open_page, path):
    return open_page(path)


@pytest.fixture(scope="module")
def held() -> dict:
    return explain(step=20)


def signed(x: float) -> str:
    return f"{'+' if x > 0 else '−'}{abs(np.float16(x)):.2f}"


@pytest.mark.slow
def test_token_effects_are_shown_beside_attention(tab, held):
    tab.check("#token-effect")
    expect_map(tab, kind="token-effect", step=20)
    assert tab.locator("#weighting").is_hidden() and tab.locator("#average").is_hidden()
    for query, key in ((14, 3), (5, 0)):
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
    tab.locator("#text .token").last.click()  # no next token
    expect(tab.locator("#lists li")).to_have_count(0)
    expect(tab.locator("#breakdown [data-part=lens]")).to_have_count(0)
    expect(tab.locator("#breakdown [data-part=direct]")).to_be_visible()
    tab.check("#attention-pattern")
    focus_map_cell(tab, 14, 3, 16)
    assert "±" in read_cell_tooltip(tab)[2]


@pytest.mark.slow
def test_pointing_at_a_token_shows_its_prediction_and_token_effects(tab, held):
    tab.check("#token-effect")
    tab.locator("#text .token").nth(9).hover()
    effects = held["token_effect"][9, :10]
    best, worst = int(effects.argmax()), int(effects.argmin())
    least = 0.01 * np.nanmax(np.abs(held["token_effect"]))
    assert tab.locator("#lists .helped li").count() == min(8, (effects >= least).sum())
    for kind, token, color in (("helped", best, "positive"), ("hurt", worst, "negative")):
        assert f"·w{token} {token}" in tab.locator(f"#lists .{kind} li").first.inner_text()
        shade = tab.locator("#text .token").nth(token).evaluate("span => span.style.background")
        assert f"--{color}" in shade
    chips = tab.locator("#expected .chance").all_inner_texts()
    likeliest = [f"·n{i}" for i in held["predicted_ids"][9]]
    assert [chip.split("\n")[0] for chip in chips] == [*likeliest, "·w10"]
    assert chips[0].endswith(f"{held['predicted_probs'][9, 0]:.3f}")
    assert tab.locator("#expected .real").all_inner_texts() == [chips[-1]]
    sentence = tab.inner_text("#expected p")
    assert f"{np.float16(held['logit_lens'][-1, 9]):.4g}"[:5] in sentence
    assert f"·w{best} {signed(effects[best])}" in sentence


@pytest.mark.slow
def test_the_prediction_breakdown_adds_up(tab, held):
    move_pointer_away(tab)
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.locator("#text .token").nth(5).click()
    expect_text(tab, "#breakdown-title", "·w5 5")
    for k, name in enumerate(("embedding", "block 0", "block 1")):
        loss = float(np.float16(held["logit_lens"][k, 5]))
        assert re.search(rf"{name}\s+{loss:.3f}", tab.inner_text("#breakdown"))
    direct = held["logit_attribution"][:, 5].astype(np.float16).astype(float)  # (12, 6)
    assert signed(direct[:, 0].sum()) in tab.inner_text("#breakdown [data-part=direct] p")
    best = int(np.abs(direct[:, 0]).argmax())
    parts = [f"L{layer}{part}" for layer in (0, 1) for part in ("H0", "H1", "H2", "H3", " MLP")]
    line = tab.locator("#breakdown [data-part=direct] li").first.inner_text()
    assert line.startswith(["embedding", *parts, "biases"][best])
    assert signed(direct[best, 0]) in line
    for k, id in enumerate(held["promoted_and_suppressed_ids"][1, 2, 5]):
        direction = "promoted" if k < 3 else "suppressed"
        assert f"·n{id}" in tab.inner_text(f"#breakdown [data-direction={direction}]")
    tab.locator("#expected .chance").nth(1).click()  # of the second likeliest
    expect_text(tab, "#breakdown [data-part=direct] h4", f"·n{held['predicted_ids'][5, 1]}")
    assert signed(direct[:, 2].sum()) in tab.inner_text("#breakdown [data-part=direct] p")
    move_pointer_away(tab)
    tab.focus("#breakdown canvas")
    tab.keyboard.press("ArrowRight")
    assert f"without L1H1\n{signed(held['head_effect'][1, 1, 5])} nats" in tab.inner_text("#tip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "prefix", "token"),
    [("abcdefghabjkljmn", "", 8), ("abcdefghijklmnop", "repeated_", 10)],
)
def test_a_page_opens_on_the_strongest_event_of_its_headline(
    open_page, tmp_path, words, prefix, token
):
    """In the text, or in the repeated tokens, which recur after eight, if the text has no event.

    The head does more for other tokens, but is not seen to copy there.
    """
    run = make_explained(tmp_path / "run")
    shot = snapshot(step=20, words=list(words)) | explain(step=20) | explain(20, "repeated_")
    shot["head_effect"][0, 0, 12] = shot["repeated_head_effect"][0, 0, 12] = 9
    shot[f"{prefix}head_effect"][0, 0, token] = 2
    shot[f"{prefix}logit_lens"][-1] = 3
    shot[f"{prefix}logit_lens"][-1, token] = 0.1
    pattern = shot["repeated"][0, -1] if prefix else shot["text"][0]
    pattern[0, token] = 0
    pattern[0, token, token - 7] = 0.9
    write_snapshot(run, shot)
    tab = open_page(page.write_page(RunDir(run)))
    expect_map(tab, heads="L0H0", step=20)
    name = re.compile(f"^token {token}:")
    expect(tab.locator("#text .token.lit")).to_have_accessible_name(name)
    expect_text(tab, "#pinned-token-text", "0.90")
    expect_text(tab, "#pinned-token-text", "0.905")  # exp(-0.1)
    assert tab.input_value("#probe") == ("1" if prefix else "0")


@pytest.mark.slow
def test_the_composition_follows_the_slider(tab):
    lines = tab.locator("#composition .composition-line")
    assert lines.count() == 1  # neither small shares nor those within two errors are drawn
    label = lines.get_attribute("aria-label")
    assert "80 ± 2%" in label and "50 ± 4%" in label
    assert tab.locator("#composition .share").all_text_contents() == ["80%"]
    tab.click("#composition input")
    wait_until(tab, "location.hash.includes('composition=all')")
    tab.reload()
    expect(tab.locator("#composition .share")).to_have_count(2)
    assert sorted(tab.locator("#composition .share").all_text_contents()) == ["60%", "80%"]
    assert lines.count() > 2  # with small shares, which have no number
    tab.click("#composition input")
    tab.focus("#step")
    tab.keyboard.press("ArrowLeft")
    expect_text(tab, "#composition h3", "at step 10")
    assert "40 ± 2%" in lines.get_attribute("aria-label")
    tab.keyboard.press("ArrowLeft")
    expect_text(tab, "#composition h3", "at step 0")
    assert lines.count() == 0
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.click("#headline button")
    expect_map(tab, heads="L0H0")
