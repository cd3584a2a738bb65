"""Killed at any moment and resumed, a run ends at the same bits; the newest complete checkpoint
always loads, and nothing is left lying about."""

import hashlib
import random
from pathlib import Path

import pytest
from processes import KILL, Process, assert_same_run, at_call, finished, kill_me, tiny

import training.optim
from data.batches import Batches
from training.checkpoint import find_checkpoint


def killed_at_step(step: int):
    """A fault: the process is killed as its step begins."""
    return at_call(training.optim, "seed_micro_step", 1, kill_me, when=lambda seed, now,
                   *_: now == step)


def killed_and_resumed(folder: Path, argv: list[str], steps: list[int]) -> None:
    """Run to the end, killed in these steps on the way."""
    for step in sorted(steps):
        process = Process(folder, *argv, "resume=auto", fault=killed_at_step(step))
        assert process.wait() == -KILL, process.said()
    finished(folder, *argv, "resume=auto")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("more", [(), ("accumulate=2", "optim=muon")],
                         ids=["adamw", "muon accumulate"])
def test_killed_at_random_steps_it_ends_at_the_bits_of_the_run_that_was_not(
        tmp_path, text_file, more, kills):
    argv = tiny(text_file, "max_steps=24", "attention.every=12", *more)
    finished(tmp_path, *argv, "run_dir=whole")
    killed_and_resumed(tmp_path, argv, random.Random(0).sample(range(24), kills))
    assert_same_run(tmp_path / "whole", tmp_path / "run", 24)


@pytest.mark.soak
@pytest.mark.parametrize("eager_steps", [0, 8])
def test_killed_twice_with_accumulation_and_compilation_it_ends_at_the_same_bits(
        tmp_path, text_file, monkeypatch, eager_steps):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    argv = tiny(text_file, "accumulate=2", "compile=true", f"eager_steps={eager_steps}")
    said = finished(tmp_path, *argv, "run_dir=whole")
    assert "compiled" in said
    killed_and_resumed(tmp_path, argv, [6, 10])
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def logging_batches(path: Path, step: int):
    """A fault: each batch's hash is appended to a file; killed as `step` begins."""
    def fault():
        batch = Batches.batch

        def logged(self, at, *args):
            x, y = batch(self, at, *args)
            with path.open("a") as file:
                file.write(f"{at} {hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()}\n")
            return x, y

        Batches.batch = logged
        killed_at_step(step)()

    return fault


@pytest.mark.slow
def test_over_the_end_of_an_epoch_no_batch_comes_twice_and_none_is_missed(tmp_path, text_file):
    small = tmp_path / "small.txt"
    # 25 windows to train on: an epoch ends in the seventh batch
    small.write_text(text_file.read_text(encoding="utf-8")[:900], encoding="utf-8")
    argv = tiny(small, "checkpoint.every=1", "eval.every=0", "attention.every=0",
                "model.block_size=32")
    for run, ends in (("whole", [99]), ("run", [6, 7, 99])):
        for end in ends:
            Process(tmp_path, *argv, f"run_dir={run}", "resume=auto",
                    fault=logging_batches(tmp_path / f"{run}.log", end)).wait()
    whole, run = ((tmp_path / f"{name}.log").read_text().splitlines() for name in ("whole", "run"))
    assert [line.split()[0] for line in whole] == [str(step) for step in range(12)]
    assert len({line.split()[1] for line in whole}) == 12
    # a step that was begun again, with the same batch, is the only thing that comes twice
    assert list(dict.fromkeys(run)) == whole
    assert len(run) == 12 + 2


SAVING = [("os", "fsync"), ("os", "mkdir"), ("os", "rename"), ("os", "replace"), ("os", "unlink"),
          ("training.checkpoint", "write_tensors"),
          ("training.checkpoint", "save_tokenizer"), ("training.checkpoint", "sha256_of"),
          ("pathlib.Path", "write_text"), ("shutil", "rmtree")]


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_at_every_write_sync_and_rename_of_a_save_the_newest_complete_checkpoint_loads(
        tmp_path, text_file, every):
    """The first save is let through, the second killed at its n-th call, for every n, or a few."""
    import importlib

    def killed_at_call(n):
        def fault():
            import training.checkpoint as checkpoint

            saves, calls, save = iter(range(1, 99)), iter(
                range(1, 10 ** 6)), checkpoint.save_checkpoint
            saving = False

            def counted(original):
                def call(*args, **more):
                    if saving and next(calls) == n:
                        kill_me()
                    return original(*args, **more)
                return call

            def second(*args):
                nonlocal saving
                saving = next(saves) == 2
                save(*args)
                saving = False

            for path, name in SAVING:
                module = path.partition(".Path")[0]
                owner = importlib.import_module(module) if not path.endswith("Path") else Path
                setattr(owner, name, counted(getattr(owner, name)))
            checkpoint.save_checkpoint = second

        return fault

    argv = tiny(text_file, "max_steps=2", "checkpoint.every=1", "eval.every=0", "attention.every=0",
                "log.every=0")
    for n in range(1, 100, every):
        run = f"run{n}"
        process = Process(tmp_path, *argv, f"run_dir={run}", fault=killed_at_call(n))
        if process.wait() == 0:
            break
        assert process.status == -KILL, process.said()
        complete = [p for p in (tmp_path / run / "checkpoints").glob("step_*")
                    if (p / "manifest.json").exists()]
        folder, state = find_checkpoint(tmp_path / run, "last", pytest.fail)
        assert folder == max(complete)
        if n % 4 == 0 or every > 1:
            said = finished(tmp_path, *argv, f"run_dir={run}", "resume=true")
            assert f"resuming at step {state['step']}" in said
            assert not list((tmp_path / run).rglob(".*.part"))
    assert n > 20, "every write, sync and rename was tried"


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "config.yaml", "metrics.jsonl", "best",
    *(pytest.param(f"step_00000006.{kind}", marks=pytest.mark.soak) for kind in ("npz", "png"))])
def test_killed_before_a_file_has_its_name_the_run_goes_on(tmp_path, text_file, whole, name):
    argv = tiny(text_file, "resume=auto")
    fault = at_call(Path, "replace", 1, kill_me, when=lambda part, to: Path(to).name == name)
    process = Process(tmp_path, *argv, fault=fault)
    assert process.wait() == -KILL, process.said()
    finished(tmp_path, *argv)
    assert_same_run(whole, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".*.part"))


@pytest.mark.slow
def test_killed_from_outside_at_any_time_it_goes_on(tmp_path, text_file, whole):
    argv = tiny(text_file, "checkpoint.every=1", "resume=auto")
    for step in (2, 7):
        process = Process(tmp_path, *argv)
        process.wait_for(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
        process.signal(KILL)
        assert process.wait() == -KILL
    finished(tmp_path, *argv)
    assert_same_run(whole, tmp_path / "run")
