"""Sweeps: the folders of their jobs, their table, resuming them, launchers and W&B agents."""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from math import inf, nan
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY, soak
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from pages import make_job
from processes import Process, rows, rows_without_times, run_to_end
from processes import run as command_line
from rich.console import Console

import cli
import train
from cli.command_line import CONFIGS, parse_command_line
from cli.config_file import read_config
from cli.job import fit_to_overrides
from common.errors import UserError
from common.text import format_magnitude
from config import Config, GPTConfig, TokenizerConfig
from generation import KVCache
from interop import read_starting_model
from sweeps import jobs as sweep_jobs
from sweeps import page as sweep_page
from sweeps.figures import kv_cache_bytes
from sweeps.ranking import Ranking, reproduce_command
from sweeps.runs import Run, identify, read_run, read_sweep
from sweeps.table import figure_names, print_sweep, write_csv
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
    best = Ranking(read_sweep(swept)).best_run
    line = next(
        line
        for line in (swept.parent / "said.txt").read_text().splitlines()
        if line.startswith("reproduce")
    )
    python, script, *argv = shlex.split(line.removeprefix("reproduce"))
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
    monkeypatch.setattr(sweep_page, "write_sweep_page", lambda folder, ranking: None)

    def run(*argv, job) -> tuple[int, list[float | None]]:
        returned: list[float | None] = []
        monkeypatch.setattr(sweep_jobs, "run_job", lambda *args: returned.append(run_job(*args)))
        monkeypatch.setattr(sys, "argv", ["train.py"])
        GlobalHydra.instance().clear()
        configure = partial(cli.configure, read_model=read_starting_model)
        try:
            argv = ["-m", "hydra.sweep.dir=sweep", *argv]
            sweep_jobs.run_sweep(parse_command_line(argv), configure, job, report=print)
        except SystemExit as e:
            return e.code, returned
        return 0, returned

    return run


@pytest.mark.slow
def test_a_job_without_a_loss_is_a_failed_trial(sweep):
    errors = UserError("wrong"), ZeroDivisionError(), OSError(28, "full"), Panic("in Rust")
    outcomes = dict(enumerate([1.5, nan, inf, *errors], 1))

    def job(job: cli.Job) -> float:
        outcome = outcomes[job.config.seed]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    seeds = ",".join(map(str, outcomes))
    assert sweep(f"seed={seeds}", job=job) == (1, [1.5] + [None] * 6)
    folders = [Path("sweep", f"seed={seed}") for seed in outcomes]
    assert [bool(read_run(path).failure) for path in folders] == [False] * 3 + [True] * 4
    has_traceback = ["Traceback" in (path / "log.txt").read_text() for path in folders[3:]]
    assert has_traceback == [False, True, False, True]  # of bugs only
    sweep(f"seed={seeds}", "resume=auto", job=lambda job: 2.0)
    assert not any(read_run(path).failure for path in folders)


JOB_SETTINGS = "optim.lr=1e-3", "eval.every=5", "seed=1,2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "are_same"),
    [
        (["eval.every=5", "optim.lr=0.001", "seed=2,1"], True),  # typed otherwise, in another order
        (["seed=1,2", "eval.every=5", "optim.lr=.001,2e-3"], True),  # grows in another direction
        (["seed=3,1,2", "eval.every=5", "optim.lr=1e-3", "model=default"], True),  # a preset's
        ([*JOB_SETTINGS, "max_steps=99999", "wandb.mode=disabled"], True),  # continues them
        ([*JOB_SETTINGS, "max_steps=99998,99999"], False),
        (["optim.lr=1e-3", "eval.every=6", "seed=1,2"], False),
        (["seed=range(1,3)", "optim.lr=choice(1e-3)", "eval.every=5"], True),
        ([*JOB_SETTINGS, "model.head_dim=32"], True),  # what null stands for
        ([*JOB_SETTINGS, "data=shakespeare", "data=stdlib"], True),  # the last value counts
        ([*JOB_SETTINGS, "seed=1,1,2"], True),
        ([*JOB_SETTINGS, "optim=adamw"], False),
        (["optim.lr=2e-3", "eval.every=5", "seed=1,2"], False),
    ],
)
def test_a_job_is_its_settings_in_every_call(again, are_same, sweep):
    jobs: list[cli.Job] = []
    sweep(*JOB_SETTINGS, job=lambda job: jobs.append(job) or 1.0)
    first = {job.config.run_dir for job in jobs}
    sweep(*again, "resume=auto", job=lambda job: jobs.append(job) or 1.0)
    folders = [job.config.run_dir for job in jobs[2:]]
    assert len(first) == 2
    assert first <= {*folders} if are_same else not first & {*folders}
    assert {job.config.resume for job in jobs} == {"auto"}
    shutil.copytree(jobs[0].config.run_dir, "sweep/a copy")
    assert len(read_sweep(Path("sweep"))) == len(first | {*folders})


@pytest.mark.slow
def test_settings_of_a_preset_and_the_same_typed_are_one_variant(sweep):
    run, typed = partial(sweep, job=lambda job: 1.0), ["batch_size=12", "max_steps=400"]
    run("seed=1", *typed)
    run("seed=2", "model=default", *typed, "resume=auto")
    run("seed=3", "model=default,small", *typed, "resume=auto")
    runs = read_sweep(Path("sweep"))
    assert [len(variant.runs) for variant in Ranking(runs).variants] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "refused",
    [
        ["wandb.mode=disabled", "wandb.project=x"],
        ["model.n_head=3"],
        ["model.n_kv_head=3,5"],
        ["device=cuda:99"],
        ["data=text", "data.path=nowhere"],
        ["init_from=nowhere"],
        ["eval.every=5,-1"],
    ],
)
def test_a_sweep_without_a_possible_job_writes_nothing(refused, sweep):
    sweep("seed=1", job=lambda job: 1.0)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for resume in ("resume=auto", "hydra.sweep.dir=new"):
        with pytest.raises(UserError, match=refused[-1].partition("=")[0]):
            sweep("seed=1,2", *refused, resume, job=lambda job: 1.0)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert not Path("new").exists()


def test_fixed_settings_are_checked_beside_an_interval():
    settings = ["data=text", "data.path=nowhere", "optim.lr=tag(log,interval(1e-3,3e-2))"]
    overrides = OverridesParser.create().parse_overrides(settings)
    configure = partial(cli.configure, read_model=pytest.fail)
    with pytest.raises(UserError, match="nowhere"):
        sweep_jobs.check_grid(None, overrides, configure)
    sweep_jobs.check_grid(None, overrides[2:], configure)


@pytest.mark.parametrize("key", ["optim.lr", "model.block_size", "attention.every"])
def test_a_typed_setting_is_not_that_which_a_pretrained_model_gets(key):
    config = Config(init_from="gpt2")
    untyped = identify(config, ["init_from"])
    assert untyped != identify(config, ["init_from", key])
    other_preset = config.with_value(key, attrgetter(key)(config) / 2)
    assert untyped != identify(other_preset, ["init_from"])


def test_a_vocabulary_that_a_short_text_cannot_fill_is_shown_as_it_is(tmp_path):
    for size, real in ((300, 300), (5000, 334)):
        settings = {"tokenizer.vocab_size": str(size)}
        make_job(tmp_path, settings, 1.0, L=1, H=2, T=8, vocab=real, maps=False)
    shown = [run.settings["tokenizer.vocab_size"] for run in read_sweep(tmp_path)]
    assert shown == ["300", "334 of 5000"]


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


@pytest.mark.slow
def test_a_call_that_is_refused_leaves_the_finished_jobs_as_they_were(tmp_path, text_file):
    text, table = tmp_path / "my.txt", tmp_path / "sweep" / "sweep.csv"
    original = text_file.read_bytes()
    text.write_bytes(original)
    call = ["-m", *small_jobs(text), "hydra.sweep.dir=sweep"]
    run_to_end(tmp_path, *call, "seed=1,2")
    before = table.read_bytes()
    text.write_bytes(original + b"more\n")
    said = run_to_end(tmp_path, *call, "seed=1", "max_steps=8", "resume=auto", status=1)
    assert re.search(r"^refused +seed=1: ", said, re.MULTILINE)
    assert table.read_bytes() == before
    text.write_bytes(original)
    said = run_to_end(tmp_path, "sweep", script="sweeps")
    assert table.read_bytes() == before and not re.search(r"^refused", said, re.MULTILINE)
    run_to_end(tmp_path, *call, "seed=1,2", "max_steps=8", "resume=auto")
    lines = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [int(line["tokens"]) for line in lines] == [8 * 4 * 32] * 2
    assert "max_steps" not in lines[0]  # which is the same in both


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
        (["hydra/sweeper=nevergrad"], ["pip install hydra-nevergrad-sweeper"]),
        (["hydra/launcher=ray_aws"], ["pip install hydra-ray-launcher"]),
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
    assert Ranking(runs).best_run == runs[1]
    runs[1].config.data.field = "body"
    assert Ranking(runs).best_run is None
    assert [variant.runs for variant in Ranking(runs).variants] == [[run] for run in runs]


def test_the_table_has_the_last_metrics_of_a_task_without_their_errors_within_a_run():
    metrics = {"task/repeated_loss": 0.5, "task/repeated_loss_se": 0.1, "val/in_context_score": 2.0}
    run = run_of({}, 1.0, **metrics)
    names = figure_names(Ranking([run]).variants, "val/loss")
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
    assert [setting.settings["a"] for setting in Ranking(runs).variants][:3] == ["6", "3", "2"]
    assert Ranking(runs).variants[-1].settings["a"] == "4"
    assert (
        Ranking(runs).best_run.settings == {"a": "6", "seed": "1"}
        and len(Ranking(runs).variants[0].finished) == 1
    )
    assert Ranking([run_of({"a": "1"}, nan)]).best_run is None and Ranking([]).best_run is None
    one, other = run_of({"v": "1"}, 2.0), run_of({"v": "2"}, 1.0, vocabulary=66)
    assert (
        Ranking([one]).metric == "val/loss" and Ranking([one, other]).metric == "val/bits_per_byte"
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


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "\ud800", '=1+1,"x"', "é" * 200])
def test_any_setting_can_be_printed(text, tmp_path):
    runs = [
        run_of({"data.path": text, "seed": seed}, loss) for seed, loss in (("1", nan), ("2", 1))
    ]
    assert all(line.isprintable() for line in printed(runs, 80, tmp_path))
    write_csv(tmp_path / "sweep.csv", Ranking(runs))
    with (tmp_path / "sweep.csv").open(encoding="utf-8", newline="") as file:
        expected = text.replace("\ud800", "\\ud800")
        assert [line["data.path"] for line in csv.DictReader(file)] == [expected] * 2


def printed(runs: list[Run], width: int, tmp_path: Path) -> list[str]:
    console = Console(width=width, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_sweep(console, tmp_path, runs)
    return console.export_text().splitlines()


# --- presets of sweeps ----------------------------------------------------------------------------


def overrides_of(*argv: str) -> list[Override]:
    """The settings typed, and those that a sweep's preset adds."""
    GlobalHydra.instance().clear()
    return sweep_jobs.sweep_settings(parse_command_line(["-m", *argv]))[1]


def jobs(*argv: str) -> int | None:
    """The number of jobs of a sweep."""
    GlobalHydra.instance().clear()
    composed, overrides = sweep_jobs.sweep_settings(parse_command_line(["-m", *argv]))
    return sweep_jobs.count_jobs(composed.hydra.sweeper, overrides)


def expanded(*argv: str) -> list[Config]:
    """The configurations of the jobs, as Hydra's own sweeper and composer make them."""
    made = BasicSweeper.split_arguments(overrides_of(*argv), None)[0]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return [OmegaConf.to_object(compose("config", job)) for job in made]


def test_the_texts_of_a_sweep_arrive_as_typed():
    texts = ["007", "20261128_0310", "1e3", "true", "é.txt", "a b"]
    swept = expanded(f"wandb.project={','.join(texts)},null")
    assert [config.wandb.project for config in swept] == [*texts, None]
    (config,) = expanded("wandb.project='a,b'")
    assert config.wandb.project == "a,b"


@pytest.mark.parametrize("values", ["007", "no", "20261128_0310,x", "1.50,x", "'true,x'"])
def test_a_text_that_would_be_changed_is_refused_in_the_preset_of_a_sweep(values, tmp_path):
    (tmp_path / "sweep").mkdir()
    preset = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      wandb.project: "
    (tmp_path / "sweep" / "mine.yaml").write_text(preset + values)
    GlobalHydra.instance().clear()
    command_line = parse_command_line(["-m", "--config-dir", str(tmp_path), "sweep=mine"])
    with pytest.raises(UserError, match=r"wandb\.project"):
        sweep_jobs.sweep_settings(command_line)


@pytest.mark.parametrize("device, width, size", [("cpu", 64, 4), ("cpu", 384, 2), ("cuda", 64, 2)])
def test_the_kv_cache_is_counted_in_the_precision_of_decoding(device, width, size):
    model = GPTConfig(9, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=width)
    config = Config(device=device, precision="bf16", model=model)
    assert kv_cache_bytes(config) == size * 2 * 2 * 8 * 2 * width // 4


@pytest.mark.soak
def test_every_job_of_a_sweep_preset_is_valid():
    for name in cli.find_presets()["sweep"]:
        made = expanded(f"sweep={name}")
        assert len({str(config) for config in made}) == len(made) == jobs(f"sweep={name}")
        for config in made:
            fit_to_overrides(config, [], log=lambda line: None).check()
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


def test_the_task_of_a_sweep_can_be_sent_to_another_process(monkeypatch, tmp_path):
    cloudpickle = pytest.importorskip("cloudpickle", reason="the launchers are not installed")
    sent: list[bytes] = []

    def launch(task, arguments):
        cloudpickle.register_pickle_by_value(train)  # as if it were __main__, which workers lack
        try:
            sent.append(cloudpickle.dumps(task))
        finally:
            cloudpickle.unregister_pickle_by_value(train)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(cli, "run_hydra", launch)
    GlobalHydra.instance().clear()
    with pytest.raises(UserError, match="no job could be started"):  # because none was run
        train.main(parse_command_line(["-m", "seed=1,2"]))
    assert callable(cloudpickle.loads(sent[0]))


@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        soak(["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]),
    ],
)
def test_launchers_run_jobs_in_their_own_processes(launcher, command, tmp_path, text_file):
    shutil.copy(text_file, tmp_path / "é.txt")
    done = command(
        "train.py",
        "-m",
        *launcher,
        *small_jobs(text_file),
        "data.path='é.txt','missing.txt'",
        "hydra.sweep.dir=sweep",
        env={"OMP_NUM_THREADS": None, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert [run.status for run in read_sweep(tmp_path / "sweep")] == ["finished", "failed"]
    assert re.search(r"^failed .*: data\.path=missing\.txt ", done.stdout, re.MULTILINE)
    assert len(list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))) == 2


@pytest.mark.slow
def test_the_command_of_a_wandb_agent_trains(tmp_path, text_file):
    search = yaml.safe_load((ROOT / "wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {
        key: given.get("value", given.get("min", given.get("values", [None])[0]))
        for key, given in search["parameters"].items()
    }
    assert search["metric"] == {"name": "val/loss", "goal": "minimize"}
    assert search["command"][-1] == "${args_no_hyphens}"
    done = command_line(
        tmp_path,
        "train.py",
        *(f"{key}={value}" for key, value in chosen.items()),
        *small_jobs(text_file, "model.n_head=4"),
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


JOB_PARTS = ["multirun.yaml", "seed=1/.job.lock", "seed=1/.hydra/.overrides.yaml.part"]


@pytest.mark.parametrize("count", range(len(JOB_PARTS) + 1))
def test_a_sweep_resumes_that_was_killed_before_its_first_job_was_recorded(tmp_path, count):
    folder = tmp_path / "sweep"
    for name in JOB_PARTS[:count]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert sweep_jobs.find_sweep(str(folder), resume=True) == folder
    (folder / "seed=1").mkdir(parents=True, exist_ok=True)
    (folder / "seed=1" / "notes.txt").touch()
    with pytest.raises(UserError, match="holds no sweep"):
        sweep_jobs.find_sweep(str(folder), resume=True)
