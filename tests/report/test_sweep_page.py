"""The page of a sweep: its figures against the files', how much of the maps it holds, what a
person sees of it in Chromium."""

import json
import re
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import soak
from pages import (
    HOSTILE,
    aside,
    expect_text,
    fail_job,
    make_job,
    pixels,
    read_back,
    read_tip,
    told,
)

from report import sweep_page
from report.sweep import read_sweep

STEPS = (0, 10, 20)
TYPED = [text for text in HOSTILE if text != "\ud800"]  # what can be typed
STRONGEST = ("previous_token", "duplicate_token", "induction", "sink")


def write(folder: Path) -> Path:
    return sweep_page.write_sweep_page(folder, read_sweep(folder))


def content_of(folder: Path) -> dict:
    return read_back(write(folder))[0]


@pytest.fixture
def grouped(tmp_path) -> Path:
    """Three settings of three seeds each."""
    for heads, final in (("1", 2.6), ("2", 2.3), ("4", 2.2)):
        for seed in ("1", "2", "3"):
            make_job(tmp_path / "sweep", {"model.n_kv_head": heads, "seed": seed},
                final + 0.01 * int(seed) ** 2, groups=int(heads),
                speed=500 * int(heads), size=100 * int(heads))
    return tmp_path / "sweep"


# What it holds

def test_its_figures_are_those_of_the_files(grouped):
    path = write(grouped)
    assert path == grouped / "sweep.html" and path.read_bytes() == write(grouped).read_bytes()
    assert {p.name for p in grouped.iterdir()} == {"sweep.html", *(
        f"model.n_kv_head={g},seed={s}" for g in (1, 2, 4) for s in (1, 2, 3))}
    content, _ = read_back(path)
    assert content["metric"] == "val/loss"
    assert content["command"] == "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert content["keys"] == [{"name": "model.n_kv_head", "values": ["1", "2", "4"]}]
    assert [run["setting"] for run in content["runs"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for k, heads in enumerate((4, 4, 4, 2, 2, 2, 1, 1, 1)):
        figures = content["runs"][k]["figures"]
        assert figures["parameters"] == 100 * heads
        assert figures["tokens_per_second"] == 500 * heads
        assert figures["kv_cache_bytes"] == 2 * 2 * heads * 16 * 8 * 4
    for run in content["runs"]:
        rows = [json.loads(line)
                for line in (grouped / run["name"] / "metrics.jsonl").read_text().splitlines()]
        losses = [row["val/loss"] for row in rows if "val/loss" in row]
        assert run["curves"]["val/loss"] == {"steps": [0, 10, 20],
                                        "values": pytest.approx(losses, rel=1e-5), "of": 3}
        assert run["curves"]["train/loss"]["steps"] == [0, 5, 10, 15, 20]
        assert run["page"].endswith("/report.html") and run["births"] == {"induction": 10}
        last = {key: value for key, value in rows[-1].items() if key.startswith("heads/")}
        for score, combine in (("induction", max), ("entropy", fmean)):
            of = {key: value for key, value in last.items() if f"/{score}/" in key}
            assert run["heads"][score]["values"][-1] == pytest.approx(
                combine(of.values()), rel=1e-4)
        of = {key: value for key, value in last.items() if "/induction/" in key}
        assert f"heads/induction/L{run['head'][0]}H{run['head'][1]}" == max(of, key=of.get)


def test_nothing_at_all_and_broken_maps_make_a_page(tmp_path):
    assert read_back(sweep_page.write_sweep_page(tmp_path, []))[0]["runs"] == []
    run = make_job(tmp_path, {"seed": "1"}, maps=False)
    (run / "attention").mkdir()
    (run / "attention" / "step_00000000.npz").write_bytes(b"PK half a file")
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"step": 20, "val/loss": NaN, "val/bits_per_byte": NaN, "tokens": 1, '
                '"train_seconds": 0, "heads/induction/L0H0": NaN}\n')
    assert content_of(tmp_path)["maps"] == [None]


# In a browser

@pytest.mark.slow
def test_the_best_setting_and_every_other_are_shown(see, grouped):
    tab, best = see(write(grouped)), "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert tab.inner_text("#summary") == "n_kv_head (3) · 3 settings · 9 runs"
    figures = tab.inner_text("#figures")
    assert "2.247 ± 0.023" in figures and "mean ± standard error of 3 seeds" in figures
    assert "8.19 kB" in figures and "2,000" in figures
    assert tab.inner_text("#best-command") == best
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#copy")
    expect_text(tab, "#copy", "copied")
    assert tab.evaluate("navigator.clipboard.readText()") == best
    assert tab.locator("#troubles").is_hidden() and tab.locator("#as-good").is_hidden()

    def column(name: str) -> list[str]:
        head = tab.locator("#settings th").all_inner_texts()
        k = next(k for k, text in enumerate(head) if text.strip(" ▲▼") == name)
        return tab.locator(f"#settings tbody td:nth-child({k + 1})").all_inner_texts()

    assert column("nats per token") == ["2.247 ± 0.023", "2.347 ± 0.023", "2.647 ± 0.023"]
    assert column("parameters") == ["400", "200", "100"]
    assert column("KV cache") == ["8.19 kB", "4.1 kB", "2.05 kB"]
    assert column("tokens per second") == ["2,000", "1,000", "500"]
    assert column("runs") == ["3", "3", "3"]
    for order in (["1", "2", "4"], ["4", "2", "1"], ["4", "2", "1"]):
        tab.locator("#settings th button").first.focus()
        tab.keyboard.press("Enter")
        assert column("n_kv_head") == order
    ends = tab.locator("#heads-ends")
    assert "born 10" in ends.inner_text() and "induction" in ends.locator("th").all_inner_texts()
    tab.click("details summary")
    assert tab.locator("#runs tbody tr").count() == 9
    link = tab.locator("#runs a").first.evaluate("a => a.href")
    assert unquote(link) == f"file://{grouped}/model.n_kv_head=4,seed=1/report.html"


@pytest.mark.slow
def test_curves_and_prices_are_read_and_singled_out(see, grouped):
    tab = see(write(grouped))
    assert tab.locator("#curve-0 .line.faint").count() == 9
    assert tab.locator("#curve-0 .line.bold").count() == 3
    names = tab.locator("#curve-0 text[data-group]").all_text_contents()
    assert sorted(names) == ["n_kv_head 1", "n_kv_head 2", "n_kv_head 4 ★"]
    assert tab.locator("#head-induction circle").count() == 9  # births
    aside(tab)
    tab.focus("#curve-0 svg")
    tab.keyboard.press("End")
    assert tab.inner_text("#tip").split("\n") == ["n_kv_head 4 ★", "2.247 nats per token",
                                                  "step 20, mean of 3 runs"]
    assert tab.locator("#curve-0 .line.bold.lit").count() == 1  # the others fade
    tab.keyboard.press("ArrowUp")
    assert "n_kv_head 2" in tab.inner_text("#tip") and "2.347" in tab.inner_text("#live")
    tab.keyboard.press("ArrowLeft")
    assert "step 10" in tab.inner_text("#tip") and "3.173" in tab.inner_text("#tip")

    assert tab.locator("#against h3").all_inner_texts() == [
        f"Validation loss against {name}" for name in (
            "n_kv_head", "parameters", "KV cache", "tokens per second", "training time")]
    assert tab.locator("#against-0 .dot").count() == 9 + 3
    assert tab.locator("#against-0 .ring").count() == 1
    tab.focus("#against-0 .dot[tabindex='0']")
    assert tab.inner_text("#tip").split("\n") == ["n_kv_head 4 ★", "2.247 ± 0.023 nats per token",
                                                  "mean of 3 runs"]
    dot = "#against-0 .dot[data-group='{}'] circle:not(.small)"
    places = [tab.locator(dot.format(g)).first.bounding_box()["x"] for g in (2, 1, 0)]
    # 1, 2, 4: even on a logarithmic axis
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=6)
    assert "logarithmic" in tab.text_content("#against-0 svg")

    chips, other = tab.locator(".chip"), tab.locator("#curve-0 .line.bold[data-group='2']")
    assert chips.all_inner_texts() == ["1", "2", "4 ★"]
    tab.evaluate("document.activeElement.blur()")
    for chosen, opacity in ((True, 0.1), (False, 1)):
        chips.nth(1).click()
        aside(tab)
        tab.evaluate("document.activeElement.blur()")
        assert float(other.evaluate("mark => getComputedStyle(mark).strokeOpacity")) == opacity
        assert (chips.nth(1).get_attribute("aria-pressed") == "true") == chosen
        assert tab.locator("#all").is_visible() == chosen
    tab.locator("#settings tbody tr").nth(2).click()
    assert chips.nth(0).get_attribute("aria-pressed") == "true"
    tab.keyboard.press("Escape")
    assert chips.nth(0).get_attribute("aria-pressed") == "false"


@pytest.mark.slow
def test_two_runs_are_seen_side_by_side_over_one_slider(see, tmp_path):
    make_job(tmp_path, {"model.n_layer": "2"}, 2.0, T=80)
    make_job(tmp_path, {"model.n_layer": "3"}, 3.0, T=80, L=3, steps=(0, 15, 20))
    make_job(tmp_path, {"model.n_layer": "1"}, 2.5, T=40, L=1)
    tab = see(write(tmp_path), width=1000)
    seen = {step: np.load(
        tmp_path / "model.n_layer=2" / "attention" / f"step_{step:08d}.npz")["text"]
            for step in STEPS}
    seen_right = np.load(tmp_path / "model.n_layer=3" / "attention" / "step_00000000.npz")["text"]
    sides = tab.locator(".side")
    assert sides.count() == 2 and tab.locator(".side select").nth(0).input_value() == "0"
    assert tab.locator(".side select").nth(1).input_value() == "2"
    for side in (0, 1):
        sides.nth(side).locator("[aria-label='layer 1, head 2']").click()
    tab.focus("#step")
    for press, text, left, right in (("Home", "step 0", 0, 0), ("ArrowRight", "step 10", 10, 0),
                                     ("ArrowRight", "step 15", 10, 15),
                                     ("Home", "step 0", 0, 0), ("ArrowRight", "step 10", 10, 0)):
        tab.keyboard.press(press)
        expect_text(tab, "#step-now", text)
        expect_text(sides.nth(0), "h3", f"L1H2 after {left} steps")
        expect_text(sides.nth(1), "h3", f"L1H2 after {right} steps")
    assert "its last snapshot before step 10" in sides.nth(1).inner_text()

    aside(tab)
    left, right = (sides.nth(k).locator(".map canvas") for k in (0, 1))
    left.focus()
    tab.keyboard.press("Escape")
    for press in ["ArrowRight"] * 3 + ["ArrowUp"] * 2:
        tab.keyboard.press(press)
    query, key, value = read_tip(tab)
    assert (query, key) == (77, 3) and told(value) == seen[10][1, 2, 77, 3]
    other = float(re.search(r"the other map there: (\S+)", value)[1])
    assert other == pytest.approx(float(seen_right[1, 2, 77, 3]), abs=0.005)
    assert sides.nth(1).locator(".mark.cell").is_visible()
    tab.keyboard.press("Escape")
    assert sides.nth(1).locator(".mark.cell").is_hidden()

    before = pixels(tab, ".side:nth-child(2) .map canvas")
    tab.locator(".side select").nth(1).select_option(label="n_layer 1 · 2.500")
    expect_text(sides.nth(1), "h3", "after 10 steps")
    assert sides.nth(1).locator("[role=radio]").count() == 4
    assert pixels(tab, ".side:nth-child(2) .map canvas") != before
    left.focus()
    tab.keyboard.press("ArrowRight")
    assert "the other map" not in tab.inner_text("#tip")  # other tokens
    tab.check("#average")
    expect_text(sides.nth(0), "h3", "the average of its 4 heads")
    tab.click("#play")
    expect_text(tab, "#step-now", "step 20", timeout=8000)


@pytest.mark.slow
def test_what_did_not_finish_is_shown_as_such(see, tmp_path):
    reason = "model.n_embd=32 is not a multiple of model.n_head=3"
    fail_job(make_job(tmp_path, {"model.n_head": "3"}, None), reason)
    fail_job(make_job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "NaN")
    make_job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    tab = see(write(tmp_path))
    assert "No run has finished yet" in tab.inner_text("main")
    assert tab.inner_text("#troubles h3") == "2 runs failed, 1 run unfinished"
    assert sorted(tab.locator("#troubles li").all_inner_texts()) == [
        "n_head 2 failed after 10 of 20 steps: NaN",
        f"n_head 3 failed before its first step: {reason}",
        "n_head 8 unfinished after 10 of 20 steps"]
    assert tab.locator("#curve-0 [style*='dasharray: 3 3']").count() == 2
    assert "Dashed: a run that has not finished" in tab.inner_text("#curves-note")


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "order", "is_log"), [
    ("1e-3 1e-4 1e-2", "1e-4 1e-3 1e-2", True), soak("0 0.2 0.1", "0 0.1 0.2", False),
    soak("null 1 2", "1 2 null", False)])
def test_values_are_put_in_order_and_on_a_fitting_axis(see, tmp_path, typed, order, is_log):
    for k, value in enumerate(typed.split()):
        make_job(tmp_path, {"optim.x": value}, 2 + k / 10, L=1, H=2, T=8)
    tab = see(write(tmp_path))
    shown = [name.removesuffix(" ★") for name in tab.locator(".chip").all_inner_texts()]
    assert shown == order.split()
    assert ("logarithmic" in tab.text_content("#against-0 svg")) == is_log
