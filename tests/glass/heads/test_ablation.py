"""Ablations, against slow loops that change one thing at a time."""

import formulas
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from models import captured_with, configs, few, lively, ngram_vectors, random_tokens, small

from generation.scoring import token_losses
from glass.heads.ablation import (
    ablate_heads,
    head_importance,
    iterate_head_effects,
    iterate_token_effects,
    measure_head_effects,
    measure_token_effects,
)
from glass.heads.capture import ForwardPass, capture, next_tokens
from glass.heads.interventions import Interventions
from glass.heads.results import Head
from model import GPT, causal_mask
from variants import build_model, gates_of, sink_of


def capture_text(model: GPT, tokens: torch.Tensor) -> ForwardPass:
    return capture(model, tokens.numpy()[None])


def slow_log_probabilities(
    model: GPT,
    tokens: torch.Tensor,
    hidden: int | None = None,
    zeroed: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return ln p (T, V) of the next tokens, by the written-out formula, head by head.

    Token `hidden` is out of sight of later queries and n-grams; the head `zeroed`, (layer, head),
    outputs nothing.
    """
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
        smear = {"mask": mask} if c.smear_keys else {}
        q, k, v = a.project(block.norm_1(x), model.rotary_at(0, T), **smear)
        sinks = [None] * c.n_head if sink_of(a) is None else sink_of(a)
        gates = gates_of(a, block.norm_1(x))
        heads = []
        for h in range(c.n_head):
            g = h // (c.n_head // c.kv_heads)
            y, _ = formulas.attend(q[:, h], k[:, g], v[:, g], mask, sinks[h])
            if gates is not None:
                y = y * gates[:, :, h]
            heads.append(y * 0 if (layer, h) == zeroed else y)
        x = x + a.W_O(torch.cat(heads, dim=-1))
        if block.mlp is not None:
            x = x + block.mlp(block.norm_2(x))
    return model.head(model.norm(x))[0].log_softmax(dim=-1).detach()


def slow_losses(model: GPT, tokens: torch.Tensor, **changes) -> np.ndarray:
    log_p = slow_log_probabilities(model, tokens, **changes)
    return -log_p[torch.arange(len(tokens) - 1), tokens[1:]].numpy()


@few
@given(configs)
@pytest.mark.slow
def test_token_effects_are_those_of_a_slow_loop(config):
    model, tokens = lively(build_model(config)).double(), random_tokens(11)
    loss, log_p = slow_losses(model, tokens), slow_log_probabilities(model, tokens)
    effects = measure_token_effects(model, capture_text(model, tokens))
    assert effects.loss.shape == (11, 11) and np.isnan(effects.loss[-1]).all()
    # A token is not hidden from itself and from the tokens before it.
    assert not np.triu(effects.loss[:-1]).any()
    for j in range(10):
        increase = slow_losses(model, tokens, hidden=j) - loss
        expected = np.where(np.arange(10) > j, increase, 0)
        assert effects.loss[:-1, j] == pytest.approx(expected, abs=1e-6)
        log_q = slow_log_probabilities(model, tokens, hidden=j)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
        assert effects.kl[:, j] == pytest.approx(kl.numpy(), abs=1e-6)
    assert np.abs(effects.loss[:-1]).max() > 1e-3


@few
@given(configs)
def test_head_effects_are_those_of_a_slow_loop(config):
    model, tokens = lively(build_model(config)).double(), random_tokens(11)
    loss = slow_losses(model, tokens)
    effects = measure_head_effects(model, capture_text(model, tokens))
    assert effects.shape == (2, 4, 11) and np.isnan(effects[..., -1]).all()
    for layer in range(2):
        for h in range(4):
            increase = slow_losses(model, tokens, zeroed=(layer, h)) - loss
            assert effects[layer, h, :-1] == pytest.approx(increase, abs=1e-9)
    assert np.nanmax(np.abs(effects)) > 1e-3


@few
@given(configs)
@pytest.mark.slow
def test_effects_add_to_other_interventions(config):
    model, ids = lively(build_model(config)).double(), random_tokens(11)
    interventions = Interventions((Head(0, 2), Head(1, 1)), (3, 6))
    forward = captured_with(model, ids, interventions)

    def losses(ablated=(), hidden=()) -> np.ndarray:
        changed = Interventions(interventions.ablated + ablated, interventions.hidden + hidden)
        x = captured_with(model, ids, changed).residuals[-1]
        return token_losses(model, x, next_tokens(ids[None]))[0].detach().numpy()

    effects = list(iterate_head_effects(model, forward, 8, int(ids[9]), interventions))
    assert [layer for layer, _ in effects] == [0, 1]
    for layer, nats in effects:
        expected = [losses(ablated=(Head(layer, h),))[8] - losses()[8] for h in range(4)]
        assert nats == pytest.approx(expected, abs=1e-9)

    last_hidden = 10
    for hidden, loss, kl in iterate_token_effects(model, forward, interventions, max_rows=3):
        assert hidden.stop == last_hidden
        assert loss.shape == kl.shape == (10 - hidden.start, len(hidden))
        last_hidden = hidden.start
        for row, j in enumerate(hidden):
            increase = losses(hidden=(j,)) - losses()
            assert loss[row:-1, row] == pytest.approx(increase[j + 1 : -1], abs=1e-6)
    assert last_hidden == 0


@pytest.mark.parametrize("max_rows", [1, 3, 100])
def test_effects_do_not_depend_on_the_size_of_a_pass(max_rows):
    model = lively(build_model(small(n_kv_head=2, block_size=64)))
    forward = capture_text(model, random_tokens(40))
    token_effects = measure_token_effects(model, forward)
    in_passes = measure_token_effects(model, forward, max_rows=max_rows)
    for effects, expected in zip(in_passes, token_effects):
        assert np.allclose(effects, expected, atol=2e-5, equal_nan=True)
    head_effects = measure_head_effects(model, forward)
    effects = measure_head_effects(model, forward, max_rows)
    assert np.allclose(effects, head_effects, atol=2e-5, equal_nan=True)


def test_effects_in_float32_differ_from_float64_only_by_rounding():
    model = lively(build_model(small(n_kv_head=2, position="rope", qk_norm=True)))
    forward = capture_text(model, random_tokens(16))
    token_effects = measure_token_effects(model, forward).loss
    head_effects = measure_head_effects(model, forward)
    assert token_effects.dtype == head_effects.dtype == np.float32
    forward = capture_text(model.double(), random_tokens(16))
    assert np.nanmax(np.abs(token_effects - measure_token_effects(model, forward).loss)) < 2e-5
    assert np.nanmax(np.abs(head_effects - measure_head_effects(model, forward))) < 2e-5


def test_measuring_effects_leaves_the_model_and_the_random_state_unchanged():
    model = build_model(small(dropout=0.5)).train()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    forward = capture_text(model, random_tokens(16))
    first, second = (measure_token_effects(model, forward).loss for _ in range(2))
    assert np.array_equal(first, second, equal_nan=True)  # no dropout
    measure_head_effects(model, forward)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))


@pytest.fixture(params=[1, 2, 4])
def validation(request):
    """A model in training mode, and windows of which one has no targets after 20 tokens."""
    model = lively(
        build_model(small(n_kv_head=request.param, n_embd=32, block_size=32, dropout=0.3))
    )
    tokens = random_tokens(5, 33)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 20:] = -1
    return model.train(), x, y


def test_head_importance_is_the_loss_increase_when_its_output_is_zeroed(validation):
    model, x, y = validation
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    importance = head_importance(ablate_heads(model, x, y)).mean
    assert importance.shape == (2, 4) and np.abs(importance).max() > 1e-3
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    model.eval()
    for layer, head in ((0, 0), (1, 3)):

        def zero_head(module, inputs, head=head):
            heads = inputs[0].clone()
            heads[..., head * 8 : (head + 1) * 8] = 0  # before W_O: the head's own output
            return (heads,)

        with torch.no_grad():
            loss = model(x, y)[1].item()
            with model.blocks[layer].attention.W_O.register_forward_pre_hook(zero_head):
                loss_without = model(x, y)[1].item()
        assert importance[layer, head] == pytest.approx(loss_without - loss, abs=1e-5)


def test_the_error_of_head_importance_is_that_of_a_bootstrap_over_windows(validation):
    model, x, y = validation
    ablation = ablate_heads(model, x, y)
    increases = np.nansum(ablation.loss_without_head - ablation.loss, axis=-1)  # (2, 4, 5)
    counts = (y >= 0).sum(dim=-1).numpy()
    drawn = np.random.default_rng(0).integers(0, 5, (4000, 5))
    means = increases[..., drawn].sum(axis=-1) / counts[drawn].sum(axis=-1)  # (2, 4, 4000)
    expected = means.std(axis=-1) * np.sqrt(5 / 4)
    assert head_importance(ablation).error == pytest.approx(expected, rel=0.1)
