"""What a run's folder holds, and which of its checkpoints is taken."""

import json
import shutil

import pytest
from run_folders import load_run, write_run

from common.errors import UserError
from run.checkpoints import MODEL_FILE, Start
from run.run_dir import RunDir


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run with checkpoints of steps 3 and 6, of which the first is the best."""
    write_run(tmp_path / "run")
    return RunDir(tmp_path / "run")


def test_an_empty_folder_is_a_run_that_has_not_begun(tmp_path):
    empty = RunDir(tmp_path)
    assert not empty.has_begun and empty.config is None


def test_the_files_of_snapshots_are_found_by_their_steps(run):
    run.snapshots.mkdir()
    for step in (100_000_000, 20, 0):
        run.snapshot(step, ".npz").touch()
    for name in ("step_00000020.png", "step_notes.npz", "step_0000000030.npz"):
        (run.snapshots / name).touch()
    assert [*run.snapshot_files(".npz")] == [0, 20, 100_000_000]
    assert run.snapshot_files(".png") == {20: run.snapshot(20, ".png")}


@pytest.mark.parametrize("which, step", [("last", 6), ("best", 3), ("3", 3), (3, 3)])
def test_a_checkpoint_is_found_by_best_last_or_its_step(run, which, step):
    assert run.checkpoint(which).step == step
    with pytest.raises(UserError, match="3, 6"):
        load_run(run.path, 5)


@pytest.mark.parametrize("which, found", [("last", 3), ("best", 6), ("6", None)])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_looked_for_again(run, which, found):
    removed = []

    def read(checkpoint):
        if not removed:
            removed.append(shutil.rmtree(checkpoint.folder))
            raise FileNotFoundError(checkpoint.folder)
        return checkpoint.step

    if found:
        assert run.open_checkpoint(which, read, pytest.fail) == found
    else:
        with pytest.raises(UserError, match="3"):
            run.open_checkpoint(which, read, pytest.fail)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(run, tiny, train_in_process):
    for step in run.steps():
        (run.checkpoint_folder(step) / MODEL_FILE).write_bytes(b"nothing")
    run.lock.touch()
    before = sorted(run.path.rglob("*"))
    with pytest.raises(UserError) as error:
        train_in_process(tiny, resume=True)
    assert str(run.path) in str(error.value)
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.parametrize("steps, first", [((), 6), ((3,), 6), ((3, 6), 7), ((6, 9), 7)])
def test_a_run_continues_with_the_first_step_that_is_not_recorded(tmp_path, steps, first):
    write_run(tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.metrics_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    start = run_dir.find_start(pytest.fail)
    assert (start.step, start.recorded + 1) == (6, first)
    run_dir.checkpoints.rename(run_dir.snapshots)
    assert run_dir.find_start(pytest.fail) == Start()
