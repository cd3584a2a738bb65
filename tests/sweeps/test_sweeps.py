"""Sweeps: the folders of their jobs, their table, resuming them, launchers and W&B agents."""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import inf, nan
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY, soak
from pages import make_job
from processes import Process, rows, rows_without_times, run_to_end
from rich.console import Console
from run_folders import write_configuration, write_fingerprint

import cli
import train
from callback import JobCallback
from cli.command_line import PRESETS, split_options
from cli.folders import find_job_folder, hash_settings
from cli.job import complete_settings
from common.errors import UserError
from common.text import format_magnitude
from config import Config, GPTConfig, TokenizerConfig
from generation.decoder import allocate_cache
from kernels import DTYPES
from model import KVCache
from run.config_file import absolute_paths
from run.row import Row
from run.run_dir import RunDir
from sweeps import jobs as sweep_jobs
from sweeps import page as sweep_page
from sweeps.figures import kv_cache_bytes
from sweeps.ranking import Ranking, reproduce_command
from sweeps.runs import JobRecord, Run, read_record, read_run, read_sweep, write_record
from sweeps.sweep import Sweep
from sweeps.table import print_sweep, write_csv
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


@pytest.fixture
def compose(run_hydra, monkeypatch):
    """compose(*argv) → the jobs of a sweep that Hydra is about to start."""

    def compose(*argv: str) -> list[cli.Job]:
        outcome = []

        def on_multirun_start(callback, config, **more) -> None:
            try:
                outcome.extend(Sweep(config).compose_jobs())
            except UserError as e:
                outcome.append(e)
            sys.exit()

        with monkeypatch.context() as patch:
            patch.setattr(JobCallback, "on_multirun_start", on_multirun_start)
            assert run_hydra("-m", *argv) == 0
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        return outcome

    return compose


# --- a sweep's folder -----------------------------------------------------------------------------


def test_each_job_has_its_own_folder_and_a_failed_job_does_not_stop_the_others(swept):
    runs = read_sweep(swept)
    assert len(runs) == 6
    for run in runs:
        heads, seed = run.settings["model.n_kv_head"], run.settings["seed"]
        assert run.path.name.startswith(f"model.n_kv_head={heads},seed={seed}_")
        assert run.record.settings["max_steps"] == "4"
        if heads == "3":
            assert (run.status, run.config, run.rows) == ("failed", None, [])
            assert "model.n_kv_head=3" in run.failure and "model.n_head=2" in run.failure
        else:
            assert (run.status, run.failure, run.rows) == ("finished", "", rows(run.path))
            assert (run.config.model.n_kv_head, run.config.seed) == (int(heads), int(seed))


def test_sweep_csv_holds_the_numbers_of_the_runs(swept):
    lines = list(csv.DictReader((swept / "sweep.csv").open(encoding="utf-8")))
    assert [line["status"] for line in lines] == ["finished"] * 4 + ["failed"] * 2
    for line in lines[:4]:
        metrics, model = rows(swept / line["run"]), read_run(swept / line["run"]).config.model
        losses = [row["val/loss"] for row in metrics if row["step"] and "val/loss" in row]
        assert float(line["val/loss"]) == min(losses)
        assert int(line["tokens"]) == metrics[-1]["tokens"] == 4 * 4 * 32
        scores = [metrics[-1][key] for key in metrics[-1] if key.startswith("heads/induction/")]
        assert float(line["heads/induction"]) == max(scores)
        assert int(line["parameters"]) == build_model(model).num_parameters()
        assert (
            int(line["kv_cache_bytes"])
            == KVCache(model, 1, model.block_size, dtype=torch.float32).nbytes
        )


@pytest.mark.slow
def test_the_printed_command_reproduces_the_best_run_bit_for_bit(swept, tmp_path):
    best = Ranking(read_sweep(swept)).best_run
    said = (swept.parent / "said.txt").read_text()
    (command,) = re.findall("^reproduce +(.*)$", said, re.MULTILINE)
    assert command == reproduce_command(best)
    _, _, *argv = shlex.split(command)
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
    assert re.search(r"^failed +model\.n_kv_head=3,seed=2_\w+: ", done.stdout, re.MULTILINE)


# --- jobs that fail or repeat ---------------------------------------------------------------------


@pytest.fixture
def sweep(monkeypatch, run_hydra, tmp_path):
    """Run a sweep in this process, whose jobs call a function instead of training.

    Returns the exit status and what each job returned to the sweeper.
    """
    run_job, folder = sweep_jobs.run_job, tmp_path / "start"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sweep_page, "write_sweep_page", lambda folder, ranking: None)

    def run(*argv, job) -> tuple[int, list[float | None]]:
        returned: list[float | None] = []

        def record(*arguments) -> float | None:
            returned.append(run_job(*arguments))
            return returned[-1]

        monkeypatch.setattr(sweep_jobs, "run_job", record)
        monkeypatch.setattr(train, "run", job)
        return run_hydra("-m", "hydra.sweep.dir=sweep", *argv), returned

    return run


@pytest.mark.slow
def test_a_job_without_a_loss_is_a_failed_trial(sweep, text_file):
    errors = UserError("wrong"), ZeroDivisionError(), OSError(28, "full")
    outcomes = dict(enumerate([1.5, nan, inf, *errors], 1))

    def job(job: cli.Job) -> float:
        outcome = outcomes[job.config.seed]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    seeds = ",".join(map(str, outcomes))
    argv = [f"seed={seeds}", "data=text", f"data.path={text_file}"]
    assert sweep(*argv, job=job) == (1, [1.5] + [None] * 5)
    folders = [next(Path("sweep").glob(f"seed={seed}_*")) for seed in outcomes]
    assert [bool(read_run(path).failure) for path in folders] == [False] * 3 + [True] * 3
    has_traceback = ["Traceback" in (path / "log.txt").read_text() for path in folders[3:]]
    assert has_traceback == [False, True, False]  # of bugs only
    sweep(*argv, "resume=auto", job=lambda job: 2.0)
    assert not any(read_run(path).failure for path in folders)


SAME = "optim.lr=1e-3", "eval.every=5", "seed=1,2"


@pytest.mark.parametrize(
    ("again", "are_same"),
    [
        (["eval.every=5", "optim.lr=.001", "seed=range(1,3)"], True),  # typed otherwise
        (["seed=1,2", "eval.every=5", "optim.lr=.001,2e-3"], True),  # grows in another direction
        (["seed=1,2", "eval.every=5", "optim.lr=1e-3", "model=default"], True),  # a preset's
        ([*SAME, "max_steps=99999", "wandb.mode=disabled", "resume=auto"], True),  # continues them
        ([*SAME, "max_steps=99998,99999"], False),
        ([*SAME, "model.n_kv_head=4"], False),  # what null stands for
        (["seed=1,2", "eval.every=5", "optim.lr=2e-3"], False),
    ],
)
def test_a_job_is_what_was_composed_for_it(again, are_same, compose):
    first = {hash_settings(job) for job in compose(*SAME)}
    others = {hash_settings(job) for job in compose(*again)}
    assert len(first) == 2
    assert first <= others if are_same else not first & others


def test_jobs_have_presets_of_ones_own(sweep, tmp_path, text_file):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("name: adamw\nlr: 0.004\n")
    rates: list[float] = []
    argv = ["--config-dir", str(tmp_path), "optim=glob(m*)", "data=text", f"data.path={text_file}"]
    sweep(*argv, job=lambda job: rates.append(job.config.optim.lr) or 1.0)
    assert rates == [0.004, 0.006]  # of mine and muon
    mine, _ = read_sweep(Path("sweep"))
    assert mine.settings == {"optim": "mine"}
    assert reproduce_command(mine).startswith(f"python train.py --config-dir={tmp_path} optim=mine")


def test_runs_of_a_row_have_one_text_and_one_number_of_steps_and_a_copy_counts_once(tmp_path):
    for seed in "1234":
        make_job(tmp_path, {"seed": seed}, maps=False)
    paths = sorted(tmp_path.glob("seed=*"))
    shutil.copytree(paths[0], tmp_path / "a copy")
    third = RunDir(paths[2])
    fourth = RunDir(paths[3])
    write_record(third, read_record(third).continued(10, 20).continued(15, 20))
    write_fingerprint(fourth.path, 20, "0123456789ab")
    write_record(third, read_record(third).continued(10, 30))
    shown = [run.settings for run in read_sweep(tmp_path)]
    assert [settings["max_steps"] for settings in shown] == ["20"] * 2 + [
        "20, then 30 from step 10",
        "20",
    ]
    assert [settings["text"] for settings in shown] == ["0" * 10] * 3 + ["0123456789"]
    ranking = Ranking(read_sweep(tmp_path))
    assert len(ranking.variants) == 3 and ranking.best_run is None  # of several texts


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (["wandb.mode=disabled", "wandb.project=x"], "wandb.project"),
        (["model.n_kv_head=3,5"], "model.n_kv_head=3"),
        (["wandb.name=x"], "wandb.name"),
        (["device=cuda:99"], "cuda:99"),
        (["data=text", "data.path=nowhere"], "nowhere"),
        (["eval.every=5,-1"], "eval.every=-1"),
        (["seed=1,a"], "seed: .*'a'"),
        (["max_steps=range(3,1)"], "max_steps"),
        (["model=small,gpt3"], "gpt3"),
        (["hydra/sweeper=nevergrad"], "pip install hydra-nevergrad-sweeper"),
        (["hydra.sweep.dir=/dev/null/x"], "/dev/null/x"),
        (["hydra.sweep.dir=mine", "resume=auto"], "mine"),
        (["hydra.sweep.dir=sweep"], "resume=auto"),
    ],
)
def test_a_sweep_that_cannot_start_is_refused_and_writes_nothing(refused, named, sweep, capsys):
    Path("mine").mkdir()
    Path("mine/sweep.csv").write_text("mine")
    make_job(Path("sweep"), {"seed": "1"}, maps=False)
    before = sorted(Path().rglob("*"))
    assert sweep("seed=1,2", "hydra.sweep.dir=new", *refused, job=pytest.fail) == (1, [])
    error = capsys.readouterr().err
    assert re.match(f"error: .*{named}", error) and error.count("\n") == 1, error
    assert sorted(Path().rglob("*")) == before


def test_fixed_settings_are_checked_beside_an_interval(compose):
    settings = ["data=text", "data.path=nowhere", "optim.lr=tag(log,interval(1e-3,3e-2))"]
    sweeper = "hydra.sweeper._target_=another.Sweeper"
    cli.configure(compose(*settings[2:], sweeper)[0], pytest.fail)
    with pytest.raises(UserError, match="nowhere"):
        cli.configure(compose(*settings, sweeper)[0], pytest.fail)
    with pytest.raises(UserError, match="optuna"):
        compose(settings[2])


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resume_auto_runs_only_the_missing_jobs(copy, swept, tmp_path, text_file):
    (missing,) = swept.glob("model.n_kv_head=1,seed=2_*")
    (kept_job,) = copy.glob("model.n_kv_head=2,seed=1_*")
    shutil.rmtree(copy / missing.name)
    before = [run for run in read_sweep(copy) if run.status == "finished"]
    kept = (kept_job / "metrics.jsonl").stat().st_mtime_ns
    # In another order, so that the jobs have other numbers.
    again = ["-m", "seed=2,1", "model.n_kv_head=2,1", "hydra.sweep.dir=sweep", "resume=auto"]
    said = run_to_end(
        tmp_path, *again, *small_jobs(text_file), status=1
    )  # others there have failed
    assert len(before) == 3
    assert len(re.findall(r"^[1-4]/4 .* \d\.\d{4} val/loss ", said, re.MULTILINE)) == 4
    assert (kept_job / "metrics.jsonl").stat().st_mtime_ns == kept
    assert rows_without_times(copy / missing.name) == rows_without_times(missing)


def test_a_begun_job_continues_only_on_its_text_and_to_no_fewer_steps(copy, text_file, compose):
    def prepare(max_steps: int) -> cli.Job:
        argv = ["model.n_kv_head=2", "seed=1,2", *small_jobs(text_file), f"max_steps={max_steps}"]
        return sweep_jobs.prepare_job(compose(*argv)[0], run_dir, pytest.fail)

    (path,) = copy.glob("model.n_kv_head=2,seed=1_*")
    run_dir = RunDir(path)
    record = read_record(run_dir)
    with pytest.raises(UserError, match="max_steps=3"):
        prepare(3)
    text = text_file.read_bytes()
    text_file.write_bytes(text.swapcase())
    for steps in (4, 8):
        with pytest.raises(UserError, match="another text"):
            prepare(steps)
    text_file.write_bytes(text)
    assert prepare(8).config.max_steps == 8
    assert read_record(run_dir) == replace(record, schedule=[[0, 4], [4, 8]])
    run = read_run(path)
    assert run.status == "unfinished" and reproduce_command(run) is None
    assert prepare(4).config.max_steps == 4  # it has not gone on to 8
    assert read_record(run_dir) == record


def test_a_refused_call_leaves_finished_jobs_as_they_are(copy, sweep, text_file):
    before = read_sweep(copy)
    argv = ["model.n_kv_head=2", "seed=1,2", *small_jobs(text_file), f"hydra.sweep.dir={copy}"]
    status, _ = sweep(*argv, "resume=auto", "max_steps=3", job=pytest.fail)
    assert status == 1
    refused = read_sweep(copy)
    assert sum("max_steps=3" in run.failure for run in refused) == 2
    assert [replace(run, failure="") for run in refused] == [
        replace(run, failure="") for run in before
    ]
    _, losses = sweep(*argv, "resume=auto", job=lambda job: 2.0)
    assert losses == [2.0, 2.0] and read_sweep(copy) == before


@pytest.mark.slow
def test_a_stopped_sweep_is_saved_and_resumes(swept, tmp_path, text_file, compose):
    argv = ["-m", "model.n_kv_head=2,1", "seed=1", *small_jobs(text_file), "hydra.sweep.dir=sweep"]
    job = find_job_folder(tmp_path / "sweep", compose(*argv[1:-1])[0])
    process = Process(tmp_path, *argv, "max_steps=10000", "wandb.mode=disabled")
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
    row = str({key: value for key, value in settings.items() if key != "seed"})
    record = JobRecord(name, row, settings, list(settings), [[0, 10]])
    return Run(Path("none", name), settings, record, config, [Row(last)], status, "", "text")


def test_runs_with_losses_of_other_tokens_are_not_ranked():
    runs = [run_of({"optim.lr": rate}, loss) for rate, loss in (("1", 2.0), ("2", 1.0))]
    assert Ranking(runs).best_run == runs[1]
    runs[1].config.data.val_max_tokens = 7
    assert Ranking(runs).best_run is None
    assert [variant.runs for variant in Ranking(runs).variants] == [[run] for run in runs]


def test_a_job_without_a_checkpoint_yet_is_in_the_row_of_its_settings():
    runs = [run_of({"optim.lr": "1", "seed": seed}, 2.0) for seed in "12"]
    runs[1] = replace(runs[1], rows=[], status="unfinished", text="")
    assert len(Ranking(runs).variants) == 1 and Ranking(runs).best_run is runs[0]


OWN_SWEEP = """# @package _global_
defaults:
  - override /experiment: induction
  - override /data: text
max_steps: 7
data:
  path: notes.txt
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      seed: 1,2
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["sweep=kv_heads", "seed=1", "model.n_kv_head=1,2", "max_steps=3"],
        ["sweep=paper_sinks", "seed=301"],
        ["optim=adamw,muon", "optim.lr=0.01", "data.path='a,b.txt','c d.txt'"],
        ["experiment=speedrun,default", "tokenizer=char", "wandb.project=it's"],
        ["--config-dir", "own", "sweep=mine", "optim.lr=0.01"],
        ["--config-dir", "own", "sweep=tuned"],
        ["init_from=openai-community/gpt2", "seed=1,2"],
    ],
)
def test_the_printed_command_of_each_job_composes_its_whole_configuration(
    argv, compose, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "sweep").mkdir(parents=True)
    (tmp_path / "own" / "sweep" / "mine.yaml").write_text(OWN_SWEEP)
    (tmp_path / "own" / "sweep" / "tuned.yaml").write_text(f"{OWN_SWEEP}init_from: model\n")
    (tmp_path / "model").mkdir()
    for job in compose(*argv):
        record = sweep_jobs.record_job(job).continued(0, job.config.max_steps)
        is_on_hub = job.config.init_from == "openai-community/gpt2"
        expected = job.config if is_on_hub else absolute_paths(job.config)
        monkeypatch.chdir(tmp_path / "own")  # where a relative path would be another one
        run = Run(tmp_path, {}, record, job.config, [], "finished", "")
        _, _, *typed = shlex.split(reproduce_command(run))
        options, settings = split_options(typed)
        again = cli.compose_job(complete_settings(options, settings), job.source)
        assert again.config == expected
        monkeypatch.chdir(tmp_path)


def test_the_printed_command_leaves_out_what_only_other_jobs_use():
    run = run_of({"optim": "adamw", "optim.momentum": "0.9", "optim.lr": "0.1"}, 1.0)
    command = reproduce_command(run)
    assert shlex.split(command) == ["python", "train.py", "optim=adamw", "optim.lr=0.1"]


def test_variants_are_ranked_by_mean_and_those_without_a_result_come_last():
    runs = [
        run_of({"a": a, "seed": seed}, loss, status)
        for a, seed, loss, status in (
            ("1", "1", nan, "finished"),
            ("2", "1", 1.0, "finished"),
            ("2", "2", 2.0, "finished"),
            ("3", "1", 0.1, "unfinished"),
            ("4", "1", None, "finished"),
            ("5", "1", 1.0, "finished"),
            ("5", "2", 0.1, "failed"),
        )
    ]
    ranking = Ranking(runs)
    names = [variant.settings["a"] for variant in ranking.variants]
    assert names[:2] == ["5", "2"] and names[-1] == "3"
    assert ranking.best_run is runs[5] and ranking.metric == "val/loss"
    assert Ranking([run_of({"a": "1"}, nan)]).best_run is None and Ranking([]).best_run is None
    other = run_of({"a": "6"}, 1.0, vocabulary=66)
    assert Ranking([*runs, other]).metric == "val/bits_per_byte"


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


def test_texts_arrive_as_they_are_and_a_number_in_a_preset_is_refused(
    tmp_path, run_hydra, capsys, compose
):
    texts = ["007", "20261128_0310", "1e3", "true", "é.txt", "a b"]
    (tmp_path / "sweep").mkdir()
    preset = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      wandb.project: "
    for argv, value in (
        ([f"wandb.project={','.join(texts)}"], "unused"),
        (["sweep=mine"], f"'{','.join(texts)}'"),
    ):
        (tmp_path / "sweep" / "mine.yaml").write_text(preset + value, encoding="utf-8")
        jobs = compose("--config-dir", str(tmp_path), *argv)
        assert [job.config.wandb.project for job in jobs] == texts
    (job,) = compose("-m", "wandb.tags=007,a b", "wandb.notes=Well, it's new")
    assert (job.config.wandb.tags, job.config.wandb.notes) == ("007,a b", "Well, it's new")
    (tmp_path / "sweep" / "mine.yaml").write_text(f"{preset}007")
    assert run_hydra("-m", "--config-dir", str(tmp_path), "sweep=mine") == 1
    assert re.search(r"mine\.yaml.*wandb\.project", capsys.readouterr().err)


@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("more", [{"n_kv_head": 2}, {"head_dim": 6, "value_head_dim": 10}])
def test_the_kv_cache_has_the_bytes_that_decoding_allocates(precision, width, more):
    model = GPTConfig(9, block_size=8, n_layer=2, n_head=4, n_embd=width, **more)
    cache = allocate_cache(build_model(model).to(DTYPES[precision]), 1)
    assert kv_cache_bytes(Config(device="cpu", precision=precision, model=model)) == cache.nbytes
    halves = kv_cache_bytes(Config(device="cuda", precision="bf16", model=model))
    assert 2 * halves == cache.nbytes


@pytest.mark.soak
def test_every_job_of_a_sweep_preset_is_valid(compose):
    for name in PRESETS["sweep"]:
        jobs = compose(f"sweep={name}")
        assert len({hash_settings(job) for job in jobs}) == len(jobs) > 1
        for job in jobs:
            cli.configure(job, read_model=pytest.fail, log=lambda line: None)
    typed = compose("sweep=kv_heads", "model.n_kv_head=2,4", "seed=7", "max_steps=3")
    assert [
        (job.config.model.n_kv_head, job.config.seed, job.config.max_steps) for job in typed
    ] == [(2, 7, 3), (4, 7, 3)]


def test_presets_are_implied_for_each_job(compose, tmp_path):
    write_configuration(tmp_path / "tuned", Config(experiment="finetune"))
    write_configuration(tmp_path / "own", Config(experiment="default"))
    path = f"data.path={ROOT / 'LICENSE'}"
    jobs = compose("experiment=default,speedrun", path)
    assert [job.config.data.source for job in jobs] == ["text", "shakespeare"]
    jobs = compose(f"init_from={tmp_path / 'own'},{tmp_path / 'tuned'}", path)
    assert [job.config.experiment for job in jobs] == ["default", "finetune"]


@pytest.mark.slow
def test_depth_and_width_are_compared_at_equal_parameters(compose):
    models = [job.config.model for job in compose("sweep=depth_width", "seed=1")]
    blocks = [build_model(replace(model, vocab_size=200)).blocks for model in models]
    counts = {sum(p.numel() for p in each.parameters() if p.dim() > 1) for each in blocks}
    assert len(models) == 3 and len(counts) == 1


# --- launchers ------------------------------------------------------------------------------------


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


def test_the_command_of_a_wandb_agent_is_a_run_with_the_values_that_it_chose():
    search = yaml.safe_load((ROOT / "wandb_sweep.yaml").read_text(encoding="utf-8"))
    chosen = {
        key: given.get("value", given.get("min", given.get("values", [None])[0]))
        for key, given in search["parameters"].items()
    }
    assert search["metric"] == {"name": "val/loss", "goal": "minimize"}
    assert search["command"][-1] == "${args_no_hyphens}"
    argv = [f"{key}={value}" for key, value in chosen.items()]
    assert cli.read_job(argv, pytest.fail).config.optim.lr == chosen["optim.lr"]


def test_a_large_mean_has_the_decimals_and_the_unit_of_its_standard_error():
    assert format_magnitude(1_669_333, 341_333) == "1.7 ± 0.3 M"
    assert format_magnitude(819_200, 156_000, "B") == "819 ± 156 kB"
    assert format_magnitude(12_300, None) == "12 k" and format_magnitude(500, 20) == "500 ± 20"
