import io
import json
import subprocess
import sys

import pytest
from conftest import TINY
from rich.text import Text

import training.record
from attention_maps.metrics import aggregate_heads
from cli import Terminal
from cli.config_file import read_config
from common.errors import UserError
from common.metrics import read_rows
from common.settings import iterate_settings
from common.text import format_with_error
from training.record import Record, begin_rows, run_folder
from training.wandb_record import wandb_mode


def test_a_folder_has_one_owner_at_a_time_and_goes_where_nothing_came_of_it(tiny):
    with run_folder(tiny, "test") as path:
        with pytest.raises(UserError, match="in use by another process"), run_folder(tiny, "test"):
            pass
        assert path.is_dir()
    assert not path.exists()


def test_a_resume_keeps_the_rows_up_to_its_step_and_beside_them_what_was_there(tmp_path):
    path, said = tmp_path / "rows.jsonl", []
    assert begin_rows(path, 3, said.append) == [] and not path.exists()
    lines = ['{"step": 1}', "nonsense", '{"step": 2, "text": "é"}', "[3]", '{"step": 4}', '{"st']
    path.write_text("\n".join(lines), encoding="utf-8")
    before = path.read_bytes()
    kept = begin_rows(path, 3, said.append)
    assert kept == read_rows(path) == [{"step": 1}, {"step": 2, "text": "é"}]
    assert len(said) == 1 and " 2 " in said[0] and str(path) in said[0]
    assert (tmp_path / "rows.jsonl.before").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_while_a_run_goes_its_record_is_only_appended_to(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with Record(tiny, tmp_path, step=1) as record:
        seen = []
        for step in (2, 3):
            record.write({"step": step})
            seen.append((tmp_path / "metrics.jsonl").read_bytes())
    assert seen == [b'{"step": 1}\n{"step": 2}\n', b'{"step": 1}\n{"step": 2}\n{"step": 3}\n']


def test_for_wandb_heads_are_their_maxima_and_errors_stay_in_metrics_jsonl():
    row = {"step": 5, "val/loss": 1.0, "emerged/sink/L0H1": 3} | {
        f"heads/{score}/L{layer}H{head}": layer + head / 100
        for score in ("induction", "induction_se", "sink")
        for layer in range(12)
        for head in range(12)
    }
    errors = (
        "heads/entropy_without_first/L0H0",
        "probe/copying_gain_se",
        "composition/induction_se/L1H0/keys/L0H0",
    )
    assert aggregate_heads(row | dict.fromkeys(errors, 0.1)) == {
        "step": 5,
        "val/loss": 1.0,
        "heads/induction/max": 11.11,
        "heads/sink/max": 11.11,
    }


def test_a_birth_lies_between_two_snapshots_and_figures_have_the_digits_that_are_known():
    assert format_with_error(1.3862, 0.0581) == "1.39 ± 0.06"
    assert (
        format_with_error(12.34, 1.7) == "12 ± 2"
        and format_with_error(-0.001, 0.02) == "0.00 ± 0.02"
    )
    assert (
        format_with_error(0.1234, None) == "0.12" and format_with_error(0.5, 0.0996) == "0.5 ± 0.1"
    )


def test_the_progress_bar_names_what_goes_on_until_it_moves(tiny, tmp_path, monkeypatch):
    console = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(training.record, "Terminal", lambda: console)
    with Record(tiny, tmp_path) as record:

        def shown() -> str:
            with console.capture() as drawn:
                console.print(record._bar.get_renderable())
            return drawn.get()

        record.show({"step": 12, "tokens": 1, "train_seconds": 1.0, "train/loss": 2.5})
        assert "loss 2.500" in shown()
        record.doing("measuring what each head is worth")
        assert "12/12" in shown() and "measuring what each head is worth …" in shown()
        assert max(map(len, Text.from_ansi(shown()).plain.splitlines())) <= 80
        record.advance(12)
        assert "loss 2.500" in shown() and "measuring" not in shown()


@pytest.mark.parametrize(
    ("setting", "env", "key", "mode"),
    [
        ("auto", None, None, "offline"),
        ("auto", None, "k", "online"),
        ("auto", "disabled", "k", "disabled"),
        ("auto", "offline", "k", "offline"),
        ("disabled", "online", "k", "disabled"),
        ("offline", "online", "k", "offline"),
        ("online", "offline", None, "online"),
    ],
)
def test_wandb_goes_by_the_setting_then_the_environment_then_the_key(
    monkeypatch, tmp_path, setting, env, key, mode
):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in (("WANDB_MODE", env), ("WANDB_API_KEY", key)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert wandb_mode(setting) == mode


@pytest.mark.slow
def test_an_offline_record_reads_back_as_the_metrics_and_the_configuration(
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
        env={"WANDB_MODE": None},
    )
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert "to upload it: wandb sync run/wandb/offline-run-*" in done.stdout
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
        assert not any("_se/" in key or "_without_first/" in key for key in item)
        for key, value in aggregate_heads(row).items():
            assert item[key] == pytest.approx(value, rel=1e-12)
    for step in (0, 3, 6):
        image = record / "files" / history[step]["attention/map.path"]
        drawn = tmp_path / "run" / "attention" / f"step_{step:08d}.png"
        assert image.read_bytes() == drawn.read_bytes()
        assert "after" in history[step]["attention/map.caption"]
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
