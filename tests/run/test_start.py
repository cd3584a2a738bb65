"""Where a run begins: at its newest checkpoint, and in its record."""

import json

import pytest
from run_folders import write_run

from run.run_dir import RunDir
from run.start import Start, find_start


@pytest.mark.parametrize("steps, first", [((), 6), ((3,), 6), ((3, 6), 7), ((6, 9), 7)])
def test_a_run_continues_with_the_first_step_that_is_not_recorded(tmp_path, steps, first):
    write_run(tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.metrics_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    start = find_start(run_dir, pytest.fail)
    assert (start.step, start.recorded + 1) == (6, first)
    run_dir.checkpoints.rename(run_dir.snapshots)
    assert find_start(run_dir, pytest.fail) == Start()
