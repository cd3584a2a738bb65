"""Probes, and what one forward pass over them captures."""

import numpy as np
import pytest
import torch

from config import GPTConfig
from data.tokenizer import CharTokenizer
from glass.heads.measure.analysis import snapshot_arrays
from glass.heads.measure.capture import capture
from glass.heads.measure.probes import make_probes
from glass.heads.measure.snapshot_files import PATTERN_ARRAYS, save_snapshot
from model import Context
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
        assert torch.allclose(
            block.attention.W_O(heads.flatten(2)), block.attention(x, Context()), atol=1e-5
        )
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
        for name in PATTERN_ARRAYS:
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
