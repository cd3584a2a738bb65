"""Sweeps: the folders of their jobs, their table, resuming them, launchers and W&B agents."""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import product
from math import inf, nan
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TINY
from filelock import FileLock
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from processes import Process, fault_at_call, rows, rows_without_times, run_to_end
from processes import run as command_line
from rich.console import Console

import cli
import report.page
import sweeps
from cli.arguments import CONFIGS, parse_command_line
from cli.config_file import read_config
from config import Config, GPTConfig, TokenizerConfig
from model import GPT, KVCache
from report.run import kv_cache_bytes
from report.sweep import (
    Run,
    find_best_run,
    rank_variants,
    ranking_metric,
    read_sweep,
    reproduce_command,
)
from report.sweep_table import write_csv

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
        assert int(line["parameters"]) == GPT(config.model).num_parameters()
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
        report.page,
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

        def init(self, config):
            if config.n_kv_head == 1:
                raise ZeroDivisionError
            make(self, config)

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
        (["max_steps=1.5"], ["max_steps: ", "'1.5'"]),
        (["model=small,gpt3"], ["gpt3", "gpt2"]),
        (["hydra.sweep.dir=/dev/null/x"], ["/dev/null/x"]),
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
        ((2.0, 2.1, 2.5, 2.6), "best", ["x=1"]),
        ((2.0, None, 2.01, None), "lowest", ["x=1"]),
    ],
    ids=["tied", "significant", "one seed"],
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
    assert not any("␛" in line for line in lines)  # no color code is printed as text


def printed(runs: list[Run], width: int, tmp_path: Path) -> list[str]:
    console = Console(width=width, record=True, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    sweeps.print_sweep(console, tmp_path, runs)
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


# --- presets of sweeps ----------------------------------------------------------------------------


def overrides_of(*argv: str) -> list[Override]:
    """The settings typed, and those that a sweep's preset adds."""
    GlobalHydra.instance().clear()
    return sweeps.sweep_overrides(parse_command_line(["-m", *argv]))


def jobs(*argv: str) -> int | None:
    """The number of jobs of a sweep."""
    return sweeps.count_jobs(overrides_of(*argv))


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


def test_the_number_of_jobs_is_known_before_they_begin():
    assert jobs("seed=1") == 1 and jobs("seed=range(1,4)") == 3
    assert jobs("model=glob(small*)") == len(
        [name for name in cli.find_presets()["model"] if name.startswith("small")]
    )
    assert jobs("optim.lr=1e-3,.01", "compile=true,auto") == 4
    assert jobs("optim.lr=interval(0,1)") is None  # for a sweeper that chooses as it goes
    assert jobs("sweep=kv_heads", "max_steps=3,4") == 4 * 3 * 2


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
        counts[shape] = sum(p.numel() for p in GPT(config).blocks.parameters() if p.dim() > 1)
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
