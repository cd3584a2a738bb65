"""What a snapshot keeps: scores often, pictures seldom, and all that a score is computed from."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import lively, small
from processes import rows
from safetensors.torch import load_file

from attention_maps import ablation, scores, snapshot
from attention_maps.capture import capture
from common.metrics import COMPANION_SUFFIXES
from config import AttentionConfig, Config
from data.tokenizer import CharTokenizer
from model import GPT
from training.checkpoint import load_run
from training.processes import Stopped, World

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuv\n")
IDS = np.random.default_rng(0).integers(0, 23, 2000)
X, Y = (torch.from_numpy(IDS[first : first + 320]).view(10, 32) for first in (0, 1))
MODEL = lively(GPT(small(block_size=32, position="rope")))


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    """A function that makes the `Snapshots` of a run of 12 steps."""
    monkeypatch.setattr(snapshot, "SAMPLE_TOKENS", 8)

    def make(every: int = 2, picture_every: int = 0, batch_size: int = 4) -> snapshot.Snapshots:
        config = Config(
            model=MODEL.config,
            max_steps=12,
            batch_size=batch_size,
            precision="fp32",
            attention=AttentionConfig(every=every, picture_every=picture_every),
        )
        tokens = SimpleNamespace(train=IDS, val=IDS[:500], tokenizer=TOKENIZER)
        return snapshot.Snapshots(config, tmp_path, tokens, (X, Y), nullcontext)

    return make


@pytest.mark.parametrize(
    ("picture_every", "drawn"), [(0, [0, 2, 4, 8, 12]), (4, [0, 4, 8, 12]), (10, [0, 10, 12])]
)
def test_scores_come_often_and_pictures_seldom(snapshots, picture_every, drawn):
    due = snapshots(2, picture_every).picture_due
    assert [step for step in range(0, 13, 2) if due(step)] == drawn


def test_every_score_and_its_error_can_be_computed_again_from_the_file(finished_run):
    model, _, _ = load_run(finished_run)
    for row in rows(finished_run):
        path = finished_run / "attention" / f"step_{row['step']:08d}.npz"
        if not path.exists():
            continue
        held, last = np.load(path), row["step"] == 12
        if not path.with_suffix(".safetensors").exists():
            continue
        model.load_state_dict(load_file(path.with_suffix(".safetensors")), strict=False)
        maps = (
            model.attention_maps(torch.from_numpy(held[f"{name}_ids"])).numpy()
            for name in ("window", "repeated", "control")
        )
        tables = scores.tables(*maps, held["repeated_periods"])
        assert len(held["repeated"][0]) == len(held["control"][0]) >= 16
        if last:
            tables["importance"] = ablation.importance(
                held["validation_loss"], held["validation_loss_without_head"]
            )
        for name, (means, errors) in tables.items():
            for (layer, head), mean in np.ndenumerate(means):
                rounding = 0.05 if "distance" in name else 2e-3  # of weights in float16
                place = f"L{layer}H{head}"
                assert row[f"heads/{name}/{place}"] == pytest.approx(mean, abs=rounding)
                if not name.endswith(COMPANION_SUFFIXES):
                    kept = row[f"heads/{name}_se/{place}"]
                    assert kept == pytest.approx(errors[layer, head], abs=rounding)
    assert "heads/importance_se/L0H0" in row


@pytest.mark.slow
def test_a_signal_ends_a_snapshot_at_once_and_it_can_be_taken_again(
    snapshots, tmp_path, monkeypatch
):
    taker = snapshots()

    def asked(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was only noted")

    for part in ("explain_predictions", "sample_text"):
        with monkeypatch.context() as patch, pytest.raises(Stopped), World() as world:
            world.at_once = True
            patch.setattr(snapshot, part, asked)
            taker.take(MODEL, 4, [])
    (tmp_path / "attention" / "step_00000004.png").unlink()
    taker.take(MODEL, 4, [])
    assert {p.name for p in (tmp_path / "attention").iterdir()} == {
        f"step_00000004.{end}" for end in ("npz", "png", "safetensors")
    }


@pytest.mark.slow
def test_a_snapshot_tells_what_predictions_needed(snapshots, tmp_path):
    metrics, text = snapshots().take(MODEL, 12, [])
    assert "heads/importance/L0H0" in metrics and len(text) == 8
    held = np.load(tmp_path / "attention" / "step_00000012.npz")
    row = int(np.argmax(held["repeated_periods"]))
    for prefix, ids in (("", held["text_ids"]), ("repeated_", held["repeated_ids"][row])):
        seen = capture(MODEL, ids[None])
        need, head_effect = held[f"{prefix}token_effect"], held[f"{prefix}head_effect"]
        assert need.dtype == head_effect.dtype == np.float32
        assert need == pytest.approx(
            ablation.measure_token_effects(MODEL, seen)["token_effect"], abs=1e-5, nan_ok=True
        )
        assert head_effect == pytest.approx(
            ablation.measure_head_effects(MODEL, seen), abs=1e-5, nan_ok=True
        )
        words = dict(zip(held[f"{prefix}named_ids"].tolist(), held[f"{prefix}named_tokens"]))
        likeliest = MODEL(seen.tokens)[0][0].argmax(dim=-1).tolist()
        assert [words[i] for i in held[f"{prefix}predicted_ids"][:, 0]] == [
            TOKENIZER.decode([i]) for i in likeliest
        ]
    # The repeat gain, from the losses that are kept, by hand.
    loss = held["reshuffled_loss"] - held["repeated_loss"]
    gains = [loss[r, p : 2 * p - 1].mean() for r, p in enumerate(held["repeated_periods"])]
    assert metrics["probe/copying_gain"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert metrics["probe/copying_gain_se"] == pytest.approx(np.std(gains, ddof=1) / 4, abs=1e-6)
    assert {f"heads/copying{end}/L1H1" for end in ("", "_se")} <= metrics.keys()


@pytest.mark.slow
def test_where_it_would_cost_too_much_it_is_told_where_a_picture_is_due(snapshots, tmp_path):
    for batch_size, step, told in (
        (4, 2, set()),
        (4, 6, {"token_effect", "repeated_token_effect"}),
        (4096, 2, {"token_effect"}),
    ):
        snapshots(2, 6, batch_size).take(MODEL, step, [])
        held = np.load(tmp_path / "attention" / f"step_{step:08d}.npz")
        assert {"token_effect", "repeated_token_effect"} & set(held) == told
