"""The runs of a folder: read in any state, in the terminal's table, on the page in Chromium."""

import json
import os
import shutil

import pytest
from pages import read_back
from playwright.sync_api import expect
from processes import run as command

from config import Config, config_yaml
from report.runs import read_runs, write_index

HOSTILE = "<img src=x onerror=alert(1)> & 'q'"


def add(folder, name, losses, max_steps=20, when=0):
    """A run with these validation losses, every 10 steps."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_yaml(Config(max_steps=max_steps)))
    with (path / "metrics.jsonl").open("w") as file:
        for n, loss in enumerate(losses):
            row = {"step": 10 * n, "tokens": 640 * n, "train_seconds": float(n),
                   "val/loss": loss, "val/bits_per_byte": loss / 2}
            file.write(json.dumps(row) + "\n")
    os.utime(path / "metrics.jsonl", (when, when))
    return path


@pytest.fixture
def folder(tmp_path):
    runs = tmp_path / "runs"
    add(runs, "2026-01-31_12-00-00_induction_2", [5.0, 3.0, 2.0], when=3000)
    add(runs, "mine", [5.0, 2.5], when=4000)
    add(runs, HOSTILE, [5.0, 3.5, 3.0], when=2000)
    add(runs, "new", [], when=1000)
    return runs


def test_runs_are_read_newest_first_in_any_state(folder):
    runs, troubles = read_runs(folder)
    assert [run.path.name for run in runs] == ["mine", "2026-01-31_12-00-00_induction_2", HOSTILE,
                                               "new"]
    assert [run.status for run in runs] == ["unfinished", "finished", "finished", "unfinished"]
    assert runs[0].measures["val/loss"] == 2.5 and not troubles
    (folder / "new" / "config.yaml").write_text("x: [")
    runs, troubles = read_runs(folder)
    assert len(runs) == 3 and len(troubles) == 1 and "new" in troubles[0]


def test_a_checkpoint_is_no_run_and_a_run_is_no_folder_of_runs(tmp_path):
    one = add(tmp_path / "runs", "mine", [5.0, 2.5])
    add(one / "checkpoints", "step_00000010", [])
    for path in (one, one / "checkpoints", one / "checkpoints" / "step_00000010"):
        before = sorted(path.iterdir())
        refused = command(tmp_path, "report/__main__.py", str(path))
        assert refused.returncode == 1 and sorted(path.iterdir()) == before
        assert "has no page yet" in refused.stderr or "there is no run in" in refused.stderr
    (one / "report.html").write_text("a page")
    done = command(tmp_path, "report/__main__.py", "runs/mine")
    assert done.stdout == "runs/mine is one run: open runs/mine/report.html\n"


@pytest.mark.slow
def test_the_command_lists_a_real_run_and_says_what_to_do_next(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "runs" / "mine")
    add(tmp_path / "runs", "stopped run", [5.0, 2.5])
    done = command(tmp_path, "report/__main__.py")
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout and "open runs/index.html" in done.stdout
    assert (tmp_path / "runs" / "index.html").stat().st_size > 1000
    refused = command(tmp_path, "report/__main__.py", "nowhere")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: there is no run in nowhere")
    assert command(tmp_path, "report/__main__.py", "a", "b").returncode == 1


def test_only_its_own_index_is_written_over_and_none_without_runs(tmp_path):
    one = add(tmp_path / "runs", "mine", [5.0])
    index = tmp_path / "runs" / "index.html"
    for _ in range(2):
        assert command(tmp_path, "report/__main__.py").returncode == 0
    index.write_text("<title>my own page</title>")
    refused = command(tmp_path, "report/__main__.py")
    assert refused.returncode == 1 and "runs/index.html is there already" in refused.stderr
    assert index.read_text() == "<title>my own page</title>"
    index.unlink()
    (one / "config.yaml").write_text("x: [")
    refused = command(tmp_path, "report/__main__.py")
    assert "no run of runs can be read" in refused.stderr and not index.exists()


def test_links_hold_from_the_sweep_itself_and_any_name_is_shown(tmp_path):
    job = add(tmp_path / "sweep", os.fsdecode(b"\x1b[31m \xff"), [5.0])
    (job / "job.json").write_text('{"overrides": {"seed": "1"}, "swept": ["seed"], "failed": ""}')
    (job / "report.html").write_text("a page")
    for folder, links in ((tmp_path / "sweep", ("", "sweep.html")),
                          (tmp_path, ("sweep/", "sweep/sweep.html"))):
        assert command(folder, "report/__main__.py", ".").returncode == 0
        run, = read_back(folder / "index.html")[0]["runs"]
        assert (run["page"], run["sweep"]) == (f"{links[0]}%1B%5B31m%20%FF/report.html", links[1])
    done = command(tmp_path, "report/__main__.py", "sweep")
    assert "\x1b" not in done.stdout and done.returncode == 0


@pytest.mark.slow
def test_the_page_sorts_filters_and_draws_what_is_ticked(folder, see):
    (folder / "mine" / "report.html").write_text("<title>a page</title>")
    tab = see(write_index(folder, read_runs(folder)[0]))
    names = tab.locator("tbody td:nth-child(2)")
    expect(names).to_have_text(["mine", "2026-01-31_12-00-00_induction_2", HOSTILE, "new"])
    expect(tab.locator("tbody a")).to_have_attribute("href", "mine/report.html")
    tab.get_by_role("button", name="val/loss", exact=True).click()
    expect(names).to_have_text(["2026-01-31_12-00-00_induction_2", "mine", HOSTILE, "new"])
    tab.get_by_role("button", name="val/loss ▲").click()
    expect(names).to_have_text([HOSTILE, "mine", "2026-01-31_12-00-00_induction_2", "new"])
    tab.locator("#filter").fill("induction fin")
    expect(names).to_have_text(["2026-01-31_12-00-00_induction_2"])
    tab.locator("#filter").fill("-unfinished")
    expect(names).to_have_count(2)
    drawn = tab.locator("#chart g path.line")
    expect(drawn).to_have_count(3)
    tab.get_by_role("button", name="untick all").click()
    expect(tab.locator("#chart")).to_be_hidden()
    tab.locator("tbody input").first.check()
    expect(drawn).to_have_count(1)
