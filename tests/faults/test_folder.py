"""A run's folder must be writable and has one owner; running out of memory loses no checkpoint."""

import resource
import time
from pathlib import Path

import pytest
import torch
from conftest import soak
from processes import (
    KILL,
    Process,
    assert_same_run,
    drop_privileges,
    fault_at_call,
    run_to_end,
    tiny_arguments,
)

import training.device
from training.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("where", ["locked/run", "file"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_text_is_prepared(
    tmp_path, text_file, where, monkeypatch
):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    run_to_end(
        tmp_path, *tiny_arguments(text_file, f"run_dir={where}"), status=1, fault=drop_privileges
    )
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert where in message
    assert not (tmp_path / "cache").exists()


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(
    tmp_path, text_file, finished_run
):
    first = Process(
        tmp_path,
        *tiny_arguments(text_file),
        fault=fault_at_call(training.device, "seed_micro_step", 8, lambda: time.sleep(30)),
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


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [["model.n_embd=1000000"], soak(["model.n_layer=10000", "model.n_embd=4096"])]
)
def test_a_model_larger_than_memory_is_refused_before_a_folder_is_created(
    tmp_path, text_file, size
):
    run_to_end(tmp_path, *tiny_arguments(text_file, *size), status=1)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert size[0] in message
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
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1].step == 4
