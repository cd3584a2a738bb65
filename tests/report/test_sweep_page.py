"""The page of a sweep: its figures against the files', how much of the maps it holds, what a
person sees of it in Chromium."""

import json
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import pytest
from conftest import soak
from pages import (
    HOSTILE,
    aside,
    expect_text,
    fail_job,
    make_job,
    read_back,
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
            make_job(
                tmp_path / "sweep",
                {"model.n_kv_head": heads, "seed": seed},
                final + 0.01 * int(seed) ** 2,
                groups=int(heads),
                speed=500 * int(heads),
                size=100 * int(heads),
            )
    return tmp_path / "sweep"


# What it holds


def test_its_figures_are_those_of_the_files(grouped):
    path = write(grouped)
    assert path == grouped / "sweep.html" and path.read_bytes() == write(grouped).read_bytes()
    assert {p.name for p in grouped.iterdir()} == {
        "sweep.html",
        *(f"model.n_kv_head={g},seed={s}" for g in (1, 2, 4) for s in (1, 2, 3)),
    }
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
        rows = [
            json.loads(line)
            for line in (grouped / run["name"] / "metrics.jsonl").read_text().splitlines()
        ]
        losses = [row["val/loss"] for row in rows if "val/loss" in row]
        assert run["curves"]["val/loss"] == {
            "steps": [0, 10, 20],
            "values": pytest.approx(losses, rel=1e-5),
            "of": 3,
        }
        assert run["curves"]["train/loss"]["steps"] == [0, 5, 10, 15, 20]
        assert run["page"].endswith("/report.html") and run["emerged"] == {"induction": 10}
        last = {key: value for key, value in rows[-1].items() if key.startswith("heads/")}
        for score, combine in (("induction", max), ("entropy", fmean)):
            of = {key: value for key, value in last.items() if f"/{score}/" in key}
            assert run["heads"][score]["values"][-1] == pytest.approx(
                combine(of.values()), rel=1e-4
            )


def test_nothing_at_all_and_rows_of_nan_make_a_page(tmp_path):
    assert read_back(sweep_page.write_sweep_page(tmp_path, []))[0]["runs"] == []
    run = make_job(tmp_path, {"seed": "1"}, maps=False)
    with (run / "metrics.jsonl").open("a") as f:
        f.write(
            '{"step": 20, "val/loss": NaN, "val/bits_per_byte": NaN, "tokens": 1, '
            '"train_seconds": 0, "heads/induction/L0H0": NaN}\n'
        )
    assert len(content_of(tmp_path)["runs"]) == 1


# In a browser


@pytest.mark.slow
def test_the_best_setting_and_every_other_are_shown(open_page, grouped):
    tab, best = open_page(write(grouped)), "python train.py max_steps=20 model.n_kv_head=4 seed=1"
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
def test_curves_and_prices_are_read_and_singled_out(open_page, grouped):
    tab = open_page(write(grouped))
    assert tab.locator("#curve-0 .line.faint").count() == 9
    assert tab.locator("#curve-0 .line.bold").count() == 3
    names = tab.locator("#curve-0 text[data-group]").all_text_contents()
    assert sorted(names) == ["n_kv_head 1", "n_kv_head 2", "n_kv_head 4 ★"]
    assert tab.locator("#head-induction circle").count() == 9  # emerged
    aside(tab)
    tab.focus("#curve-0 svg")
    tab.keyboard.press("End")
    assert tab.inner_text("#tip").split("\n") == [
        "n_kv_head 4 ★",
        "2.247 nats per token",
        "step 20, mean of 3 runs",
    ]
    assert tab.locator("#curve-0 .line.bold.lit").count() == 1  # the others fade
    tab.keyboard.press("ArrowUp")
    assert "n_kv_head 2" in tab.inner_text("#tip") and "2.347" in tab.inner_text("#live")
    tab.keyboard.press("ArrowLeft")
    assert "step 10" in tab.inner_text("#tip") and "3.173" in tab.inner_text("#tip")

    assert tab.locator("#against h3").all_inner_texts() == [
        f"Validation loss against {name}"
        for name in ("n_kv_head", "parameters", "KV cache", "tokens per second", "training time")
    ]
    assert tab.locator("#against-0 .dot").count() == 9 + 3
    assert tab.locator("#against-0 .ring").count() == 1
    tab.focus("#against-0 .dot[tabindex='0']")
    assert tab.inner_text("#tip").split("\n") == [
        "n_kv_head 4 ★",
        "2.247 ± 0.023 nats per token",
        "mean of 3 runs",
    ]
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
def test_what_did_not_finish_is_shown_as_such(open_page, tmp_path):
    reason = "model.n_embd=32 is not a multiple of model.n_head=3"
    fail_job(make_job(tmp_path, {"model.n_head": "3"}, None), reason)
    fail_job(make_job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "NaN")
    make_job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    tab = open_page(write(tmp_path))
    assert "No run has finished yet" in tab.inner_text("main")
    assert tab.inner_text("#troubles h3") == "2 runs failed, 1 run unfinished"
    assert sorted(tab.locator("#troubles li").all_inner_texts()) == [
        "n_head 2 failed after 10 of 20 steps: NaN",
        f"n_head 3 failed before its first step: {reason}",
        "n_head 8 unfinished after 10 of 20 steps",
    ]
    assert tab.locator("#curve-0 [style*='dasharray: 3 3']").count() == 2
    assert "Dashed: a run that has not finished" in tab.inner_text("#curves-note")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "order", "is_log"),
    [
        ("1e-3 1e-4 1e-2", "1e-4 1e-3 1e-2", True),
        soak("0 0.2 0.1", "0 0.1 0.2", False),
        soak("null 1 2", "1 2 null", False),
    ],
)
def test_values_are_put_in_order_and_on_a_fitting_axis(open_page, tmp_path, typed, order, is_log):
    for k, value in enumerate(typed.split()):
        make_job(tmp_path, {"optim.x": value}, 2 + k / 10, L=1, H=2, T=8)
    tab = open_page(write(tmp_path))
    shown = [name.removesuffix(" ★") for name in tab.locator(".chip").all_inner_texts()]
    assert shown == order.split()
    assert ("logarithmic" in tab.text_content("#against-0 svg")) == is_log
