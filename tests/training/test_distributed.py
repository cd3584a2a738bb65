"""Several processes train one run under a real torchrun: in the steps of one process, through
deaths, signals and restarts."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from processes import assert_same_run, finished, rows, tiny
from safetensors.numpy import load_file

from config import Config, GPTConfig, OptimConfig, UserError
from data.tokenizer import CharTokenizer
from data.tokens import prepare
from model import GPT
from training.checkpoint import find_checkpoint
from training.distributed import Team, check
from training.follower import same_tokens
from training.optim import build_optimizers, partition_parameters

SCRIPT = f"""
import os, runpy, signal, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def signals(number, then=0):
    os.kill(os.getpid(), number)
    time.sleep(then)
FAULT
sys.argv[0] = {str(ROOT / 'train.py')!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Torchrun:
    """`torchrun … train.py ARGV` in a folder.

    `fault` is Python that each process runs first, which knows its `rank` and `attempt`.
    """

    def __init__(self, folder: Path, processes: int, *argv: str, fault: str = "",
                 options: tuple = ("--standalone",), name: str = "torchrun",
                 env: dict | None = None):
        script, self.log = folder / f"{name}.py", folder / f"{name}.txt"
        fault = fault and f"from processes import at_call\n{fault}"
        script.write_text(SCRIPT.replace("FAULT", fault))
        with self.log.open("w") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}",
                 *options, str(script), *argv],
                cwd=folder, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})

    def wait(self, timeout: float = 150) -> int:
        try:
            return self.agent.wait(timeout)
        except subprocess.TimeoutExpired:
            self.agent.terminate()  # which it passes on, and kills those that do not end
            self.agent.wait(60)
            raise AssertionError(f"still running after {timeout} s: {self.said()}") from None

    def wait_for(self, words: str, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while words not in self.said():
            waiting = self.agent.poll() is None and time.monotonic() < end
            assert waiting, f"it does not say {words!r}: {self.said()}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """The process ids that it started."""
        return [int(pid) for task in Path(f"/proc/{self.agent.pid}/task").iterdir()
                for pid in (task / "children").read_text().split()]

    def kill(self) -> None:
        """As when its machine loses power."""
        for pid in (self.agent.pid, *self.workers()):
            os.kill(pid, signal.SIGKILL)
        self.agent.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def statuses(self) -> dict[int, int]:
        """The exit status of each process that failed, from torchrun's report."""
        found = re.findall(r"rank +: (\d+) .*\n.*exitcode +: (-?\d+)", self.said())
        return {int(rank): int(status) for rank, status in found}


def twenty(text_file: Path, *more: str) -> list[str]:
    """A run of 20 steps without dropout."""
    return tiny(text_file, "model.dropout=0", "batch_size=8", "accumulate=2", "max_steps=20",
                "optim.warmup_steps=1",
                "eval.every=5", "attention.every=10", "checkpoint.every=5", *more)


def assert_same_steps(one: Path, other: Path, steps: int = 20):
    """The losses of every step are within 1e-5, the checkpoints' tensors equal but for rounding."""
    a, b = rows(one), rows(other)
    assert [row["step"] for row in a] == [row["step"] for row in b] == list(range(steps + 1))
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        mine, its = ({row["step"]: row[key] for row in run if key in row} for run in (a, b))
        assert mine.keys() == its.keys()
        assert max(abs(mine[step] - its[step]) for step in mine) < 1e-5
    folders = [run / "checkpoints" / f"step_{steps:08d}" for run in (one, other)]
    assert len({tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}) == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = (load_file(folder / name) for folder in folders)
        assert list(x) == list(y) and all(x[k].dtype == y[k].dtype for k in x)
        assert all(np.allclose(x[k], y[k], rtol=1e-3, atol=1e-4) for k in x)


@pytest.mark.parametrize("optim, first, then", [
    pytest.param("muon", 2, 1, marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.soak)
      for case in (("adamw", 2, 1), ("muon", 4, 2), ("adamw", 4, 2), ("muon", 1, 4),
                   ("adamw", 1, 4)))])
def test_any_number_of_processes_takes_the_steps_of_one_and_another_number_goes_on(
        tmp_path, text_file, optim, first, then):
    argv = twenty(text_file, f"optim={optim}", "optim.schedule=constant", "run_dir=team",
                  *(["accumulate=1"] if 4 in (first, then) else []))

    def run(processes: int, *more: str):
        if processes == 1:
            finished(tmp_path, *argv, *more)
        else:
            torchrun = Torchrun(tmp_path, processes, *argv, *more)
            assert torchrun.wait() == 0, torchrun.said()
            assert f"{processes} processes" in torchrun.said()

    run(first, "max_steps=10")
    run(then, "resume=true")
    finished(tmp_path, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "team")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_torchrun_goes_on_from_the_last_checkpoint(
        tmp_path, text_file):
    argv, fault = twenty(text_file, "optim=muon"), """
import training.optim
if rank == 1 and not attempt:
    at_call(training.optim, "seed_micro_step", 14, lambda: signals(signal.SIGKILL))()

import training.distributed
leave = training.distributed.Team.__exit__
def left(self, *error):
    leave(self, *error)
    left = [name for task in os.listdir("/proc/self/task")
            if "gloo" in (name := open(f"/proc/self/task/{task}/comm").read())]
    os.write(1, f"threads left: {left}\\n".encode())
training.distributed.Team.__exit__ = left
"""
    torchrun = Torchrun(tmp_path, 2, *argv, "resume=auto", fault=fault,
                        options=("--standalone", "--max-restarts=1"))
    assert torchrun.wait() == 0, torchrun.said()
    assert torchrun.said().count("error: process 1 of 2 has ended") == 1
    assert "Traceback" not in torchrun.said()
    assert torchrun.said().count("going on after 5 steps") == 1
    # Threads that outlive the group crash the process now and then as it ends.
    assert torchrun.said().count("threads left: []") == 2
    finished(tmp_path, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_one_process_amid_an_evaluation_saves_once_and_all_leave_with_its_status(
        tmp_path, text_file):
    torchrun = Torchrun(tmp_path, 2, *twenty(text_file), fault="""
import training.evaluate
if rank == 1:
    calls, whole = iter(range(1, 100)), training.evaluate.Validation.local_loss
    def slow(self, model, between):
        if next(calls) < 2:
            return whole(self, model, between)
        self.rows = 1  # a window at a time, each of which takes long
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, model, lambda: (time.sleep(2), between()))
    training.evaluate.Validation.local_loss = slow
""")
    began = time.monotonic()
    assert torchrun.wait() == 1 and torchrun.statuses() == {0: 143, 1: 143}, torchrun.said()
    assert time.monotonic() - began < 40
    assert torchrun.said().count("stopped after 5 steps; to go on") == 1
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == 5


# What of these a user meets often is above; the rest of the faults.

MOMENTS = {"the first amid a capture": (0, "attention_maps.capture", "maps", 4, "SIGTERM", 10, 143),
           "the second amid a step": (1, "training.optim", "seed_micro_step", 14, "SIGINT", 8, 130)}


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_to_one_process_at_other_moments(tmp_path, text_file, moment):
    rank, module, name, call, number, step, status = MOMENTS[moment]
    torchrun = Torchrun(tmp_path, 2, *twenty(text_file), fault=f"""
import {module}
if rank == {rank}:
    at_call({module}, "{name}", {call}, lambda: signals(signal.{number}, then={2 * (rank == 0)}))()
""")
    assert torchrun.wait(60) == 1 and torchrun.statuses() == {0: status, 1: status}, torchrun.said()
    assert torchrun.said().count(f"stopped after {step} steps; to go on") == 1


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_the_run_goes_on_to_the_same_bits(tmp_path, text_file):
    argv = tiny(text_file, "max_steps=400", "optim=muon", "optim.schedule=constant",
                "optim.warmup_steps=20",
                "checkpoint.every=0", "eval.every=0", "attention.every=0")
    torchrun = Torchrun(tmp_path, 2, *argv)
    torchrun.wait_for("step  20 ")
    torchrun.agent.terminate()
    torchrun.wait()
    assert torchrun.said().count("to go on: python train.py") == 1
    step = find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"]
    assert step >= 20
    for more in (["resume=true"], ["run_dir=whole"]):
        torchrun = Torchrun(tmp_path, 2, *argv, f"max_steps={step + 5}", *more)
        assert torchrun.wait() == 0, torchrun.said()
    assert_same_run(tmp_path / "whole", tmp_path / "run", step + 5)


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_reason_while_the_first_draws(tmp_path, text_file):
    torchrun = Torchrun(tmp_path, 3, *twenty(text_file, "batch_size=6", "accumulate=1"), fault="""
import training.follower, attention_maps.picture
def fail():
    raise ValueError("the card is hot")
if rank == 2:
    at_call(training.follower, "update", 7, fail)()
if rank == 0:
    at_call(attention_maps.picture, "printable", 20, lambda: time.sleep(8))()
""")
    assert torchrun.wait() == 1
    error = "error: process 2 of 3 has ended (the card is hot)"
    assert torchrun.said().count(error) == 1, torchrun.said()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["stop", pytest.param("skip", marks=pytest.mark.soak)])
def test_what_is_not_finite_in_one_process_is_so_for_all(tmp_path, text_file, then):
    fault = """
import math, model
import training.optim
now, seed, forward = 0, training.optim.seed_micro_step, model.GPT.forward
def seeded(s, step, *more):
    global now
    now = step + 1
    seed(s, step, *more)
def poisoned(self, *args, **more):
    logits, loss = forward(self, *args, **more)
    return logits, loss * math.nan if rank == 1 and self.training and now == 7 else loss
training.optim.seed_micro_step, model.GPT.forward = seeded, poisoned
"""
    torchrun = Torchrun(tmp_path, 2, *twenty(text_file, f"on_nonfinite={then}"), fault=fault)
    if then == "skip":
        assert torchrun.wait() == 0, torchrun.said()
        assert [row["train/skipped"] for row in rows(tmp_path / "run")[1:]] == [0] * 6 + [1] * 14
        return
    assert torchrun.wait() == 1
    error, = re.findall("^error: .*", torchrun.said(), re.M)
    assert error.startswith("error: step 7: the loss and the gradient of")
    assert torchrun.statuses()[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrong, sentence", [
    (["batch_size=3", "accumulate=1"], "batch_size=3 cannot be divided among 2"),
    pytest.param(["batch_sise=4"], "batch_sise is not a setting", marks=pytest.mark.soak),
    pytest.param(["data.path=nothing"], "nothing", marks=pytest.mark.soak)])
def test_a_mistake_is_said_once(tmp_path, text_file, wrong, sentence):
    torchrun = Torchrun(tmp_path, 2, *twenty(text_file), *wrong)
    assert torchrun.wait() == 1
    said = re.findall("^error: .*", torchrun.said(), re.M)
    assert len(said) == 1 and sentence in said[0], torchrun.said()
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_of_two_machines_one_is_killed_and_started_again(tmp_path, text_file):
    # Without it, torch 2.13 does not tell a machine that comes later where the first one is.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    port = free_port()
    options = ("--nnodes=2", "--max-restarts=3", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=glass")
    argv = twenty(text_file, "optim=muon", "resume=auto")
    slow = """
import training.optim
at_call(training.optim, "seed_micro_step", 30, lambda: time.sleep(0 if attempt else 6))()
"""
    one = Torchrun(tmp_path, 1, *argv, options=options, env=env, name="one", fault=slow)
    end = time.monotonic() + 90
    while subprocess.run([sys.executable, "-c",
                          f"import socket; socket.create_connection(('127.0.0.1', {port}))"],
                         capture_output=True).returncode:
        assert time.monotonic() < end  # until the first machine is the one where they meet
    other = Torchrun(tmp_path, 1, *argv, options=options, env=env, name="other", fault=slow)
    while not (tmp_path / "run" / "checkpoints" / "step_00000010").exists():
        assert time.monotonic() < end, one.said() + other.said()
        time.sleep(0.05)
    other.kill()
    again = Torchrun(tmp_path, 1, *argv, options=options, env=env, name="again")
    assert (one.wait(), again.wait()) == (0, 0), one.said() + again.said()
    assert "going on after 10 steps" in one.said() + again.said()
    finished(tmp_path, *argv, "resume=false", "run_dir=whole")
    assert_same_steps(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_updated_by_one_process_and_the_work_is_even(name):
    model = GPT(GPTConfig(vocab_size=96, block_size=16, n_layer=4, n_head=2, n_embd=32))
    optim = OptimConfig(name=name)
    for processes in (1, 2, 3, 4, 40):
        parts = partition_parameters(model, optim, processes)
        parted = sorted(id(p) for part in parts for p in part)
        assert parted == sorted(id(p) for p in model.parameters())
        optimizers = [build_optimizers(model, optim, updated=part) for part in parts]
        updated = [[p for o in mine for g in o.param_groups for p in g["params"]]
                   for mine in optimizers]
        assert all({id(p) for p in mine} == {id(p) for p in part}
                   for mine, part in zip(updated, parts))
        if processes <= 4:
            sizes = [sum(p.numel() for p in part) for part in parts]
            assert max(sizes) < 1.5 * min(sizes)


def test_one_process_alone_is_a_team_that_changes_nothing():
    team, values = Team(), torch.tensor([1.0, 2.0])
    assert team.sum(values) is values and team.total(3.0, 2) == (3.0, 2)
    assert team.broadcast_bytes(b"x") == b"x"
    with pytest.raises(ValueError), team:
        raise ValueError


def test_what_does_not_go_with_so_many_processes_is_refused(monkeypatch):
    check(Config(batch_size=12, accumulate=3), 4)
    with pytest.raises(UserError, match="make it a multiple of 9"):
        check(Config(batch_size=12, accumulate=3), 3)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    check(Config(run_dir="x", resume="auto"), 2)
    with pytest.raises(UserError, match="resume=auto"):
        check(Config(run_dir="x"), 2)


def test_a_follower_has_the_text_and_the_vocabulary_of_the_first(tiny):
    tokens = prepare(tiny.data, tiny.tokenizer, lambda line: None)
    vocabulary = tokens.tokenizer.to_json()
    assert np.array_equal(same_tokens(tiny, vocabulary, tokens.fingerprint).train, tokens.train)
    kept = CharTokenizer(tokens.tokenizer.alphabet + "¡")
    again = same_tokens(tiny, kept.to_json(), tokens.fingerprint)
    assert again.tokenizer.alphabet == kept.alphabet
    with pytest.raises(UserError, match="another than that of process 0"):
        same_tokens(tiny, vocabulary, "0" * 64)
