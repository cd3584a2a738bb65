"""A profile shows where the time of training steps goes, and changes nothing that it observes."""

import gzip
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from processes import assert_same_run, fault_at_call

import training.device
from config import Config
from training.profiling import SHOWN_OPERATIONS, TRAIN_STEP

TABLE_END = "Self CPU time total"


def count_traced_steps(run_dir: str | Path) -> int:
    with gzip.open(Path(run_dir, "trace.json.gz")) as trace:
        events = json.load(trace)["traceEvents"]
    return sum(e.get("name") == TRAIN_STEP and e.get("cat") == "user_annotation" for e in events)


@pytest.mark.slow
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
    output = capsys.readouterr().out
    lines = output[: output.index(TABLE_END)].splitlines()[-SHOWN_OPERATIONS - 1 : -1]
    operations = {line.split()[0]: line.split()[1:] for line in lines}
    assert len(operations) == SHOWN_OPERATIONS and "aten::mm" in operations
    shares = [float(values[0].rstrip("%")) for values in operations.values()]
    assert shares == sorted(shares, reverse=True)
    assert str(Path(other.run_dir, "trace.json.gz")) in output


@pytest.mark.slow
def test_a_stopped_profile_is_made_again_by_the_resumed_run(
    tiny: Config, train_in_process, monkeypatch
):
    tiny.profile, tiny.attention.every = 4, 0
    with monkeypatch.context() as patch:
        patch.setattr(*(where := (training.device, "seed_micro_step")), getattr(*where))
        fault_at_call(*where, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))()
        with pytest.raises(SystemExit):
            train_in_process(tiny)
    trace = Path(tiny.run_dir, "trace.json.gz")
    assert not trace.exists()
    train_in_process(tiny, resume=True)  # from step 5, so that steps 9 to 12 are profiled
    assert count_traced_steps(tiny.run_dir) == 4
