"""On a full disk a failed save loses no earlier checkpoint; only a failed last save is fatal."""

import errno
import os
import subprocess
from contextlib import suppress

import pytest
from conftest import small_disk
from processes import (
    assert_same_run,
    fault_at_call,
    rows,
    run_to_end,
    same_tensors,
    tiny_arguments,
)

import training.device
from run.run_dir import RunDir

pytestmark = pytest.mark.slow
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def small(tmp_path):
    """A disk of 900 kB: room for the page and snapshots of the tiny run and for one checkpoint."""
    with small_disk(tmp_path / "run", "900k") as path:
        yield path


def enlarge(disk) -> None:
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)


def test_a_run_whose_last_save_fails_ends_with_the_previous_checkpoint(
    tmp_path, text_file, small, finished_run
):
    output = run_to_end(tmp_path, *tiny_arguments(text_file), status=1)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert "step 12" in message
    assert any("step 8" in line and FULL in line for line in output.splitlines())
    assert RunDir(small).checkpoint("last", pytest.fail).step == 4
    assert not list(small.rglob(".*.part"))
    enlarge(small)
    run_to_end(tmp_path, *tiny_arguments(text_file, "resume=true"))
    assert_same_run(finished_run, small)


def test_a_temporarily_full_disk_loses_no_step(tmp_path, text_file, small, finished_run):
    enlarge(small)
    filler = small / "filler"

    def fault():
        fault_at_call(training.device, "seed_micro_step", 4, fill)()
        fault_at_call(training.device, "seed_micro_step", 10, filler.unlink)()

    def fill():
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    output = run_to_end(tmp_path, *tiny_arguments(text_file), fault=fault)
    notes = [line for line in output.splitlines() if FULL in line]
    assert [step for step in (4, 8) if any(f"step {step}" in note for note in notes)] == [4, 8]
    losses = {row["step"]: row["train/loss"] for row in rows(finished_run)[1:]}
    remaining = [row["step"] for row in rows(small)]
    assert remaining == sorted({*remaining, 0, *range(10, 13)})
    assert all(row["train/loss"] == losses[row["step"]] for row in rows(small)[1:])
    assert same_tensors(
        *(
            run / "checkpoints" / "step_00000012" / "optimizer.safetensors"
            for run in (finished_run, small)
        )
    )


def test_a_full_disk_while_text_is_prepared_is_a_one_line_error(
    tmp_path, text_file, disk, monkeypatch
):
    monkeypatch.setenv("GLASSGPT_CACHE", str(disk))
    large = tmp_path / "large.txt"
    large.write_text(text_file.read_text(encoding="utf-8") * 120, encoding="utf-8")
    run_to_end(tmp_path, *tiny_arguments(large), status=1)
    (message,) = (tmp_path / "err.txt").read_text().splitlines()
    assert str(disk) in message and FULL in message and "GLASSGPT_CACHE" in message
