"""Ablations, against whole passes that change one thing at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import captured_with, configs, few, lively, random_tokens, small, smeared_configs

from glass.heads.measure.ablation import (
    ablate_heads,
    head_importance,
    iterate_head_effects,
    iterate_token_effects,
)
from glass.heads.measure.capture import ForwardPass, capture, next_tokens
from glass.heads.measure.interventions import Interventions
from model import GPT
from run.row import Head
from variants import build_model


def capture_text(model: GPT, tokens: torch.Tensor) -> ForwardPass:
    return capture(model, tokens.numpy()[None])


def whole_pass(model: GPT, ids: torch.Tensor, interventions: Interventions) -> torch.Tensor:
    """Return ln p (T, V) of the next tokens in a pass over the whole text."""
    x = captured_with(model, ids, interventions).residuals[-1, 0]
    return model.head(model.norm(x)).log_softmax(dim=-1).detach()


@few
@given(
    configs | smeared_configs,
    st.sampled_from([Interventions(), Interventions((Head(0, 2), Head(1, 1)), (3, 6))]),
)
def test_effects_are_those_of_whole_passes_with_one_more_intervention(config, interventions):
    model, ids = lively(build_model(config)).double(), random_tokens(11)
    forward = captured_with(model, ids, interventions)
    log_p = whole_pass(model, ids, interventions)

    def losses(log_p) -> np.ndarray:
        return -log_p[torch.arange(10), ids[1:]].numpy()

    table = np.zeros((2, 11, 11))  # of the loss and KL, [i, j]
    for hidden, loss, kl in iterate_token_effects(model, forward, interventions):
        table[:, hidden.start + 1 :, hidden.start : hidden.stop] = loss, kl
    for j in set(range(10)) - set(interventions.hidden):
        changed = interventions._replace(hidden=(*interventions.hidden, j))
        log_q = whole_pass(model, ids, changed)
        assert table[0, :-1, j] == pytest.approx(losses(log_q) - losses(log_p), abs=1e-6)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
        assert table[1, :, j] == pytest.approx(kl.numpy(), abs=1e-6)
    assert np.isnan(table[0, -1, :10]).all() and np.abs(table[0, :-1]).max() > 1e-3
    assert not np.triu(table[0, :-1]).any()  # of itself and of the tokens before it

    targets = next_tokens(forward.tokens)
    effects = np.stack(list(iterate_head_effects(model, forward, targets, interventions)))
    first_tokens, target = forward.first_tokens(9), targets[:, 8:9]
    of_one = np.stack(list(iterate_head_effects(model, first_tokens, target, interventions)))
    for head in np.ndindex(2, 4):
        changed = interventions._replace(ablated=(*interventions.ablated, Head(*head)))
        increase = losses(whole_pass(model, ids, changed)) - losses(log_p)
        assert of_one[head] == pytest.approx(increase[8:9], abs=1e-9)
        assert effects[head][:-1] == pytest.approx(increase, abs=1e-9)
        assert np.isnan(effects[head][-1])


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
    importance, _ = head_importance(*ablate_heads(model, x, y))
    assert importance.shape == (2, 4) and np.abs(importance).max() > 1e-3
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
