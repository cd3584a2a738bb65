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
from sweeps.comparison import read_comparison
from sweeps.ranking import Ranking
from sweeps.runs import read_sweep

# The box around each line of a chart, in pixels.
READ_BOXES = """lines => lines.map(line => {
  const { y, width } = line.getBBox();
  return { y, width };
})"""


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
    assert (
        path == three_settings / "sweep.html"
        and path.read_bytes() == write(three_settings).read_bytes()
    )
    assert {p.name for p in three_settings.iterdir()} == {
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
            for line in (three_settings / run["name"] / "metrics.jsonl").read_text().splitlines()
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
def test_the_best_setting_is_shown_with_its_cost_and_its_command(open_page, three_settings):
    tab = open_page(write(three_settings))
    command = "python train.py max_steps=20 model.n_kv_head=4 seed=1"
    assert "3 settings" in tab.inner_text("#summary") and "9 runs" in tab.inner_text("#summary")
    figures = {
        "model.n_kv_head": "4",
        "loss": "2.247 ± 0.023",
        "kv_cache_bytes": "8.19 kB",
        "tokens_per_second": "2k",
    }
    for name, value in figures.items():
        assert tab.inner_text(f"[data-figure='{name}'] b") == value
    assert tab.inner_text("#best-command") == command
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#copy")
    expect_text(tab, "#copy", "copied")
    assert tab.evaluate("navigator.clipboard.readText()") == command
    assert tab.locator("#failures").is_hidden() and tab.locator("#caveat").is_hidden()


@pytest.mark.slow
def test_with_one_seed_no_setting_is_declared_best(open_page, tmp_path):
    for heads, final in (("1", 2.6), ("2", 2.3)):
        make_job(tmp_path, {"model.n_kv_head": heads}, final, groups=int(heads))
    tab = open_page(write(tmp_path))
    assert tab.locator("#caveat").is_visible()
    assert "★" not in tab.inner_text("main") and tab.locator(".ring").count() == 0


@pytest.mark.slow
def test_the_tables_list_and_sort_all_settings_and_link_to_all_runs(open_page, three_settings):
    tab = open_page(write(three_settings))
    assert read_column(tab, "loss") == ["2.247 ± 0.023", "2.347 ± 0.023", "2.647 ± 0.023"]
    assert read_column(tab, "parameters") == ["400", "200", "100"]
    assert read_column(tab, "kv_cache_bytes") == ["8.19 kB", "4.1 kB", "2.05 kB"]
    assert read_column(tab, "tokens_per_second") == ["2k", "1k", "500"]
    assert read_column(tab, "seeds") == ["3", "3", "3"]
    ascending, descending, by_loss = ["1", "2", "4"], ["4", "2", "1"], ["4", "2", "1"]
    for order in (ascending, descending, by_loss):
        tab.locator("#settings th button").first.focus()
        tab.keyboard.press("Enter")
        assert read_column(tab, "model.n_kv_head") == order
    assert tab.locator("#final-scores th[data-column=induction]").count() == 1
    best = tab.inner_text("#final-scores tbody tr >> nth=0")
    assert "step 10" in best  # first emergence
    scores = content_of(three_settings)["runs"][0]["heads"]["induction"]["values"]
    assert f"{scores[-1]:.4f}; emerged" in best  # alike in all runs, so without an error
    assert "±" not in best
    tab.click("#table summary")
    assert tab.locator("#runs tbody tr").count() == 9
    link = tab.locator("#runs a").first.evaluate("a => a.href")
    assert unquote(link) == f"file://{three_settings}/model.n_kv_head=4,seed=1/report.html"


@pytest.mark.slow
def test_arrow_keys_read_the_curves_of_all_settings(open_page, three_settings):
    tab = open_page(write(three_settings))
    assert tab.locator("#curve-0 .line.faint").count() == 9
    assert tab.locator("#curve-0 .line.bold").count() == 3
    names = tab.locator("#curve-0 text[data-group]").all_text_contents()
    assert sorted(names) == ["n_kv_head 1", "n_kv_head 2", "n_kv_head 4 ★"]
    assert tab.locator("#head-induction circle").count() == 9  # one emergence in each run
    move_pointer_away(tab)
    tab.focus("#curve-0 svg")
    tab.keyboard.press("End")
    assert "n_kv_head 4" in tab.inner_text("#tip") and "step 20" in tab.inner_text("#tip")
    assert read_value(tab) == "2.247"
    assert tab.locator("#curve-0 .line.bold.lit").count() == 1  # the other lines fade
    tab.keyboard.press("ArrowUp")
    assert "n_kv_head 2" in tab.inner_text("#tip") and "2.347" in tab.inner_text("#live")
    tab.keyboard.press("ArrowLeft")
    assert "step 10" in tab.inner_text("#tip") and read_value(tab) == "3.173"


@pytest.mark.slow
def test_lines_of_rare_evaluations_are_within_the_chart(open_page, three_settings):
    tab = open_page(write(three_settings))
    boxes = tab.locator("#curve-0 g .line").evaluate_all(READ_BOXES)
    assert len(boxes) == 12 and all(box["y"] >= 0 for box in boxes)


@pytest.mark.slow
def test_a_run_is_no_vertical_line_beside_one_that_is_much_longer(open_page, tmp_path):
    for last_step in (20, 2000):
        steps = (0, last_step // 4, last_step // 2, last_step)
        make_job(tmp_path / "sweep", {"max_steps": str(last_step)}, steps=steps, maps=False)
    tab = open_page(write(tmp_path / "sweep"))
    short, long = tab.locator("#curve-0 g .line").evaluate_all(READ_BOXES)
    assert min(short["width"], long["width"]) > 0.2 * max(short["width"], long["width"])


@pytest.mark.slow
def test_the_loss_is_drawn_against_each_swept_key_and_each_cost(open_page, three_settings):
    tab = open_page(write(three_settings))
    charts = tab.locator("#tradeoffs-charts > div:visible").evaluate_all(
        "all => all.map(c => c.id)"
    )
    assert charts == [
        "loss-by-key-0",
        "loss-by-parameters",
        "loss-by-kv_cache_bytes",
        "loss-by-tokens_per_second",
        "loss-by-train_seconds",
    ]
    assert tab.locator("#loss-by-key-0 .dot").count() == 9 + 3
    tab.focus("#loss-by-key-0 .dot[tabindex='0']")
    assert "n_kv_head 4 ★" in tab.inner_text("#tip") and read_value(tab) == "2.247 ± 0.023"


@pytest.mark.slow
def test_failed_and_unfinished_runs_are_listed_with_their_reasons(open_page, tmp_path):
    reason = "model.n_embd=32 is not divisible by model.n_head=3"
    fail_job(make_job(tmp_path, {"model.n_head": "3"}, None), reason)
    fail_job(make_job(tmp_path, {"model.n_head": "2"}, 1.0, steps=(0, 10)), "NaN")
    make_job(tmp_path, {"model.n_head": "8"}, 3.0, steps=(0, 10))
    tab = open_page(write(tmp_path))
    assert tab.locator("#nothing").is_visible() and tab.locator("#best").is_hidden()
    failed = tab.locator("#failures li[data-status=failed]").all_inner_texts()
    two_heads, three_heads = sorted(failed)
    assert "n_head 2" in two_heads and "10 of 20" in two_heads and "NaN" in two_heads
    assert "n_head 3" in three_heads and reason in three_heads
    (unfinished,) = tab.locator("#failures li[data-status=unfinished]").all_inner_texts()
    assert "n_head 8" in unfinished and "10 of 20" in unfinished
    assert tab.locator("#curve-0 [style*='dasharray: 3 3']").count() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "typed", "order", "axis"),
    [
        ("optim.lr", "0.001 0.0001 0.01", "0.0001 0.001 0.01", "log"),
        soak("optim.lr", "0.0 0.2 0.1", "0.0 0.1 0.2", "linear"),
        ("optim.lr", "0.1593 0.1592 0.1591", "0.1591 0.1592 0.1593", "linear"),
        soak("model.n_kv_head", "null 1 2", "1 2 null", "names"),
    ],
)
def test_swept_values_are_in_order_on_a_fitting_axis(open_page, tmp_path, key, typed, order, axis):
    for k, value in enumerate(typed.split()):
        make_job(tmp_path, {key: value}, 2 + k / 10, L=1, H=2, T=8)
    tab = open_page(write(tmp_path))
    assert tab.locator(".chip").all_inner_texts() == order.split()
    assert tab.get_attribute("#loss-by-key-0 svg", "data-axis") == axis
    ticks = tab.locator("#loss-by-key-0 svg text").all_text_contents()
    assert axis != "linear" or len({*ticks}) == len(ticks)


@pytest.mark.slow
def test_compared_runs_are_named_and_linked_wherever_they_are(open_page, tmp_path):
    make_run(tmp_path / "here" / "wide run", H=8)
    (tmp_path / "here" / "wide run" / "report.html").write_text("<title>wide</title>")
    make_run(tmp_path / "there" / "narrow", max_steps=1000)
    (tmp_path / "out").mkdir()
    runs = read_comparison([tmp_path / "here", tmp_path / "there"])
    tab = open_page(sweep_page.write_sweep_page(tmp_path / "out", Ranking(runs)))
    assert read_column(tab, "run") == ["here/wide run", "there/narrow"]
    assert read_column(tab, "model.n_head") == ["8", "4"]
    assert read_column(tab, "loss") == ["2.500", "2.500"]  # also of the unfinished one
    assert tab.locator(".chip").all_inner_texts() == ["here/wide run", "there/narrow"]
    assert tab.locator("#best-command").is_hidden()
    assert "20 of 1,000" in tab.inner_text("#failures li")
    assert tab.locator("#formed-charts .dot").count() > 0
    link = tab.locator("#runs a").evaluate("a => a.href")
    assert unquote(link) == f"file://{tmp_path}/here/wide run/report.html"
