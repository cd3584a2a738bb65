"""What a real run keeps: scores often, pictures seldom, and all that a score is computed from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import rows

from attention_maps import ablation, scores
from attention_maps.snapshot import Snapshots
from config import Config, UserError, read_config
from files import ASIDE, read_rows
from training.checkpoint import load_run


def steps_of(run: str, kind: str) -> list[int]:
    return sorted(int(p.stem[5:]) for p in Path(run, "attention").glob(f"*{kind}"))


@pytest.mark.slow
@pytest.mark.parametrize(("picture_every", "drawn"), [
    (0, [0, 2, 4, 8, 12]), (4, [0, 4, 8, 12]), (10, [0, 10, 12])])
def test_scores_come_often_and_pictures_seldom(tiny: Config, train_here, picture_every, drawn):
    tiny.attention.every, tiny.attention.picture_every = 2, picture_every
    train_here(tiny)
    assert steps_of(tiny.run_dir, ".npz") == [0, 2, 4, 6, 8, 10, 12]
    scored = [row["step"] for row in rows(tiny.run_dir) if "heads/induction/L1H1" in row]
    assert scored == [0, 2, 4, 6, 8, 10, 12]
    assert steps_of(tiny.run_dir, ".png") == drawn
    assert [s["step"] for s in read_rows(Path(tiny.run_dir, "samples.jsonl"))] == drawn


def test_a_picture_that_would_be_of_no_snapshot_is_refused(tiny: Config):
    for every, picture_every in ((100, 150), (0, 100)):
        tiny.attention.every, tiny.attention.picture_every = every, picture_every
        with pytest.raises(UserError, match=f"picture_every={picture_every} is not a multiple"):
            tiny.check()


def test_every_score_and_its_error_can_be_computed_again_from_the_file(whole):
    for row in rows(whole):
        path = whole / "attention" / f"step_{row['step']:08d}.npz"
        if not path.exists():
            continue
        held = np.load(path)
        maps = (held[name].astype(np.float32) for name in ("text", "repeat", "control"))
        tables = scores.tables(*maps, held["repeat_periods"])
        assert len(held["repeat"][0]) == len(held["control"][0]) >= 16
        if row["step"] == 12:
            tables["importance"] = ablation.importance(held["loss"], held["loss_without"])
        for name, (means, errors) in tables.items():
            for (layer, head), mean in np.ndenumerate(means):
                rounding = 0.05 if "distance" in name else 2e-3  # of float16
                place = f"L{layer}H{head}"
                assert row[f"heads/{name}/{place}"] == pytest.approx(mean, abs=rounding)
                if not name.endswith(ASIDE):
                    kept = row[f"heads/{name}_se/{place}"]
                    assert kept == pytest.approx(errors[layer, head], abs=rounding)
    assert "heads/importance_se/L0H0" in row


def test_a_snapshot_can_be_left_between_its_parts(tiny: Config, train_here, monkeypatch):
    class Asked(Exception):
        pass

    whole, calls = Snapshots.take, []

    def asked(self, model, step, rows, *_):
        def between():
            calls.append(step)
            if calls.count(6) == 2:
                raise Asked

        return whole(self, model, step, rows, between)

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "take", asked)
        with pytest.raises(Asked):
            train_here(tiny)
    assert calls[-1] == 6 and "heads/sink/L0H0" not in rows(tiny.run_dir)[-1]
    train_here(read_config(Path(tiny.run_dir, "config.yaml")), resume=True)
    assert steps_of(tiny.run_dir, ".npz") == [0, 6, 12]


@pytest.mark.slow
def test_every_snapshot_tells_what_predictions_needed(tiny: Config, train_here):
    train_here(tiny)
    model, tokenizer, _ = load_run(tiny.run_dir)
    held = np.load(Path(tiny.run_dir, "attention", "step_00000012.npz"))
    row = int(np.argmax(held["repeat_periods"]))
    for prefix, ids in (("", held["text_ids"]), ("repeat_", held["repeat_ids"][row])):
        tokens = torch.from_numpy(ids)
        need, knockout = held[f"{prefix}need"], held[f"{prefix}knockout"]
        assert need.dtype == knockout.dtype == np.float32
        assert need == pytest.approx(ablation.need(model, tokens), abs=1e-5, nan_ok=True)
        assert knockout == pytest.approx(ablation.knockout(model, tokens), abs=1e-5, nan_ok=True)
        words = dict(zip(held[f"{prefix}words_ids"].tolist(), held[f"{prefix}words"]))
        likeliest = model(tokens[None])[0][0].argmax(dim=-1).tolist()
        assert [words[i] for i in held[f"{prefix}predicted_ids"][:, 0]] == [
            tokenizer.decode([i]) for i in likeliest]
    # The repeat gain, from the losses that are kept, by hand.
    loss, periods = held["repeat_loss"], held["repeat_periods"]
    gains = [loss[r, :p - 1].mean() - loss[r, p:2 * p - 1].mean() for r, p in enumerate(periods)]
    last = rows(tiny.run_dir)[-1]
    assert last["probe/repeat_gain"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert last["probe/repeat_gain_se"] == pytest.approx(np.std(gains, ddof=1) / 4, abs=1e-6)
    assert {f"heads/copying{end}/L1H1" for end in ("", "_se")} <= last.keys()


@pytest.mark.slow
def test_where_it_would_cost_too_much_it_is_told_where_a_picture_is_due(tiny: Config, train_here):
    tiny.attention.every, tiny.attention.picture_every = 2, 6
    train_here(tiny)  # 256 tokens between two snapshots: what predictions needed would cost more
    assert told(tiny.run_dir) == {0: {"need", "repeat_need"}, 2: set(), 4: set(), 12: {
        "need", "repeat_need"}, 6: {"need", "repeat_need"}, 8: set(), 10: set()}
    tiny.batch_size, tiny.run_dir = 256, tiny.run_dir + "_of_more"  # of the text it is cheap now
    train_here(tiny, max_steps=6)
    assert told(tiny.run_dir)[2] == {"need"}


def told(run: str) -> dict[int, set[str]]:
    return {step: {"need", "repeat_need"} & set(np.load(
        Path(run, "attention", f"step_{step:08d}.npz"))) for step in steps_of(run, ".npz")}


@pytest.mark.slow
def test_what_a_snapshot_tells_changes_nothing_of_the_training(tiny: Config, train_here, tmp_path):
    losses = []
    for every in (0, 2):
        tiny.attention.every, tiny.run_dir = every, str(tmp_path / f"every_{every}")
        train_here(tiny)
        losses.append([row["train/loss"] for row in rows(tiny.run_dir) if "train/loss" in row])
    assert losses[0] == losses[1]
