"""Probes, and what one forward pass over them captures."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from config import GPTConfig
from data.tokenizer import CharTokenizer, train_bpe
from glass.heads.capture import (
    PATTERNS,
    capture,
    save_snapshot,
    snapshot_arrays,
)
from glass.heads.probes import make_probes
from variants import build_model


@pytest.fixture(params=[1, 2, 4])
def model(request):
    torch.manual_seed(0)
    return build_model(
        GPTConfig(
            vocab_size=60,
            block_size=64,
            n_layer=2,
            n_head=4,
            n_kv_head=request.param,
            n_embd=32,
            dropout=0.3,
        )
    )


ALPHABET = CharTokenizer("".join(chr(c) for c in range(64, 123)) + "\n")


@pytest.fixture
def probes():
    ids = np.random.default_rng(0).integers(0, 60, 5000)
    return make_probes(ids, ids[:500], ALPHABET, 24, seed=1)


def test_random_rows_repeat_after_their_period_and_nowhere_else(probes):
    assert [ALPHABET.decode([i]) for i in probes.text] == probes.text_tokens
    for row, control, period in zip(probes.repeated, probes.control, probes.periods):
        assert np.array_equal(row[:period], row[period : 2 * period])
        assert len(set(row)) == len(row) - period
        assert len(set(control)) == len(control)
    for row, other, period in zip(probes.repeated, probes.reshuffled, probes.periods):
        again, pairs = other[period : 2 * period], set(pairwise(row[:period]))
        assert np.array_equal(other[:period], row[:period]) and again[0] == row[0]
        assert np.array_equal(other[2 * period :], row[2 * period :])
        assert set(again) == set(row[:period]) and not pairs & set(pairwise(again))
    assert len(set(probes.periods)) >= 3 and len(probes.periods) >= 16
    assert probes.repeated.shape == probes.control.shape == (len(probes.periods), 24)
    assert probes.windows.shape == (16, 24)
    assert np.array_equal(probes.windows[0], probes.text)


def test_random_tokens_are_drawn_by_their_frequency_in_the_training_split():
    share = np.where(np.arange(500) % 3 == 0, 0, 1 / np.arange(1, 501))  # a third is never seen
    train = np.random.default_rng(0).choice(500, 400_000, p=share / share.sum())
    tokenizer = CharTokenizer("".join(map(chr, range(1000, 1500))))
    probes = make_probes(train, np.arange(100), tokenizer, 48, seed=3)
    drawn = np.concatenate([probes.repeated.ravel(), probes.control.ravel()])
    assert np.isin(drawn, train).all()
    assert (
        np.isin(np.arange(1, 10), drawn).sum() == 6
    )  # of the nine most frequent ids, three are unseen
    seen = np.flatnonzero(share)
    assert (drawn < np.median(seen)).mean() > 0.7  # uniform ids would be 0.5
    # Pieces of a long split are counted, up to its end.
    late = np.concatenate([np.zeros(5_000_000, np.int64), np.arange(1, 60)])
    probes = make_probes(late, np.arange(100), tokenizer, 48, seed=3)
    assert set(probes.control.ravel()) > {0, 1, 59}


def test_random_rows_lack_the_end_of_text_token_and_fit_a_small_vocabulary():
    tokenizer = train_bpe(["some text"], 257)
    probes = make_probes(np.arange(257), np.arange(200), tokenizer, 48, seed=0)
    assert tokenizer.end_of_text not in probes.repeated
    few = make_probes(np.arange(4), np.zeros(50, int), CharTokenizer("abc\n"), 48, seed=0)
    assert not len(few.random) and not len(few.periods)
    five = make_probes(np.arange(5), np.zeros(50, int), CharTokenizer("abcd\n"), 48, seed=0)
    assert five.repeated.shape == (16, 6) and (five.periods == 3).all()
    assert all(
        row[i] != row[i - back] for row in five.control for back in (2, 3) for i in range(3, 6)
    )
    long = make_probes(np.arange(257), np.arange(200), tokenizer, 150, seed=0)
    assert len(long.text) == 150 and long.repeated.shape == (16, 64)


def run_probes(model, probes):
    """Return the forward pass over the text, and the arrays of a snapshot."""
    text = capture(model, probes.text[None])
    return text, snapshot_arrays(model, text, capture(model, probes.random))


def test_captured_values_are_those_of_the_model_with_fused_attention(model, probes):
    text = run_probes(model, probes)[0]
    model.eval()
    for layer, block in enumerate(model.blocks):
        v = text.v[layer].repeat_interleave(4 // model.config.kv_heads, dim=1)  # (1, H, T, d_v)
        heads = (text.weights[layer] @ v).transpose(1, 2)
        assert torch.allclose(heads, text.heads[layer], atol=1e-6)
        x = block.norm_1(text.residuals[layer])
        assert torch.allclose(block.attention.W_O(heads.flatten(2)), block.attention(x), atol=1e-5)
    logits = model.head(model.norm(text.residuals[-1]))
    assert torch.allclose(logits, model(text.tokens)[0], atol=1e-5)


def test_a_saved_snapshot_needs_no_pickle_and_its_rows_still_sum_to_1(model, probes, tmp_path):
    arrays = run_probes(model, probes)[1]
    save_snapshot(tmp_path / "step.npz", 7, probes, arrays)
    with np.load(tmp_path / "step.npz", allow_pickle=False) as saved:
        assert saved["text"].dtype == np.float16
        assert np.abs(saved["text"].astype(np.float32).sum(-1) - 1).max() < 2e-3
        assert list(saved["text_tokens"]) == probes.text_tokens
        assert saved["step"] == 7
        for name in PATTERNS:
            assert np.array_equal(saved[f"{name}_ids"], getattr(probes, name))
            maps = model.attention_maps(torch.from_numpy(np.atleast_2d(saved[f"{name}_ids"])))
            maps = maps.squeeze(1) if name == "text" else maps
            assert np.allclose(maps, saved[name], atol=1e-3)
        assert np.array_equal(saved["window_ids"], probes.windows)
        assert np.array_equal(saved["reshuffled_ids"], probes.reshuffled)
    assert [p.name for p in tmp_path.iterdir()] == ["step.npz"]


def test_value_norms_are_the_lengths_of_what_a_head_writes_for_each_token(model, probes):
    text, arrays = run_probes(model, probes)
    for layer, block in enumerate(model.blocks):
        for head in range(4):
            W_O = block.attention.W_O.weight[:, head * 8 : (head + 1) * 8]  # (C, d_v)
            v = text.v[layer, 0, head // (4 // model.config.kv_heads)]  # (T, d_v)
            written = (v @ W_O.T).norm(dim=-1).detach().numpy()
            assert np.allclose(arrays["text_value_norms"][layer, head], written, atol=1e-6)
