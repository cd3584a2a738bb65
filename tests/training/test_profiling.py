"""A profile shows where the time of training steps goes, and changes nothing that it observes."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from processes import assert_same_run

from config import Config
from training.profiling import TRAIN_STEP


def count_traced_steps(run_dir: str | Path) -> int:
    with gzip.open(Path(run_dir, "trace.json.gz")) as trace:
        events = json.load(trace)["traceEvents"]
    return sum(e.get("name") == TRAIN_STEP and e.get("cat") == "user_annotation" for e in events)


@pytest.mark.soak
def test_a_profile_lists_the_operations_of_its_steps_and_changes_no_bit(
    tiny: Config, train_in_process, tmp_path, capsys
):
    tiny.optim.name, tiny.attention.every = "muon", 0
    train_in_process(tiny)
    other = replace(tiny, run_dir=str(tmp_path / "profiled"), profile=5)
    capsys.readouterr()
    train_in_process(other)
    assert_same_run(tiny.run_dir, other.run_dir)
    assert count_traced_steps(other.run_dir) == 5
    assert "aten::mm" in capsys.readouterr().out
