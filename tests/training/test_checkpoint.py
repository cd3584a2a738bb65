import shutil
from pathlib import Path

import pytest
from run_folders import load_run, write_run

from common.errors import UserError
from run.checkpoints import MODEL_FILE
from run.run_dir import RunDir


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with checkpoints of steps 3 and 6, of which the first is the best."""
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("which, step", [("last", 6), ("best", 3), ("3", 3), (3, 3)])
def test_a_checkpoint_is_found_by_best_last_or_its_step(run, which, step):
    assert RunDir(run).checkpoint(which).step == step
    with pytest.raises(UserError, match="3, 6"):
        load_run(run, 5)


@pytest.mark.parametrize("which, found", [("last", 3), ("best", 6), ("6", None)])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_looked_for_again(run, which, found):
    removed = []

    def read(checkpoint):
        if not removed:
            removed.append(shutil.rmtree(checkpoint.folder))
            raise FileNotFoundError(checkpoint.folder)
        return checkpoint.step

    if found:
        assert RunDir(run).open_checkpoint(which, read, pytest.fail) == found
    else:
        with pytest.raises(UserError, match="3"):
            RunDir(run).open_checkpoint(which, read, pytest.fail)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(run, tiny, train_in_process):
    for model in run.glob(f"checkpoints/*/{MODEL_FILE}"):
        model.write_bytes(b"nothing")
    (run / ".lock").touch()
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError) as error:
        train_in_process(tiny, resume=True)
    assert str(run) in str(error.value)
    assert sorted(run.rglob("*")) == before
