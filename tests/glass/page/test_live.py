"""A page that follows its run, an address for every selection, the page of a prompt; in Chromium,
opened from disk."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import wait_until
from pages import (
    expect_map,
    expect_text,
    make_run,
    move_pointer_away,
    read_back,
    read_cell_tooltip,
    snapshot,
    value_within_error,
    write_lines,
    write_prompt,
)

from glass.page import write as page
from run.config_file import config_yaml
from run.run_dir import RunDir

HEAD = "[role=radio][aria-label='layer 1, head 2']"


def make_live_run(folder: Path, experiment: str, typed: str | None) -> RunDir:
    """Make a run that Hydra has started with what is typed, or that a function has started."""
    run = RunDir(make_run(folder, steps=(0, 10), max_steps=2100))
    attention = replace(run.config.attention, every=200)
    config = replace(run.config, experiment=experiment, attention=attention)
    run.config_file.write_text(config_yaml(config))
    if typed is not None:
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(typed)
    return run


@pytest.mark.slow
def test_a_page_follows_its_run_and_keeps_the_selection(open_page, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 10), max_steps=20)
    tab = open_page(page.write_page(RunDir(run)))
    loads, asked = [], []
    tab.on("load", lambda _: loads.append(tab.url))
    tab.on("request", lambda request: asked.append(".js?" in request.url))
    expect_text(tab, "#alive", "step 10 of 20")
    tab.click(HEAD)
    tab.click("#text .token >> nth=5")
    tab.click("#theme")
    theme = tab.evaluate("document.documentElement.dataset.theme")
    move_pointer_away(tab)
    tab.evaluate("scrollTo(0, 300)")
    assert tab.inner_text("#step-now") == "step 10"
    while sum(asked) < 6:
        tab.wait_for_timeout(500)
    assert not loads  # though nobody has used the page for longer than it waits
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
    assert len(loads) == 2  # as often as there was a newer page
    del asked[:]
    tab.wait_for_timeout(2000)
    assert not asked


@pytest.mark.slow
def test_a_copy_of_a_live_page_stays_as_it_is(chromium, tmp_path):
    run = RunDir(make_run(tmp_path / "run", steps=(0, 10), max_steps=20))
    tab = chromium.new_page()
    asked = []
    tab.on("request", lambda request: asked.append(".js?" in request.url))
    tab.goto(shutil.copy(page.write_page(run), tmp_path / "mailed.html").as_uri())
    expect_text(tab, "#alive", "step 10 of 20")
    tab.wait_for_timeout(2000)
    assert sum(asked) == 1
    tab.close()


@pytest.mark.parametrize(
    "experiment, typed, expected",
    [
        ("default", "[]\n", 550),
        ("induction", "- experiment=induction\n- seed=7\n- 'run_dir=a b'\n", 500),
        ("default", None, None),  # Hydra did not start it, so what was typed is not known
        ("nanogpt_cpu", "[]\n", None),
        ("default", "- model=small\n", None),
        ("default", "- seed=1\n- 'data.path=my text'\n", None),
        ("default", "- optim.lr=1e-3\n", None),
        ("default", "- tokenizer=char\n", None),
        ("default", "- batch_size=4\n", None),
        ("default", "- max_steps=4000\n", None),
        ("default", "- init_from=runs/other\n", None),
    ],
)
def test_the_step_of_an_induction_head_is_known_only_with_the_settings_of_a_preset(
    tmp_path, experiment, typed, expected
):
    run = make_live_run(tmp_path, experiment, typed)
    content, _ = read_back(page.write_page(run))
    assert (content["inductionStep"], content["nextSnapshot"]) == (expected, 200)


@pytest.mark.slow
@pytest.mark.parametrize("typed, awaited", [("[]\n", "550"), ("- model=small\n", "200")])
def test_a_live_page_says_what_it_waits_for_until_an_induction_head_emerges(
    open_page, tmp_path, typed, awaited
):
    run = make_live_run(tmp_path, "default", typed)
    rows = run.rows()
    write_lines(
        run.metrics_file, [{k: v for k, v in row.items() if "emerged" not in k} for row in rows]
    )
    assert awaited in open_page(page.write_page(run)).inner_text("#more")
    write_lines(run.metrics_file, rows)
    assert awaited not in open_page(page.write_page(run)).inner_text("#more")


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
