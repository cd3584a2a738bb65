"""Snapshots: scores often, attention grids seldom, and everything that a score depends on."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively, small
from processes import rows
from run_folders import load_run
from safetensors.torch import load_file

from config import AttentionConfig, Config, GPTConfig
from data.tokenizer import CharTokenizer
from glass.heads.measure import ablation, analysis, scores, snapshot
from glass.heads.measure.analysis import ProbeRun, analyze
from glass.heads.measure.probes import make_probes
from glass.heads.say.findings import summarize
from run.row import COMPANION_SUFFIXES, Row
from run.run_dir import RunDir
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuv\n")
IDS = np.random.default_rng(0).integers(0, 23, 2000)
X, Y = (torch.from_numpy(IDS[first : first + 320]).view(10, 32) for first in (0, 1))
MODEL = lively(build_model(small(block_size=32, position="rope")))


@pytest.fixture
def make_measurer(tmp_path) -> Callable[..., snapshot.SnapshotMeasurer]:
    """A function that makes the `SnapshotMeasurer` of a run of 12 steps."""

    def make(every: int = 2, batch_size: int = 4) -> snapshot.SnapshotMeasurer:
        config = Config(
            model=MODEL.config,
            max_steps=12,
            batch_size=batch_size,
            precision="fp32",
            attention=AttentionConfig(every=every),
        )
        tokens = SimpleNamespace(train=IDS, val=IDS[:500], tokenizer=TOKENIZER, task=None)
        return snapshot.SnapshotMeasurer(config, RunDir(tmp_path), tokens, (X, Y))

    return make


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
    row = run.score_heads()
    row |= run.measure_copying()
    row |= run.measure_composition(row)
    assert len(row.heads("heads/entropy")) == config.n_layer * config.n_head
    analysis = analyze(model, tokenizer, text.tolist(), lambda line: None)
    assert analysis.arrays["text"].shape[-1] == min(len(text), config.block_size)
    summarize(analysis.row)


def test_the_highest_prefix_matching_score_is_that_of_all_measurements():
    probes = make_probes(IDS, IDS[:500], TOKENIZER, 32, seed=0)
    highest = max(ProbeRun(MODEL, probes).score_heads().heads("heads/induction").values())
    assert analysis.highest_induction_score(MODEL, probes) == pytest.approx(highest, abs=1e-6)


@pytest.mark.parametrize(("change", "expected"), [(0.0, False), (0.04, False), (-0.06, True)])
def test_a_changed_prefix_matching_score_asks_for_a_snapshot(make_measurer, change, expected):
    measurer = make_measurer()
    highest = analysis.highest_induction_score(MODEL, measurer.probes)
    previous = Row({"heads/induction/L1H0": highest + change, "heads/induction/L0H1": -1.0})
    before = torch.random.get_rng_state()
    assert measurer.has_changed(MODEL, previous) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not measurer.has_changed(MODEL, Row())
    assert not measurer.has_changed(MODEL, Row({"heads/sink/L0H0": 0.5}))


@pytest.mark.parametrize(
    ("windows", "tokens", "count"), [(5, 999, 5), (500, 10, 16), (500, 400, 40), (500, 9999, 128)]
)
def test_importance_is_measured_on_windows_from_the_first_to_the_last(windows, tokens, count):
    numbers = torch.arange(windows)[:, None].expand(-1, 10)
    validation = SimpleNamespace(inputs=numbers, targets=numbers, device="cpu")
    inputs, targets = snapshot.spread_windows(validation, tokens)
    assert len(inputs) == len(targets) == count
    assert inputs[0, 0] == 0 and inputs[-1, 0] == windows - 1
    assert torch.equal(inputs, targets)


def test_an_extra_snapshot_measures_the_heads_but_explains_no_predictions(make_measurer):
    measurer = make_measurer(2, batch_size=4096)
    extra, regular = (measurer.measure(MODEL, step, Row()) for step in (3, 6))
    assert extra[0].keys() == regular[0].keys()
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
        readings = scores.readings(*maps, arrays["repeated_periods"])
        recomputed = {name: scores.mean_and_error(values) for name, values in readings.items()}
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
