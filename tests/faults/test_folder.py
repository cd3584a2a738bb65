"""The run's folder: refused at once where it cannot be written, has one owner, may be renamed; the
clock may jump, the machine change."""

import re
import time

import pytest
from processes import (
    KILL,
    Process,
    after_8_steps,
    assert_same_run,
    at_call,
    finished,
    kill_me,
    rows,
    tiny,
    without_rights,
)

import data.tokens
import training.optim

pytestmark = pytest.mark.slow


@pytest.fixture
def locked(tmp_path):
    """A folder that cannot be written."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("where", ["locked", "locked/run", "/proc/run", "file/run", "file"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_text_is_prepared(
        tmp_path, text_file, locked, where, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    finished(tmp_path, *tiny(text_file, f"run_dir={where}"), status=1, fault=without_rights)
    assert not (tmp_path / "cache").exists()
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert sentence.startswith(f"error: run_dir={where} cannot be written (")
    assert "choose another folder" in sentence
    assert not (tmp_path / "cache").exists()


def test_a_run_whose_folder_became_read_only_is_refused_too(tmp_path, text_file):
    finished(tmp_path, *tiny(text_file), "max_steps=4")
    (tmp_path / "run").chmod(0o555)
    (tmp_path / "run" / ".lock").chmod(0o666)
    try:
        finished(tmp_path, *tiny(text_file, "resume=true"), status=1, fault=without_rights)
    finally:
        (tmp_path / "run").chmod(0o755)
    assert "run_dir=run cannot be written (" in (tmp_path / "err.txt").read_text()


def test_the_second_run_in_a_folder_is_refused_and_the_lock_of_a_dead_process_is_free(
        tmp_path, text_file, whole):
    first = Process(tmp_path, *tiny(text_file),
                    fault=at_call(training.optim, "seed_micro_step", 8, lambda: time.sleep(30)))
    first.wait_for(tmp_path / "run" / "checkpoints" / "last")
    (tmp_path / "other").mkdir()
    for resume in ("true", "auto"):
        other = Process(tmp_path / "other",
                        *tiny(text_file, f"resume={resume}", f"run_dir={tmp_path / 'run'}"))
        assert other.wait() == 1 and "is in use by another process" in other.said()
        assert other.said().count("\n") == 1
    first.signal(KILL)
    first.wait()
    assert (tmp_path / "run" / ".lock").exists()
    finished(tmp_path, *tiny(text_file, "resume=true"))
    assert_same_run(whole, tmp_path / "run")


def test_the_lock_of_a_killed_preparation_is_free(tmp_path, text_file, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    assert Process(tmp_path, *tiny(text_file),
                   fault=at_call(data.tokens, "build_tokenizer", 1, kill_me)).wait() == -KILL
    assert list((tmp_path / "cache").glob("*.lock"))
    finished(tmp_path, *tiny(text_file, "resume=auto"))


def test_a_run_that_was_renamed_goes_on_in_its_new_place(tmp_path, text_file, whole):
    after_8_steps(whole, tmp_path / "elsewhere" / "new name")
    finished(tmp_path, "run_dir=elsewhere/new name", "resume=true", "max_steps=12")
    assert [row["train/loss"] for row in rows(
        tmp_path / "elsewhere" / "new name")[1:]] == [row["train/loss"] for row in rows(whole)[1:]]
    assert not (tmp_path / "run").exists()
    assert "elsewhere" in (tmp_path / "elsewhere" / "new name" / "config.yaml").read_text()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_nothing(tmp_path, text_file, whole, jump):
    def fault():
        clock = time.time
        at_call(training.optim, "seed_micro_step", 6,
                lambda: setattr(time, "time", lambda: clock() + jump))()

    finished(tmp_path, *tiny(text_file), fault=fault)
    assert_same_run(whole, tmp_path / "run")
    assert all(row["train_seconds"] >= 0 for row in rows(tmp_path / "run"))


def test_another_machine_goes_on_and_says_what_may_differ(tmp_path, text_file, whole):
    import torch

    after_8_steps(whole, tmp_path / "run")
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=12",
                    fault=lambda: torch.set_num_threads(2))
    note, = (line for line in said.splitlines() if "the last bits may differ" in line)
    assert "1 threads" in note and "2 threads" in note and f"torch {torch.__version__}" in note
    for a, b in zip(rows(whole)[1:], rows(tmp_path / "run")[1:]):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)


def test_a_run_of_another_device_is_told_how_to_go_on_here(tmp_path, text_file):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    finished(tmp_path, *tiny(text_file, "max_steps=4"))
    for path in (tmp_path / "run").rglob("config.yaml"):
        if path.parent.name == "run":
            path.write_text(re.sub("device: cpu", "device: cuda", path.read_text()))
    finished(tmp_path, "run_dir=run", "resume=true", "max_steps=6", status=1)
    assert "device=cuda is not available here" in (tmp_path / "err.txt").read_text()
    finished(tmp_path, "run_dir=run", "resume=true", "max_steps=6", "device=auto")


def test_a_copy_of_a_run_goes_on_as_the_run(tmp_path, text_file, whole):
    after_8_steps(whole, tmp_path / "run")
    finished(tmp_path, *tiny(text_file, "resume=true"))
    assert [row["train/loss"]
            for row in rows(tmp_path / "run")[1:]] == [row["train/loss"] for row in rows(whole)[1:]]
