"""What an analysis measures: which heads, on which random tokens."""

import numpy as np
import pytest
import torch
from models import lively, random_tokens, small

from data.tokenizer import CharTokenizer
from glass.heads.measure import analysis, logit_attribution
from glass.heads.measure.analysis import analyze, draw_expected_tokens
from glass.heads.measure.capture import capture
from run.row import Head
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
