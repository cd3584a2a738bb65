"""The record of a run: its folder, its files, the progress bar and W&B."""

import io
import json
import subprocess
import sys
import threading
from math import nan
from pathlib import Path

import pytest
import wandb
from conftest import TINY
from filelock import FileLock
from rich.text import Text

from cli.config_file import read_config
from common.errors import UserError
from common.metrics import is_plotted, read_rows
from common.settings import iterate_settings
from common.terminal import Terminal
from common.text import format_with_error
from config import WandbConfig
from glass.heads.metrics import PLOTTED_HEADS, read_head_values
from training.record import (
    BAR_METRICS,
    SHOWN_METRICS,
    ProgressBar,
    Record,
    print_losses,
    remove_snapshots_after,
    truncate_rows,
)
from training.run_folder import run_folder
from training.wandb_record import check_wandb


def test_a_folder_is_locked_by_one_run_and_removed_if_it_stays_empty(tiny):
    with run_folder(tiny, "test") as path:
        with pytest.raises(UserError) as error, run_folder(tiny, "test"):
            pass
        assert f"run_dir={path}" in str(error.value) and path.is_dir()
    assert not path.exists()


def test_a_run_of_several_processes_waits_for_the_lock_of_a_lost_machine(tiny, monkeypatch):
    monkeypatch.setattr("training.run_folder.count_processes", lambda alone: 2)
    path = Path(tiny.run_dir)
    path.mkdir()
    lock = FileLock(path / ".lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.5, lock.release).start()
    with run_folder(tiny, "test"):
        assert not lock.is_locked


def test_a_resumed_run_keeps_the_rows_up_to_its_step_and_a_copy_of_all(tmp_path):
    path, notes = tmp_path / "rows.jsonl", []
    assert truncate_rows(path, 3, notes.append) == [] and not path.exists()
    lines = ['{"step": 1}', "nonsense", '{"step": 2, "text": "é"}', "\0\0", '{"step": 4}', '{"st']
    path.write_text("\n".join(lines), encoding="utf-8")
    before = path.read_bytes()
    kept = truncate_rows(path, 3, notes.append)
    assert kept == read_rows(path) == [{"step": 1}, {"step": 2, "text": "é"}]
    assert len(notes) == 1 and " 2 " in notes[0] and str(path) in notes[0]
    assert (tmp_path / "rows.jsonl.before").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_are_appended_while_a_run_trains(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with Record(tiny, tmp_path, step=1) as record:
        contents = []
        for step in (2, 3):
            record.write({"step": step})
            contents.append((tmp_path / "metrics.jsonl").read_bytes())
    assert contents == [b'{"step": 1}\n{"step": 2}\n', b'{"step": 1}\n{"step": 2}\n{"step": 3}\n']


def test_a_resumed_run_keeps_the_snapshots_up_to_its_step_and_all_other_files(tmp_path):
    kept = ["step_00000003.npz", "step_00000004.npz", "step_00000004.png", "step_x.npz", "notes"]
    for name in [*kept, "step_00000005.npz", "step_00000012.safetensors"]:
        (tmp_path / name).touch()
    remove_snapshots_after(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_the_summary_of_a_run_gives_the_metrics_of_its_task_with_their_errors():
    lines: list[str] = []
    row = {"step": 5, "val/loss": 1.0, "task/loss": 2.0, "task/accuracy": 0.5123}
    print_losses(lines.append, [row | {"task/accuracy_se": 0.0312}])
    assert "0.51 ± 0.03" in lines[-1] and len(lines[-1]) <= 80


def test_values_have_the_decimals_of_their_standard_errors():
    assert format_with_error(1.3862, 0.0581) == "1.39 ± 0.06"
    assert (
        format_with_error(12.34, 1.7) == "12 ± 2"
        and format_with_error(-0.001, 0.02) == "0.00 ± 0.02"
    )
    assert (
        format_with_error(0.1234, None) == "0.12" and format_with_error(0.5, 0.0996) == "0.5 ± 0.1"
    )
    assert format_with_error(6961, 12.3) == "6,961 ± 12"
    for unknown in (0.0, nan, 1e-17):  # the last one is the rounding error of equal values
        assert format_with_error(0.1234, unknown) == "0.12"


def test_the_progress_bar_fits_80_columns_and_shows_an_activity_until_the_next_step():
    console = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    bar = ProgressBar(console, max_steps=24000)

    def drawn() -> str:
        with console.capture() as capture:
            console.print(bar.progress.get_renderable())
        (line,) = Text.from_ansi(capture.get()).plain.splitlines()
        assert len(line) <= 80
        return line

    numbers = (2.5, 2.6, 3.4, 123456.0, 142.0, 0.45, 12.3)
    values = {key: show(number) for (key, show), number in zip(SHOWN_METRICS.items(), numbers)}
    bar.advance(12000, values)
    for shown in ("12000/24000", *(values[key] for key in BAR_METRICS)):
        assert shown in drawn()
    bar.show_activity("measuring importance")
    assert "12000/24000" in drawn() and "measuring importance …" in drawn()
    bar.advance(12001, {"train/loss": "loss 2.400"})
    assert "loss 2.400 val 2.600" in drawn() and "measuring" not in drawn()


def test_the_time_left_is_that_of_the_remaining_steps_at_the_speed_so_far():
    bar, now = ProgressBar(Terminal(file=io.StringIO()), max_steps=120), [0.0]
    bar.progress.get_time = lambda: now[0]
    assert bar.time_left == "--:-- left"
    for step in range(21):
        bar.advance(step, {})
        now[0] += 3
    assert bar.time_left == "05:00 left"


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
    for step in (0, 3, 6):
        image = record / "files" / history[step]["attention/map.path"]
        drawn = tmp_path / "run" / "attention" / f"step_{step:08d}.png"
        assert image.read_bytes() == drawn.read_bytes()
        assert sum(key.startswith("heads/sink/L") for key in history[step]) == PLOTTED_HEADS
    samples = json.loads((record / "files" / history[6]["samples.path"]).read_text())
    assert [step for step, _ in samples["data"]] == [0, 3, 6]
    page = (record / "files" / history[6]["attention/explorer.path"]).read_text(encoding="utf-8")
    assert page == (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "https://" not in page
    configuration = next(
        entry["run"]["config"]["update"] for entry in back if entry["type"] == "run"
    )
    for name, _, value in iterate_settings(read_config(tmp_path / "run" / "config.yaml")):
        section, _, key = name.rpartition(".")
        assert (configuration[section] if section else configuration)[key] == value
