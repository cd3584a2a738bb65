"""The folder of a run: where a run may begin or continue."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep

import pytest
from run_folders import write_run

from common.errors import UserError
from config import Config
from run import locking
from run.locking import check_run_dir, locked_run_dir
from run.run_dir import RunDir

RESUMED = Config(resume=True)


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run with checkpoints of steps 3 and 6, and no rows."""
    write_run(tmp_path / "run")
    return RunDir(tmp_path / "run")


def write_rows(run_dir: RunDir, *rows: dict) -> None:
    run_dir.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_begins_only_in_a_folder_without_other_files(tmp_path):
    run_dir = RunDir(tmp_path)
    for path in run_dir.files_before_start():
        path.touch()
    check_run_dir(Config(), run_dir)
    (tmp_path / "notes.txt").touch()
    for config in (Config(), RESUMED):
        with pytest.raises(UserError, match="not empty"):
            check_run_dir(config, run_dir)


def test_a_run_continues_only_with_resume_and_not_without_its_checkpoints(run):
    write_rows(run, {"step": 6, "seconds/save": 0.1})
    check_run_dir(RESUMED, run)
    with pytest.raises(UserError, match="resume=true"):
        check_run_dir(Config(), run)
    run.checkpoints.rename(run.snapshots)
    with pytest.raises(UserError, match="no checkpoint"):
        check_run_dir(RESUMED, run)
    write_rows(run, {"step": 6})  # none was saved
    check_run_dir(RESUMED, run)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_starter_that_waited_for_the_lock_does_not_train_into_what_another_has_begun(
    tmp_path, monkeypatch, resume
):
    monkeypatch.setattr(locking, "count_processes", lambda alone: 2)  # which wait
    config = Config(run_dir=str(tmp_path / "run"), resume=resume)
    is_waiting = Event()

    def start_later():
        is_waiting.set()
        with locked_run_dir(config):
            pytest.fail("the run is another one")

    with ThreadPoolExecutor() as pool:
        with locked_run_dir(config) as begun:
            waiting = pool.submit(start_later)
            is_waiting.wait()
            sleep(0.5)  # until it has looked at the folder
            write_run(begun.path)
        with pytest.raises(UserError, match="another process" if resume else "not empty"):
            waiting.result()


def test_one_process_at_a_time_holds_the_folder_also_while_it_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "count_processes", lambda alone: 2)
    config = Config(run_dir=str(tmp_path / "run"))
    holders = []

    def hold(_):
        with locked_run_dir(config):
            holders.append(1)
            sleep(0.01)
            assert len(holders) == 1
            holders.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(20)))  # each finds it empty, and removes it
    assert not (tmp_path / "run").exists()
