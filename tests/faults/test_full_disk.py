"""A full disk: a save that fails says what it needs, costs no earlier checkpoint, and ends the run
only where it was the last."""

import os
import resource
import shutil
import subprocess

import pytest
from processes import Process, assert_same_run, at_call, finished, rows, tiny

import training.optim
from training.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path):
    """A disk of 860 kB in memory: it holds the pages and snapshots of the tiny run, one checkpoint,
    and a part of a second."""
    path = tmp_path / "run"
    path.mkdir()
    if shutil.which("mount") is None or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=860k", "none", path], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def grown(disk) -> None:
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)


def at_steps(**do):
    """A fault: as these steps begin (s3=…), something is done."""
    def fault():
        for name, what in do.items():
            at_call(training.optim, "seed_micro_step", 1, what, when=lambda seed, step, *_,
                    at=int(name[1:]): step == at)()

    return fault


def test_a_save_that_finds_the_disk_full_says_what_it_needs_and_the_run_goes_on(
        tmp_path, text_file, disk, whole):
    process = Process(tmp_path, *tiny(text_file), fault=at_steps(s9=lambda: grown(disk)))
    assert process.wait() == 0, process.said()
    said, = (line for line in process.said().splitlines() if "could not be written" in line)
    assert said.startswith("the checkpoint of step 8 could not be written (No space left on "
                           "device): it needs 198,696 bytes")
    assert said.endswith("training goes on")
    assert_same_run(whole, disk)


def test_where_the_last_save_finds_the_disk_full_the_run_ends_with_the_checkpoint_before(
        tmp_path, text_file, disk, whole):
    said = finished(tmp_path, *tiny(text_file), status=1)
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith("error: the checkpoint of step 12 could not be written (No space "
                               "left on device): it needs ")
    assert "are free" in sentence and said.count("training goes on") == 1
    assert find_checkpoint(disk, "last", pytest.fail)[1]["step"] == 4
    assert not list(disk.rglob(".*.part"))
    grown(disk)
    finished(tmp_path, *tiny(text_file, "resume=true"))
    assert_same_run(whole, disk)


def test_a_stop_signal_that_finds_the_disk_full_ends_with_status_1(tmp_path, text_file, disk):
    fault = at_steps(s9=lambda: os.kill(os.getpid(), 15))
    said = finished(tmp_path, *tiny(text_file), status=1, fault=fault)
    assert "error: the checkpoint of step 10 could not be written" in said


def test_a_disk_that_is_full_for_a_while_costs_no_line_of_the_record(
        tmp_path, text_file, disk, whole):
    grown(disk)
    filler = disk / "filler"

    def fill():
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"\0" * 4096):
                    pass
            except OSError:
                return

    said = finished(tmp_path, *tiny(text_file, "checkpoint.every=0", "eval.every=0"),
                    fault=at_steps(s3=fill, s9=filler.unlink))
    assert said.count("could not be written (No space left on device): training goes on") == 1
    assert [row["step"] for row in rows(disk)] == [0, *range(1, 13)]
    assert [row["train/loss"]
            for row in rows(disk)[1:]] == [row["train/loss"] for row in rows(whole)[1:]]
    assert sorted(p.name for p in (disk / "attention").iterdir()) == sorted(
        f"step_{step:08d}.{kind}" for step in (0, 12) for kind in ("npz", "png"))


def test_a_limit_on_the_size_of_files_is_as_a_full_disk(tmp_path, text_file, whole):
    """As `ulimit -f` sets one; needs no rights."""
    process = Process(tmp_path, *tiny(text_file),
                      fault=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (98_000, 98_000)))
    assert process.wait() == 1
    # Three checkpoints, and once the page.
    assert process.said().count(
        "could not be written (File too large)") == 4 and "Traceback" not in process.said()
    finished(tmp_path, *tiny(text_file, "resume=auto"))
    assert_same_run(whole, tmp_path / "run")


def test_a_reader_of_the_output_that_goes_away_does_not_end_the_run(tmp_path, text_file, whole):
    reading, writing = os.pipe()
    process = Process(tmp_path, *tiny(text_file), stdout=writing)
    os.close(writing)
    assert os.read(reading, 10)
    os.close(reading)
    assert process.wait() == 0, process.said()
    assert_same_run(whole, tmp_path / "run")


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, text_file, whole):
    process = Process(tmp_path, *tiny(text_file), stdout=os.open("/dev/full", os.O_WRONLY))
    assert process.wait() == 0, process.said()
    assert_same_run(whole, tmp_path / "run")


def test_a_full_disk_while_text_is_prepared_is_one_sentence(tmp_path, text_file, disk, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(disk))
    large = tmp_path / "large.txt"
    large.write_text(text_file.read_text(encoding="utf-8") * 120, encoding="utf-8")
    finished(tmp_path, *tiny(large, "run_dir=other"), status=1)
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith(f"error: the cache folder {disk} cannot be written (No space left "
                               f"on device)")
    assert "GLASSGPT_CACHE" in sentence
