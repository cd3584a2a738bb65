"""Sweeps: the folders of their jobs, their table, resuming them, launchers and W&B agents."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from itertools import product
from math import inf, nan
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY
from filelock import FileLock, Timeout
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict
from processes import Process, fault_at_call, rows, rows_without_times, run_to_end
from processes import run as command_line
from rich.console import Console

import cli
import glass.page.write
from cli.command_line import CONFIGS, parse_command_line
from cli.config_file import config_yaml, read_config
from common.errors import UserError
from common.text import format_magnitude
from config import Config, GPTConfig, TokenizerConfig
from generation import KVCache
from sweeps import jobs as sweep_jobs
from sweeps import page as sweep_page
from sweeps.figures import kv_cache_bytes
from sweeps.note import JOB_LOCK, read_job
from sweeps.runs import (
    Run,
    find_best_run,
    is_sweep,
    rank_variants,
    ranking_metric,
    read_sweep,
    reproduce_command,
)
from sweeps.table import figure_names, format_cell, print_sweep, write_csv
from variants import build_model

SHORT = [
    "max_steps=4",
    "model.n_head=2",
    "eval.every=2",
    "attention.every=2",
    "attention.tokens=16",
    "checkpoint.every=2",
    "data.val_max_tokens=300",
]


def small_jobs(text_file, *more: str) -> list[str]:
    return [
        *(setting for setting in TINY if not setting.startswith("model.n_kv_head")),
        "data=text",
        f"data.path={text_file}",
        *SHORT,
        *more,
    ]


@pytest.fixture(scope="module")
def swept(text_file, shared) -> Path:
    """A sweep of six jobs, two of which fail; its output is in said.txt beside it."""

    def make(folder: Path) -> None:
        said = run_to_end(
            folder,
            "-m",
            "model.n_kv_head=1,3,2",
            "seed=1,2",
            *small_jobs(text_file),
            "hydra.sweep.dir=sweep",
            status=1,
        )
        (folder / "said.txt").write_text(said)

    return shared("swept", make) / "sweep"


@pytest.fixture
def copy(swept, tmp_path) -> Path:
    return Path(shutil.copytree(swept, tmp_path / "sweep"))


# --- a sweep's folder -----------------------------------------------------------------------------


def test_each_job_has_its_own_folder_and_a_failed_job_does_not_stop_the_others(swept):
    runs = read_sweep(swept)
    assert len(runs) == 6
    for run in runs:
        heads, seed = run.settings["model.n_kv_head"], run.settings["seed"]
        assert run.path.name == f"model.n_kv_head={heads},seed={seed}"
        assert run.overrides["max_steps"] == "4"
        if heads == "3":
            assert (run.status, run.config, run.rows) == ("failed", None, [])
            assert "model.n_kv_head=3" in run.failure and "model.n_head=2" in run.failure
        else:
            assert (run.status, run.failure, run.rows) == ("finished", "", rows(run.path))
            assert (run.config.model.n_kv_head, run.config.seed) == (int(heads), int(seed))


def test_sweep_csv_holds_the_numbers_of_the_runs(swept):
    lines = list(csv.DictReader((swept / "sweep.csv").open(encoding="utf-8")))
    assert [line["status"] for line in lines] == ["finished"] * 4 + ["failed"] * 2
    runs = {run.path.name: run for run in read_sweep(swept)}
    for line in lines[:4]:
        metrics, config = rows(swept / line["run"]), runs[line["run"]].config
        best, last = (
            min(
                (row for row in metrics if row["step"] and "val/loss" in row),
                key=lambda row: row["val/loss"],
            ),
            metrics[-1],
        )
        assert float(line["val/loss"]) == best["val/loss"]
        assert float(line["train_seconds"]) == last["train_seconds"]
        assert int(line["tokens"]) == last["tokens"] == 4 * 4 * 32
        for score in ("previous_token", "induction", "sink"):
            assert float(line[f"heads/{score}"]) == max(
                value for key, value in last.items() if key.startswith(f"heads/{score}/")
            )
        assert int(line["parameters"]) == build_model(config.model).num_parameters()
        assert int(line["kv_cache_bytes"]) == KVCache(config.model, 1, dtype=torch.float32).nbytes


@pytest.mark.slow
def test_the_printed_command_reproduces_the_best_run_bit_for_bit(swept, tmp_path):
    best = find_best_run(read_sweep(swept))
    line = next(
        line
        for line in (swept.parent / "said.txt").read_text().splitlines()
        if line.startswith("best run  ")
    )
    python, script, *argv = shlex.split(line.removeprefix("best run"))
    assert [python, script, *argv] == shlex.split(reproduce_command(best))
    run_to_end(tmp_path, *argv, "run_dir=again")
    assert rows_without_times(tmp_path / "again") == rows_without_times(best.path)


@pytest.mark.slow
def test_the_summary_is_made_from_the_folder_alone_without_torch(copy, tmp_path):
    before = (copy / "sweep.csv").read_bytes()
    (copy / "sweep.csv").unlink()
    code = (
        "import runpy, sys; sys.argv[1:] = ['sweep']; "
        "runpy.run_module('sweeps', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert (copy / "sweep.csv").read_bytes() == before
    assert "n_kv_head" in done.stdout
    assert re.search(r"^failed +model\.n_kv_head=3,seed=2: ", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [[], ["nowhere"], ["mine"], ["--all"], ["a", "b"]])
def test_a_folder_without_a_sweep_is_refused_and_unchanged(argv, tmp_path):
    (tmp_path / "mine").mkdir()
    done = command_line(tmp_path, "sweeps", *argv)
    assert done.returncode == 1 and re.fullmatch("error: .*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir())


# --- jobs that fail or repeat ---------------------------------------------------------------------


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Run a sweep in this process, whose jobs call a function instead of training.

    Returns the exit status and what each job returned to the sweeper.
    """
    run_job, folder = sweep_jobs.run_job, tmp_path / "start"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sweep_page, "write_sweep_page", lambda folder, runs: None)

    def run(*argv: str, job) -> tuple[int, list[float | None]]:
        returned: list[float | None] = []
        monkeypatch.setattr(sweep_jobs, "run_job", lambda *args: returned.append(run_job(*args)))
        monkeypatch.setattr(sys, "argv", ["train.py"])
        GlobalHydra.instance().clear()
        try:
            sweep_jobs.run_sweep(parse_command_line(["-m", "hydra.sweep.dir=sweep", *argv]), job)
        except SystemExit as e:
            return e.code, returned
        return 0, returned

    return run


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Run a job with settings that a sweeper has drawn, and return what the sweeper gets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_jobs, "summarize", lambda folder: None)
    plan = sweep_jobs.SweepPlan(Path("sweep"), tmp_path, None, [], None)

    def run(setting: str, job) -> float | None:
        cfg = cli.compose_settings([setting, "hydra.job.num=0"])
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            cfg.pop("hydra")
        return sweep_jobs.run_job(cfg, plan, job)

    return run


@pytest.mark.parametrize(
    "outcome",
    [
        1.5,
        nan,
        inf,
        UserError("wrong"),
        ZeroDivisionError(),
        OSError(28, "No space left on device"),
        MemoryError(),
        Panic("in Rust"),
    ],
    ids=repr,
)
@pytest.mark.slow
def test_a_job_without_a_loss_is_a_failed_trial(outcome, draw):
    def job(job: cli.Job) -> float:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    assert draw("seed=1", job) == (1.5 if outcome == 1.5 else None)
    failed = isinstance(outcome, BaseException)
    assert bool(read_job(Path("sweep", "seed=1")).failure) == failed
    assert draw("seed=1", lambda job: 2.0) == 2.0
    assert not read_job(Path("sweep", "seed=1")).failure


@pytest.mark.parametrize("status", [130, 143])
@pytest.mark.slow
def test_a_stop_signal_in_a_job_ends_the_sweep(status, sweep):
    def job(job: cli.Job) -> float:
        raise SystemExit(status)

    assert sweep("seed=1,2", job=job) == (status, [])
    assert [path.name for path in Path("sweep").glob("seed=*")] == ["seed=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, folder",
    [
        ("hydra.job.chdir=true", "sweep"),
        ("hydra.sweep.dir=./a/../sweep", "sweep"),
        ("hydra.sweep.dir=${hydra.job.name}, it's (1)", "${hydra.job.name}, it's (1)"),
        ("resume=auto,false", "sweep"),
    ],
)
def test_jobs_run_where_the_sweep_was_started(setting, folder, sweep):
    def job(job: cli.Job) -> float:
        ran.append((Path.cwd(), Path(job.config.run_dir).resolve()))
        return 1.0

    ran, here = [], Path.cwd()
    _, returned = sweep(setting, job=job)
    assert set(returned) == {1.0} and set(ran) == {(here, here / folder / "job")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, damage",
    [("job.json", "text"), ("config.yaml", "folder"), ("config.yaml", "text")],
)
def test_a_damaged_job_does_not_keep_a_sweep_from_resuming(name, damage, sweep):
    sweep("seed=1,2", job=lambda job: 1.0)
    path = Path("sweep", "seed=1", name)
    path.unlink(missing_ok=True)
    if damage == "text":
        path.write_text("seed: [")
    else:
        path.mkdir()
    status, returned = sweep("seed=1,2", "resume=auto", job=lambda job: 2.0)
    assert (status, returned[1]) == (1, 2.0)
    assert [run.path.name for run in read_sweep(Path("sweep"))] == ["seed=1", "seed=2"]


@pytest.mark.slow
def test_a_job_that_cannot_be_opened_costs_only_its_own_row(sweep):
    sweep("seed=1,2", job=lambda job: 1.0)
    Path("sweep", "0").symlink_to("0")
    assert {run.path.name: bool(run.failure) for run in read_sweep(Path("sweep"))} == {
        "0": True,
        "seed=1": False,
        "seed=2": False,
    }
    Path("other").mkdir()
    Path("other", "0").symlink_to("0")
    with pytest.raises(OSError):
        is_sweep(Path("other"))


@pytest.mark.parametrize("error", [None, ValueError("n_jobs == 0"), AssertionError()], ids=repr)
def test_a_sweep_without_any_job_is_a_failure(error, sweep, monkeypatch):
    def run_hydra(task, arguments):  # as a launcher could
        if error:
            raise error

    monkeypatch.setattr(cli, "run_hydra", run_hydra)
    with pytest.raises(UserError, match="sweep"):
        sweep("seed=1,2", job=lambda job: 1.0)
    assert not Path("sweep").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "key, values",
    [
        ("seed", ["1", "+1", "01"]),
        ("optim.lr", ["1e-3", "0.001", ".001", "1E-3", "1.0e-03"]),
        ("compile", ["true", "True"]),
        ("model", ["small", "small"]),
        ("model.n_kv_head", ["null", "NULL"]),
        ("data.path", ["a.txt", "'a.txt'"]),
    ],
)
def test_equal_jobs_share_a_folder_in_which_the_second_continues_the_first(key, values, draw):
    jobs: list[cli.Job] = []
    for value in values:
        draw(f"{key}={value}", lambda job: jobs.append(job) or 1.0)
    assert {job.config.resume for job in jobs} == {"auto"}
    assert len(jobs) == len(values) and len({job.config.run_dir for job in jobs}) == 1


@pytest.mark.slow
def test_different_draws_have_different_folders(draw):
    draws = [0.1, 0.1 + 1e-16, 1e-7]
    jobs: list[cli.Job] = []
    for value in draws:
        draw(f"optim.lr={value!r}", lambda job: jobs.append(job) or 1.0)
    assert len({job.config.run_dir for job in jobs}) == len(draws)


def test_an_equal_job_in_parallel_waits_for_the_first(draw):
    def job(job: cli.Job) -> float:
        lock = FileLock(Path(job.config.run_dir) / JOB_LOCK, timeout=0)
        with pytest.raises(Timeout):
            lock.acquire()
        return 1.0

    assert draw("seed=1", job) == 1.0


@pytest.mark.slow
def test_an_equal_job_returns_the_result_of_the_first(tmp_path, text_file):
    said = run_to_end(
        tmp_path,
        "-m",
        "optim.lr=1e-3,0.001",
        "hydra.job.chdir=true",
        *small_jobs(text_file),
        "hydra.sweep.dir=sweep",
    )
    losses = re.findall(r"^[12]/2 .* (\d\.\d{4}) val/loss ", said, re.MULTILINE)
    (run,) = read_sweep(tmp_path / "sweep")
    assert losses == [f"{run.figures['val/loss']:.4f}"] * 2
    assert (run.status, run.failure, len(run.rows)) == ("finished", "", 5)


@pytest.mark.soak
def test_optuna_goes_on_after_failed_trials(command, tmp_path, text_file):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    done = command(
        "train.py",
        "-m",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.sampler.seed=1",
        "model.n_kv_head=choice(1,3)",
        "seed=choice(1,2)",
        *small_jobs(text_file),
        "hydra.sweep.dir=sweep",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.findall(r"^(\d)/6 .* val/loss", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^\d/6 ", done.stdout, re.MULTILINE)) >= 6
    assert {run.status for run in read_sweep(tmp_path / "sweep")} == {"finished", "failed"}


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resume_auto_runs_only_the_missing_jobs(copy, swept, tmp_path, text_file):
    shutil.rmtree(copy / "model.n_kv_head=1,seed=2")
    before = [run for run in read_sweep(copy) if run.status == "finished"]
    kept = (copy / "model.n_kv_head=2,seed=1" / "metrics.jsonl").stat().st_mtime_ns
    # In another order, so that the jobs have other numbers.
    again = ["-m", "seed=2,1", "model.n_kv_head=2,1", "hydra.sweep.dir=sweep", "resume=auto"]
    said = run_to_end(
        tmp_path, *again, *small_jobs(text_file), status=1
    )  # others there have failed
    assert len(before) == 3
    assert len(re.findall(r"^[1-4]/4 .* \d\.\d{4} val/loss ", said, re.MULTILINE)) == 4
    assert (copy / "model.n_kv_head=2,seed=1" / "metrics.jsonl").stat().st_mtime_ns == kept
    assert rows_without_times(copy / "model.n_kv_head=1,seed=2") == rows_without_times(
        swept / "model.n_kv_head=1,seed=2"
    )
    said = run_to_end(tmp_path, *again, *small_jobs(text_file, "model.n_layer=1"), status=1)
    assert said.count("(model.n_layer=2)") == 2 * 4, said  # in a job's line, and below the table
    now = {run.path: run for run in read_sweep(copy)}
    assert all(now[run.path].overrides == run.overrides for run in before)


@pytest.mark.slow
def test_a_stopped_sweep_is_saved_and_resumes(swept, tmp_path, text_file):
    argv = ["-m", "model.n_kv_head=2,1", "seed=1", *small_jobs(text_file), "hydra.sweep.dir=sweep"]
    process = Process(tmp_path, *argv, "max_steps=10000", "wandb.mode=disabled")
    job = tmp_path / "sweep" / "model.n_kv_head=2"
    process.wait_for(job / "metrics.jsonl", lines=3)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.output()
    (again,) = re.findall(r"^python (train\.py .*)", process.output(), re.MULTILINE)
    assert {"-m", "resume=auto", "hydra.sweep.dir=sweep", *argv} == {*shlex.split(again)[1:]} - {
        "max_steps=10000",
        "wandb.mode=disabled",
    }
    assert [run.status for run in read_sweep(job.parent)] == ["unfinished"]
    lines = list(csv.DictReader((job.parent / "sweep.csv").open(encoding="utf-8")))
    assert [line["status"] for line in lines] == ["unfinished"]
    step = max(int(path.name[5:]) for path in (job / "checkpoints").glob("step_*"))
    run_to_end(tmp_path, *argv, f"max_steps={step + 2}", "resume=auto")
    assert {run.status for run in read_sweep(job.parent)} == {"finished"}
    assert len(rows(job)) == step + 3


@pytest.mark.slow
def test_a_stop_signal_while_a_jobs_last_page_is_written_ends_the_sweep(tmp_path, text_file):
    fault = fault_at_call(
        glass.page.write,
        "write_html",
        1,
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        when=lambda path, name, content, *_: content.get("step") == 4,
    )
    said = run_to_end(
        tmp_path,
        "-m",
        "seed=1,2",
        *small_jobs(text_file, "max_steps=4"),
        "hydra.sweep.dir=sweep",
        fault=fault,
        status=143,
    )
    assert "resume=auto" in said
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["finished"]


@pytest.mark.slow
def test_a_bug_fails_only_its_own_job(tmp_path, text_file):
    def fault():
        import model

        make = model.GPT.__init__

        def init(self, config, *parts):
            if config.n_kv_head == 1:
                raise ZeroDivisionError
            make(self, config, *parts)

        model.GPT.__init__ = init

    process = Process(
        tmp_path,
        "-m",
        "model.n_kv_head=1,2",
        *small_jobs(text_file),
        "hydra.sweep.dir=sweep",
        fault=fault,
    )
    assert process.wait() == 1
    assert "model.n_kv_head=1: ZeroDivisionError" in process.output()
    (job,) = tmp_path.glob("sweep/*=1")
    assert (job / "log.txt").read_text().count("Traceback") == 1
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["failed", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, names",
    [
        (["hydra.sweep.dir=sweep"], ["hydra.sweep.dir=sweep", "resume=auto"]),
        (["hydra.sweep.dir=mine", "resume=auto"], ["hydra.sweep.dir=mine"]),
        (["sweep=kv_head"], ["kv_head", "kv_heads"]),
        (["seed=1,a"], ["seed: ", "'a'"]),
        (["max_steps=1.5"], ["max_steps: ", "1.5"]),
        (["model=small,gpt3"], ["gpt3", "gpt2"]),
        (["hydra.sweep.dir=/dev/null/x"], ["/dev/null/x"]),
        (["max_steps=range(3,1)"], ["max_steps=range(3,1)"]),
        (["hydra.sweeper.max_batch_size=1", "max_steps=1,a"], ["max_steps: ", "'a'"]),
    ],
)
def test_a_sweep_that_cannot_start_is_refused_and_leaves_nothing(argv, names, copy, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sweep.csv").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    done = command_line(
        tmp_path, "train.py", "-m", *([] if "seed" in argv[0] else ["seed=1,2"]), *argv
    )
    assert done.returncode == 1 and re.fullmatch("error: .*\n", done.stderr), done.stderr
    assert all(name in done.stderr for name in names), done.stderr
    if (tmp_path / "runs").exists():
        (tmp_path / "runs").rmdir()  # and is empty
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


# --- the comparison -------------------------------------------------------------------------------


def run_of(settings: dict, loss: float | None, status="finished", vocabulary=65, **more) -> Run:
    config = Config(
        model=GPTConfig(vocab_size=vocabulary),
        tokenizer=TokenizerConfig("char"),
        precision="fp32",
        max_steps=10,
    )
    last = {"step": 10, "tokens": 100, "train_seconds": 2.0, **more}
    if loss is not None:
        last |= {"val/loss": loss, "val/bits_per_byte": loss / 2}
    name = ",".join(f"{key}={value}" for key, value in settings.items())
    return Run(Path("none", name), settings, settings, config, [last], status, "")


def test_runs_of_different_texts_are_not_ranked():
    runs = [run_of({"data.field": name}, loss) for name, loss in (("text", 2.0), ("body", 1.0))]
    assert find_best_run(runs) == runs[1]
    runs[1].config.data.field = "body"
    assert find_best_run(runs) is None
    assert [variant.runs for variant in rank_variants(runs)] == [[run] for run in runs]


@pytest.mark.parametrize(
    ("steps", "cell"),
    [
        ([300, 400, 200], "300"),
        ([300, None, 200], "300 (2 of 3)"),
        ([300, None, None], "– (1 of 3)"),
    ],
)
def test_a_time_of_emergence_is_a_median_in_which_runs_without_it_are_late(steps, cell):
    name = "emerged/induction"
    runs = [run_of({"seed": str(seed)}, 1.0) for seed in range(3)]
    for run, step in zip(runs, steps):
        run.figures.update({name: step} if step else {})
    assert format_cell(rank_variants(runs)[0], name) == cell


def test_the_table_has_the_last_metrics_of_a_task_without_their_errors_within_a_run():
    metrics = {"task/repeated_loss": 0.5, "task/repeated_loss_se": 0.1, "val/in_context_score": 2.0}
    run = run_of({}, 1.0, **metrics)
    names = figure_names(rank_variants([run]), "val/loss")
    assert names[1] == "task/repeated_loss" and "val/in_context_score" in names
    assert "task/repeated_loss_se" not in run.figures and run.figures["task/repeated_loss"] == 0.5


def test_the_printed_command_leaves_out_what_only_other_jobs_use():
    run = run_of({"optim": "adamw", "optim.momentum": "0.9", "optim.lr": "0.1"}, 1.0)
    command = reproduce_command(run)
    assert shlex.split(command) == ["python", "train.py", "optim=adamw", "optim.lr=0.1"]


def test_variants_are_ranked_by_mean_and_those_without_a_result_come_last():
    runs = [
        run_of({"a": a, "seed": seed}, loss, status)
        for a, seed, loss, status in (
            ("1", "1", nan, "finished"),
            ("2", "1", 3.0, "finished"),
            ("3", "1", 1.0, "finished"),
            ("3", "2", 2.0, "finished"),
            ("4", "1", 0.1, "unfinished"),
            ("5", "1", None, "finished"),
            ("6", "1", 1.0, "finished"),
            ("6", "2", 0.1, "failed"),
            ("7", "1", inf, "finished"),
        )
    ]
    assert [setting.settings["a"] for setting in rank_variants(runs)][:3] == ["6", "3", "2"]
    assert rank_variants(runs)[-1].settings["a"] == "4"
    assert (
        find_best_run(runs).settings == {"a": "6", "seed": "1"}
        and len(rank_variants(runs)[0].finished) == 1
    )
    assert find_best_run([run_of({"a": "1"}, nan)]) is None and find_best_run([]) is None
    one, other = run_of({"v": "1"}, 2.0), run_of({"v": "2"}, 1.0, vocabulary=66)
    assert (
        ranking_metric([one]) == "val/loss" and ranking_metric([one, other]) == "val/bits_per_byte"
    )


@pytest.mark.parametrize(
    ("losses", "name", "variants"),
    [
        ((2.0, 2.2, 2.1, 2.3), "best", ["x=1", "x=2"]),
        ((2.0, 2.02, 2.0, 2.2), "best", ["x=1", "x=2"]),
        ((2.0, 2.1, 2.5, 2.6), "best", ["x=1"]),
        ((2.0, None, 2.01, None), "lowest", ["x=1"]),
    ],
    ids=["tied", "tied by the other's error", "significant", "one seed"],
)
def test_a_best_variant_needs_an_error_estimate_and_names_its_tie(losses, name, variants, tmp_path):
    runs = [
        run_of({"a.x": x, "seed": seed}, loss)
        for loss, (x, seed) in zip(losses, product("12", "12"))
        if loss is not None
    ]
    lines = printed(runs, 80, tmp_path)
    (conclusion,) = [line for line in lines if re.match("(best|lowest) {4}", line)]
    assert conclusion.startswith(f"{name} ") and re.findall(r"x=\d", conclusion) == variants
    assert not any("\ufffd" in line for line in lines)  # no color code is printed as text


def printed(runs: list[Run], width: int, tmp_path: Path) -> list[str]:
    console = Console(width=width, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_sweep(console, tmp_path, runs)
    return console.export_text().splitlines()


@given(
    st.lists(
        st.tuples(
            st.text(max_size=12),
            st.none() | st.floats(),
            st.sampled_from(["finished", "unfinished", "failed"]),
        ),
        min_size=1,
    )
)
def test_any_settings_and_losses_can_be_printed(tmp_path_factory, cases):
    runs = [
        run_of({"data.path": text, "seed": str(n)}, loss, status)
        for n, (text, loss, status) in enumerate(cases)
    ]
    folder = tmp_path_factory.getbasetemp()
    for line in printed(runs, 80, folder):
        assert line.isprintable()
    write_csv(folder / "sweep.csv", runs)
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        assert sorted(line["data.path"] for line in csv.DictReader(file)) == sorted(
            run.settings["data.path"] for run in runs
        )


NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(10**299), 10**299),
    st.integers(0, 9),
    st.sampled_from([10**299, nan]),
)
ANYTHING = st.one_of(NUMBERS, st.text(max_size=5), st.none(), st.booleans(), st.just([]))
METRIC_NAMES = st.one_of(
    st.sampled_from(["step", "tokens", "train_seconds", "val/loss", "val/bits_per_byte", "text"]),
    st.sampled_from(["probe/copying_gain", "faithfulness/none", "circuit/L0H0"]),
    st.builds(
        "{}/{}/{}".format,
        st.sampled_from(["heads", "emerged", "composition", "lost"]),
        st.sampled_from(["induction", "previous_token", "sink", "induction_se", "x"]),
        st.sampled_from(["L0H0", "L999H999", "", "L" + "9" * 5000 + "H0", "L0H" + "9" * 5000]),
    ),
)
ROWS = st.builds(
    lambda row, step: row | {"step": step},
    st.dictionaries(METRIC_NAMES, NUMBERS, max_size=12),
    st.integers(0, 9) | ANYTHING,
)
NOTES = st.one_of(
    st.builds(
        lambda overrides, failed: {"overrides": overrides, "swept": [*overrides], "failed": failed},
        st.dictionaries(st.sampled_from(["seed", "optim.lr", "data.path"]), st.text()),
        st.text(),
    ),
    st.dictionaries(st.sampled_from(["overrides", "swept", "failed"]), ANYTHING),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(jobs=[([{"step": 4, "emerged/induction/L0H0": 2}], {}, True)])
@example(jobs=[([{"step": 4, "heads/sink/L" + "9" * 5000 + "H0": 0.5}], {}, True)])
@given(jobs=st.lists(st.tuples(st.lists(ROWS), NOTES, st.booleans()), min_size=1, max_size=3))
@pytest.mark.slow
def test_rows_and_notes_of_any_type_or_size_can_be_summarized(jobs, tmp_path):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for number, (rows_of_job, note, has_config) in enumerate(jobs):
        (folder / f"{number}").mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows_of_job)
        (folder / f"{number}" / "metrics.jsonl").write_text(lines)
        (folder / f"{number}" / "job.json").write_text(json.dumps(note))
        config = run_of({}, 1.0).config if has_config else None
        text = config_yaml(config) if config else "seed: [1]"
        (folder / f"{number}" / "config.yaml").write_text(text)
    runs = sweep_jobs.summarize(folder)
    printed(runs, 80, folder)
    assert all(run.failure for run, (*_, has_config) in zip(runs, jobs) if not has_config)


# --- presets of sweeps ----------------------------------------------------------------------------


def overrides_of(*argv: str) -> list[Override]:
    """The settings typed, and those that a sweep's preset adds."""
    GlobalHydra.instance().clear()
    return sweep_jobs.sweep_settings(parse_command_line(["-m", *argv]))[1]


def jobs(*argv: str, **sweeper) -> int | None:
    """The number of jobs of a sweep, by Hydra's sweeper if there is no other."""
    GlobalHydra.instance().clear()
    hydra_settings, overrides = sweep_jobs.sweep_settings(parse_command_line(["-m", *argv]))
    own = OmegaConf.create(sweeper) if sweeper else hydra_settings.sweeper
    return sweep_jobs.count_jobs(own, overrides)


def expanded(*argv: str) -> list[Config]:
    """The configurations of the jobs, as Hydra's own sweeper and composer make them."""
    made = BasicSweeper.split_arguments(overrides_of(*argv), None)[0]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return [OmegaConf.to_object(compose("config", job)) for job in made]


@pytest.mark.parametrize("device, width, size", [("cpu", 64, 4), ("cpu", 384, 2), ("cuda", 64, 2)])
def test_the_kv_cache_is_counted_in_the_precision_of_decoding(device, width, size):
    model = GPTConfig(9, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=width)
    config = Config(device=device, precision="bf16", model=model)
    assert kv_cache_bytes(config) == size * 2 * 2 * 8 * 2 * width // 4


@pytest.mark.slow
def test_the_number_of_jobs_is_known_before_they_begin():
    assert jobs("seed=1") == 1 and jobs("seed=range(1,4)") == 3
    assert jobs("model=glob(small*)") is None
    assert jobs("optim.lr=1e-3,.01", "compile=true,auto") == 4
    assert jobs("seed=1,1") == 2  # the second repeats the first one's result
    with pytest.raises(UserError) as error:
        jobs("seed=interval(0,1)")  # it needs another sweeper
    assert "seed=interval(0,1)" in str(error.value)
    with pytest.raises(UserError, match=re.escape(str(error.value))):
        sweep_jobs.preview_sweep(parse_command_line(["-m", "seed=interval(0,1)"]), train=None)
    assert jobs("sweep=kv_heads", "max_steps=3,4") == 4 * 3 * 2


@pytest.mark.parametrize("values", ["choice(1,2)", "1,2,3", "range(1,9)", "interval(0,1)", "1"])
def test_a_sweeper_that_decides_itself_announces_its_trials(values):
    optuna = {"_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"}
    grid = {"_target_": "optuna.samplers.GridSampler"}
    assert jobs(f"seed={values}", **optuna, n_trials=20, sampler=None) == 20
    assert jobs(f"seed={values}", **optuna, n_trials=20, sampler=grid) is None
    assert jobs(f"seed={values}", _target_="hydra_plugins.another.Sweeper") is None


@pytest.mark.soak
def test_every_job_of_a_sweep_preset_is_valid():
    for name in cli.find_presets()["sweep"]:
        made = expanded(f"sweep={name}")
        assert len({str(config) for config in made}) == len(made) == jobs(f"sweep={name}") >= 9
        for config in made:
            config.check()
    made = expanded("sweep=kv_heads", "model.n_kv_head=2,4", "seed=7", "max_steps=3")
    assert [(c.model.n_kv_head, c.seed, c.max_steps, c.model.n_head) for c in made] == [
        (2, 7, 3, 8),
        (4, 7, 3, 8),
    ]


@pytest.mark.slow
def test_depth_and_width_are_compared_at_equal_parameters():
    shapes = {
        (c.model.n_layer, c.model.n_embd, c.model.key_dim): c.model
        for c in expanded("sweep=depth_width", "seed=1")
    }
    assert len(shapes) == 3 and len({d for _, _, d in shapes}) == 1
    counts = {}
    for shape, config in shapes.items():
        config.vocab_size = 200
        counts[shape] = sum(
            p.numel() for p in build_model(config).blocks.parameters() if p.dim() > 1
        )
    assert len(set(counts.values())) == 1


# --- launchers ------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
    ],
)
def test_launchers_run_jobs_in_their_own_processes(launcher, command, tmp_path, text_file):
    done = command(
        "train.py",
        "-m",
        *launcher,
        "model.n_kv_head=1,3",
        *small_jobs(text_file),
        "hydra.sweep.dir=sweep",
        env={"OMP_NUM_THREADS": None},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["finished", "failed"]
    assert re.search(r"^failed +model\.n_kv_head=3: ", done.stdout, re.MULTILINE)
    assert len(list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))) == 2


@pytest.mark.soak
def test_a_stop_signal_ends_jobs_in_other_processes(tmp_path, text_file):
    process = Process(
        tmp_path,
        "-m",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "model.n_kv_head=1,2",
        "hydra.sweep.dir=sweep",
        *small_jobs(
            text_file, "max_steps=100000", "eval.every=0", "attention.every=0", "checkpoint.every=0"
        ),
    )
    folders = [tmp_path / "sweep" / f"model.n_kv_head={heads}" for heads in (1, 2)]
    for folder in folders:
        process.wait_for(folder / "metrics.jsonl", lines=1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    for folder in folders:
        FileLock(folder / ".lock").acquire(timeout=20)  # whose job has ended


@pytest.mark.slow
def test_the_command_of_a_wandb_agent_trains(tmp_path, text_file):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    search = yaml.safe_load((ROOT / "wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {
        key: given.get("value", given.get("min", given.get("values", [None])[0]))
        for key, given in search["parameters"].items()
    }
    assert search["metric"] == {"name": "val/loss", "goal": "minimize"}
    args = create_sweep_command_args(
        {"args": {key: {"value": value} for key, value in chosen.items()}}
    )
    words = args[create_sweep_command(search["command"])[-1][2:-1]]
    smaller = [
        setting
        for setting in small_jobs(text_file)
        if setting.partition("=")[0] not in (set(chosen) - {"max_steps", "eval.every"})
    ]
    done = command_line(
        tmp_path,
        "train.py",
        *words,
        *smaller,
        "model.n_head=4",
        env={"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "search", "WANDB_RUN_ID": "chosen1"},
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert read_config(run / "config.yaml").optim.lr == chosen["optim.lr"]
    assert [path.name.rpartition("-")[2] for path in (run / "wandb").glob("offline-run-*")] == [
        "chosen1"
    ]


def test_a_large_mean_has_the_decimals_and_the_unit_of_its_standard_error():
    assert format_magnitude(1_669_333, 341_333) == "1.7 ± 0.3 M"
    assert format_magnitude(819_200, 156_000, "B") == "819 ± 156 kB"
    assert format_magnitude(12_300, None) == "12 k" and format_magnitude(500, 20) == "500 ± 20"
