"""What an analysis measures: which heads, on which random tokens, of any model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import few, lively, random_tokens, small
from processes import rows
from run_folders import load_run
from safetensors.torch import load_file

from config import GPTConfig
from data.tokenizer import CharTokenizer
from glass.heads.measure import ablation, analysis, logit_attribution, scores
from glass.heads.measure.analysis import (
    ProbeRun,
    analyze,
    draw_expected_tokens,
    highest_induction_score,
)
from glass.heads.measure.capture import capture
from glass.heads.measure.probes import make_probes
from glass.heads.say.findings import summarize
from run.row import COMPANION_SUFFIXES, Head
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuv\n")


def test_expected_tokens_are_drawn_from_the_mean_of_the_predictions():
    model, tokens = lively(build_model(small())), random_tokens(1, 16)
    drawn = draw_expected_tokens(model, capture(model, tokens.numpy()), vocab_size=20)
    with torch.no_grad():
        expected = model(tokens)[0][0, :, :20].softmax(dim=-1).mean(dim=0).numpy()
    assert np.bincount(drawn, minlength=20) / len(drawn) == pytest.approx(expected, abs=0.01)


def test_a_long_text_is_cut_after_its_begin_of_text():
    model = lively(build_model(small()))
    tokenizer = CharTokenizer(TOKENIZER.alphabet)
    for begin, first in ((None, 4), (3, 3), (9, 4)):
        tokenizer.begin_of_text = begin
        found = analyze(model, tokenizer, [3, *range(20)], lambda line: None).arrays["text_ids"]
        assert found.tolist() == [first, *range(5, 20)]


def test_fewer_measurements_are_taken_of_a_large_model(monkeypatch):
    model, ids = lively(build_model(small())), random_tokens(16).tolist()
    complete = analyze(model, TOKENIZER, ids, lambda line: None)
    monkeypatch.setattr(analysis, "LARGE_MODEL_PARAMETERS", 0)
    monkeypatch.setattr(logit_attribution, "MAX_HEAD_EFFECT_COST", 0)
    reduced = analyze(model, TOKENIZER, ids, lambda line: None)
    assert not reduced.row.places("faithfulness")
    assert np.isnan(reduced.arrays["head_effect"]).all()
    all_heads = {Head(*index) for index in np.ndindex(2, 4)}
    assert complete.row.heads("heads/copying").keys() == all_heads
    estimates = {head: reduced.row.score("induction", head) for head in all_heads}
    induction_heads = {head for head, (value, error) in estimates.items() if value - error >= 0.2}
    assert reduced.row.heads("heads/copying").keys() == induction_heads
    for name in complete.row.columns("heads").keys() - {"copying", "copying_se"}:
        assert reduced.row.heads(f"heads/{name}") == complete.row.heads(f"heads/{name}")


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
    measured = analyze(model, tokenizer, text.tolist(), lambda line: None)
    assert measured.arrays["text"].shape[-1] == min(len(text), config.block_size)
    summarize(measured.row)


def test_the_highest_prefix_matching_score_is_that_of_all_measurements():
    model = lively(build_model(small(block_size=32, position="rope")))
    ids = np.random.default_rng(0).integers(0, 23, 2000)
    probes = make_probes(ids, ids[:500], TOKENIZER, 32, seed=0)
    highest = max(ProbeRun(model, probes).score_heads().heads("heads/induction").values())
    assert highest_induction_score(model, probes) == pytest.approx(highest, abs=1e-6)


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
            losses = arrays["validation_loss"], arrays["validation_loss_without_head"]
            recomputed["importance"] = ablation.head_importance(*losses)
        for name, (means, errors) in recomputed.items():
            rounding = 0.05 if "distance" in name else 2e-3  # of weights in float16
            for (layer, head), mean in np.ndenumerate(means):
                key = f"L{layer}H{head}"
                assert row[f"heads/{name}/{key}"] == pytest.approx(mean, abs=rounding)
                if not name.endswith(COMPANION_SUFFIXES):
                    error = row[f"heads/{name}_se/{key}"]
                    assert error == pytest.approx(errors[layer, head], abs=rounding)
    assert "heads/importance_se/L0H0" in row
