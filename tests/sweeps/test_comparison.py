"""Comparing any runs: `python -m sweeps RUN RUN …`."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
from pages import make_job, make_run
from run_folders import write_fingerprint

from common.errors import UserError
from sweeps.__main__ import main


def compare(*argv: str, monkeypatch, capsys) -> list[str]:
    """Run `python -m sweeps` in this process, and return the lines that it prints."""
    monkeypatch.setattr(sys, "argv", ["sweeps", *argv])
    main()
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two runs, one of which is unfinished, beside a sweep of two jobs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    make_run(folder / "wide", H=8)
    make_run(folder / "narrow", max_steps=1000)
    for name in ("wide", "narrow"):
        write_fingerprint(folder / name, 20)
    make_job(folder / "sweep", {"optim.lr": "0.1"})
    make_job(folder / "sweep", {"optim.lr": "0.2"}, final=1.5)
    return folder


def test_any_runs_are_compared_by_the_settings_in_which_they_differ(runs, monkeypatch, capsys):
    argv = ["runs/wide", str(runs / "narrow"), "runs/../runs/wide"]
    printed_lines = compare(*argv, monkeypatch=monkeypatch, capsys=capsys)
    heading, _, *table_rows = printed_lines[1:5]
    assert heading.split()[:4] == ["run", "max_steps", "n_head", "n_embd"]
    cells = {row.split()[0]: row.split()[1:] for row in table_rows}
    assert cells["wide"][:3] == ["20", "8", "64"] and cells["narrow"][:3] == ["1000", "4", "32"]
    assert "20 of 1,000" in " ".join(cells["narrow"]) and cells["wide"][3] == "20"
    assert not any(line.startswith("best") for line in printed_lines)

    lines = list(csv.DictReader(open("comparison/comparison.csv", encoding="utf-8")))  # noqa: SIM115
    assert {line["run"]: line["status"] for line in lines} == {
        "wide": "finished",
        "narrow": "unfinished",
    }
    (narrow,) = [line for line in lines if line["run"] == "narrow"]
    assert float(narrow["val/loss"]) == 2.5
    assert (narrow["max_steps"], narrow["model.n_embd"]) == ("1000", "32")
    assert "seed" not in narrow and "run_dir" not in narrow  # they are equal in both


def test_only_losses_on_one_text_are_ranked(runs, monkeypatch, capsys):
    """However the runs come together: jobs and other runs, of one seed or of several."""

    def is_ranked(*paths: str) -> bool:
        lines = compare(*paths, monkeypatch=monkeypatch, capsys=capsys)
        return not any(line.startswith("note") and "texts differ" in line for line in lines)

    jobs = [str(path) for path in sorted((runs / "sweep").glob("optim*"))]
    assert is_ranked("runs/wide", *jobs) and is_ranked("runs/sweep")
    for path, text in zip(jobs, ("generated-1", "generated-2")):
        write_fingerprint(Path(path), 20, text)
    assert not is_ranked(*jobs) and is_ranked("runs/sweep")  # whose jobs differ by their seeds
    for path in jobs:
        write_fingerprint(Path(path), 20, "another text")
    assert is_ranked(*jobs) and not is_ranked("runs/wide", *jobs)
    shutil.rmtree(runs / "narrow" / "checkpoints")
    assert not is_ranked("runs/wide", "runs/narrow")


def test_a_folder_stands_for_the_runs_and_sweeps_in_it(runs, monkeypatch, capsys):
    compare("runs", "out=elsewhere", monkeypatch=monkeypatch, capsys=capsys)
    lines = list(csv.DictReader(open("elsewhere/comparison.csv", encoding="utf-8")))  # noqa: SIM115
    jobs = [f"sweep/{path.name}" for path in (runs / "sweep").glob("optim*")]
    assert {line["run"] for line in lines} == {"wide", "narrow", *jobs}
    figures = [float(line["val/bits_per_byte"]) for line in lines]  # their tokenizers differ
    assert figures == sorted(figures) and len(set(figures)) == 3
    assert not (runs / "comparison.csv").exists()
    compare("runs/sweep", monkeypatch=monkeypatch, capsys=capsys)
    assert (runs / "sweep" / "sweep.csv").exists() and not Path("comparison").exists()


@pytest.mark.parametrize("name", ["job.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["{}", "\0", '{"settings": 3}', "nested", "cut"])
def test_a_damaged_file_of_a_run_is_one_sentence_with_its_name(
    name, content, runs, monkeypatch, capsys
):
    path = next((runs / "sweep").glob("optim*")) / name
    damaged = {"cut": path.read_text()[:60], "nested": "[" * 100_000}
    path.write_text(damaged.get(content, content) + "\n")
    for folder in ("runs", "runs/sweep"):
        lines = compare(folder, monkeypatch=monkeypatch, capsys=capsys)
        (failure,) = [line for line in lines if line.startswith("failed")]
        assert f"{path.parent.name}/{name}" in failure


@pytest.mark.parametrize(
    "argv", [["runs/wide", "nowhere"], ["runs/wide", "out=runs/narrow/new"], ["out=new"], []]
)
def test_runs_that_cannot_be_compared_are_refused_and_nothing_is_written(
    argv, runs, monkeypatch, capsys
):
    before = sorted(runs.parent.rglob("*"))
    with pytest.raises(UserError):
        compare(*argv, monkeypatch=monkeypatch, capsys=capsys)
    assert sorted(runs.parent.rglob("*")) == before
