"""The record of a run: its numbers, failures of its files, and W&B."""

import io
import json
import subprocess
import sys
from math import nan

import pytest
import wandb
from conftest import TINY
from rich.text import Text

from cli.config_file import read_config
from common.errors import UserError
from common.metrics import is_plotted, read_rows
from common.settings import iterate_settings
from common.terminal import Terminal
from common.text import format_with_error
from config import WandbConfig
from glass.heads.metrics import read_head_values
from training.record import SHOWN_METRICS, ProgressBar, Record
from training.wandb_record import check_wandb


def test_values_have_the_decimals_of_their_standard_errors():
    assert format_with_error(1.3862, 0.0581) == "1.39 ± 0.06"
    assert format_with_error(-0.001, 0.02) == "0.00 ± 0.02"
    assert format_with_error(6961, 12.3) == "6,961 ± 12"
    for unknown in (None, 0.0, nan, 1e-17):  # the last one is the rounding error of equal values
        assert format_with_error(0.1234, unknown) == "0.12"


def test_the_progress_bar_is_a_line_of_at_most_80_columns():
    console = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    bar = ProgressBar(console, max_steps=24000)
    bar.show_activity("measuring importance")
    bar.advance(12000, {key: show(123.4) for key, show in SHOWN_METRICS.items()})
    with console.capture() as capture:
        console.print(bar.progress.get_renderable())
    (line,) = Text.from_ansi(capture.get()).plain.splitlines()
    assert "12000/24000" in line and "measuring" not in line and len(line) <= 80


def test_a_recurring_failure_is_noted_once_and_costs_nothing_else(tiny, tmp_path, capsys):
    with Record(tiny, tmp_path) as record:
        (tmp_path / "metrics.jsonl").mkdir()
        for step in (1, 2):
            record.write({"step": step})
            with record.tolerate_errors("drawing a page"):
                raise KeyError("key")
        (tmp_path / "metrics.jsonl").rmdir()
        record.write({"step": 3})
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 2 and "KeyError" in warnings[1]
    assert f"{tmp_path / 'metrics.jsonl'} failed (Is a directory)" in warnings[0]
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 3}]


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


@pytest.mark.slow
def test_an_offline_wandb_record_contains_the_metrics_and_the_configuration(
    command, tmp_path, text_file
):
    done = command(
        "train.py",
        *TINY,
        "data=text",
        f"data.path={text_file}",
        "max_steps=6",
        "eval.every=3",
        "attention.every=3",
        "attention.tokens=16",
        "run_dir=run",
        "wandb.mode=auto",
        env={"WANDB_MODE": None, "WANDB_API_KEY": ""},
    )
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert "wandb sync run/wandb/offline-run-*" in done.stdout
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)],
        capture_output=True,
        text=True,
        check=True,
    )
    back = [json.loads(line) for line in inspected.stdout.splitlines()]
    history = {}
    for entry in back:
        if entry["type"] == "history":
            item = entry["history"]["item"]
            history.setdefault(item["step"], {}).update(item)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert list(history) == list(range(7))
    for item, row in zip(history.values(), rows):
        plotted = {key: value for key, value in row.items() if is_plotted(key)}
        for score, values in read_head_values(row, "heads").items():
            plotted[f"heads/{score}/max"] = max(values.values())
        for key, value in plotted.items():
            assert item[key] == pytest.approx(value, rel=1e-12)
    for name, drawn in (
        ("attention/map", "attention/step_00000006.png"),
        ("attention/explorer", "report.html"),
    ):
        logged = record / "files" / history[6][f"{name}.path"]
        assert logged.read_bytes() == (tmp_path / "run" / drawn).read_bytes()
    samples = json.loads((record / "files" / history[6]["samples.path"]).read_text())
    assert [step for step, _ in samples["data"]] == [0, 3, 6]
    configuration = next(
        entry["run"]["config"]["update"] for entry in back if entry["type"] == "run"
    )
    for name, _, value in iterate_settings(read_config(tmp_path / "run" / "config.yaml")):
        section, _, key = name.rpartition(".")
        assert (configuration[section] if section else configuration)[key] == value
