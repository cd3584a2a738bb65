"""Which snapshots keep their weights in the folder of a run."""

from itertools import pairwise

import pytest

from glass.heads.measure import snapshot_files
from glass.heads.measure.snapshot_files import prune_stored_weights
from run.row import Row
from run.run_dir import RunDir


@pytest.mark.parametrize("emergence", [None, 4, 50, 98])
def test_a_folder_keeps_as_many_weights_as_allowed_and_those_around_emergence(
    tmp_path, monkeypatch, emergence
):
    monkeypatch.setattr(snapshot_files, "MAX_STORED_BYTES", 2000)
    run, row = RunDir(tmp_path), Row()
    run.snapshots.mkdir()
    for step in range(100):
        run.snapshot(step, ".safetensors").write_bytes(bytes(100))
        run.snapshot(step, ".npz").touch()
        if emergence is not None and step > emergence:  # it is known at the next snapshot
            row = Row({"emerged/induction/L1H0": emergence})
        prune_stored_weights(run, row)
        kept = [*run.snapshot_files(".safetensors")]
        assert len(kept) == min(step + 1, 20)
        assert kept[0] == 0 and kept[-4:] == [*range(max(0, step - 3), step + 1)]
    if emergence is not None:
        assert {*range(emergence - 2, min(99, emergence + 2) + 1)} <= {*kept}
    assert max(after - before for before, after in pairwise(kept)) <= 25
    assert len(run.snapshot_files(".npz")) == 100
