import json
import shutil
from pathlib import Path

import pytest
from processes import pointer
from run_folders import load_run

from common.checkpoints import find_checkpoint, open_checkpoint, saved_steps
from common.errors import UserError


@pytest.fixture
def run(tiny, train_in_process, shared) -> Path:
    """A finished run with checkpoints of steps 8 and 12."""
    trained = shared("trained", lambda folder: train_in_process(tiny, run_dir=str(folder / "run")))
    return Path(shutil.copytree(trained / "run", tiny.run_dir))


@pytest.mark.slow
def test_checkpoints_are_found_by_best_last_and_step(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row and row["step"]}
    assert pointer(run, "best") == min(losses, key=losses.get)
    assert find_checkpoint(run, "last")[1].step == 12
    assert find_checkpoint(run, "8")[1].step == find_checkpoint(run, 8)[1].step == 8
    with pytest.raises(UserError, match="8, 12"):
        load_run(run, 5)


@pytest.mark.slow
def test_the_newest_checkpoints_and_the_best_are_kept(tiny, train_in_process):
    tiny.checkpoint.every, tiny.checkpoint.keep, tiny.max_steps = 1, 2, 20
    train_in_process(tiny)
    run = Path(tiny.run_dir)
    assert set(saved_steps(run)) == {19, 20, pointer(run, "best")}
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_checkpoints_that_cannot_be_removed_do_not_stop_the_saving(run, tiny, train_in_process):
    for folder in [*run.glob("checkpoints/step_*")]:
        kept = folder.rename(run.with_name(folder.name))
        folder.symlink_to(kept)  # which shutil.rmtree refuses
    train_in_process(tiny, resume=True, max_steps=20)
    assert saved_steps(run)[-2:] == [16, 20]
    assert (kept / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("which, found", [("last", 8), ("best", 8), ("8", None)])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_looked_for_again(run, which, found):
    removed = []

    def read(folder, manifest):
        if not removed:
            removed.append(shutil.rmtree(folder))
            raise FileNotFoundError(folder)
        return manifest.step

    if found:
        assert open_checkpoint(run, which, read, pytest.fail) == found
    else:
        with pytest.raises(UserError, match="12"):
            open_checkpoint(run, which, read, pytest.fail)


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(run, tiny, train_in_process):
    for model in run.glob("checkpoints/*/model.safetensors"):
        model.write_bytes(b"nothing")
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError) as error:
        train_in_process(tiny, resume=True)
    assert str(run) in str(error.value)
    assert sorted(run.rglob("*")) == before
