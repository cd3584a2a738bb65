"""What a prediction needed, against slow loops that change one thing at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from models import configs, few, lively, ngram_vectors, random_tokens, small

from attention_maps import ablation
from attention_maps.capture import capture
from model import GPT, attention, causal_mask


def captured(model, tokens):
    return capture(model, tokens.numpy()[None])


def slow(model, tokens, hidden=None, silent=None) -> torch.Tensor:
    """ln p of the next tokens, by the written-out formula, a layer and a head at a time, with
    token `hidden` out of sight of later queries and n-grams, or the head `silent`, (layer, head),
    zeroed."""
    c, T = model.config, len(tokens)
    mask = causal_mask(T, T)
    if hidden is not None:
        mask[hidden + 1 :, hidden] = False
    x = model.token_embedding.weight[tokens][None]
    if model.position_embedding is not None:
        x = x + model.position_embedding.weight[:T]
    if model.ngrams is not None:
        x = x + ngram_vectors(model, tokens, hidden)
    if c.norm_embedding:
        x = F.rms_norm(x, (c.n_embd,))
    for layer, block in enumerate(model.blocks):
        a = block.attention
        q, k, v = a.project(block.norm_1(x), model.rotary_at(0, T))
        heads = []
        for h in range(c.n_head):
            g = h // (c.n_head // c.kv_heads)
            y, _ = attention(q[:, h], k[:, g], v[:, g], mask)
            heads.append(y * 0 if (layer, h) == silent else y)
        x = x + a.W_O(torch.cat(heads, dim=-1))
        x = x + block.mlp(block.norm_2(x))
    return model.head(model.norm(x))[0].log_softmax(dim=-1).detach()  # (T, V)


def slow_losses(model, tokens, **changed) -> np.ndarray:
    return -slow(model, tokens, **changed)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()


@few
@given(configs)
def test_need_and_knockout_are_what_a_slow_loop_finds(config):
    model, tokens = lively(GPT(config)).double(), random_tokens(11)
    whole = slow_losses(model, tokens)
    found = ablation.measure_token_effects(model, captured(model, tokens))
    need, log_p = found["token_effect"], slow(model, tokens)
    assert need.shape == (11, 11) and np.isnan(need[-1]).all()
    assert not np.triu(need[:-1]).any()  # a token is not hidden from itself and those before it
    for j in range(10):
        changed = slow_losses(model, tokens, hidden=j) - whole
        assert need[:-1, j] == pytest.approx(np.where(np.arange(10) > j, changed, 0), abs=1e-6)
        kl = F.kl_div(slow(model, tokens, hidden=j), log_p, reduction="none", log_target=True)
        assert found["token_effect_kl"][:, j] == pytest.approx(kl.sum(dim=-1).numpy(), abs=1e-6)
    head_effect = ablation.measure_head_effects(model, captured(model, tokens))
    assert head_effect.shape == (2, 4, 11) and np.isnan(head_effect[..., -1]).all()
    for layer in range(2):
        for h in range(4):
            changed = slow_losses(model, tokens, silent=(layer, h)) - whole
            assert head_effect[layer, h, :-1] == pytest.approx(changed, abs=1e-9)
    assert np.abs(need[:-1]).max() > 1e-3 and np.nanmax(np.abs(head_effect)) > 1e-3


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_need_and_knockout_are_the_same_in_passes_of_any_size(monkeypatch, rows):
    model = lively(GPT(small(n_kv_head=2, block_size=64)))
    whole = captured(model, random_tokens(40))
    need, head_effect = (
        ablation.measure_token_effects(model, whole),
        ablation.measure_head_effects(model, whole),
    )
    monkeypatch.setattr(ablation, "at_once", lambda model, length: rows)
    for name, found in ablation.measure_token_effects(model, whole).items():
        assert np.allclose(found, need[name], atol=2e-5, equal_nan=True)
    assert np.allclose(
        ablation.measure_head_effects(model, whole), head_effect, atol=2e-5, equal_nan=True
    )


def test_in_float32_need_is_exact_to_its_last_digits():
    model = lively(GPT(small(n_kv_head=2, position="rope", qk_norm=True)))
    whole = captured(model, random_tokens(16))
    need, head_effect = (
        ablation.measure_token_effects(model, whole)["token_effect"],
        ablation.measure_head_effects(model, whole),
    )
    assert need.dtype == head_effect.dtype == np.float32
    whole = captured(model.double(), random_tokens(16))
    assert (
        np.nanmax(np.abs(need - ablation.measure_token_effects(model, whole)["token_effect"]))
        < 2e-5
    )
    assert np.nanmax(np.abs(head_effect - ablation.measure_head_effects(model, whole))) < 2e-5


def test_what_is_measured_leaves_the_model_as_it_was():
    model = GPT(small(dropout=0.5)).train()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    whole = captured(model, random_tokens(16))
    first, again = (ablation.measure_token_effects(model, whole)["token_effect"] for _ in range(2))
    assert np.array_equal(first, again, equal_nan=True)  # no dropout
    ablation.measure_head_effects(model, whole)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_importance_is_what_the_loss_gains_when_a_heads_output_is_nothing(groups):
    model = lively(GPT(small(n_kv_head=groups, n_embd=32, block_size=32, dropout=0.3)))
    tokens = random_tokens(5, 33)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 20:] = -1
    model.train()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    losses = ablation.losses_without_heads(model, x, y)
    table, error = ablation.importance(**losses)
    assert table.shape == (2, 4) and model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    model.eval()
    with torch.no_grad():
        whole = model(x, y)[1].item()
        for layer, head in ((0, 0), (1, 3)):

            def without(module, inputs, head=head):
                y = inputs[0].clone()
                y[..., head * 8 : (head + 1) * 8] = 0  # before W_O: the head's own output
                return (y,)

            hook = model.blocks[layer].attention.W_O.register_forward_pre_hook(without)
            assert table[layer, head] == pytest.approx(model(x, y)[1].item() - whole, abs=1e-5)
            hook.remove()
    assert np.abs(table).max() > 1e-3
    # The error is that of a bootstrap over windows, of which one has fewer tokens.
    gain = losses["validation_loss_without_head"] - losses["validation_loss"]  # (2, 4, 5, 32)
    chosen = np.random.default_rng(0).integers(0, 5, (4000, 5))
    sums, counts = np.nansum(gain, axis=-1), (y >= 0).sum(dim=-1).numpy()
    drawn = sums[..., chosen].sum(axis=-1) / counts[chosen].sum(axis=-1)  # (2, 4, 4000)
    assert error == pytest.approx(drawn.std(axis=-1) * np.sqrt(5 / 4), rel=0.1)
