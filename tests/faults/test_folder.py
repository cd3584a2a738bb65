"""A run's folder must be writable and has one owner; running out of memory loses no checkpoint.

A folder that cannot be listed is not an empty one.
"""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from processes import (
    KILL,
    Process,
    assert_same_run,
    copy_after_8_steps,
    drop_privileges,
    fault_at_call,
    run_to_end,
    tiny_arguments,
)
from run_folders import load_run

import training.device
from interop import save_hf
from run.run_dir import RunDir

pytestmark = pytest.mark.slow


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(
    tmp_path, text_file, finished_run
):
    first = Process(
        tmp_path,
        *tiny_arguments(text_file),
        fault=fault_at_call(training.device, "seed_micro_step", 8, signal.pause),
    )
    first.wait_for(tmp_path / "run" / "checkpoints" / "last")
    (tmp_path / "other").mkdir()
    other = Process(
        tmp_path / "other", *tiny_arguments(text_file, "resume=auto", f"run_dir={tmp_path / 'run'}")
    )
    assert other.wait() == 1
    (message,) = other.err.read_text().splitlines()
    assert str(tmp_path / "run") in message
    first.signal(KILL)
    first.wait()
    assert (tmp_path / "run" / ".lock").exists()
    run_to_end(tmp_path, *tiny_arguments(text_file, "resume=true"))
    assert_same_run(finished_run, tmp_path / "run")


def test_all_files_of_a_run_and_of_an_export_follow_the_umask(tmp_path, text_file):
    argv = tiny_arguments(text_file, "max_steps=2", "attention.picture_every=6")
    run_to_end(tmp_path, *argv, fault=lambda: os.umask(0o027))
    previous = os.umask(0o027)
    try:
        save_hf(load_run(tmp_path / "run")[0], tmp_path / "run" / "exported")
    finally:
        os.umask(previous)
    paths = [*(tmp_path / "run").rglob("*")]
    assert {path.suffix for path in paths} >= {".safetensors", ".json", ".npz", ".html", ".yaml"}
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o640, 0o750}


# --- folders that cannot be listed ----------------------------------------------------------------


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def make_unlistable(path: Path, how: str) -> None:
    if how == "mode":
        path.chmod(0)
    else:
        path.rename(path.with_name("away"))


@pytest.mark.parametrize("how", ["mode", "lost"])
def test_a_run_with_rows_never_starts_over_because_its_checkpoints_cannot_be_seen(
    tmp_path, text_file, finished_run, how
):
    run = copy_after_8_steps(finished_run, tmp_path / "run")
    make_unlistable(run / "checkpoints", how)
    before = contents(run / "attention"), (run / "metrics.jsonl").read_bytes()
    argv = tiny_arguments(text_file, "resume=auto")
    run_to_end(tmp_path, *argv, status=1, fault=drop_privileges)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert str(run.name) + "/checkpoints" in message
    assert before == (contents(run / "attention"), (run / "metrics.jsonl").read_bytes())
    assert not (run / "metrics.jsonl.before").exists()


# --- memory ---------------------------------------------------------------------------------------


def test_a_model_larger_than_memory_is_refused_before_a_folder_is_created(tmp_path, text_file):
    run_to_end(tmp_path, *tiny_arguments(text_file, "model.n_embd=1000000"), status=1)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert "model.n_embd=1000000" in message
    assert not (tmp_path / "run").exists()


def test_running_out_of_memory_in_a_step_loses_no_checkpoint(tmp_path, text_file):
    def allocate_too_much():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 1_000_000,) * 2)
        torch.empty(1 << 28)

    fault = fault_at_call(training.device, "seed_micro_step", 6, allocate_too_much)
    run_to_end(tmp_path, *tiny_arguments(text_file, "attention.every=0"), status=1, fault=fault)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert "memory" in message
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step == 4
