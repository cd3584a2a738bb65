"""Which snapshots keep their weights in the folder of a run."""

from itertools import pairwise

import pytest

from glass.heads.measure import snapshot_files
from glass.heads.measure.snapshot_files import order_by_importance, prune_stored_weights
from run.row import Row
from run.run_dir import RunDir


@pytest.mark.parametrize("emergence", [None, 4, 50, 98])
def test_a_folder_keeps_as_many_weights_as_allowed_and_those_around_emergence(
    tmp_path, monkeypatch, emergence
):
    monkeypatch.setattr(snapshot_files, "MAX_STORED_BYTES", 2000)
    run_dir, row = RunDir(tmp_path), Row()
    run_dir.snapshots.mkdir()
    for step in range(100):
        run_dir.snapshot(step, ".safetensors").write_bytes(bytes(100))
        run_dir.snapshot(step, ".npz").touch()
        if emergence is not None and step > emergence:  # it is known at the next snapshot
            row = Row({"emerged/induction/L1H0": emergence})
        prune_stored_weights(run_dir, row)
        kept = [*run_dir.snapshot_files(".safetensors")]
        assert len(kept) == min(step + 1, 20)
        assert kept[0] == 0 and kept[-4:] == [*range(max(0, step - 3), step + 1)]
    if emergence is not None:
        assert {*range(emergence - 2, min(99, emergence + 2) + 1)} <= {*kept}
    assert max(after - before for before, after in pairwise(kept)) <= 25
    assert len(run_dir.snapshot_files(".npz")) == 100


def test_steps_are_ordered_by_what_happened_there():
    steps = [*range(0, 170, 10)]
    emerged = {"induction/L1H0": 45, "induction/L0H1": 100, "previous_token/L0H0": 125}
    row = Row({f"emerged/{place}": step for place, step in emerged.items()})
    best, last, first = [130], [160], [0]
    around_the_first = [50, 40, 60, 30, 70, 20]
    other_heads = [100, 90, 130, 120]
    expected = dict.fromkeys([*best, *last, *first, *around_the_first, *other_heads])
    assert order_by_importance(steps, row, best_step=133)[: len(expected)] == [*expected]
    assert order_by_importance(steps, Row(), best_step=133)[:3] == [*best, *last, *first]
    fewest = Row({"emerged/previous_token/L0H0": 125, "emerged/sink/L0H0": 10})
    assert order_by_importance(steps, fewest)[:8] == [160, 0, 130, 120, 140, 110, 150, 100]
