"""Neither stopping and resuming a run nor observing it changes its results."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from processes import (
    assert_same_run,
    fault_at_call,
    rows,
    run_to_end,
    same_tensors,
    tiny_arguments,
)

import glass.observer
import training.device
from config import Config
from run.checkpoints import write_manifest
from run.row import scored_rows
from run.run_dir import RunDir

pytestmark = pytest.mark.slow


def losses_of_steps(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in rows(run_dir) if "train/loss" in row]


def test_evaluations_snapshots_and_checkpoints_do_not_change_the_weights(
    tmp_path, text_file, finished_run
):
    never = ["eval.every=0", "attention.every=0", "checkpoint.every=0"]
    run_to_end(tmp_path, *tiny_arguments(text_file, *never))
    run = tmp_path / "run"
    assert losses_of_steps(run) == losses_of_steps(finished_run)
    model = Path("checkpoints", "step_00000012", "model.safetensors")
    assert same_tensors(run / model, finished_run / model)


def test_the_logged_loss_and_the_seconds_continue_across_a_stop(tmp_path, text_file, finished_run):
    step_losses, run = losses_of_steps(finished_run), tmp_path / "run"
    stop = fault_at_call(
        training.device, "seed_micro_step", 8, lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    seldom = tiny_arguments(text_file, "log.every=5", "attention.every=0")
    run_to_end(tmp_path, *seldom, fault=stop, status=128 + signal.SIGTERM)
    saved = RunDir(run).checkpoint()
    write_manifest(
        saved.folder, replace(saved.manifest, seconds={"train": 1000.0, "evaluate": 2000.0})
    )
    run_to_end(tmp_path, *seldom, "resume=true")
    logged = {row["step"]: row["train/loss"] for row in rows(run) if "train/loss" in row}
    assert logged == {
        step: pytest.approx(fmean(step_losses[begin:step]), rel=1e-6)
        for begin, step in ((0, 5), (5, 10), (10, 12))
    }
    last = rows(run)[-1]
    assert abs(last["train/eval_loss"] - last["val/loss"]) < 0.5
    assert 1000 < last["train_seconds"] < 2000 < last["seconds/evaluate"]  # goes on counting


def test_extra_snapshots_are_the_same_after_a_stop(
    tiny: Config, train_in_process, tmp_path, monkeypatch
):
    tiny.attention.check_every = 1
    monkeypatch.setattr(glass.observer, "MIN_CHANGE", 2e-5)
    train_in_process(tiny)
    snapshots = [row["step"] for row in scored_rows(rows(tiny.run_dir))]
    assert {0, 6, 12} < set(snapshots)
    stopped = replace(tiny, run_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        patch.setattr(*(where := (training.device, "seed_micro_step")), getattr(*where))
        fault_at_call(*where, 9, lambda: os.kill(os.getpid(), signal.SIGTERM))()
        with pytest.raises(SystemExit):
            train_in_process(stopped)
    train_in_process(stopped, resume=True)
    assert_same_run(tiny.run_dir, stopped.run_dir)


def test_the_last_step_is_logged_evaluated_captured_and_saved(tiny: Config, train_in_process):
    tiny.log.every = tiny.eval.every = tiny.checkpoint.every = tiny.attention.every = 0
    tiny.optim = replace(tiny.optim, name="muon", schedule="constant")
    train_in_process(tiny)
    (row,) = rows(tiny.run_dir)
    seconds_per_step = row["train/ms_per_step"] / 1000
    assert 12 * seconds_per_step == pytest.approx(row["train_seconds"], rel=0.1)
    assert row["train/tokens_per_second"] * seconds_per_step == pytest.approx(4 * 32)
    assert "train/mfu" not in row and 0.1 < row["memory/peak_gib"] < 100
    assert (row["train/lr"], row["train/muon_lr"]) == (tiny.optim.lr, 5 * tiny.optim.lr)
    assert row["step"] == 12 and row["tokens"] == 12 * 4 * 32
    assert {
        "train/loss",
        "train/tokens_per_second",
        "val/loss",
        "val/bits_per_byte",
        "heads/induction/L1H1",
    } <= row.keys()
    for saved in ("attention/step_00000012.png", "checkpoints/step_00000012"):
        assert Path(tiny.run_dir, saved).exists()
