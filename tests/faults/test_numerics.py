"""The loss does not depend on how a batch is split or ordered; AdamW is the published rule."""

import math
from itertools import permutations

import pytest
import torch

from config import Config, GPTConfig, OptimConfig
from model import GPT
from training.nonfinite import NonFiniteGuard
from training.optimizers import build_optimizers, clip_gradients
from training.processes import World
from training.schedule import lr_factor, set_learning_rates


def made(**optim):
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=13, block_size=16, n_layer=2, n_head=2, n_kv_head=1, n_embd=32)
    )
    config = Config(
        device="cpu", batch_size=4, max_steps=400, optim=OptimConfig(warmup_steps=0, **optim)
    )
    tokens = torch.randint(0, 13, (4, 17), generator=torch.Generator().manual_seed(1))
    return model, build_optimizers(model, config.optim), tokens[:, :-1], tokens[:, 1:], config


def take_step(model, optimizers, x, y, config, step=0) -> tuple[torch.Tensor, torch.Tensor]:
    """A step as train.py takes it: the loss, and the norm of the gradient before it is clipped."""
    set_learning_rates(optimizers, lr_factor(step, config.optim, config.max_steps))
    loss = torch.zeros(())
    for batch in zip(x.chunk(config.accumulate), y.chunk(config.accumulate)):
        micro_loss = model(*batch)[1] / config.accumulate
        micro_loss.backward()
        loss += micro_loss.detach()
    norms = clip_gradients(model, config.optim.grad_clip, World())
    NonFiniteGuard(model).check(step, loss, norms)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss, norms.norm()


@pytest.mark.slow
def test_loss_and_gradient_norm_do_not_depend_on_order_or_micro_steps():
    results = []
    for order in permutations(range(4)):
        for accumulate in (1, 2, 4):
            model, optimizers, x, y, config = made()
            config.accumulate = accumulate
            results.append(
                torch.stack(take_step(model, optimizers, x[list(order)], y[list(order)], config))
            )
    assert torch.allclose(torch.stack(results), results[0], rtol=1e-6, atol=0)


def test_adamw_agrees_with_the_published_rule():
    model, optimizers, x, y, config = made(grad_clip=0.0, schedule="constant")
    p, c = model.blocks[0].mlp.W_in.weight, config.optim
    expected, mean, square = p.detach().double(), 0.0, 0.0
    for step in range(1, 6):
        (grad,) = torch.autograd.grad(model(x, y)[1], p)
        mean, square = (
            c.beta1 * mean + (1 - c.beta1) * grad.double(),
            c.beta2 * square + (1 - c.beta2) * grad.double() ** 2,
        )
        expected = expected * (1 - c.lr * c.weight_decay)
        expected = expected - c.lr * (mean / (1 - c.beta1**step)) / (
            (square / (1 - c.beta2**step)).sqrt() + 1e-8
        )
        take_step(model, optimizers, x, y, config, step - 1)
        assert torch.allclose(p.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_model_overfits_one_batch(name):
    model, optimizers, x, y, config = made(name=name, lr=5e-3, weight_decay=0.0)
    losses = [take_step(model, optimizers, x, y, config, step)[0].item() for step in range(250)]
    assert losses[0] == pytest.approx(math.log(13), rel=0.1) and losses[-1] < 0.05
