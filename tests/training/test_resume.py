"""A run that is stopped and continued ends at the same bits as one that was not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from processes import assert_same_run, rows, same_tensors

from config import Config, UserError


class Stopped(Exception):
    pass


def stop_at(monkeypatch, owner, name: str, call: int):
    """Let a function raise at its n-th call, from outside."""
    do, calls = getattr(owner, name), iter(range(1, 1000))

    def dying(*args, **more):
        if next(calls) == call:
            raise Stopped
        return do(*args, **more)

    monkeypatch.setattr(owner, name, dying)


pytestmark = pytest.mark.slow


WHERE = ["in an evaluation", "in the last evaluation", "in a capture", "in a step"]


@pytest.mark.parametrize("where, optimizer", [
    *((where, "muon") for where in WHERE), ("in a step", "adamw"),
    *(pytest.param(where, "adamw", marks=pytest.mark.soak) for where in WHERE[:-1])])
def test_a_run_stopped_anywhere_and_resumed_has_the_same_bits(tiny: Config, train_here, tmp_path,
                                                              monkeypatch, where, optimizer):
    tiny.model.dropout, tiny.accumulate, tiny.optim.name = 0.2, 2, optimizer
    whole = replace(tiny, run_dir=str(tmp_path / "whole"))
    train_here(whole)
    with monkeypatch.context() as patch:
        import attention_maps.snapshot
        import training.evaluate
        import training.optim

        stop_at(patch, *{"in an evaluation": (training.evaluate.Validation, "evaluate", 3),
                         "in the last evaluation": (training.evaluate.Validation, "evaluate", 4),
                         "in a capture": (attention_maps.snapshot.Snapshots, "take", 2),
                         "in a step": (training.optim, "seed_micro_step", 19)}[where])
        with pytest.raises(Stopped):
            train_here(tiny)
    train_here(tiny, resume=True)
    assert_same_run(whole.run_dir, tiny.run_dir)


def test_what_observes_a_run_does_not_change_it(tiny: Config, train_here, tmp_path):
    tiny.model.dropout = 0.2
    train_here(tiny)
    losses = [row["train/loss"] for row in rows(tiny.run_dir) if "train/loss" in row]
    for evaluation, attention, save in ((0, 0, 0), (1, 1, 1), (5, 3, 2)):
        other = replace(tiny, run_dir=str(tmp_path / str(evaluation)),
                        eval=replace(tiny.eval, every=evaluation),
                        attention=replace(tiny.attention, every=attention),
                        checkpoint=replace(tiny.checkpoint, every=save))
        train_here(other)
        assert [row["train/loss"] for row in rows(other.run_dir) if "train/loss" in row] == losses
        assert same_tensors(*(Path(run, "checkpoints", "step_00000012", "model.safetensors")
                              for run in (tiny.run_dir, other.run_dir)))


def test_accumulation_changes_the_loss_by_rounding_only(tiny: Config, train_here, tmp_path):
    train_here(tiny)
    other = replace(tiny, run_dir=str(tmp_path / "four"), accumulate=4)
    train_here(other)
    for a, b in zip(rows(tiny.run_dir), rows(other.run_dir)):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)


def test_the_last_step_is_logged_evaluated_captured_and_saved(tiny: Config, train_here):
    tiny.log.every = tiny.eval.every = tiny.checkpoint.every = tiny.attention.every = 0
    train_here(tiny)
    row, = rows(tiny.run_dir)
    assert row["step"] == 12 and row["tokens"] == 12 * 4 * 32
    assert {"train/loss", "train/lr", "train/tokens_per_second", "val/loss", "val/bits_per_byte",
            "heads/induction/L1H1"} <= row.keys()
    assert Path(tiny.run_dir, "attention", "step_00000012.png").exists()
    assert Path(tiny.run_dir, "checkpoints", "step_00000012").is_dir()


def test_steps_of_the_diary_only_go_up_and_half_a_line_does_not_survive(tiny: Config, train_here):
    train_here(tiny, max_steps=8)
    metrics = Path(tiny.run_dir, "metrics.jsonl")
    metrics.write_text(metrics.read_text() + '{"step": 9, "tok')
    train_here(tiny, resume=True)
    steps = [row["step"] for row in rows(tiny.run_dir)]
    assert steps == list(range(13))


def test_a_larger_max_steps_extends_a_finished_run(tiny: Config, train_here, capsys):
    train_here(tiny)
    best = train_here(tiny, resume=True)
    assert "is finished" in capsys.readouterr().out
    assert best == min(row["val/loss"] for row in rows(tiny.run_dir) if row["step"]
                       and "val/loss" in row)
    train_here(tiny, resume=True, max_steps=16)
    assert rows(tiny.run_dir)[-1]["step"] == 16


def test_a_decayed_rate_that_rises_again_is_mentioned(tiny: Config, train_here, capsys):
    train_here(tiny)
    assert "rises again" not in capsys.readouterr().out
    train_here(tiny, resume=True, max_steps=16)
    note, = (line for line in capsys.readouterr().out.splitlines() if "rises again" in line)
    assert "from 10% to" in note and "falls until step 16" in note
    rates = [row["train/lr"] for row in rows(tiny.run_dir)[1:]]
    assert rates[11] < rates[12]


def test_training_seconds_are_carried_over_a_resume(tiny: Config, train_here):
    train_here(tiny, max_steps=8)
    before = rows(tiny.run_dir)[-1]["train_seconds"]
    train_here(tiny, resume=True)
    seconds = [row["train_seconds"] for row in rows(tiny.run_dir)]
    assert before > 0 and seconds == sorted(seconds)


def test_a_changed_text_is_refused_on_resume(tiny: Config, train_here, text_file, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text(text_file.read_text(encoding="utf-8"), encoding="utf-8")
    tiny.data.path = str(mine)
    train_here(tiny, max_steps=8)
    mine.write_text(mine.read_text(encoding="utf-8").replace("glass", "grass", 1), encoding="utf-8")
    with pytest.raises(UserError, match="has changed since the run began"):
        train_here(tiny, resume=True)


def test_a_run_learns(tiny: Config, train_here):
    tiny.max_steps, tiny.optim.name, tiny.optim.lr, tiny.eval.every = 120, "muon", 1e-2, 120
    best = train_here(tiny)
    untrained = rows(tiny.run_dir)[0]["val/loss"]
    assert untrained == pytest.approx(np.log(21), rel=0.05)
    assert best < 0.75 * untrained
