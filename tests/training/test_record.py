import io
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import TINY
from rich.text import Text

from cli import Terminal
from config import UserError, knobs, read_config
from data.prepare import show, stages
from data.tokenizer import CharTokenizer
from files import as_known, born_when, read_rows
from training.evaluate import Validation
from training.record import MetricLogger, RunFolder, Stopwatch, new_run_dir, open_rows
from training.summary import print_summary, proportions
from training.wandb_record import (
    LINES,
    POINTS,
    head_table,
    stories,
    wandb_mode,
    without_aside,
    without_heads,
)


def test_two_runs_of_the_same_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({new_run_dir("x") for _ in range(5)}) == 5


def test_the_errors_of_scores_are_left_to_metrics_jsonl():
    row = {"step": 1, "heads/sink/L0H0": 1.0, "probe/repeat_gain": 2.0,
           "wiring/induction/L1H0/keys/L0H0": 0.5}
    errors = ("heads/sink_se/L0H0", "heads/entropy_without_first/L0H0", "probe/repeat_gain_se",
              "wiring/induction_se/L1H0/keys/L0H0")
    assert without_aside(row | dict.fromkeys(errors, 0.1)) == row


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    first = RunFolder(tmp_path / "run", new=True)
    with pytest.raises(UserError, match="in use by another process"):
        RunFolder(tmp_path / "run", new=True)
    first.release()
    assert not (tmp_path / "run").exists()  # nothing came of it


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run", new=True)


def test_rows_are_read_up_to_the_first_damaged_line(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in read_rows(tmp_path / "m")] == [1, 2]
    assert read_rows(tmp_path / "none") == []


def test_a_file_of_rows_is_started_again_with_what_is_to_be_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "text": "\u00e9"}\n{"st')
    with open_rows(path, read_rows(path)) as file:
        file.write(b'{"step": 3}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_heads_are_a_chart_for_each_score_a_table_and_their_maxima():
    def row(step, layers, heads):
        return {"step": step, "val/loss": 1.0, "births/sink/L0H1": 3} | {
            f"heads/{score}/L{layer}H{head}": step + layer + head / 100
            for score in ("induction", "induction_se", "sink")
            for layer in range(layers) for head in range(heads)}

    assert without_heads(row(5, 12, 12)) == {"step": 5, "val/loss": 1.0,
                                             "heads/induction/max": 16.11, "heads/sink/max": 16.11}
    steps, lines = stories([row(0, 2, 2), {"step": 1}, row(5, 2, 2)])["sink"]
    assert steps == [0, 5] and lines["L1H0"] == [1, 6] and next(iter(lines)) == "L1H1"
    assert stories([{"step": 0}, row(5, 2, 2)]) == {}
    many = stories([row(step, 12, 12) for step in range(2000)])
    assert all(len(steps) * len(lines) <= POINTS and steps[-1] == 1999 and len(lines) == LINES
               for steps, lines in many.values())
    columns, data = head_table(row(5, 2, 2))
    assert columns == ["head", "born: sink", "induction", "induction_se", "sink"]
    assert ["L0H1", 3, 5.01, 5.01, 5.01] in data and len(data) == 4


def test_a_layout_is_built_without_a_network():
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    from training.wandb_layout import SCORES, layout

    found = layout("me", "glassgpt")
    names = [section.name for section in found.sections]
    assert names[0] == "Learning" and len(found.sections[2].panels) == len(SCORES)
    built = json.dumps(found._to_model().model_dump(mode="json", by_alias=True))
    for key in ("val/loss", "probe/repeat_gain", "attention/map", "heads/induction/lines_table"):
        assert key in built


def test_a_layout_needs_a_key(monkeypatch, tmp_path):
    from training import wandb_layout

    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["wandb_layout"])
    with pytest.raises(UserError, match="wandb login"):
        wandb_layout.main()


def test_a_birth_lies_between_two_snapshots_and_figures_have_the_digits_that_are_known():
    assert born_when(700, [0, 600, 700, 800]) == "between steps 600 and 700"
    assert born_when(700, [700, 800]) == born_when(700, [699, 700]) == "at step 700"
    assert as_known(1.3862, 0.0581) == "1.39 ± 0.06"
    assert as_known(-0.0036, 0.0020) == "-0.004 ± 0.002"
    assert as_known(12.34, 1.7) == "12 ± 2" and as_known(-0.001, 0.02) == "0.00 ± 0.02"
    assert as_known(0.1234, None) == "0.12" and as_known(0.5, 0.0996) == "0.5 ± 0.1"


def test_the_summary_says_which_kinds_of_heads_there_are_not_yet(tmp_path):
    rows = [{"step": step, "val/loss": 2.0, "val/bits_per_byte": 1.0, "heads/sink/L0H1": 0.4567,
             "heads/sink_se/L0H1": 0.03, "heads/sink/L0H0": 0.1, "heads/induction/L1H1": 0.21,
             "heads/induction_se/L1H1": 0.02} for step in (0, 100, 200)]
    lines: list[str] = []
    validation = Validation(np.arange(200) % 7, CharTokenizer("abcdefg"), 32, "cpu", "fp32")
    print_summary(lines.append, tmp_path, rows, {"sink": 0.31, "induction": 0.2}, {"train": 1.0},
                  validation)
    assert "sink                 strongest L0H1, 0.46 ± 0.03" in lines
    assert ("induction            strongest L1H1, 0.21 ± 0.02: none yet (counts from 0.2)"
            in lines)
    assert "                     after 100 steps" in lines


def test_the_progress_bar_names_what_goes_on_until_it_moves(tiny, tmp_path):
    console = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    with MetricLogger(tmp_path, tiny, "default", console) as log:
        def shown() -> str:
            with console.capture() as drawn:
                console.print(log._bar.get_renderable())
            return drawn.get()

        log.show({"step": 12, "tokens": 1, "train_seconds": 1.0, "train/loss": 2.5})
        assert "loss 2.500" in shown()
        log.doing("measuring what each head is worth")
        assert "12/12" in shown() and "measuring what each head is worth …" in shown()
        assert max(map(len, Text.from_ansi(shown()).plain.splitlines())) <= 80
        log.advance(12)
        assert "loss 2.500" in shown() and "measuring" not in shown()


def test_a_stage_of_unknown_size_shows_none():
    bar = stages(Terminal(file=io.StringIO(), force_terminal=True, width=80))
    for stage, done, total in (("vocabulary", 0, None), ("tokens", 500_000, 2_000_000)):
        show(bar, stage, done, total)
    with bar.console.capture() as drawn:
        bar.console.print(bar.get_renderable())
    assert "500.0 kB of 2.0 MB" in drawn.get() and "?" not in drawn.get()


def test_the_stopwatch_books_time_by_kind():
    began, watch = time.perf_counter(), Stopwatch(lambda: None, {"train": 10.0})
    watch.switch("train")
    time.sleep(0.02)
    watch.switch("evaluate")
    time.sleep(0.03)
    watch.switch("train")
    watch.switch(None)
    elapsed, trained, evaluated = (time.perf_counter() - began, watch.seconds["train"] - 10,
                                   watch.seconds["evaluate"])
    assert trained > 0.019 and evaluated > 0.029 and trained + evaluated <= elapsed + 1e-6


@pytest.mark.parametrize(("setting", "env", "key", "mode"), [
    ("auto", None, None, "offline"), ("auto", None, "k", "online"),
    ("auto", "disabled", "k", "disabled"), ("auto", "offline", "k", "offline"),
    ("auto", "dryrun", None, "offline"), ("disabled", "online", "k", "disabled"),
    ("offline", "online", "k", "offline"),
    ("online", "offline", None, "online"),
])
def test_wandb_goes_by_the_setting_then_the_environment_then_the_key(monkeypatch, tmp_path, setting,
                                                                     env, key, mode):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in (("WANDB_MODE", env), ("WANDB_API_KEY", key)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert wandb_mode(setting) == mode


@pytest.mark.slow
def test_an_offline_record_reads_back_as_the_metrics_and_the_configuration(
        command, tmp_path, text_file):
    done = command("train.py", *TINY, "data=text", f"data.path={text_file}", "max_steps=6",
                   "eval.every=3", "attention.every=3",
                   "attention.tokens=16", "run_dir=run", "wandb.mode=auto",
                   "wandb.log_artifacts=true", env={"WANDB_MODE": None})
    assert done.returncode == 0, done.stderr
    record, = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert f"to upload it: wandb sync run/wandb/{record.name}" in done.stdout
    inspected = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json",
                                str(record)], capture_output=True, text=True, check=True)
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
        for key, value in without_heads(row).items():
            assert item[key] == pytest.approx(value, rel=1e-12)
    assert any("_se/" in key for key in rows[-1])
    for step in (0, 3, 6):
        image = record / "files" / history[step]["attention/map.path"]
        drawn = tmp_path / "run" / "attention" / f"step_{step:08d}.png"
        assert image.read_bytes() == drawn.read_bytes()
        assert "after" in history[step]["attention/map.caption"]
        for score in ("previous_token", "duplicate_token", "induction", "sink", "entropy",
                      "distance"):
            assert (record / "files" / history[step][f"heads/{score}.path"]).stat().st_size > 100
        path = record / "files" / history[step]["attention/explorer.path"]
        page = path.read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "https://" not in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        table = json.loads((record / "files" / history[step]["heads/table.path"]).read_text())
        assert [row[0] for row in table["data"]] == ["L0H0", "L0H1", "L1H0", "L1H1"]
        assert {"map", "induction", "induction_se"} <= set(table["columns"])
    assert path.read_text() == (tmp_path / "run" / "report.html").read_text()
    assert {"importance", "importance_se"} <= set(table["columns"])
    lines = json.loads((record / "files" / history[6]["heads/induction/lines_table.path"])
                       .read_text())
    told = {(step, head): value for step, head, value in lines["data"]}
    assert len(told) == 3 * 4
    assert told[3, "L1H0"] == pytest.approx(rows[3]["heads/induction/L1H0"])
    artifacts = [entry["artifact"] for entry in back if "artifact" in entry]
    kept = {artifact["type"]: [file["path"] for file in artifact["manifest"]["contents"]]
            for artifact in artifacts}
    tables = [artifact["manifest"]["contents"] for artifact in artifacts
              if artifact["type"] == "run_table"]
    # The heads' maps are in their table.
    assert max(sum(file["path"].endswith(".png") for file in of) for of in tables) == 4
    assert "model.safetensors" in kept["model"] and kept["report"] == ["report.html"]
    configuration = next(entry["run"]["config"]["update"] for entry in back
                         if entry["type"] == "run")
    for name, _, value in knobs(read_config(tmp_path / "run" / "config.yaml")):
        section, _, key = name.rpartition(".")
        assert (configuration[section] if section else configuration)[key] == value


def test_a_run_out_of_proportion_to_its_text_is_told_so():
    assert proportions(parameters=1_000_000, tokens=1_000_000, epochs=3.0) == []
    assert "seen 50 times" in proportions(1000, 1000, 50.0)[0]
    assert "100 parameters for each token" in proportions(100_000, 1000, 1.0)[0]

