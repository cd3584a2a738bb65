"""The loss does not depend on how a batch is split or ordered; AdamW is the published rule."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from config import GPTConfig, OptimConfig, ResolvedConfig
from train import train_step
from training.state import build_state
from training.world import World

TOKENS = torch.randint(0, 13, (4, 17), generator=torch.Generator().manual_seed(1))


def make_config(**optim) -> ResolvedConfig:
    return ResolvedConfig(
        device="cpu",
        precision="fp32",
        batch_size=4,
        max_steps=400,
        optim=OptimConfig(warmup_steps=0, **optim),
        model=GPTConfig(13, block_size=16, n_layer=2, n_head=2, n_kv_head=1, n_embd=32),
    )


def take_step(state, step=0, tokens=TOKENS):
    return train_step(state, step, tokens[:, :-1].numpy(), tokens[:, 1:].numpy())


@pytest.mark.slow
def test_loss_and_gradient_norm_do_not_depend_on_order_or_micro_steps():
    results = []
    for order in permutations(range(4)):
        for accumulate in (1, 2, 4):
            state = build_state(replace(make_config(), accumulate=accumulate), World())
            result = take_step(state, tokens=TOKENS[list(order)])
            results.append(torch.stack([result.loss, result.gradient_norms.norm()]))
    assert torch.allclose(torch.stack(results), results[0], rtol=1e-6, atol=0)


def test_adamw_agrees_with_the_published_rule():
    config = make_config(grad_clip=0.0, schedule="constant")
    state = build_state(config, World())
    p, c = state.model.blocks[0].mlp.W_in.weight, config.optim
    expected, mean, square = p.detach().double(), 0.0, 0.0
    for step in range(1, 6):
        loss = state.model(TOKENS[:, :-1], TOKENS[:, 1:])[1]
        (grad,) = torch.autograd.grad(loss, p)
        mean = c.beta1 * mean + (1 - c.beta1) * grad.double()
        square = c.beta2 * square + (1 - c.beta2) * grad.double() ** 2
        expected = expected * (1 - c.lr * c.weight_decay)
        expected = expected - c.lr * (mean / (1 - c.beta1**step)) / (
            (square / (1 - c.beta2**step)).sqrt() + 1e-8
        )
        take_step(state, step - 1)
        assert torch.allclose(p.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_one_batch_can_be_overfitted(name):
    state = build_state(make_config(name=name, lr=5e-3, weight_decay=0.0), World())
    losses = [take_step(state, step).loss.item() for step in range(250)]
    assert losses[0] == pytest.approx(math.log(13), rel=0.1) and losses[-1] < 0.05
