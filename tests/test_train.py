"""train.py as a user runs it: commands, exit statuses, what is left on disk."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from omegaconf import OmegaConf
from processes import Process

from config import knobs, read_config, read_experiment
from files import read_rows

pytestmark = pytest.mark.slow


def on(text_file) -> list[str]:
    return [*TINY, "data=text", f"data.path={text_file}", "eval.every=5", "attention.every=5",
            "attention.tokens=16"]


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A finished run of 12 steps, to be changed."""
    return shutil.copytree(whole, tmp_path / "run")


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises_and_says_what_to_do_next(command, tmp_path, text_file):
    done = command("train.py", *on(text_file), "max_steps=10")
    assert done.returncode == 0, done.stderr
    run, = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_default", run.name)
    assert f"python sample.py run_dir=runs/{run.name}" in done.stdout
    assert "best validation loss" in done.stdout
    assert re.search(r"\ninduction +strongest L\dH\d, -?\d\.\d+( ± \d\.\d+)?: none yet \(counts "
                     r"from 0.2\)\n", done.stdout)
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "attention",
            "checkpoints"} <= {p.name for p in run.iterdir()}
    assert [sample["step"] for sample in read_rows(run / "samples.jsonl")] == [0, 5, 10]
    assert [row["step"] for row in rows(run)] == list(range(11))
    last = rows(run)[-1]
    assert last["tokens"] == 10 * 4 * 32
    # Six scores and copying, at the end the importance and two costs, with errors; three without
    # the first token too.
    assert sum(key.startswith("heads/") for key in last) == (10 + 10 + 3) * 2 * 2
    assert {"seconds/evaluate", "seconds/attention", "seconds/save"} <= last.keys()
    assert sorted(p.name for p in (run / "attention").iterdir()) == sorted(
        f"step_{step:08d}.{kind}" for step in (0, 5, 10) for kind in ("npz", "png"))
    config = read_config(run / "config.yaml")
    assert "auto" not in (config.device, config.precision, config.compile)
    assert not (tmp_path / "outputs").exists()
    said = command("sample.py", "max_new_tokens=20")  # from the newest run
    assert said.returncode == 0 and run.name in said.stderr


def test_resuming_a_finished_run_says_so_and_more_steps_extend_it(command, run):
    again = command("train.py", "run_dir=run", "resume=true")
    assert again.returncode == 0 and "is finished" in again.stdout
    longer = command("train.py", "run_dir=run", "resume=true", "max_steps=14")
    assert longer.returncode == 0, longer.stderr
    assert [row["step"] for row in rows(run)] == list(range(15))
    # what was typed first holds
    assert read_config(run / "config.yaml").model.n_embd == 32


def test_resume_auto_starts_and_continues_with_the_same_command(command, tmp_path, text_file):
    for steps in (3, 6):
        done = command("train.py", *on(text_file), "run_dir=run", "resume=auto",
                       f"max_steps={steps}")
        assert done.returncode == 0, done.stderr
        assert read_experiment(tmp_path / "run" / "config.yaml") == "default"
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(7))


def test_a_folder_that_is_not_empty_or_holds_no_run_is_refused(command, tmp_path, text_file):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for folder, resume, sentence in (("full", "false", "is not empty"),
                                     ("full", "true", "nothing to continue"),
                                     ("none", "true", "nothing to continue")):
        done = command("train.py", *on(text_file), f"run_dir={folder}", f"resume={resume}")
        assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "none").exists()


def test_a_run_cannot_go_on_with_another_model(command, whole):
    done = command("train.py", f"run_dir={whole}", "resume=true", "max_steps=15", "model.n_layer=3",
                   "seed=2")
    assert done.returncode == 1 and "model.n_layer: 2 in the run, 3 asked for" in done.stderr
    assert "seed: 1337" in done.stderr


def test_eval_only_reports_the_loss_that_was_recorded(command, tmp_path, run):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    done = command("train.py", "run_dir=run", "eval_only=true")
    assert f"validation loss {rows(tmp_path / 'run')[-1]['val/loss']:.4f}" in done.stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_text_too_short_is_refused_and_leaves_no_run(command, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    done = command("train.py", *TINY, "data=text", "data.path=short.txt")
    assert done.returncode == 1 and "too few for model.block_size=32" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_saves_and_the_run_goes_on(command, tmp_path, text_file, number, status):
    run = tmp_path / "run"
    endless = ["run_dir=run", "max_steps=100000", "checkpoint.every=0", "eval.every=0",
               "attention.every=0"]
    process = Process(tmp_path, *on(text_file), *endless)
    process.wait_for(run / "metrics.jsonl", lines=4)
    process.signal(number)
    assert process.wait() == status, process.said()
    assert "resume=true" in process.said() and "Traceback" not in process.said()
    steps = len(rows(run))
    done = command("train.py", "run_dir=run", "resume=true", f"max_steps={steps + 5}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == list(range(1, steps + 6))


def test_ctrl_c_while_torch_is_loaded_leaves_at_once(tmp_path, text_file):
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *on(text_file)], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "GLASSGPT_CACHE": str(tmp_path / "cache")})
    said = [process.stdout.readline() for _ in range(3)]
    assert said[1].startswith("loading PyTorch") and said[2].startswith("preparing")  # meanwhile
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), process.stderr.read()) == (130, "")
    assert not (tmp_path / "runs").exists()


def test_what_was_left_out_of_a_text_is_said_once(new_command, tmp_path, text_file):
    (tmp_path / "text").mkdir()
    shutil.copy(text_file, tmp_path / "text" / "a.txt")
    (tmp_path / "text" / "b.bin").write_bytes(bytes(1000))
    done = new_command("train.py", *on("text"), "max_steps=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left out of text: b.bin (binary)") == 1


def test_a_run_stopped_before_its_first_step_goes_on_too(tiny, train_here, monkeypatch, capsys):
    from training.runtime import StopSignal

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(StopSignal, "__enter__",
                      lambda self: setattr(self, "exit_status", 130) or self)
        patch.setattr(StopSignal, "__exit__", lambda *_: None)
        train_here(replace(tiny, run_dir=tiny.run_dir + " with a space"))
    assert stopped.value.code == 130
    assert "run_dir='" in capsys.readouterr().out  # as a shell takes it
    train_here(replace(tiny, run_dir=tiny.run_dir + " with a space"), resume=True)


def test_what_is_typed_on_resume_is_checked_against_the_run_and_not_against_the_defaults(
        command, tmp_path, text_file, run):
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text_file.read_bytes())
    for more in (["accumulate=4"], [f"data.path={moved}"], ["data=text", f"data.path={moved}"],
                 ["model.n_layer=2", "tokenizer=char"]):
        done = command("train.py", "run_dir=run", "resume=true", *more, "max_steps=13")
        assert done.returncode == 0, done.stderr


def test_a_run_killed_before_its_first_checkpoint_is_started_again_with_resume_auto(
        command, run):
    shutil.rmtree(run / "checkpoints")
    refused = command("train.py", "run_dir=run", "resume=true")
    assert refused.returncode == 1 and "resume=auto" in refused.stderr
    assert command("train.py", "run_dir=run", "resume=auto").returncode == 0


@pytest.mark.parametrize("script", ["train.py --help", "sample.py --help"])
def test_output_that_nobody_reads_on_is_no_error(script, tmp_path):
    done = subprocess.run(f"'{sys.executable}' '{ROOT}'/{script} | head -1", shell=True,
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_a_second_process_in_a_run_is_refused(command, tmp_path, text_file):
    process = Process(tmp_path, *on(text_file), "run_dir=run", "max_steps=100000",
                      "checkpoint.every=1")
    try:
        process.wait_for(tmp_path / "run" / "checkpoints" / "last")
        done = command("train.py", "run_dir=run", "resume=true")
        assert done.returncode == 1 and "in use by another process" in done.stderr
    finally:
        process.signal(signal.SIGKILL)
        process.wait()
    # a dead process holds nothing
    assert command("train.py", "run_dir=run", "resume=true", "max_steps=1").returncode == 0


def test_a_sweep_runs_a_job_for_each_value_and_one_failure_spares_the_others(
        command, tmp_path, text_file):
    done = command("train.py", "-m", *on(text_file), "max_steps=3", "model.n_head=2",
                   "model.n_kv_head=1,2,5", "hydra.sweep.dir=sweep",
                   "wandb.mode=offline")
    assert done.returncode == 1
    assert "model.n_kv_head=5 does not divide model.n_head=2" in done.stderr
    assert "Traceback" not in done.stderr
    for job, heads in (("model.n_kv_head=1", 1), ("model.n_kv_head=2", 2)):
        config = read_config(tmp_path / "sweep" / job / "config.yaml")
        assert config.model.n_kv_head == heads
        assert rows(tmp_path / "sweep" / job)[-1]["step"] == 3
        record, = (tmp_path / "sweep" / job / "wandb").glob("offline-run-*")
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record)]
        assert '"run_group":"sweep"' in subprocess.run(inspect, capture_output=True,
                                                       text=True).stdout


def test_the_run_keeps_the_configuration_that_cfg_job_prints(command, tmp_path, text_file):
    printed = OmegaConf.create(command("train.py", *on(text_file), "max_steps=2", "run_dir=run",
                                       "--cfg", "job").stdout)
    command("train.py", *on(text_file), "max_steps=2", "run_dir=run")
    kept = {name: value for name, _, value in knobs(read_config(tmp_path / "run" / "config.yaml"))}
    differ = {name for name, value in kept.items() if value != OmegaConf.select(printed, name)}
    assert differ <= {"device", "shard", "eager_steps", "model.vocab_size", "model.mlp_hidden"}


def test_the_default_run_starts_on_this_pythons_library(new_command, command):
    done = new_command("train.py", "max_steps=2", "batch_size=2", "compile=false",
                       "data.val_max_tokens=2000", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "standard library" in done.stdout
    text = command("sample.py", "run_dir=run", "prompt=import ", "max_new_tokens=20")
    assert text.returncode == 0 and text.stdout.strip()


@pytest.mark.soak
def test_two_compiled_runs_on_two_threads_have_the_same_bits(new_command, text_file, tmp_path):
    losses = []
    for name in ("one", "two"):
        done = new_command(
            "train.py", *on(text_file), "max_steps=12", "compile=true", "batch_size=32",
            "model.n_embd=64", f"run_dir={name}",
            env={"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
        assert "compiled" in done.stdout, done.stderr
        losses.append([row["train/loss"] for row in rows(tmp_path / name)[1:]])
    assert losses[0] == losses[1] and len(losses[0]) == 12
