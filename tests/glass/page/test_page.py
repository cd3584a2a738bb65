"""The page: what is embedded, decoded here; what a person sees of it, in Chromium."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import wait_until
from models import lively
from pages import (
    HOSTILE,
    PROMPTED,
    expect_map,
    expect_text,
    focus_map_cell,
    make_run,
    move_pointer_away,
    pixels,
    read_back,
    read_cell_tooltip,
    snapshot,
    value_within_error,
)
from safetensors.torch import save_file

from common.metrics import read_rows
from glass.heads.findings import Finding
from glass.page import write as page
from training.checkpoint import load_run


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    content, _ = read_back(page.write_page(tmp_path))
    assert content["steps"] == [] and content["config"] == []
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "step_00000000.npz").write_bytes(b"PK half a file")
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "x"}\n{"step": 2, "te')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "train/loss": NaN, "val/loss": Infinity}\n{"step"'
    )
    content, _ = read_back(page.write_page(tmp_path))
    assert content["steps"] == [] and len(content["samples"]) == 1
    assert content["curves"]["train/loss"]["steps"] == []


def test_the_speed_is_that_of_the_last_machine_which_may_not_know_its_peak_rate(tmp_path):
    run = make_run(tmp_path / "run")
    content, _ = read_back(page.write_page(run))
    assert content["speed"] == {"msPerStep": 250.0, "mfu": 0.4, "peakGib": 1.5}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 21, "train/ms_per_step": 80.0}\n{"step": 22, "val/loss": 2.0}\n')
    content, _ = read_back(page.write_page(run))
    assert content["speed"] == {"msPerStep": 80.0, "mfu": None, "peakGib": None}


def test_a_served_page_has_the_scores_of_one_step_and_may_ask_its_server(tmp_path):
    run = make_run(tmp_path / "run")
    scores = page.read_scores(read_rows(run / "metrics.jsonl"))
    explored = page.ExploredModel(HOSTILE[0], PROMPTED.config, 24, 30, prompt=HOSTILE[0])
    path = tmp_path / "served.html"
    for known in (scores, None):
        path.write_text(page.render_explore_page(replace(explored, scores=known), 32))
        content, blobs = read_back(path)
        assert (content["title"], content["server"]["prompt"]) == (HOSTILE[0], HOSTILE[0])
        assert (content["steps"], content["maxSteps"], content["shape"]) == ([24], 30, [2, 4])
        assert content["scored"]["steps"] == ([20] if known else [])
        assert not any(key.startswith("emerged/") for key in content["scored"]["columns"])
        assert content["server"]["canMeasure"] == (known is None) and blobs == []
    own_page = page.write_page(run).read_text()
    assert "connect-src 'self';" in path.read_text() and "connect-src" not in own_page
    assert "{" not in own_page.partition("<style>")[0]  # no placeholder is left


def test_many_long_samples_leave_room_for_the_maps(tmp_path):
    run = make_run(tmp_path / "run", samples=["é" * 1_000_000] * 3)
    content, _ = read_back(page.write_page(run))
    assert [len(sample["text"]) for sample in content["samples"]] == [4000] * 3
    assert (run / "report.html").stat().st_size < page.MAX_PAGE_BYTES


@pytest.mark.slow
def test_a_real_run_has_a_page(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    content, _ = read_back(page.write_page(run))
    assert content["steps"][0] == 0 and content["curves"]["val/loss"]["values"]
    assert content["groups"] == 1
    assert content["scored"]["steps"] == content["steps"] and content["config"]
    last = read_rows(run / "metrics.jsonl")[-1]
    columns = content["scored"]["columns"]
    assert columns["heads/entropy/L1H1"][-1] == pytest.approx(last["heads/entropy/L1H1"], rel=1e-3)
    assert list(content["weights"]["blobs"]) == ["0", "6", "12"]


# In a browser


@pytest.mark.slow
def test_a_pinned_cell_shows_which_components_produced_its_score(finished_run, open_page, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    model, path = lively(load_run(run)[0]), run / "attention" / "step_00000012"
    weights = {name: p.detach().half() for name, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # tied: the output layer is not named again
    held = dict(np.load(f"{path}.npz"))
    maps = model.attention_maps(torch.from_numpy(held["text_ids"])[None])[:, 0]
    save_file(weights, f"{path}.safetensors")
    np.savez(f"{path}.npz", **held | {"text": maps.half().numpy()})
    tab = open_page(page.write_page(run))
    tab.click("[role=radio][aria-label='layer 1, head 1']")
    focus_map_cell(tab, 12, 4, 16)
    tab.keyboard.press("Enter")
    expect_text(tab, "#score-attribution h3", "L1H1")
    logs = maps[1, 1, 12, :13].log()  # the scores, up to a constant of the row
    numbers = re.findall(r"[+−]\d+\.\d\d", tab.inner_text("#score-attribution"))
    total, *terms = (float(number.replace("−", "-")) for number in numbers)
    assert total == pytest.approx((logs[4] - logs.mean()).item(), abs=0.01) and abs(total) > 0.05
    assert sum(terms) == pytest.approx(total, abs=0.06)  # each is rounded
    tab.focus("#step")
    tab.keyboard.press("Home")  # by the weights of step 0
    expect_map(tab, step=0)
    wait_until(
        tab, f"!document.getElementById('score-attribution').innerText.includes('{numbers[0]}')"
    )


@pytest.mark.slow
def test_the_map_shows_the_captured_numbers(open_page, tmp_path):
    T, held = 80, snapshot(T=80, step=20)
    # too narrow for labels: the map is all cells
    tab = open_page(page.write_page(make_run(tmp_path / "run", T=T)), width=620)
    tab.click("[role=radio][aria-label='layer 1, head 2']")
    tab.locator("#map canvas").scroll_into_view_if_needed()
    box = tab.locator("#map canvas").bounding_box()
    for query, key in ((0, 0), (79, 0), (79, 79), (50, 23)):
        tab.mouse.move(
            box["x"] + (key + 0.5) * box["width"] / T, box["y"] + (query + 0.5) * box["height"] / T
        )
        assert read_cell_tooltip(tab)[:2] == (query, key)
        text = read_cell_tooltip(tab)[2]
        assert value_within_error(text) == held["text"][1, 2, query, key]
        value, _, bound = text.split()
        assert len(value.partition(".")[2]) == len(bound.partition(".")[2])
    tab.mouse.move(box["x"] + box["width"] - 3, box["y"] + 3)  # what lies ahead has no weight
    assert tab.locator("#tip").is_hidden()
    assert tab.inner_text("#precision")
    focus_map_cell(tab, 78, 3, T)
    assert read_cell_tooltip(tab)[:2] == (78, 3) and "78" in tab.inner_text("#live")


@pytest.mark.slow
def test_the_controls_choose_step_head_input_weighting_and_average(open_page, tmp_path):
    tab = open_page(page.write_page(make_run(tmp_path / "run")))
    first = {step: snapshot(step=step) for step in (0, 10, 20)}

    def value() -> str:
        focus_map_cell(tab, 15, 3, 16)
        return read_cell_tooltip(tab)[2]

    tab.click("[role=radio][aria-label='layer 1, head 0']")
    expect_map(tab, heads="L1H0", step=20)
    assert value_within_error(value()) == first[20]["text"][1, 0, 15, 3]
    before = pixels(tab, "#map canvas")
    tab.focus("#step")
    tab.keyboard.press("Home")
    expect_map(tab, step=0)
    assert tab.inner_text("#step-now") == "step 0"
    assert value_within_error(value()) == first[0]["text"][1, 0, 15, 3]
    assert pixels(tab, "#map canvas") != before and "at step 0" in tab.inner_text("#scored-at")

    tab.click("#play")
    assert tab.get_attribute("#play", "aria-label") == "pause"
    expect_text(tab, "#step-now", "step 20", timeout=8000)
    expect_text(tab, "#play", "▶")

    tab.focus("[role=radio][aria-checked=true]")
    tab.keyboard.press("ArrowRight")
    expect_map(tab, heads="L1H1")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 1"
    tab.keyboard.press("ArrowUp")
    expect_map(tab, heads="L0H1")

    assert tab.inner_text("#bar").endswith("\n1")  # a weight is at most 1
    tab.check("#weighted")
    weight, norm = (
        float(first[20]["text"][0, 1, 15, 3]),
        float(first[20]["text_value_norms"][0, 1, 3]),
    )
    assert value_within_error(value()) == weight * norm and "‖v W_O‖" in tab.inner_text("#bar")
    scale = tab.inner_text("#bar")
    for key in ("Home", "End"):
        tab.focus("#step")
        tab.keyboard.press(key)
        expect_map(tab, step=0 if key == "Home" else 20)
        assert tab.inner_text("#bar") == scale
    tab.check("#raw")
    tab.check("#average")
    mean = first[20]["text"][0, :, 15, 3].astype(float).mean()
    assert value_within_error(value()) == mean
    expect_map(tab, heads="L0")
    tab.uncheck("#average")

    tab.select_option("#probe", "1")
    tab.wait_for_selector("#large[data-probe=repeated]")
    assert value_within_error(value()) == first[20]["repeated"][0, 1, 1, 15, 3]
    assert "r7" in tab.inner_text("#tip")


@pytest.mark.slow
def test_the_text_highlights_keys_and_queries_of_a_token(open_page, tmp_path):
    words = ["if", " x", ":", "\n", "\t", "return", " x", "\n"] * 2
    tab, held = (
        open_page(page.write_page(make_run(tmp_path / "run", words=words))),
        snapshot(step=20),
    )
    tab.click("[role=radio][aria-label='layer 0, head 3']")
    tab.locator("#text .token").nth(9).hover()
    to, back = tab.inner_text("#lists .to"), tab.inner_text("#lists .from")
    A = held["text"][0, 3].astype(float)
    for text, weights, offset in ((to, A[9, :10], 0), (back, A[9:, 9], 9)):
        k = int(weights.argmax())
        assert f"{k + offset}\n{weights[k]:.4g}"[:6] in text
    shade = [
        tab.locator("#text .token").nth(i).evaluate("span => span.style.background")
        for i in (2, 9, 12)
    ]
    assert "--to" in shade[0] and shade[1] == "" and "--from" in shade[2]
    shown = tab.inner_text("#text")
    assert "·x" in shown and "⏎\n" in shown and "⇥" in shown
    move_pointer_away(tab)
    tab.focus("#text .token[tabindex='0']")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "token 1"
    assert "1" in tab.inner_text("#lists .to h4")


@pytest.mark.slow
def test_scores_emergence_and_training_are_shown(open_page, tmp_path):
    tab = open_page(page.write_page(make_run(tmp_path / "run")))
    shown = tab.locator("#scores figure").evaluate_all("all => all.map(f => f.dataset.score)")
    assert shown == ["previous_token", "induction", "entropy", "distance", "importance"]
    move_pointer_away(tab)
    canvas = tab.locator("#scores canvas").nth(1)
    canvas.focus()
    tab.keyboard.press("ArrowRight")
    assert "L0H1" in tab.inner_text("#tip")
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert f"{last['heads/induction/L0H1']:.2f} ± 0.02" in tab.inner_text("#tip")
    tab.keyboard.press("Enter")
    expect_map(tab, heads="L0H1")
    assert "L0H1" in tab.inner_text("#trajectory h3")
    assert f"{last['heads/induction/L0H1']:.2f} ± 0.02" in tab.inner_text("#map-caption")
    assert tab.locator("#trajectory .band").count() == 1
    tab.focus("#trajectory svg")
    tab.keyboard.press("End")
    assert f"{last['heads/induction/L0H1']:.2f} ± 0.02" in tab.inner_text("#tip")
    tab.locator("#scores canvas").nth(2).focus()
    assert "0.76" in tab.inner_text("#tip")
    marks = tab.locator("#emergence [data-emerged]")
    assert sorted(marks.evaluate_all("all => all.map(m => m.getAttribute('aria-label'))")) == [
        "L0H0: induction, emerged between steps 0 and 10",
        "L1H3: previous token, emerged between steps 0 and 4",
    ]
    marks.first.locator("circle").click()
    expect_map(tab, heads=marks.first.get_attribute("data-emerged"))

    move_pointer_away(tab)
    tab.focus("#chart-loss svg")
    tab.keyboard.press("Home")
    assert tab.inner_text("#tip").split("\n") == ["step 0", "training 3.000", "validation 3.500"]
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#tip").split("\n") == [
        "step 2",
        "training 2.900",
        "validation 3.500, at step 0",
    ]
    tab.focus("#chart-in-context svg")
    tab.keyboard.press("End")
    assert "0.5 ± 0.1" in tab.inner_text("#tip")
    assert tab.locator("#task-charts svg").count() == 1
    tab.focus("#task-charts svg")
    tab.keyboard.press("End")
    assert "0.20 ± 0.03" in tab.inner_text("#tip")
    box = tab.locator("#chart-loss svg").bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 14, box["y"] + 60)
    assert "step 20" in tab.inner_text("#tip")
    figures = tab.inner_text("#figures")
    assert all(value in figures for value in ("2.500", "250 ms", "40.0%", "1.50 GiB"))
    assert "10.0 s" in tab.inner_text("#time-list")
    assert tab.inner_text("#sample") == "sample 20"
    tab.click("#sample-before")
    assert tab.inner_text("#sample") == "sample 10"
    tab.click("#config summary")
    assert "model.n_kv_head" in tab.inner_text("#config")


@pytest.mark.slow
def test_a_deep_models_head_grid_fits_the_window_and_the_first_token_can_be_excluded(
    open_page, tmp_path
):
    held = snapshot(L=24, H=4, T=16)
    held["text"][:, :, :, 0] += 60 * (np.arange(16) > 0)  # attention sinks
    held["text"] = (
        held["text"] / held["text"].sum(axis=-1, keepdims=True, dtype=np.float32)
    ).astype(np.float16)
    scores = {
        f"heads/induction/L{layer}H{head}": 0.8 if (layer, head) == (20, 1) else 0.01
        for layer in range(24)
        for head in range(4)
    }
    deep = PROMPTED._replace(config=replace(PROMPTED.config, n_layer=24))
    text = "L20H1 attends to whatever followed the current token last time."
    finding = Finding("Induction head", text, ["L20H1: score 0.80 ± 0.02"], ["L20H1"])
    tab = open_page(
        page.write_prompt_page(
            tmp_path / "p.html", {"title": "deep"}, held, deep, scores, [finding]
        ),
        width=1366,
    )
    assert text in tab.inner_text("#headline")
    expect_map(tab, heads="L20H1")
    for part in ("#map", "#text", "#overview-map", "#heads-grid"):
        box = tab.locator(part).bounding_box()
        assert box["y"] + min(box["height"], 100) <= 900, part  # in the first window
    frame = tab.locator("#heads-grid")
    assert frame.evaluate("e => e.scrollHeight > e.clientHeight && e.scrollTop > 0")
    inside, head = frame.bounding_box(), tab.locator("[aria-checked=true]").bounding_box()
    assert inside["y"] <= head["y"] and head["y"] <= inside["y"] + inside["height"]

    tab.check("#exclude-first")
    tab.wait_for_timeout(300)
    focus_map_cell(tab, 15, 3, 16)
    query, key, value = read_cell_tooltip(tab)
    A = held["text"][20, 1, query].astype(np.float64)
    assert key > 0 and value_within_error(value) == A[key] / A[1:].sum()
    assert "first=no" in tab.evaluate("new Promise(r => setTimeout(() => r(location.hash), 300))")


@pytest.mark.slow
def test_the_weight_on_a_sink_logit_has_a_column(open_page, tmp_path):
    arrays = snapshot(T=16)
    arrays["text"] = arrays["text"] * np.float16(0.75)  # the sink has the rest of every row
    model = PROMPTED._replace(config=replace(PROMPTED.config, attention_sink=True))
    facts = {"title": "a prompt", "promptTokens": 16}
    tab = open_page(page.write_prompt_page(tmp_path / "page.html", facts, arrays, model))
    focus_map_cell(tab, 5, 5, 16)
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#tip [data-query]").get_attribute("data-key") == "sink"
    value = float(tab.inner_text("#tip .value b"))
    assert value == pytest.approx(1 - arrays["text"][0, 0, 5].astype(float).sum(), abs=0.01)
    assert "sink" in tab.inner_text("#lists .to")
    tab.keyboard.press("ArrowLeft")
    assert read_cell_tooltip(tab)[:2] == (5, 5)

    tab.check("#weighted")
    tab.wait_for_timeout(100)
    focus_map_cell(tab, 5, 5, 16)
    tab.keyboard.press("ArrowRight")
    assert read_cell_tooltip(tab)[:2] == (5, 5)  # nothing is read from the sink
