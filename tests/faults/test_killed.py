"""Killed at any moment and resumed, a run ends at the same bits; the newest checkpoint is
always whole, and nothing is left lying about."""

import importlib
import os
import random
import shutil
from pathlib import Path

import pytest
from processes import KILL, Process, after_8_steps, assert_same_run, at_call, finished, kill_me
from processes import tiny as typed

import training.device
from data.tokens import prepare
from model import GPT
from training.checkpoint import Checkpoints, find_checkpoint, saved_steps
from training.optim import build_optimizers
from training.plan import resolve
from training.processes import World
from training.record import Stopwatch

CLOCK = Stopwatch(lambda: None, {})


def killed_at_step(step: int):
    """A fault: the process is killed as its step begins."""
    return at_call(training.device, "seed_micro_step", 1, kill_me,
                   when=lambda seed, now, *_: now == step)


@pytest.mark.slow
@pytest.mark.parametrize("steps, kills, more", [
    (12, 3, ("optim=muon", "accumulate=2")),
    pytest.param(24, 10, (), marks=pytest.mark.soak),
    pytest.param(12, 2, ("accumulate=2", "compile=true"), marks=pytest.mark.soak)])
def test_killed_at_random_steps_it_ends_at_the_bits_of_the_run_that_was_not(
        tmp_path, text_file, steps, kills, more):
    argv = typed(text_file, f"max_steps={steps}", *more)
    finished(tmp_path, *argv, "run_dir=whole")
    for step in sorted(random.Random(0).sample(range(steps), kills)):
        process = Process(tmp_path, *argv, "resume=auto", fault=killed_at_step(step))
        assert process.wait() == -KILL, process.said()
    finished(tmp_path, *argv, "resume=auto")
    assert_same_run(tmp_path / "whole", tmp_path / "run", steps)


SAVING = [("os", "fsync"), ("os", "mkdir"), ("os", "rename"), ("os", "replace"), ("os", "unlink"),
          ("shutil", "rmtree"), ("training.checkpoint", "save_file"),
          ("training.checkpoint", "save_tokenizer"), ("training.checkpoint", "sha256_of")]


def killed_in_a_save(checkpoints: Checkpoints, n: int) -> int:
    """Save step 2 in a fork that is killed at the n-th of the calls in SAVING; its status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    calls = iter(range(1, 10 ** 6))

    def counted(original):
        def call(*args, **more):
            if next(calls) == n:
                kill_me()
            return original(*args, **more)
        return call

    for name, function in SAVING:
        owner = importlib.import_module(name)
        setattr(owner, function, counted(getattr(owner, function)))
    try:
        checkpoints.keep(2, {"val/loss": 1.0, "val/bits_per_byte": 1.0}, CLOCK)
    finally:
        os._exit(0)


@pytest.mark.slow
def test_killed_at_every_write_sync_and_rename_of_a_save_the_newest_checkpoint_is_whole(
        tmp_path, tiny):
    text = prepare(tiny.data, tiny.tokenizer, lambda line: None)
    config = resolve(tiny, World(), text)
    model = GPT(config.model)
    checkpoints = Checkpoints(config, tmp_path / "whole", World(), pytest.fail)
    checkpoints.begin(model, build_optimizers(model, config.optim), text)
    assert checkpoints.save(1, {}, CLOCK)
    for killed in range(100):
        run = checkpoints.run_dir = shutil.copytree(tmp_path / "whole", tmp_path / f"run{killed}")
        status = killed_in_a_save(checkpoints, killed + 1)
        assert find_checkpoint(run, "last", pytest.fail)[1]["step"] == saved_steps(run)[-1]
        checkpoints.prune()
        assert not list(run.rglob(".step_*.part"))
        if status == 0:
            break
    assert 100 > killed > 20, "every write, sync and rename was tried"


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "metrics.jsonl", *(pytest.param(name, marks=pytest.mark.soak) for name in (
        "config.yaml", "metrics.jsonl.before", "best", "step_00000012.npz"))])
def test_killed_before_a_file_has_its_name_the_run_goes_on(tmp_path, text_file, whole, name):
    after_8_steps(whole, tmp_path / "run")
    argv = typed(text_file, "resume=auto")
    fault = at_call(Path, "replace", 1, kill_me, when=lambda part, to: Path(to).name == name)
    process = Process(tmp_path, *argv, fault=fault)
    assert process.wait() == -KILL, process.said()
    finished(tmp_path, *argv)
    assert_same_run(whole, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".*.part"))
