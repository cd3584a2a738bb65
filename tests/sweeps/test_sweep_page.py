"""The page of a sweep: its figures against those of the runs, and its behavior in Chromium."""

import json
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import pytest
from conftest import soak
from pages import (
    expect_text,
    fail_job,
    make_job,
    make_run,
    move_pointer_away,
    read_back,
)

from sweeps import page as sweep_page
from sweeps.ranking import Ranking
from sweeps.runs import read_comparison, read_sweep


def write(folder: Path) -> Path:
    return sweep_page.write_sweep_page(folder, Ranking(read_sweep(folder)))


def content_of(folder: Path) -> dict:
    return read_back(write(folder))[0]


@pytest.fixture
def three_settings(tmp_path) -> Path:
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


# Content


def test_the_figures_on_the_page_equal_those_in_the_runs_files(three_settings):
    path = write(three_settings)
    assert path.read_bytes() == write(three_settings).read_bytes()
    content, _ = read_back(path)
    assert content["command"] == "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert content["keys"] == [{"name": "n_kv_head", "values": ["4", "2", "1"]}]
    assert [run["setting"] for run in content["runs"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    (loss,) = [figure for figure in content["figures"] if figure["name"] == "val/loss"]
    assert loss["texts"] == ["2.2467 ± 0.0233", "2.3467 ± 0.0233", "2.6467 ± 0.0233"]
    run = content["runs"][0]
    metrics = three_settings / run["name"] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert run["curves"]["val/loss"]["steps"] == [0, 10, 20]
    assert run["curves"]["val/loss"]["values"] == pytest.approx(losses, rel=1e-5)
    assert run["emerged"] == {"induction": 10}
    for score, combine in (("induction", max), ("entropy", fmean)):
        of = [value for key, value in rows[-1].items() if key.startswith(f"heads/{score}/")]
        assert run["heads"][score]["values"][-1] == pytest.approx(combine(of), rel=1e-4)


def test_a_sweep_without_runs_or_with_nan_losses_still_has_a_page(tmp_path):
    assert read_back(sweep_page.write_sweep_page(tmp_path, Ranking([])))[0]["runs"] == []
    run = make_job(tmp_path, {"seed": "1"}, maps=False)
    with (run / "metrics.jsonl").open("a") as f:
        f.write(
            '{"step": 20, "val/loss": NaN, "val/bits_per_byte": NaN, "tokens": 1, '
            '"train_seconds": 0, "heads/induction/L0H0": NaN}\n'
        )
    assert len(content_of(tmp_path)["runs"]) == 1


# In a browser


def read_column(tab, column: str) -> list[str]:
    """The cells of a column of the table of settings."""
    ids = tab.locator("#settings th[data-column]").evaluate_all(
        "headings => headings.map(heading => heading.dataset.column)"
    )
    place = ids.index(column) + 2  # after the column of colors; CSS counts from 1
    return tab.locator(f"#settings tbody td:nth-child({place})").all_inner_texts()


def read_value(tab) -> str:
    """The number that the tooltip shows."""
    return tab.inner_text("#tip .value b")


@pytest.mark.slow
def test_the_result_and_its_command_stand_above_the_sortable_table(open_page, three_settings):
    tab = open_page(write(three_settings))
    assert "3 settings" in tab.inner_text("#summary") and "9 runs" in tab.inner_text("#summary")
    assert "n_kv_head=4" in tab.inner_text("#conclusion") and tab.locator("#failures").is_hidden()
    command = "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert tab.inner_text("#command") == command
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#copy")
    expect_text(tab, "#copy", "copied")
    assert tab.evaluate("navigator.clipboard.readText()") == command

    for order in (["1", "2", "4"], ["4", "2", "1"], ["4", "2", "1"]):  # up, down, by loss
        tab.locator("#settings th button").first.click()
        assert read_column(tab, "n_kv_head") == order
    assert read_column(tab, "parameters") == ["400", "200", "100"]
    assert read_column(tab, "runs")[0].split() == ["1", "2", "3"]
    link = tab.locator("#settings a").first.evaluate("a => a.href")
    assert f"{three_settings}/model.n_kv_head=4,seed=1_" in unquote(link)


@pytest.mark.slow
def test_arrow_keys_read_the_curves_of_all_settings(open_page, three_settings):
    tab = open_page(write(three_settings))
    assert tab.locator("#curve-0 .line.faint").count() == 9
    assert tab.locator("#curve-0 .line.bold").count() == 3
    names = tab.locator("#curve-0 text[data-group]").all_text_contents()
    assert sorted(names) == ["n_kv_head=1", "n_kv_head=2", "n_kv_head=4"]
    assert tab.locator("#head-induction circle").count() == 9  # one emergence in each run
    move_pointer_away(tab)
    tab.focus("#curve-0 svg")
    tab.keyboard.press("End")
    assert "n_kv_head=4" in tab.inner_text("#tip") and "step 20" in tab.inner_text("#tip")
    assert read_value(tab) == "2.247"
    assert tab.locator("#curve-0 .line.bold.lit").count() == 1  # the other lines fade
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    assert "n_kv_head=2" in tab.inner_text("#tip") and "step 10" in tab.inner_text("#tip")
    assert read_value(tab) == "3.173"


@pytest.mark.slow
def test_a_figure_is_drawn_against_a_swept_key(open_page, three_settings):
    tab = open_page(write(three_settings))
    assert tab.locator("#figure-chart circle").count() == 9 + 3
    tab.focus("#figure-chart svg")
    for key in ("End", "ArrowLeft"):
        tab.keyboard.press(key)
    assert "n_kv_head=2" in tab.inner_text("#tip") and read_value(tab) == "2.3467 ± 0.0233"
    assert tab.locator("#settings tr.lit").count() == 1
    tab.select_option("#shown", label="Parameters")
    tab.focus("#figure-chart svg")
    tab.keyboard.press("Home")
    assert "n_kv_head=1" in tab.inner_text("#tip") and read_value(tab) == "100"


@pytest.mark.slow
def test_failed_and_unfinished_runs_are_listed_with_their_reasons(open_page, tmp_path):
    reason = "model.n_embd=32 is not divisible by model.n_head=3"
    fail_job(make_job(tmp_path, {"model.n_head": "3"}, None), reason)
    fail_job(make_job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "NaN")
    make_job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    tab = open_page(write(tmp_path))
    assert tab.locator("#again").is_hidden()
    failed = tab.locator("#failures li[data-status=failed]").all_inner_texts()
    two_heads, three_heads = sorted(failed)
    assert "n_head=2" in two_heads and "10 of 20" in two_heads and "NaN" in two_heads
    assert "n_head=3" in three_heads and reason in three_heads
    (unfinished,) = tab.locator("#failures li[data-status=unfinished]").all_inner_texts()
    assert "n_head=8" in unfinished and "10 of 20" in unfinished
    assert tab.locator("#curve-0 [style*='dasharray: 3 3']").count() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "order", "is_log"),
    [
        ("0.001 0.0001 0.01", "0.0001 0.001 0.01", True),
        soak("0.0 0.2 0.1", "0.0 0.1 0.2", False),
        ("0.1593 0.1592 0.1591", "0.1591 0.1592 0.1593", False),
    ],
)
def test_swept_values_are_in_order_on_a_fitting_axis(open_page, tmp_path, typed, order, is_log):
    for k, value in enumerate(typed.split()):
        make_job(tmp_path, {"optim.lr": value}, 2 + k / 10, L=1, H=2, T=8)
    tab = open_page(write(tmp_path))
    assert tab.locator(".chip").all_inner_texts() == order.split()
    texts = tab.locator("#figure-chart svg text").all_text_contents()
    assert [text for text in texts if text in order.split()] == order.split()
    assert ("lr, log scale" in texts) == is_log


@pytest.mark.slow
def test_compared_runs_are_named_and_linked_wherever_they_are(open_page, tmp_path):
    make_run(tmp_path / "here" / "wide run", H=8)
    (tmp_path / "here" / "wide run" / "report.html").write_text("<title>wide</title>")
    make_run(tmp_path / "there" / "narrow", max_steps=1000)
    (tmp_path / "out").mkdir()
    runs = read_comparison([tmp_path / "here", tmp_path / "there"])
    tab = open_page(sweep_page.write_sweep_page(tmp_path / "out", Ranking(runs)))
    assert tab.locator(".chip").all_inner_texts() == ["here/wide run", "there/narrow"]
    assert tab.locator("#command").is_hidden()
    assert "20 of 1,000" in tab.inner_text("#failures li")
    link = tab.locator("#settings a").evaluate("a => a.href")
    assert unquote(link) == f"file://{tmp_path}/here/wide run/report.html"
