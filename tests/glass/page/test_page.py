"""The page: what is embedded, decoded here; what a person sees of it, in Chromium."""

import re
import shutil
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
from conftest import wait_until
from hypothesis import given
from hypothesis import strategies as st
from models import lively
from pages import (
    PROMPTED,
    expect_map,
    expect_text,
    focus_map_cell,
    make_run,
    move_pointer_away,
    read_back,
    read_cell_tooltip,
    snapshot,
    value_within_error,
    write_lines,
    write_prompt,
)
from playwright.sync_api import expect
from run_folders import load_run
from safetensors.torch import save_file

from config import Config, GPTConfig
from glass.heads.measure.snapshot_files import float16_weights
from glass.page import write as page
from glass.page.values import metric_curve
from run.config_file import config_yaml
from run.run_dir import RunDir


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    config = Config(model=GPTConfig(vocab_size=65))
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    content, _ = read_back(page.write_page(RunDir(tmp_path)))
    assert content["steps"] == [] and content["step"] == 0
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "step_00000000.npz").write_bytes(b"PK half a file")
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "x"}\n{"step": 2, "te')
    rows = '{"step": 0, "train/loss": NaN, "val/loss": Infinity}\n{"step"'
    (tmp_path / "metrics.jsonl").write_text(rows)
    content, _ = read_back(page.write_page(RunDir(tmp_path)))
    assert content["steps"] == [] and len(content["samples"]) == 1
    assert content["curves"]["train/loss"]["steps"] == []


@given(st.integers(0, 99), st.integers(2, 30))
def test_a_thinned_curve_keeps_both_ends_and_even_gaps(count, max_points):
    rows = [{"step": step, "x": 2.0 * step if step % 3 else nan} for step in range(count)]
    measured = [step for step in range(count) if step % 3]
    curve = metric_curve(rows, "x", max_points)
    assert curve["of"] == len(measured) and len(curve["steps"]) == min(len(measured), max_points)
    assert curve["values"] == [2 * step for step in curve["steps"]]
    places = [measured.index(step) for step in curve["steps"]]
    assert {*places[:1], *places[-1:]} == ({0, len(measured) - 1} if measured else set())
    assert np.ptp(np.diff(places)) <= 1 if len(places) > 1 else True


# In a browser


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return page.write_page(RunDir(make_run(tmp_path_factory.mktemp("page") / "run")))


@pytest.mark.slow
def test_the_page_of_an_overfitted_model_opens_on_the_weights_nearest_to_the_best(
    finished_run, open_page, tmp_path
):
    run = shutil.copytree(finished_run, tmp_path / "run")
    rows = RunDir(run).rows()
    for row in rows:
        row["train/loss"] = 3 - row["step"] / 10
        row["val/loss"] = 2 + abs(row["step"] - 5)
    write_lines(run / "metrics.jsonl", rows)
    page.write_page(RunDir(run))
    tab = open_page(run / "report.html")
    expect_map(tab, step=6)
    for text in ("overfitting since step 5", "load step 5", "opens on step 6", "step 12."):
        expect_text(tab, "#loss-warning", text)
    tab.focus("#step")
    tab.keyboard.press("End")
    expect_map(tab, step=12)
    expect(tab).to_have_url(re.compile("step=12"))
    tab.reload()
    expect_map(tab, step=12)


def choose_head(tab, layer: int, head: int) -> None:
    tab.click(f"[role=radio][aria-label='layer {layer}, head {head}']")


@pytest.mark.slow
def test_a_pinned_cell_shows_which_components_produced_its_score(finished_run, open_page, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    path = run / "attention" / "step_00000012.safetensors"
    save_file(float16_weights(lively(load_run(run)[0])), path)  # its scores differ visibly
    tab = open_page(page.write_page(RunDir(run)))
    choose_head(tab, 1, 1)
    focus_map_cell(tab, 12, 4, 16)
    tab.keyboard.press("Enter")
    expect_text(tab, "#score-attribution h3", "L1H1")
    numbers = re.findall(r"[+−]\d+\.\d\d", tab.inner_text("#score-attribution"))
    total, *terms = (float(number.replace("−", "-")) for number in numbers)
    assert sum(terms) == pytest.approx(total, abs=0.06)  # each is rounded
    assert abs(total) > 0.05
    tab.focus("#step")
    tab.keyboard.press("Home")  # by the weights of step 0
    expect_map(tab, step=0)
    expect(tab.locator("#score-attribution")).not_to_contain_text(numbers[0])
    expect_text(tab, "#score-attribution h3", "L1H1")


@pytest.mark.slow
def test_the_map_shows_the_captured_numbers(open_page, tmp_path):
    T, held = 80, snapshot(T=80, step=20)
    # too narrow for labels: the map is all cells
    tab = open_page(page.write_page(RunDir(make_run(tmp_path / "run", T=T))), width=620)
    choose_head(tab, 1, 2)
    tab.locator("#map canvas").scroll_into_view_if_needed()
    box = tab.locator("#map canvas").bounding_box()
    cell = box["width"] / T
    for query, key in ((0, 0), (79, 0), (79, 79), (50, 23)):
        tab.mouse.move(box["x"] + (key + 0.5) * cell, box["y"] + (query + 0.5) * cell)
        shown_query, shown_key, text = read_cell_tooltip(tab)
        assert (shown_query, shown_key) == (query, key)
        assert value_within_error(text) == held["text"][1, 2, query, key]
        value, *bound = re.findall(r"[\d.]+", text)
        assert not bound or len(value.partition(".")[2]) == len(bound[0].partition(".")[2])
    tab.mouse.move(box["x"] + box["width"] - 3, box["y"] + 3)  # what lies ahead has no weight
    assert tab.locator("#tip").is_hidden()
    focus_map_cell(tab, 78, 3, T)
    assert read_cell_tooltip(tab)[:2] == (78, 3) and "78" in tab.inner_text("#live")


@pytest.mark.slow
def test_the_controls_choose_step_head_input_weighting_and_average(open_page, path):
    tab = open_page(path)
    last = snapshot(step=20)

    def value():
        focus_map_cell(tab, 15, 3, 16)
        return value_within_error(read_cell_tooltip(tab)[2])

    choose_head(tab, 1, 0)
    expect_map(tab, heads="L1H0", step=20)
    assert value() == last["text"][1, 0, 15, 3]
    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_map(tab, step=0)
    assert tab.inner_text("#step-now") == "step 0"
    assert value() == snapshot(step=0)["text"][1, 0, 15, 3]

    tab.click("#play")
    assert tab.get_attribute("#play", "aria-label") == "pause"
    expect_text(tab, "#step-now", "step 20")
    expect_text(tab, "#play", "▶")

    tab.focus("[role=radio][aria-checked=true]")
    tab.keyboard.press("ArrowRight")
    expect_map(tab, heads="L1H1")
    tab.keyboard.press("ArrowUp")
    expect_map(tab, heads="L0H1")

    assert tab.inner_text("#bar").endswith("\n1")  # a weight is at most 1
    tab.check("#weighted")
    norm = float(last["text_value_norms"][0, 1, 3])
    assert value() == float(last["text"][0, 1, 15, 3]) * norm
    scale = tab.inner_text("#bar")
    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_map(tab, step=0)
    assert tab.inner_text("#bar") == scale
    tab.keyboard.press("End")
    expect_map(tab, step=20)
    tab.check("#raw")
    tab.check("#average")
    expect_map(tab, heads="L0")
    assert value() == last["text"][0, :, 15, 3].astype(float).mean()
    tab.uncheck("#average")
    tab.select_option("#probe", "1")
    tab.wait_for_selector("#large[data-probe=repeated]")
    assert value() == last["repeated"][0, 1, 1, 15, 3]

    tab.check("#exclude-first")
    wait_until(tab, "location.hash.includes('first=no')")
    A = last["repeated"][0, 1, 1, 15].astype(float)
    assert value() == A[3] / A[1:].sum()


@pytest.mark.slow
def test_the_text_highlights_keys_and_queries_of_a_token(open_page, tmp_path):
    words = ["if", " x", ":", "\n", "\t", "return", " x", "\n"] * 2
    tab = open_page(page.write_page(RunDir(make_run(tmp_path / "run", words=words))))
    choose_head(tab, 0, 3)
    tokens = tab.locator("#text .token")
    tokens.nth(9).hover()
    A = snapshot(step=20)["text"][0, 3].astype(float)
    for kind, weights, offset in (("to", A[9, :10], 0), ("from", A[9:, 9], 9)):
        k = int(weights.argmax())
        assert f"{k + offset}\n{weights[k]:.2f}" in tab.inner_text(f"#lists .{kind}")
        assert tab.locator(f"#lists .{kind} li").count() == min(8, (weights >= 0.01).sum())
    for token, color in ((2, "--to"), (12, "--from")):
        assert color in tokens.nth(token).evaluate("span => span.style.background")
    shown = tab.inner_text("#text")
    assert "·x" in shown and "⏎\n" in shown and "⇥" in shown
    move_pointer_away(tab)
    tab.focus("#text .token[tabindex='0']")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "token 1: ·x"
    assert "1" in tab.inner_text("#lists .to h4")


@pytest.mark.slow
def test_a_page_says_that_it_is_being_read_and_that_it_is_damaged(chromium, path, tmp_path):
    text, copy = path.read_text(), tmp_path / "report.html"
    tab = chromium.new_page()
    for content, message in (
        (text.partition('<script type="module">')[0], "#loading"),
        (text.replace('class="blob">', 'class="blob">AAAA'), "#failure"),
        (text, None),
    ):
        copy.write_text(content)
        tab.goto(copy.as_uri())
        if message is not None:
            expect(tab.locator(message)).to_be_visible()
        expect(tab.locator("#loading")).to_have_count(int(message == "#loading"))
    tab.close()


@pytest.mark.slow
def test_scores_emergence_and_training_are_shown(open_page, path):
    tab = open_page(path)
    score = f"{RunDir(path.parent).rows()[-1]['heads/induction/L0H1']:.2f} ± 0.02"

    def read(selector: str, key: str) -> list[str]:
        move_pointer_away(tab)
        tab.focus(selector)
        tab.keyboard.press(key)
        return tab.inner_text("#tip").split("\n")

    scores = tab.locator("#heads figure:visible")
    names = "all => all.map(figure => figure.dataset.score)"
    assert scores.evaluate_all(names) == ["induction", "previous_token", "importance"]
    tab.focus("#more-scores summary")
    tab.keyboard.press("Enter")
    wait_until(tab, "location.hash.includes('scores=all')")
    tab.reload()
    expect(scores).to_have_count(5)
    assert scores.evaluate_all(names)[3:] == ["entropy", "distance"]
    assert "0.76 if" in " ".join(read("[data-score=entropy] canvas", "ArrowRight"))
    assert score in " ".join(read("[data-score=induction] canvas", "ArrowRight"))
    tab.keyboard.press("Enter")
    expect_map(tab, heads="L0H1")
    assert score in tab.inner_text("#head-scores")
    assert tab.locator("#ticks .emerged").count() == 0
    assert score in " ".join(read("#trajectory svg", "End"))
    assert tab.locator("#trajectory .band").count() == 1
    marks = tab.locator("#emergence [data-emerged]")
    assert sorted(marks.evaluate_all("all => all.map(m => m.getAttribute('aria-label'))")) == [
        "L0H0: induction, emerged between steps 0 and 10",
        "L1H3: previous token, emerged between steps 0 and 4",
    ]
    marks.first.locator("circle").click()
    expect_map(tab, heads=marks.first.get_attribute("data-emerged"))
    assert tab.locator("#ticks .emerged").count() == 1

    assert read("#chart-loss svg", "Home") == ["step 0", "training 3.000", "validation 3.500"]
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#tip").endswith("training 2.900\nvalidation 3.500, at step 0")
    assert "0.5 ± 0.1" in " ".join(read("#chart-in-context svg", "End"))
    assert "0.20 ± 0.03" in " ".join(read("#task-charts svg", "End"))
    figures = tab.inner_text("#figures")
    assert all(value in figures for value in ("2.500", "250 ms", "40.0%", "1.50 GiB"))
    assert "10.0 s" in tab.inner_text("#time-list")
    assert tab.inner_text("#sample") == "sample 20"
    tab.click("#sample-before")
    assert tab.inner_text("#sample") == "sample 10"


@pytest.mark.slow
def test_the_axis_of_the_losses_leaves_out_the_first_tenth_of_a_run(open_page, tmp_path):
    run_dir = RunDir(make_run(tmp_path / "run"))
    first, *others = run_dir.rows()
    write_lines(run_dir.metrics_file, [first | {"train/loss": 5000.0}, *others])
    tab = open_page(page.write_page(run_dir))
    for chart in ("#chart-loss", "#emergence"):
        labels = tab.locator(f"{chart} svg > text[text-anchor=end]").all_text_contents()
        assert labels and all(float(label) <= 20 for label in labels if label != "step")
    tab.focus("#chart-loss svg")
    tab.keyboard.press("Home")
    expect_text(tab, "#tip", "5,000")


@pytest.mark.slow
def test_the_weight_on_a_sink_logit_has_a_column(open_page, tmp_path):
    arrays = snapshot(T=16)
    arrays["text"] = arrays["text"] * np.float16(0.75)  # the sink has the rest of every row
    config = replace(PROMPTED, attention_sink=True)
    facts = {"title": "a prompt", "promptTokens": 16}
    tab = open_page(write_prompt(tmp_path / "page.html", facts, arrays, config=config))
    focus_map_cell(tab, 5, 5, 16)
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#tip [data-query]").get_attribute("data-key") == "sink"
    value = float(tab.inner_text("#tip .value b"))
    assert value == pytest.approx(1 - arrays["text"][0, 0, 5].astype(float).sum(), abs=0.01)
    assert "sink" in tab.inner_text("#lists .to")
    tab.check("#weighted")
    wait_until(tab, "location.hash.includes('weights=value')")
    focus_map_cell(tab, 5, 5, 16)
    tab.keyboard.press("ArrowRight")
    assert read_cell_tooltip(tab)[:2] == (5, 5)  # nothing is read from the sink
