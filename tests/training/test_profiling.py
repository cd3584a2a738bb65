"""A profile shows where the time of training steps goes, and changes nothing that it observes."""

import gzip
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from processes import assert_same_run, fault_at_call, rows
from ranks import odd, trained
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import training.device
from common.errors import UserError
from config import Config
from training.profiling import IDLE, PYTHON, TRAIN_STEP, Operation, StepProfile, summarize_events


def count_traced_steps(run_dir: str | Path) -> int:
    with gzip.open(Path(run_dir, "trace.json.gz")) as trace:
        events = json.load(trace)["traceEvents"]
    return sum(e.get("name") == TRAIN_STEP and e.get("cat") == "user_annotation" for e in events)


def read_table(output: str) -> dict[str, tuple[float, float, float]]:
    """Return calls per step, milliseconds per step and share of each operation in a profile."""
    row = re.compile(r"^ {9}(\S.*?) +([\d,.]+) +([\d,.]+) +([\d.]+)%$", re.MULTILINE)
    return {name: tuple(map(float, values)) for name, *values in row.findall(output)}


@pytest.mark.slow
def test_a_profile_lists_the_operations_of_its_steps_and_changes_no_bit(
    tiny: Config, train_in_process, tmp_path, capsys
):
    tiny.optim.name, tiny.attention.every = "muon", 0
    train_in_process(tiny)
    capsys.readouterr()
    other = replace(tiny, run_dir=str(tmp_path / "profiled"), profile=5)
    train_in_process(other)
    assert_same_run(tiny.run_dir, other.run_dir)
    assert count_traced_steps(other.run_dir) == 5

    output = capsys.readouterr().out
    profile = output[output.index("profile  steps 4 to 8") :].splitlines()[:12]
    assert all(len(line) <= 80 for line in profile)
    table = read_table("\n".join(profile))
    assert len(table) == 10 and "aten::mm" in table and table[PYTHON][0] == 1
    shares = [share for _, _, share in table.values()]
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) < 101
    assert f"{other.run_dir}/trace.json.gz" in output[output.index("best validation loss") :]


@pytest.mark.slow
def test_a_stopped_profile_is_made_again_and_a_finished_one_is_kept(
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

    trace.unlink()
    train_in_process(tiny, resume=True, max_steps=15)  # ends before the first step to profile
    assert not trace.exists()
    train_in_process(tiny, resume=True, max_steps=20)  # from step 15: steps 19 and 20
    assert count_traced_steps(tiny.run_dir) == 2
    before = trace.read_bytes()
    train_in_process(tiny, resume=True, max_steps=28)
    assert trace.read_bytes() == before


@pytest.mark.slow
def test_only_rank_0_is_profiled(tmp_path, text_file):
    argv = odd(text_file, "max_steps=7", "eval.every=0", "optim.name=muon")
    output = trained(tmp_path, 2, *argv, "shard=2", "profile=3")
    assert output.count("profile  steps 4 to 6") == 1
    assert count_traced_steps(tmp_path / "run") == 3


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tiny: Config, train_in_process, capsys, monkeypatch
):
    tiny.profile, tiny.attention.every, run_dir = 2, 0, Path(tiny.run_dir)
    monkeypatch.setattr(*(where := (training.device, "seed_micro_step")), getattr(*where))
    fault_at_call(*where, 3, (run_dir / ".trace.json.gz.part").mkdir)()
    train_in_process(tiny)
    assert "trace.json.gz" in capsys.readouterr().out
    assert rows(run_dir)[-1]["step"] == 12 and not (run_dir / "trace.json.gz").exists()


def test_a_run_too_short_for_its_profile_is_refused():
    Config(profile=10, max_steps=13).check()
    with pytest.raises(UserError, match=r"profile=10.*max_steps=13") as error:
        Config(profile=10, max_steps=12).check()
    assert "12" in str(error.value)


def event(name: str, start: float, end: float, **more) -> FunctionEvent:
    return FunctionEvent(len(name), name, more.pop("thread", 1), start, end, **more)


def test_on_a_gpu_the_kernels_count_that_training_steps_launched():
    step, other_step = event(TRAIN_STEP, 100, 200), event(TRAIN_STEP, 500, 600)
    product, copy = event("aten::mm", 110, 120), event("aten::copy_", 510, 511, thread=2)
    evaluation = event("aten::mm", 300, 310)
    product.append_kernel("gemm", 0, 70.0)
    product.append_kernel("split_k", 0, 10.0)
    copy.append_kernel("Memcpy", 0, 40.0)
    evaluation.append_kernel("gemm", 0, 1000.0)
    step.append_kernel(TRAIN_STEP, 0, 90.0)  # the label's own range on the GPU
    kernel = event("gemm", 115, 185, device_type=DeviceType.CUDA)
    events = [step, product, kernel, evaluation, other_step, copy]
    operations = summarize_events(events, 200e-6)
    assert [(name, calls) for name, calls, _ in operations] == [
        ("aten::mm", 1),
        (IDLE, 2),
        ("aten::copy_", 1),
    ]
    assert [seconds for *_, seconds in operations] == pytest.approx([80e-6, 80e-6, 40e-6])


def test_long_names_fit_the_table_and_remain_different():
    operations = [Operation(f"{'kernel' * 30}{n}", 4, 0.02) for n in range(30)]
    lines = StepProfile(4, 2, 1.0, operations).table()
    assert len(lines) == 12 and max(map(len, lines)) <= 80
    assert len(read_table("\n".join(lines))) == 10
