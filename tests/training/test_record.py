"""The record of a run: its numbers, failures of its files, and W&B."""

import json
import queue
import shutil
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import wandb
from conftest import TINY
from run_folders import open_record

import training.display
from common.errors import UserError
from common.settings import iterate_settings
from common.text import format_with_error
from config import GPTConfig, ResolvedConfig, WandbConfig
from interop import load
from run.config_file import read_config
from run.run_dir import RunDir
from training.wandb_record import check_wandb, start


def test_values_have_the_decimals_of_their_standard_errors():
    assert format_with_error(1.3862, 0.0581) == "1.39 ± 0.06"
    assert format_with_error(-0.001, 0.02) == "0.00 ± 0.02"
    assert format_with_error(6961, 12.3) == "6,961 ± 12"
    for unknown in (None, 0.0, nan, 1e-17):  # the last one is the rounding error of equal values
        assert format_with_error(0.1234, unknown) == "0.12"


@pytest.mark.parametrize("step", [-1, 0, 6, 7, 12, 99])
def test_a_resume_keeps_rows_and_snapshots_up_to_its_step_and_removes_later_ones(
    tiny, tmp_path, step
):
    steps, names = range(13), [f"step_{n:08d}.{e}" for n in (0, 6, 7, 12) for e in ("npz", "png")]
    (tmp_path / "attention").mkdir()
    for name in [*names, "step_notes.npz"]:
        (tmp_path / "attention" / name).touch()
    files = RunDir(tmp_path).metrics_file, RunDir(tmp_path).samples_file
    lines = "".join(f'{{"step": {n}}}\n' for n in steps)
    for file in files:
        file.write_text(lines)
    record = open_record(tiny, tmp_path, step)
    assert record.rows == [{"step": n} for n in steps if n <= step]
    assert RunDir(tmp_path).rows() == RunDir(tmp_path).samples() == record.rows
    for file in files:
        assert file.with_name(f"{file.name}.before").read_text() == lines
    kept = {name for name in names if int(name[5:13]) <= step}
    assert {path.name for path in (tmp_path / "attention").iterdir()} == kept | {"step_notes.npz"}


def test_the_time_left_is_that_at_the_speed_of_the_last_minute(tiny, tmp_path, monkeypatch, capsys):
    clock = iter([0, 100, 200, 300, 320, 340, 360])
    monkeypatch.setattr(training.display, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with open_record(replace(tiny, max_steps=12), tmp_path) as record:
        for step in range(7):
            record.show(step, {"train/loss": 1.0})
    assert "02:00 left" in capsys.readouterr().out.splitlines()[-1]


def test_without_a_terminal_a_line_shows_what_takes_long(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training.display, "SILENT_SECONDS", 0.01)
    record, lines = open_record(tiny, tmp_path), queue.Queue()
    monkeypatch.setattr(record.display, "log", lines.put)
    with record:
        record.show(3, {})
        record.display.show_activity("measuring attention")
        while "3  measuring attention" not in lines.get(timeout=60):
            pass


def test_a_torn_row_costs_no_sample(tiny, tmp_path):
    run_dir = RunDir(tmp_path)
    samples = [{"step": step, "text": "x"} for step in (0, 4, 8)]
    run_dir.samples_file.write_text("".join(json.dumps(row) + "\n" for row in samples))
    run_dir.metrics_file.write_text('{"step": 0}\n{"step"\n{"step": 5}\n')
    record = open_record(tiny, tmp_path, recorded=4)
    assert [row["step"] for row in record.rows] == [0]
    assert [row["step"] for row in run_dir.samples()] == [0, 4]


def test_a_recurring_failure_is_noted_once_and_costs_nothing_else(tiny, tmp_path, capsys):
    with open_record(tiny, tmp_path) as record:
        (tmp_path / "metrics.jsonl").mkdir()
        for step in (1, 2):
            record.write(step, {"val/loss": 1.0})
            with record.tolerate_errors("drawing a page"):
                raise KeyError("key")
        (tmp_path / "metrics.jsonl").rmdir()
        record.write(3, {"val/loss": 1.0})
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 2 and "KeyError" in warnings[1]
    assert f"{tmp_path / 'metrics.jsonl'} failed (Is a directory)" in warnings[0]
    assert [row["step"] for row in RunDir(tmp_path).rows()] == [3]


@pytest.fixture
def wandb_environment(monkeypatch, tmp_path):
    """Remove W&B's settings and keys of this machine, and forget those of a test."""
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "user"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


def test_a_resumed_run_keeps_the_name_that_it_was_given_in_wandb(
    wandb_environment, tmp_path, monkeypatch
):
    started = []

    def init(**settings):
        started.append((settings["id"], settings["name"]))
        return SimpleNamespace(id="its-id", define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    run_dir = RunDir(tmp_path / "mine")
    run_dir.wandb.mkdir(parents=True)
    config = ResolvedConfig(wandb=WandbConfig(mode="offline"), model=GPTConfig(9))
    for _ in range(2):
        start(config, run_dir, print)
    assert started == [(None, "mine"), ("its-id", None)]


KEY = {"WANDB_API_KEY": "0" * 40}


@pytest.mark.parametrize(
    ("setting", "variables", "settings_file", "mode"),
    [
        ("auto", {}, "", "offline"),
        ("auto", KEY, "", "online"),
        ("auto", {}, f"api_key = {'0' * 40}", "online"),
        ("auto", KEY | {"WANDB_MODE": "offline"}, "", "offline"),
        ("auto", KEY | {"WANDB_MODE": "disabled"}, "", "disabled"),
        ("auto", KEY, "mode = offline", "offline"),
        ("offline", KEY, "", "offline"),
        ("online", {}, "", "offline"),
        ("online", KEY | {"WANDB_MODE": "offline"}, "", "offline"),
        ("disabled", KEY | {"WANDB_MODE": "online"}, "", "disabled"),
    ],
)
def test_the_more_private_of_the_setting_and_wandb_counts_then_the_key(
    wandb_environment, monkeypatch, tmp_path, setting, variables, settings_file, mode
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\n{settings_file}\n")
    assert check_wandb(WandbConfig(mode=setting)) == mode


@pytest.mark.parametrize(
    ("project", "variables", "named"),
    [
        ("a/b", {}, "a/b"),
        (None, {"WANDB_INIT_TIMEOUT": "soon"}, "init_timeout=soon"),
        (None, {"WANDB_TAGS": "x" * 65}, "x" * 20),
    ],
)
def test_a_project_or_variable_that_wandb_rejects_is_refused(
    wandb_environment, monkeypatch, project, variables, named
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        check_wandb(WandbConfig(project=project))
    assert named in str(error.value) and "\n" not in str(error.value)


class WandbFile(NamedTuple):
    """The contents of an offline record of W&B."""

    history: dict[int, dict]  # logged values by step
    charts: set[str]  # numbers that get a chart
    summary: dict
    configuration: dict


def read_entries(run_dir: Path) -> list[dict]:
    """Read the only record in a run's folder with W&B's own reader."""
    (record,) = (run_dir / "wandb").glob("offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)]
    lines = subprocess.run(inspect, capture_output=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def read_wandb(run_dir: Path) -> WandbFile:
    """Arrange the entries of a record."""
    entries = read_entries(run_dir)
    history: dict[int, dict] = {}
    for entry in entries:
        if entry["type"] == "history":
            item = entry["history"]["item"]
            history.setdefault(item["step"], {}).update(item)
    logged = {key for item in history.values() for key in item}
    metrics = [entry["metric"] for entry in entries if entry["type"] == "metric"]
    hidden = {metric.get("name") for metric in metrics if metric["options"].get("hidden")}
    media = {key for key in logged if f"{key.rpartition('.')[0]}._type" in logged}
    internal = {key for key in logged if key.startswith("_")}
    return WandbFile(
        history,
        logged - hidden - media - internal,
        [entry["summary"]["update"] for entry in entries if entry["type"] == "summary"][-1],
        next(entry["run"]["config"]["update"] for entry in entries if entry["type"] == "run"),
    )


def test_a_metric_that_is_added_to_a_row_gets_a_chart(offline_wandb, tmp_path):
    config = ResolvedConfig("cpu", model=GPTConfig(9), wandb=WandbConfig(mode="offline"))
    metrics = {"train/grad_norm": 1.0, "mine": 2.0, "mine_se": 0.1, "infinite": inf}
    head = {"heads/sink/L0H0": 0.5, "heads/sink_se/L0H0": 0.1}
    page = {"faithfulness/none": 0.1, "faithfulness_se/none": 0.1, "probe/repeated_loss": 3.0}
    with open_record(config, tmp_path) as record:
        record.write(1, metrics | head | page)
    assert RunDir(tmp_path).rows()[0].items() > (metrics | head | page).items() - {
        ("infinite", inf)
    }
    assert read_wandb(tmp_path).charts == {"train/grad_norm", "mine"}


def test_the_best_checkpoint_is_logged_once_and_opens_as_a_model(
    offline_wandb, tiny, train_in_process, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_TAGS", "x,y")
    monkeypatch.setenv("WANDB_NOTES", "a b")
    logged = WandbConfig(mode="offline", log_model=True, name="mine", tags="a, 1e3")
    for resume in (False, True):
        train_in_process(replace(tiny, wandb=logged), max_steps=2, resume=resume)
    entries = read_entries(Path(tiny.run_dir))
    artifacts = [entry["artifact"] for entry in entries if entry["type"] == "artifact"]
    (files,) = [each["manifest"]["contents"] for each in artifacts if each["type"] == "model"]
    for file in files:
        shutil.copyfile(file["local_path"], tmp_path / file["path"])
    (model, _), (expected, _) = load(tmp_path), load(tiny.run_dir)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    (run,) = [entry["run"] for entry in entries if entry["type"] == "run"]
    assert (run["display_name"], run["tags"], run["notes"]) == ("mine", ["a", "1e3"], "a b")


@pytest.mark.soak
def test_an_offline_wandb_record_contains_the_metrics_and_the_configuration(command, tmp_path):
    done = command(
        "train.py",
        *TINY,
        "data=synthetic",
        "max_steps=6",
        "eval.every=3",
        "attention.every=3",
        "attention.tokens=16",
        "run_dir=run",
        "wandb.mode=auto",
        env={"WANDB_MODE": None, "WANDB_API_KEY": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "wandb sync run/wandb/offline-run-*" in done.stdout
    record = read_wandb(tmp_path / "run")
    (files,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files")
    rows = RunDir(tmp_path / "run").rows()
    assert list(record.history) == list(range(7))
    for item, row in zip(record.history.values(), rows):
        for key in row.keys() & item.keys():
            assert item[key] == pytest.approx(row[key], rel=1e-12)
        if row.is_scored:
            table = json.loads((files / item["attention/head_scores.path"]).read_text())
            for step, head, *cells in table["data"]:
                names = (f"heads/{name}/{head}" for name in table["columns"][2:])
                assert step == row["step"]
                assert [row.get(name) for name in names] == pytest.approx(cells, rel=1e-12)
    for name, drawn in (
        ("attention/map", "attention/step_00000006.png"),
        ("attention/explorer", "report.html"),
    ):
        logged = files / record.history[6][f"{name}.path"]
        assert logged.read_bytes() == (tmp_path / "run" / drawn).read_bytes()
    samples = json.loads((files / record.history[6]["samples.path"]).read_text())
    assert [step for step, _ in samples["data"]] == [0, 3, 6]
    for name, _, value in iterate_settings(read_config(tmp_path / "run" / "config.yaml")):
        section, _, key = name.rpartition(".")
        configured = record.configuration[section] if section else record.configuration
        assert configured[key] == value

    # What a person sees: a few charts, each with a point of every step, evaluation or snapshot
    scores = ("current_token", "previous_token", "duplicate_token", "induction", "sink")
    values = [key for key in rows[-1] if key.startswith(("train/", "val/", "task/"))]
    assert record.charts == {
        "probe/copying_gain",
        *(f"heads/{score}/max" for score in scores),
        *(key for key in values if not key.endswith("_se")),
    }
    for key in record.charts:
        steps = [step for step, item in record.history.items() if key in item]
        assert steps in ([0, 3, 6], [1, 2, 3, 4, 5, 6], [6])
        assert record.summary[key] == record.history[6][key]
    assert record.history[6]["val/loss"] == rows[-1]["val/loss"]
