"""Snapshots: scores often, attention grids seldom, and everything that a score depends on."""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import few, lively, small
from processes import rows
from safetensors.torch import load_file

from common.errors import UserError
from common.metrics import COMPANION_SUFFIXES
from config import AttentionConfig, Config, GPTConfig
from data.tokenizer import CharTokenizer
from glass.heads import ablation, analysis, scores, snapshot
from glass.heads.analysis import ProbeRun, analyze
from glass.heads.attention_grid import draw_attention_grid
from glass.heads.capture import capture, save_snapshot
from glass.heads.findings import summarize, summarize_run
from glass.heads.metrics import flatten, read_latest
from glass.heads.probes import make_probes
from glass.heads.results import Head
from glass.page.write import write_page
from training.checkpoint import load_run
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuv\n")
IDS = np.random.default_rng(0).integers(0, 23, 2000)
X, Y = (torch.from_numpy(IDS[first : first + 320]).view(10, 32) for first in (0, 1))
MODEL = lively(build_model(small(block_size=32, position="rope")))


@pytest.fixture
def make_snapshots(tmp_path) -> Callable[..., snapshot.Snapshots]:
    """A function that makes the `Snapshots` of a run of 12 steps."""

    def make(every: int = 2, picture_every: int = 0, batch_size: int = 4) -> snapshot.Snapshots:
        config = Config(
            model=MODEL.config,
            max_steps=12,
            batch_size=batch_size,
            precision="fp32",
            attention=AttentionConfig(every=every, picture_every=picture_every),
        )
        tokens = SimpleNamespace(train=IDS, val=IDS[:500], tokenizer=TOKENIZER, task=None)
        return snapshot.Snapshots(config, tmp_path, tokens, (X, Y), sample_tokens=8)

    return make


@pytest.mark.slow
@settings(
    max_examples=settings.default.max_examples // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from([name for name, _ in MODEL.named_parameters()]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    st.booleans(),
    st.sampled_from([2, 12]),
)
@example("blocks.1.attention.W_Q.weight", float("nan"), False, 12)
def test_a_model_that_is_not_finite_is_measured_without_warnings_and_shown(
    make_snapshots, tmp_path, name, value, everywhere, step
):
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        weight[: None if everywhere else 1] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshots = make_snapshots()
        measurements, arrays = snapshots.measure(model, step, None)
        metrics = flatten(measurements)
        save_snapshot(snapshots.path(step, ".npz"), step, snapshots.probes, arrays)
        draw_attention_grid(arrays["text"], snapshots.probes.text_tokens, 1, "a title")
        with suppress(UserError):
            snapshots.sample(model)
        row = json.dumps({"step": step} | metrics)
        (tmp_path / "metrics.jsonl").write_text(row + "\n")
        write_page(tmp_path)  # its data is strict JSON
        summarize_run([json.loads(row)])


tiny_models = st.builds(
    GPTConfig,
    vocab_size=st.integers(1, 6),
    block_size=st.integers(2, 8),
    n_layer=st.integers(1, 2),
    n_head=st.sampled_from([1, 2]),
    n_embd=st.just(8),
    position=st.sampled_from(["learned", "rope"]),
    ngrams=st.sampled_from([0, 2, 5]),
    ngram_rows=st.integers(1, 3),
)


@few
@given(tiny_models, st.lists(st.integers(0, 5), min_size=2, max_size=20))
def test_models_and_texts_of_any_size_can_be_measured(config, ids):
    model, tokenizer = build_model(config), CharTokenizer("ACGTN\n"[: config.vocab_size])
    text = np.array(ids) % config.vocab_size
    run = ProbeRun(model, make_probes(text, text, tokenizer, config.block_size, seed=0))
    assert np.isfinite(run.measure(0, run.score_heads()).scores["entropy"].mean).all()
    analysis = analyze(model, tokenizer, text.tolist(), lambda line: None)
    assert analysis.arrays["text"].shape[-1] == min(len(text), config.block_size)
    summarize(analysis)


@pytest.mark.parametrize(
    ("picture_every", "expected"), [(0, [0, 2, 4, 8, 12]), (4, [0, 4, 8, 12]), (10, [0, 10, 12])]
)
def test_grids_are_due_at_both_ends_and_regularly_or_at_each_doubling(
    make_snapshots, picture_every, expected
):
    snapshots = make_snapshots(2, picture_every)
    assert [step for step in range(13) if snapshots.is_grid_due(step)] == expected


def test_the_highest_prefix_matching_score_is_that_of_all_measurements():
    probes = make_probes(IDS, IDS[:500], TOKENIZER, 32, seed=0)
    scored = ProbeRun(MODEL, probes).score_heads()["induction"].mean
    assert analysis.highest_induction_score(MODEL, probes) == pytest.approx(scored.max(), abs=1e-6)


@pytest.mark.parametrize(("change", "expected"), [(0.0, False), (0.04, False), (-0.06, True)])
def test_a_changed_prefix_matching_score_asks_for_a_snapshot(make_snapshots, change, expected):
    snapshots = make_snapshots()
    highest = analysis.highest_induction_score(MODEL, snapshots.probes)
    others = [{"step": 0, "heads/induction/L0H0": 9.0}, {"step": 3, "val/loss": 2.0}]
    last = {"step": 2, "heads/induction/L1H0": highest + change, "heads/induction/L0H1": -1.0}
    before = torch.random.get_rng_state()
    previous = read_latest([others[0], last, others[1]])
    assert snapshots.has_changed(MODEL, previous) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not snapshots.has_changed(MODEL, None)
    previous = read_latest([{"step": 0, "heads/sink/L0H0": 0.5}])
    assert not snapshots.has_changed(MODEL, previous)


def test_an_extra_snapshot_measures_the_heads_but_explains_no_predictions(make_snapshots):
    snapshots = make_snapshots(2, batch_size=4096)
    extra, regular = (snapshots.measure(MODEL, step, None) for step in (3, 6))
    assert flatten(extra[0]).keys() == flatten(regular[0]).keys()
    assert ["token_effect" in arrays for _, arrays in (extra, regular)] == [False, True]


def test_every_score_and_its_error_can_be_recomputed_from_the_file(finished_run):
    model, _, _ = load_run(finished_run)
    for row in rows(finished_run):
        path = finished_run / "attention" / f"step_{row['step']:08d}.npz"
        if not path.exists():
            continue
        arrays = np.load(path)
        model.load_state_dict(load_file(path.with_suffix(".safetensors")), strict=False)
        maps = (
            model.attention_maps(torch.from_numpy(arrays[f"{name}_ids"])).numpy()
            for name in ("window", "repeated", "control")
        )
        recomputed = scores.score_heads(*maps, arrays["repeated_periods"])
        assert len(arrays["repeated"][0]) == len(arrays["control"][0]) >= 16
        if row["step"] == 12:
            losses = ablation.HeadAblation(
                arrays["validation_loss"], arrays["validation_loss_without_head"]
            )
            recomputed["importance"] = ablation.head_importance(losses)
        for name, (means, errors) in recomputed.items():
            rounding = 0.05 if "distance" in name else 2e-3  # of weights in float16
            for (layer, head), mean in np.ndenumerate(means):
                key = f"L{layer}H{head}"
                assert row[f"heads/{name}/{key}"] == pytest.approx(mean, abs=rounding)
                if not name.endswith(COMPANION_SUFFIXES):
                    error = row[f"heads/{name}_se/{key}"]
                    assert error == pytest.approx(errors[layer, head], abs=rounding)
    assert "heads/importance_se/L0H0" in row


@pytest.fixture
def last_snapshot(make_snapshots, tmp_path):
    """The measurements of a run's last snapshot, and the arrays in its file."""
    snapshots = make_snapshots()
    measurements, arrays = snapshots.measure(MODEL, 12, None)
    path = snapshots.path(12, ".npz")
    save_snapshot(path, 12, snapshots.probes, arrays)
    return measurements, np.load(path)


def test_equal_weights_give_equal_sample_texts(make_snapshots):
    snapshots = make_snapshots()
    sample = snapshots.sample(MODEL)
    assert len(sample) == 8 and snapshots.sample(MODEL) == sample


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "is_measured"), [(4, False), (400, True)])
def test_the_importance_of_a_large_models_heads_is_measured_if_the_run_is_long(
    make_snapshots, monkeypatch, batch_size, is_measured
):
    monkeypatch.setattr(analysis, "LARGE_MODEL_PARAMETERS", 0)
    measurements, _ = make_snapshots(batch_size=batch_size).measure(MODEL, 12, None)
    assert ("importance" in measurements.scores) == is_measured


@pytest.mark.slow
def test_the_last_snapshot_explains_the_text_and_a_repeated_row(last_snapshot):
    measurements, arrays = last_snapshot
    assert "importance" in measurements.scores
    longest = int(np.argmax(arrays["repeated_periods"]))
    for prefix, ids in (("", arrays["text_ids"]), ("repeated_", arrays["repeated_ids"][longest])):
        forward = capture(MODEL, ids[None])
        token_effect, head_effect = arrays[f"{prefix}token_effect"], arrays[f"{prefix}head_effect"]
        assert token_effect.dtype == head_effect.dtype == np.float32
        expected = ablation.measure_token_effects(MODEL, forward).loss
        assert token_effect == pytest.approx(expected, abs=1e-5, nan_ok=True)
        expected = ablation.measure_head_effects(MODEL, forward)
        assert head_effect == pytest.approx(expected, abs=1e-5, nan_ok=True)
        names = dict(zip(arrays[f"{prefix}named_ids"].tolist(), arrays[f"{prefix}named_tokens"]))
        most_probable = MODEL(forward.tokens)[0][0].argmax(dim=-1).tolist()
        assert [names[id] for id in arrays[f"{prefix}predicted_ids"][:, 0]] == [
            TOKENIZER.decode([id]) for id in most_probable
        ]


@pytest.mark.slow
def test_the_copying_gain_is_that_of_the_losses_in_the_file(last_snapshot):
    measurements, arrays = last_snapshot
    loss = arrays["reshuffled_loss"] - arrays["repeated_loss"]
    gains = [loss[row, p : 2 * p - 1].mean() for row, p in enumerate(arrays["repeated_periods"])]
    gain, error = measurements.copying_gain
    assert gain == pytest.approx(np.mean(gains), abs=1e-6)
    assert error == pytest.approx(np.std(gains, ddof=1) / 4, abs=1e-6)
    with torch.no_grad():
        correct = MODEL(torch.from_numpy(arrays["repeated_ids"]))[0].argmax(dim=-1).numpy()[:, :-1]
    correct = correct == arrays["repeated_ids"][:, 1:]
    periods = arrays["repeated_periods"]
    for estimate, values in (
        (measurements.repeated_accuracy, correct),
        (measurements.repeated_loss, arrays["repeated_loss"]),
    ):
        expected = np.mean([values[row, p : 2 * p - 1].mean() for row, p in enumerate(periods)])
        assert estimate.value == pytest.approx(expected, abs=1e-6)
    assert measurements.score("copying", Head(1, 1)).is_known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "step", "explained"),
    [(4, 2, set()), (4, 6, {"token_effect", "repeated_token_effect"}), (4096, 2, {"token_effect"})],
)
def test_where_explaining_is_expensive_it_is_done_only_with_a_grid(
    make_snapshots, batch_size, step, explained
):
    _, arrays = make_snapshots(2, 6, batch_size).measure(MODEL, step, None)
    assert {"token_effect", "repeated_token_effect"} & set(arrays) == explained
