"""Sweeps: what the jobs leave, what is said of them, what survives; with every launcher, and by
the command that a W&B agent runs."""

import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from math import inf, nan, sqrt
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from processes import Process, at_call, finished, rows, timeless
from processes import run as command_line
from rich.console import Console

import cli
import data.prepare
import sweeps
from config import Config, GPTConfig, TokenizerConfig, UserError, config_yaml
from model import GPT, KVCache
from report.sweep import Run, best_run, command, compared_by, ranked, read_sweep
from report.sweep_table import table, write_csv
from sweeps import print_sweep

SHORT = ["max_steps=4", "model.n_head=2", "eval.every=2", "attention.every=2",
         "attention.tokens=16",
         "checkpoint.every=2", "data.val_max_tokens=300"]
SWEPT = ["model.n_kv_head=1,3,2", "seed=1,2"]


def of(text_file, *more: str) -> list[str]:
    return [*(setting for setting in TINY if not setting.startswith("model.n_kv_head")),
            "data=text", f"data.path={text_file}", *SHORT, *more]


@pytest.fixture(scope="module")
def swept(text_file, shared) -> Path:
    """A sweep of six jobs, of which two cannot work; what it said is in said.txt beside it."""
    def make(folder: Path) -> None:
        said = finished(folder, "-m", *SWEPT, *of(text_file), "hydra.sweep.dir=sweep", status=1)
        (folder / "said.txt").write_text(said)

    return shared("swept", make) / "sweep"


@pytest.fixture
def copy(swept, tmp_path) -> Path:
    return Path(shutil.copytree(swept, tmp_path / "sweep"))


# --- what a sweep leaves and says -----------------------------------------------------------------


def test_each_job_has_a_folder_of_its_own_and_failures_spare_the_others(swept):
    runs = {run.path.name: run for run in read_sweep(swept)}
    assert set(runs) == {f"model.n_kv_head={heads},seed={seed}" for heads in (1, 2, 3)
                         for seed in (1, 2)}
    for run in runs.values():
        heads, seed = run.settings["model.n_kv_head"], run.settings["seed"]
        assert run.path.name == f"model.n_kv_head={heads},seed={seed}"
        assert run.overrides["max_steps"] == "4"
        if heads == "3":
            assert (run.status, run.config, run.rows) == ("failed", None, [])
            assert run.reason == ("model.n_kv_head=3 does not divide model.n_head=2: "
                                  "choose one of 1, 2")
        else:
            assert (run.status, run.reason, run.rows) == ("finished", "", rows(run.path))
            assert (run.config.model.n_kv_head, run.config.seed) == (int(heads), int(seed))


def test_it_says_at_the_end_what_failed_and_why_in_a_line_each(swept):
    lines = (swept.parent / "said.txt").read_text().splitlines()
    why = "model.n_kv_head=3 does not divide model.n_head=2: choose one of 1, 2"
    assert [line for line in lines if line.startswith(
        "failed ")] == [f"failed      model.n_kv_head=3,seed={seed}: {why}" for seed in (1, 2)]
    assert not any("Error executing job" in line or "HYDRA" in line for line in lines)
    assert [line for line in lines if line.startswith("job ")] == [
        f"job {n} of 6: model.n_kv_head={heads} seed={seed}" for n,
        (heads, seed) in enumerate(((h, s) for h in (1, 3, 2) for s in (1, 2)), 1)]


def test_sweep_csv_holds_the_numbers_of_the_runs(swept):
    lines = list(csv.DictReader((swept / "sweep.csv").open(encoding="utf-8")))
    assert [line["status"] for line in lines] == ["finished"] * 4 + ["failed"] * 2
    for line in lines[:4]:
        metrics = rows(swept / line["run"])
        best, last = min((row for row in metrics if row["step"] and "val/loss" in row),
                         key=lambda row: row["val/loss"]), metrics[-1]
        assert float(line["val/loss"]) == best["val/loss"]
        assert float(line["val/bits_per_byte"]) == best["val/bits_per_byte"]
        assert float(line["train_seconds"]) == last["train_seconds"]
        assert int(line["tokens"]) == last["tokens"] == 4 * 4 * 32
        assert float(line["tokens_per_second"]) == pytest.approx(
            last["tokens"] / last["train_seconds"])
        for score in ("previous_token", "induction", "sink", "entropy", "importance"):
            assert float(line[f"heads/{score}"]) == max(value for key, value in last.items()
                                                        if key.startswith(f"heads/{score}/"))
        config = next(run.config for run in read_sweep(swept) if run.path.name == line["run"])
        assert int(line["parameters"]) == GPT(config.model).num_parameters()
        assert int(line["kv_cache_bytes"]) == KVCache(config.model, 1, dtype=torch.float32).nbytes
    means = [sum(float(line["val/loss"]) for line in lines[n:n + 2]) / 2 for n in (0, 2)]
    assert means == sorted(means) and lines[0]["model.n_kv_head"] == lines[1]["model.n_kv_head"]


def test_the_table_has_the_mean_and_the_standard_error_over_the_seeds(swept):
    said = (swept.parent / "said.txt").read_text()
    for setting in ranked(read_sweep(swept))[:2]:
        one, other = (run.measures["val/loss"] for run in setting.runs)
        # of two: their deviation over √2 is half their distance
        shown = f"{(one + other) / 2:.4f} ± {abs(one - other) / 2:.4f}"
        assert re.search(rf"^{setting.settings['model.n_kv_head']} +2 +{shown} ", said,
                         re.MULTILINE)
    assert "bits/byte" in said and "parameters" in said and "KV cache" in said


@pytest.mark.slow
def test_the_best_settings_command_gives_that_run_again_to_the_bit(swept, tmp_path):
    best = best_run(read_sweep(swept))
    line = next(line for line in (swept.parent / "said.txt").read_text().splitlines()
                if line.startswith("best run  "))
    python, script, *argv = shlex.split(line.removeprefix("best run"))
    assert [python, script, *argv] == shlex.split(command(best))
    assert (python, script) == ("python", "train.py")
    finished(tmp_path, *argv, "run_dir=again")
    assert timeless(tmp_path / "again") == timeless(best.path)


def new_python(folder: Path, *argv: str):
    return subprocess.run([sys.executable, *argv], cwd=folder, env={**os.environ, "PYTHONPATH": str(
        ROOT)}, capture_output=True, text=True)


def test_the_summary_is_a_function_of_the_folder_and_does_not_wait_for_torch(copy, tmp_path):
    before = (copy / "sweep.csv").read_bytes()
    (copy / "sweep.csv").unlink()
    code = ("import runpy, sys; sys.argv[1:] = ['sweep']; "
            "runpy.run_module('sweeps', run_name='__main__'); assert 'torch' not in sys.modules")
    done = new_python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert (copy / "sweep.csv").read_bytes() == before
    assert "n_kv_head" in done.stdout and "failed      model.n_kv_head=3,seed=2" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()
               if not line.startswith(("best", "failed")))


@pytest.mark.parametrize("argv", [[], ["nowhere"], ["--all"], ["a", "b"]])
def test_a_folder_without_a_sweep_gets_a_sentence(argv, tmp_path):
    done = command_line(tmp_path, "sweeps", *argv)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: ") and "sweep" in done.stderr and "Traceback" not in done.stderr


DAMAGED = [
    "", "{", "[]", "3", "[" * 10 ** 5, '{"overrides": {}, "swept": ["x"]}',
    '{"overrides": 3, "swept": []}', '{"overrides": {"x": 3}, "swept": ["x"]}',
    '{"overrides": {}, "swept": [[]]}', '{"overrides": {}, "swept": 3}',
    '{"overrides": {}, "swept": [], "failed": 3}', '{"overrides": {}, "swept": [], "until": [3]}',
    '{"overrides": {}, "swept": [], "until": [{"step": "x", "config": {}}]}',
    '{"overrides": {}, "swept": [], "until": [{"step": 1, "config": {"x": 1}}]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_note_of_a_job_is_named(copy, text):
    note = copy / "model.n_kv_head=1,seed=1" / "job.json"
    note.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{note} cannot be read (")):
        read_sweep(copy)


@pytest.mark.parametrize("text", ["3", '{"jobs": 3}', '{"jobs": {"a": {"x": 3}}}'])
def test_a_damaged_list_of_jobs_is_named(copy, text):
    (copy / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{copy}/sweep.json cannot be read (")):
        read_sweep(copy)


def test_pipes_do_not_hang_and_nothing_is_written_through_links(copy, tmp_path):
    mine, note = tmp_path / "mine", copy / "model.n_kv_head=1,seed=1" / "job.json"
    mine.write_text("mine")
    for name in ("sweep.csv", "sweep.html", "multirun.yaml", "sweep.json", ".lock"):
        for make in (lambda path: path.symlink_to(mine), os.mkfifo, Path.mkdir):
            (copy / name).rename(tmp_path / "kept")
            make(copy / name)
            refusal = re.escape(f"{copy / name} is a link, or not a file")
            with pytest.raises(UserError, match=refusal):
                sweeps.summarise(copy)
            with pytest.raises(UserError, match=refusal):
                sweeps.open_sweep(str(copy), True)
            (copy / name).rmdir() if make is Path.mkdir else (copy / name).unlink()
            (tmp_path / "kept").rename(copy / name)
    note.rename(tmp_path / "job.json")
    note.symlink_to(tmp_path / "job.json")
    before = note.read_text()
    sweeps.end_job(note.parent, "why")
    assert not note.is_symlink() and (tmp_path / "job.json").read_text() == before
    note.unlink()
    os.mkfifo(note)
    with pytest.raises(UserError, match=r"job\.json cannot be read"):
        read_sweep(copy)
    (copy / "linked").symlink_to(tmp_path)
    with pytest.raises(UserError, match="linked is a link"):
        sweeps.begin_job(copy / "linked", {}, [])
    with pytest.raises(UserError, match="linked is a link"):
        sweeps.end_job(copy / "linked", "why")
    assert mine.read_text() == "mine"


# --- going on -------------------------------------------------------------------------------------


def note_of(job: Path) -> dict:
    return json.loads((job / "job.json").read_text())


@pytest.mark.slow
def test_a_job_refused_or_finished_keeps_the_settings_of_its_run(copy, tmp_path, text_file):
    before = [run for run in read_sweep(copy) if run.status == "finished"]
    again = ["-m", "model.n_kv_head=1,2", "seed=1,2", "hydra.sweep.dir=sweep", "resume=auto"]
    # Finished, so that nothing is trained; and what failed before is no job of this command.
    finished(tmp_path, *again, *of(text_file, "optim.lr=0.5"))
    said = finished(tmp_path, *again, *of(text_file, "model.n_layer=1"), status=1)
    # As each fails, and at the end.
    assert said.count("cannot continue with other settings") == 2 * 4
    now = [run for run in read_sweep(copy) if run.status == "finished"]
    assert [(run.overrides, run.changes) for run in now] == [(run.overrides, ()) for run in before]
    assert f"best run    {command(best_run(before))}\n" in said


@pytest.mark.slow
def test_of_a_run_that_was_extended_no_command_is_said_to_give_it_again(copy, tmp_path, text_file):
    before = {run.path.name: run for run in read_sweep(copy)}
    said = finished(tmp_path, "-m", "model.n_kv_head=1,2", "seed=1,2", "hydra.sweep.dir=sweep",
                    "resume=auto", *of(text_file, "max_steps=6", "optim.lr=0.002"))
    runs = [run for run in read_sweep(copy) if run.status == "finished"]
    for run in runs:
        assert run.overrides == before[run.path.name].overrides
        assert run.changes == ((4, {"max_steps": "6", "optim.lr": "0.002"}),)
    lines = [line.strip() for line in said.splitlines()]
    shown = lines.index(f"best run    {command(best_run(runs))}")
    assert lines[shown + 1:shown + 3] == [
        "after 4 steps it went on with max_steps=6 optim.lr=0.002",
        "so this command alone does not give that run again"]
    # A run that was gone on with by itself is known to have changed too.
    finished(tmp_path, f"run_dir={runs[0].path}", "resume=true", "max_steps=8")
    assert read_sweep(copy)[0].changes[1] == (6, {"max_steps": "8"})


def test_only_what_was_trained_under_counts_as_a_change(tmp_path):
    def begun(max_steps: int, saved: int) -> None:
        (run / "checkpoints" / f"step_{saved:08d}").mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(config_yaml(Config(max_steps=max_steps)))

    run = tmp_path / "seed=1"

    def attempt(max_steps: int) -> None:
        sweeps.begin_job(run, {"max_steps": str(max_steps), "seed": "1"}, ["seed"])

    attempt(3)  # refused: nothing has trained
    attempt(4)
    begun(4, saved=2)  # and killed, so that no end is noted
    attempt(4)
    begun(4, saved=4)
    attempt(5)  # refused
    attempt(6)
    begun(6, saved=4)  # killed before its first checkpoint
    attempt(7)
    begun(7, saved=7)
    sweeps.end_job(run, "")
    found, = read_sweep(tmp_path)
    assert found.overrides["max_steps"] == "4" and found.changes == ((4, {"max_steps": "7"}),)
    attempt(7)
    assert len(note_of(run)["until"]) == 2


@pytest.mark.slow
def test_resume_auto_runs_what_is_missing_matched_by_settings(copy, swept, tmp_path, text_file):
    shutil.rmtree(copy / "model.n_kv_head=1,seed=2")
    kept = (copy / "model.n_kv_head=2,seed=1" / "metrics.jsonl").stat().st_mtime_ns
    # In another order, and so by other numbers.
    said = finished(tmp_path, "-m", "seed=2,1", "model.n_kv_head=2,1", *of(text_file),
                    "hydra.sweep.dir=sweep", "resume=auto")
    assert said.count("best validation loss") == 1 and said.count("is finished") == 3
    assert (copy / "model.n_kv_head=2,seed=1" / "metrics.jsonl").stat().st_mtime_ns == kept
    assert timeless(copy / "model.n_kv_head=1,seed=2") == timeless(
        swept / "model.n_kv_head=1,seed=2")


@pytest.mark.slow
def test_a_stop_signal_ends_the_sweep_saved_and_resume_auto_goes_on(swept, tmp_path, text_file):
    argv = ["-m", "model.n_kv_head=2,1", "seed=1", *of(text_file), "hydra.sweep.dir=sweep"]
    process = Process(tmp_path, *argv, fault=stopping_after_3_steps)
    assert process.wait() == 143, process.said()
    assert "to go on: the same command with resume=auto hydra.sweep.dir=sweep" in process.said()
    job = tmp_path / "sweep" / "model.n_kv_head=2"
    assert (job / "checkpoints" / "step_00000003").is_dir()
    assert [run.status for run in read_sweep(job.parent)] == ["not begun", "unfinished"]
    finished(tmp_path, *argv, "resume=auto")
    assert timeless(job) == timeless(swept / "model.n_kv_head=2,seed=1")
    assert {run.status for run in read_sweep(tmp_path / "sweep")} == {"finished"}


def stopping_after_3_steps():
    import training.optim
    calls, update = iter(range(1, 100)), training.optim.update

    def stopped(*args):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    training.optim.update = stopped


@pytest.mark.slow
def test_a_sweep_whose_output_is_full_trains_and_ends_with_a_sentence(tmp_path, text_file):
    process = Process(tmp_path, "-m", "seed=1,2", *of(text_file), "hydra.sweep.dir=sweep",
                      stdout=os.open("/dev/full", os.O_WRONLY))
    assert process.wait() == 1
    error, = process.said().splitlines()
    assert error.startswith("error: not all that the sweep prints could be written")
    assert "python -m sweeps sweep" in error
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["finished"] * 2


@pytest.mark.slow
def test_a_stop_signal_before_a_job_trains_ends_the_sweep_too(tmp_path, text_file):
    process = Process(tmp_path, "-m", "model.n_kv_head=2,1", *of(text_file),
                      "hydra.sweep.dir=sweep",
                      fault=at_call(data.prepare, "prepare", 1,
                                    lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert process.wait() == 143 and "to go on: the same command" in process.said()
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["not begun", "unfinished"]
    lines = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open(encoding="utf-8")))
    assert {line["run"]: line["status"] for line in lines} == {
        "model.n_kv_head=1": "not begun", "model.n_kv_head=2": "unfinished"}
    assert "not begun   model.n_kv_head=1\n" in command_line(tmp_path, "sweeps", "sweep").stdout


@pytest.mark.slow
def test_what_nobody_foresaw_fails_its_job_alone(tmp_path, text_file):
    def fault():
        import model
        make = model.GPT.__init__

        def init(self, config):
            if config.n_kv_head == 1:
                raise ZeroDivisionError
            make(self, config)

        model.GPT.__init__ = init

    process = Process(tmp_path, "-m", "model.n_kv_head=1,2", *of(text_file),
                      "hydra.sweep.dir=sweep", fault=fault)
    assert process.wait() == 1
    assert "failed      model.n_kv_head=1: ZeroDivisionError" in process.said()
    assert process.said().count("Traceback") == 1
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["failed", "finished"]


@pytest.mark.parametrize("argv, said", [
    (["-m", "seed=1,2", "hydra.sweep.dir=sweep"],
     "hydra.sweep.dir=sweep holds a sweep: go on with it by resume=auto"),
    (["-m", "seed=1,2", "resume=true"], "resume=auto"),
    (["sweep=kv_heads"], "sweep=kv_heads is a sweep: add -m"),
    (["-m", "sweep=kv_head"], "did you mean kv_heads"),
    (["-m", "sweep=kv_heads,heads"], "sweep=kv_heads,heads is not one of"),
    (["-m", "seed=1,a"], "seed=a is not a whole number"),
    (["-m", "seed=1,2", "--cfg", "job"], "leave -m out"),
    (["-m", "seed=1,2", "hydra.sweep.dir=/dev/null/x"],
     "hydra.sweep.dir=/dev/null/x cannot be made"),
])
def test_a_sweep_that_cannot_start_is_refused_in_a_sentence_and_leaves_nothing(
        argv, said, copy, tmp_path):
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    told = finished(tmp_path, *argv, status=1)
    assert told.startswith("error: ") and said in told and told.count("\n") == 1
    (tmp_path / "out.txt").unlink()
    (tmp_path / "err.txt").unlink()
    runs = tmp_path / "runs"
    if runs.exists():
        runs.rmdir()  # and is empty
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["sweep.csv", "multirun.yaml", "a/mine.txt", "a/job.json",
                                  "sweep.json"])
@pytest.mark.parametrize("resume", ["false", "auto"])
def test_a_folder_that_is_not_empty_and_no_sweep_is_refused(name, resume, tmp_path):
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True)
    mine.write_text('{"mine": 1}')
    error = finished(tmp_path, "-m", "seed=1,2", f"resume={resume}", "hydra.sweep.dir=mine",
                     status=1)
    assert error.startswith("error: ") and "mine" in error and error.count("\n") == 1
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == '{"mine": 1}'


def test_where_nothing_can_be_written_the_sweeps_own_setting_is_named(tmp_path):
    (tmp_path / "runs").touch()
    error = finished(tmp_path, "-m", "seed=1,2", status=1)
    assert "hydra.sweep.dir=PATH" in error and "run_dir" not in error


def test_sweeps_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({sweeps.open_sweep(None, False) for _ in range(5)}) == 5


def test_jobs_whose_settings_make_no_name_have_folders_of_their_own(tmp_path):
    values = ["a/b", "a:b", "../a", "", "é" * 200, "é" * 201, "x" * 400, "\n", ".", ".."]
    folders = [tmp_path / sweeps.job_name({"data.path": value}) for value in values]
    for folder, value in zip(folders, values):
        sweeps.begin_job(folder, {"data.path": value}, ["data.path"])
    assert len(set(folders)) == len(values)
    assert all(folder.parent == tmp_path and folder.is_dir() for folder in folders)
    assert {run.settings["data.path"] for run in read_sweep(tmp_path)} == set(values)


# --- the comparison -------------------------------------------------------------------------------


def run_of(settings: dict, loss: float | None, status="finished", vocabulary=65, **more) -> Run:
    config = Config(model=GPTConfig(vocab_size=vocabulary), tokenizer=TokenizerConfig("char"),
                    precision="fp32", max_steps=10)
    last = {"step": 10, "tokens": 100, "train_seconds": 2.0, **more}
    if loss is not None:
        last |= {"val/loss": loss, "val/bits_per_byte": loss / 2}
    name = ",".join(f"{key}={value}" for key, value in settings.items())
    return Run(Path("none", name), settings, settings, config, [last], status, "")


def test_the_best_mean_comes_first_and_what_has_no_result_last():
    runs = [run_of({"a": "1", "seed": "1"}, nan), run_of({"a": "2", "seed": "1"}, 3.0),
            run_of({"a": "3", "seed": "1"}, 1.0),
            run_of({"a": "3", "seed": "2"}, 2.0), run_of(
                {"a": "4", "seed": "1"}, 0.1, "unfinished"), run_of({"a": "5", "seed": "1"}, None),
            run_of({"a": "6", "seed": "1"}, 1.0), run_of({"a": "6", "seed": "2"}, 0.1, "failed"),
            run_of({"a": "7", "seed": "1"}, inf)]
    assert [setting.settings["a"] for setting in ranked(runs)][:3] == ["6", "3", "2"]
    assert ranked(runs)[-1].settings["a"] == "4"
    assert best_run(runs).settings == {"a": "6", "seed": "1"} and len(ranked(runs)[0].finished) == 1
    assert best_run([run_of({"a": "1"}, nan)]) is None
    assert best_run([run_of({"a": "1"}, None)]) is None and best_run([]) is None


@pytest.mark.parametrize(("losses", "said"), [
    ((2.0, 2.2, 2.1, 2.3), "best        x=1, but x=2 is within the error"),
    ((2.0, 2.1, 2.5, 2.6), "best        x=1"),
    ((2.0, None, 2.01, None), "best        x=1")])  # of one seed each no error is known
def test_the_next_best_is_named_where_it_is_within_the_error(losses, said, tmp_path):
    runs = [run_of({"a.x": x, "seed": seed}, loss) for loss, (x, seed) in
            zip(losses, product("12", "12")) if loss is not None]
    assert said in printed(runs, 80, tmp_path)


def test_vocabularies_are_compared_by_bits_per_byte():
    one, other = run_of({"v": "1"}, 2.0), run_of({"v": "2"}, 1.0, vocabulary=66)
    assert compared_by([one]) == "val/loss" and compared_by([one, other]) == "val/bits_per_byte"


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=9))
def test_mean_and_standard_error(losses):
    setting, = ranked([run_of({"a": "1", "seed": str(n)}, loss) for n, loss in enumerate(losses)])
    mean = sum(losses) / len(losses)
    assert setting.mean("val/loss") == pytest.approx(mean)
    assert setting.error("val/loss") == pytest.approx(sqrt(
        sum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1) / len(losses)), abs=1e-12)


def printed(runs: list[Run], width: int, tmp_path: Path) -> list[str]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_sweep(console, tmp_path, runs)
    return console.export_text().splitlines()


def test_a_sweep_of_hundreds_is_said_in_a_page(tmp_path):
    births = {"births/induction/L0H1": 300, "heads/induction/L0H1": 0.7,
              "heads/induction/L0H0": 0.1}
    runs = [run_of({"optim.lr": f"{lr}e-3", "model.n_embd": str(width), "seed": str(seed)},
                   1 + lr / 100 + width / 1000 + seed / 1e4, **births)
            for lr in range(20) for width in range(10) for seed in range(3)]
    narrow, wide = printed(runs, 80, tmp_path), printed(runs, 200, tmp_path)
    assert len(narrow) < 50
    assert all(len(line) <= 80 for line in narrow if not line.startswith(("best", "table", "page")))
    assert narrow[1].split()[:4] == ["lr", "n_embd", "seeds", "val/loss"]
    assert narrow[3].split()[:4] == ["0e-3", "0", "3", "1.0001"]
    assert any("170 more" in line for line in narrow)
    assert "births/induction" in wide[1] and "heads/induction" in wide[1] and "300" in wide[3]
    assert "0.70" in wide[3]
    write_csv(tmp_path / "sweep.csv", runs)
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == 600


@given(st.lists(st.tuples(st.text(max_size=12), st.none() | st.floats(),
                          st.sampled_from(["finished", "unfinished", "failed"])), min_size=1))
def test_any_texts_and_any_losses_can_be_shown(tmp_path_factory, cases):
    runs = [run_of({"data.path": text, "seed": str(n)}, loss, status) for n,
            (text, loss, status) in enumerate(cases)]
    folder = tmp_path_factory.getbasetemp()
    printed(runs, 80, folder)
    write_csv(folder / "sweep.csv", runs)
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        assert sorted(line["data.path"] for line in csv.DictReader(file)) == sorted(
            run.settings["data.path"] for run in runs)


def test_control_characters_reach_no_terminal(tmp_path, copy):
    hostile = "\x1b[31m\x9b\x07\n\u202e\ud800"
    for n, job in enumerate(path.parent for path in copy.glob("*[12],seed=[12]/job.json")):
        note = note_of(job)
        note["overrides"] |= {"data.path": f"{n}{hostile}", f"a{hostile}": "b"}
        note |= {"swept": ["data.path", f"a{hostile}"], "failed": hostile}
        (job / "job.json").write_text(json.dumps(note))
    done = command_line(tmp_path, "sweeps", "sweep")
    assert done.returncode == 0, done.stderr
    assert "␛[31m" in done.stdout and done.stdout.replace("\n", "").isprintable()
    line = next(line for line in done.stdout.splitlines() if line.startswith("best run"))
    shell = subprocess.run(["bash", "-c", f"printf '%s ' {line.removeprefix('best run')}"],
                           capture_output=True)
    # The shell gets what was typed.
    assert "\x1b[31m\x9b\x07\n\u202e" in shell.stdout.decode(errors="replace")


def test_summaries_between_jobs_take_a_small_share_of_the_time(tmp_path):
    assert sweeps.summary_is_due(tmp_path)
    for name in ("sweep.csv", "sweep.html"):
        (tmp_path / name).touch()
    for took, since, due in ((0.01, 1, True), (10, 100, False), (10, 300, True), (0, 0, True)):
        now = time.time()
        os.utime(tmp_path / "sweep.csv", (now, now - since - took))
        os.utime(tmp_path / "sweep.html", (now, now - since))
        assert sweeps.summary_is_due(tmp_path) == due


def test_a_sweeps_end_is_summed_up_however_short_ago_the_last_summary_was(swept):
    lines = list(csv.DictReader((swept / "sweep.csv").open(encoding="utf-8")))
    assert len(lines) == 6
    table, page = (swept / name for name in ("sweep.csv", "sweep.html"))
    assert table.stat().st_mtime <= page.stat().st_mtime


def test_names_of_settings_that_end_alike_stay_whole():
    made = table(ranked([run_of({"model.name": "1", "optim.name": "2", "optim.lr": "3"}, 1.0)]),
                 "val/loss", 80)
    assert [str(column.header) for column in made.columns][:3] == ["model.name", "optim.name", "lr"]


# --- the prepared sweeps --------------------------------------------------------------------------

PRESETS = cli.groups()["sweep"]


@pytest.fixture
def expand():
    """The configurations of a sweep's jobs: expand("sweep=heads", …), as Hydra's own sweeper and
    composer make them."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        def expanded(*argv: str) -> list[Config]:
            checked = cli.check_arguments(["-m", *argv])[1:]
            params = OmegaConf.to_container(compose("config", checked[:1],
                                                    return_hydra_config=True).hydra.sweeper.params)
            overrides = OverridesParser.create().parse_overrides(
                [f"{key}={value}" for key, value in params.items()] + checked)
            made = []
            for job in BasicSweeper.split_arguments(overrides, None)[0]:
                made.append(OmegaConf.to_object(compose("config", job)))
                made[-1].check()
            return made
        yield expanded


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_job_of_a_prepared_sweep_is_right_and_is_told_in_full_by_what_it_was_given(
        name, expand):
    given = yaml.safe_load((cli.CONFIGS / "sweep" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert list(given) == ["hydra"] and list(given["hydra"]) == ["sweeper"]
    assert list(given["hydra"]["sweeper"]) == ["params"]
    made = expand(f"sweep={name}")
    assert len({str(config) for config in made}) == len(made) >= 9


def test_what_is_typed_wins_over_the_prepared_sweep(expand):
    made = expand("sweep=kv_heads", "model.n_kv_head=2,4", "seed=7", "max_steps=3")
    assert [(c.model.n_kv_head, c.seed, c.max_steps, c.model.n_head)
            for c in made] == [(2, 7, 3, 8), (4, 7, 3, 8)]
    assert set(plan("sweep=kv_heads", "seed=7")) == {f"model.n_kv_head={n}" for n in (1, 2, 4, 8)}
    assert len(plan("sweep=kv_heads", "max_steps=3,4")) == 4 * 3 * 2


def plan(*argv: str) -> dict[str, dict[str, str]]:
    """The jobs that these arguments ask for."""
    return sweeps.planned(sweeps.arguments(cli.check_arguments(["-m", *argv])))


def test_the_jobs_are_known_before_they_begin():
    assert plan("seed=1") == {"job": {}}
    assert list(plan("seed=range(1,4)")) == ["seed=1", "seed=2", "seed=3"]
    assert set(plan("model=glob(small*)")) == {f"model={name}" for name in cli.groups()["model"]
                                               if name.startswith("small")}
    assert list(plan("optim.lr=1e-3,.01", "compile=true,auto")) == [
        f"compile={c},optim.lr={lr}" for lr in ("0.001", "0.01") for c in ("true", "auto")]
    assert [*plan("data=text", "data.path=a b,c")] == [
        "data.path=a_b_" + hashlib.sha256(b"data.path=a b").hexdigest()[:8], "data.path=c"]
    assert plan("optim.lr=interval(0,1)") == {}  # for a sweeper that chooses as it goes


def test_depth_and_width_are_compared_at_equal_parameters(expand):
    shapes = {(c.model.n_layer, c.model.n_embd, c.model.key_dim): c.model
              for c in expand("sweep=depth_width", "seed=1")}
    assert len(shapes) == 3 and len({d for _, _, d in shapes}) == 1
    counts = {}
    for shape, config in shapes.items():
        config.vocab_size = 200
        counts[shape] = sum(p.numel() for p in GPT(config).blocks.parameters() if p.dim() > 1)
    assert len(set(counts.values())) == 1


@pytest.mark.slow
def test_a_prepared_sweep_runs(tmp_path, text_file):
    said = finished(tmp_path, "-m", "sweep=vocab_size", "tokenizer.vocab_size=300,320", "seed=1",
                    *of(text_file, "tokenizer=bpe"),
                    "hydra.sweep.dir=sweep")
    assert re.search(r"^vocab_size +bits/byte", said, re.MULTILINE)
    assert [run.settings for run in read_sweep(
        tmp_path / "sweep")] == [{"tokenizer.vocab_size": "300"}, {"tokenizer.vocab_size": "320"}]


# --- what starts the jobs -------------------------------------------------------------------------


@pytest.mark.slow
def test_joblib_runs_the_jobs_in_processes_that_share_the_cores(command, tmp_path, text_file):
    done = command("train.py", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2",
                       *SWEPT[:1], *of(text_file), "hydra.sweep.dir=sweep",
                   env={"OMP_NUM_THREADS": None})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    # with 1, 2, 3 heads
    assert [run.status
            for run in read_sweep(tmp_path / "sweep")] == ["finished", "finished", "failed"]
    assert set(re.findall(r"(\d+) threads", done.stdout)) == {str(max(1, os.cpu_count() // 2))}
    assert len(list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))) == 3


@pytest.mark.slow
def test_a_stop_signal_reaches_the_jobs_in_other_processes_which_save(tmp_path, text_file):
    process = Process(tmp_path, "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2",
                      "model.n_kv_head=1,2", "hydra.sweep.dir=sweep",
                      *of(text_file, "max_steps=100000", "eval.every=0", "attention.every=0",
                          "checkpoint.every=0"))
    folders = [tmp_path / "sweep" / f"model.n_kv_head={heads}" for heads in (1, 2)]
    for folder in folders:
        process.wait_for(folder / "metrics.jsonl", lines=1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert all(list((folder / "checkpoints").glob("step_*")) for folder in folders), process.said()


@pytest.mark.slow
def test_submitit_runs_the_jobs_from_any_folder(command, tmp_path, text_file):
    done = command("train.py", "-m", "hydra/launcher=submitit_local",
                   "hydra.launcher.timeout_min=5", "model.n_kv_head=1,3", *of(text_file),
                   "hydra.sweep.dir=sweep")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["finished", "failed"]
    assert "failed      model.n_kv_head=3: model.n_kv_head=3 does not divide" in done.stdout


@pytest.mark.parametrize("launcher", cli.LAUNCHERS)
def test_a_launcher_that_is_not_installed_is_named(launcher, monkeypatch):
    monkeypatch.setitem(cli.LAUNCHERS, launcher, "hydra-no-such-launcher")
    with pytest.raises(UserError, match="pip install hydra-no-such-launcher"):
        cli.check_arguments(["-m", f"hydra/launcher={launcher}", "seed=1,2"])


@pytest.mark.slow
def test_the_command_of_wandbs_agent_trains(tmp_path, text_file):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    search = yaml.safe_load((ROOT / "wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {key: given.get("value", given.get("min", given.get("values", [None])[0])) for key,
              given in search["parameters"].items()}
    assert None not in chosen.values(
        ) and search["metric"] == {"name": "val/loss", "goal": "minimize"}
    parts = {**create_sweep_command_args({"args": {key: {"value": value} for key,
                                                   value in chosen.items()}}),
             "env": ["/usr/bin/env"], "interpreter": ["python"],
             "program": [str(ROOT / search["program"])]}
    line = [word for c in create_sweep_command(search["command"])
            for word in (parts[c[2:-1]] if c.startswith("${") else [c])]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SWEEP_ID": "search",
                   "WANDB_RUN_ID": "chosen1",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    smaller = [setting for setting in of(text_file)
               if setting.partition("=")[0] not in (set(chosen) - {"max_steps", "eval.every"})]
    done = subprocess.run([*line, *smaller, "model.n_head=4"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run, = (tmp_path / "runs").iterdir()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["optim"]["lr"],
            config["model"]["n_kv_head"]) == (chosen["optim.lr"], chosen["model.n_kv_head"])
    assert [path.name.rpartition("-")[2]
            for path in (run / "wandb").glob("offline-run-*")] == ["chosen1"]
    assert rows(run)[-1]["val/loss"] > 0


# --- many jobs ------------------------------------------------------------------------------------


@pytest.mark.soak
def test_thirty_jobs_leave_memory_and_open_files_flat(tmp_path, text_file):
    def fault():
        record = tmp_path / "record.jsonl"
        original = sweeps.summarise

        def summarise(folder):
            runs = original(folder)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE")
            with record.open("a") as file:
                file.write(json.dumps([resident, len(os.listdir("/proc/self/fd")),
                                       len(os.listdir("/proc/self/task"))]) + "\n")
            return runs

        sweeps.summarise, sweeps.summary_is_due = summarise, lambda folder: True

    process = Process(tmp_path, "-m", "model.n_kv_head=1,2",
                      f"seed={','.join(map(str, range(15)))}", *of(text_file, "wandb.mode=offline"),
                      "hydra.sweep.dir=sweep", fault=fault)
    assert process.wait(900) == 0, process.said()
    resident, files, threads = zip(*map(json.loads,
                                        (tmp_path / "record.jsonl").read_text().splitlines()[:30]))
    assert files[29] == files[9] and threads[29] <= threads[9]
    assert resident[29] < resident[9] * 1.03 + 4e6, resident
    assert {run.status for run in read_sweep(tmp_path / "sweep")} == {"finished"}


def test_a_folder_that_is_no_sweep_is_named_and_left_as_it_is(tmp_path, command):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "nowhere"):
        done = command("sweeps.py", name)
        assert (done.returncode, done.stderr) == (
            1, f"error: {name} is not the folder of a sweep: "
               "python train.py -m … names it when it ends\n")
    assert not list((tmp_path / "mine").iterdir()) and not (tmp_path / "nowhere").exists()
