"""A full disk: a save that fails says what it needs, costs no earlier checkpoint, and ends the run
only where it was the last."""

import os
import subprocess
from contextlib import suppress

import pytest
from conftest import mounted
from processes import (
    Process,
    assert_same_run,
    fault_at_call,
    rows,
    run_to_end,
    same_tensors,
    tiny_arguments,
)

import training.device
from training.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def small(tmp_path):
    """A disk of 700 kB in memory: it holds the pages and snapshots of the tiny run, one checkpoint,
    and a part of a second."""
    with mounted(tmp_path / "run", "700k") as path:
        yield path


def grown(disk) -> None:
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)


def test_where_the_last_save_finds_the_disk_full_the_run_ends_with_the_checkpoint_before(
    tmp_path, text_file, small, finished_run
):
    said = run_to_end(tmp_path, *tiny_arguments(text_file), status=1)
    (sentence,) = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith("error: the checkpoint of step 12 could not be written")
    assert "the checkpoint of step 8 could not be written" in said
    assert find_checkpoint(small, "last", pytest.fail)[1]["step"] == 4
    assert not list(small.rglob(".*.part"))
    grown(small)
    run_to_end(tmp_path, *tiny_arguments(text_file, "resume=true"))
    assert_same_run(finished_run, small)


def test_a_disk_that_is_full_for_a_while_costs_no_step(tmp_path, text_file, small, finished_run):
    grown(small)
    filler = small / "filler"

    def fault():
        fault_at_call(training.device, "seed_micro_step", 4, fill)()
        fault_at_call(training.device, "seed_micro_step", 10, filler.unlink)()

    def fill():
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    said = run_to_end(tmp_path, *tiny_arguments(text_file), fault=fault)
    notes = [line for line in said.splitlines() if line.endswith("training goes on")]
    assert len([line for line in notes if line.startswith("the checkpoint of step")]) == 2
    losses = {row["step"]: row["train/loss"] for row in rows(finished_run)[1:]}
    left = [row["step"] for row in rows(small)]
    assert left == sorted({*left, 0, *range(10, 13)})
    assert all(row["train/loss"] == losses[row["step"]] for row in rows(small)[1:])
    assert same_tensors(
        *(
            run / "checkpoints" / "step_00000012" / "optimizer.safetensors"
            for run in (finished_run, small)
        )
    )


@pytest.mark.soak
def test_a_log_that_nobody_reads_or_that_cannot_be_written_does_not_end_the_run(
    tmp_path, text_file
):
    argv = tiny_arguments(text_file, "attention.every=0", "max_steps=4")
    reading, writing = os.pipe()
    gone = Process(tmp_path, *argv, stdout=writing)
    os.close(writing)
    assert os.read(reading, 10)
    os.close(reading)
    assert gone.wait() == 0, gone.output()
    full = Process(tmp_path, *argv, "run_dir=full", stdout=os.open("/dev/full", os.O_WRONLY))
    assert full.wait() == 0, full.output()
    assert rows(tmp_path / "full")[-1]["step"] == rows(tmp_path / "run")[-1]["step"] == 4


def test_a_full_disk_while_text_is_prepared_is_one_sentence(tmp_path, text_file, disk, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(disk))
    large = tmp_path / "large.txt"
    large.write_text(text_file.read_text(encoding="utf-8") * 120, encoding="utf-8")
    run_to_end(tmp_path, *tiny_arguments(large), status=1)
    (sentence,) = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith(f"error: the cache folder {disk} cannot be written (No space left")
    assert "GLASSGPT_CACHE" in sentence
