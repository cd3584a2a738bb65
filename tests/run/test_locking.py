"""The folder of a run: where a run may begin or continue."""

import json

import pytest
from run_folders import write_run

from common.errors import UserError
from config import Config
from run.locking import check_run_dir
from run.run_dir import RunDir

RESUMED = Config(resume=True)


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run with checkpoints of steps 3 and 6, and no rows."""
    write_run(tmp_path / "run")
    return RunDir(tmp_path / "run")


def write_rows(run: RunDir, *rows: dict) -> None:
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_begins_only_in_a_folder_without_other_files(tmp_path):
    run = RunDir(tmp_path)
    for path in run.files_before_start():
        path.touch()
    check_run_dir(Config(), run)
    (tmp_path / "notes.txt").touch()
    for config in (Config(), RESUMED):
        with pytest.raises(UserError, match="not empty"):
            check_run_dir(config, run)


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
