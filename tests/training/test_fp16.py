"""Training in fp16: a loss scale keeps gradients in range, and steps that overflow are skipped."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import soak
from models import random_tokens, small
from processes import assert_same_run, copy_after_8_steps, rows
from ranks import in_ranks
from steps import Steps

from common.errors import UserError
from config import OptimConfig, ResolvedConfig
from run.checkpoints import read_manifest
from training import loss_scale
from training.loss_scale import MIN_LOSS_SCALE, LossScaler
from training.optimizers import orthogonalize
from training.sharding import full_tensor
from training.world import World

close = torch.testing.assert_close


def make_steps(world: World | None = None, **settings) -> Steps:
    """The steps of a small run in fp16 on a CPU."""
    settings = {"precision": "fp16", "batch_size": 4, "model": small()} | settings
    optim = OptimConfig(name="muon", warmup_share=0)
    return Steps(ResolvedConfig(device="cpu", optim=optim, **settings), world)


def take_step(steps: Steps, step: int = 0):
    """Take a step on a batch of the number `step`."""
    tokens = random_tokens(4 // steps.world.size, 17, seed=step).numpy()
    return steps.take(step, tokens[:, :-1], tokens[:, 1:])


def weights(steps: Steps) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in steps.model.named_parameters()}


@contextmanager
def infinite_gradient(steps: Steps) -> Iterator[None]:
    """Take steps with the same loss and an infinite gradient of one weight: √x at 0."""

    def add(model, inputs, outputs):
        logits, loss = outputs
        return logits, loss + (model.token_embedding.weight[0, 0] * 0).abs().sqrt()

    hook = steps.model.register_forward_hook(add)
    yield
    hook.remove()


def test_steps_that_overflow_change_no_weight_and_halve_the_factor_until_it_fits():
    steps = make_steps()
    steps.scaler.factor = 2.0**60
    before, losses = weights(steps), []
    for step in range(60):
        result = take_step(steps)
        losses.append(result.loss.item())
        if step < 5:
            assert not result.gradient_norms.isfinite().all()
            close(weights(steps), before, rtol=0, atol=0)
            assert steps.scaler.factor == 2.0 ** (59 - step)
    assert 1 < steps.scaler.factor < 2.0**30
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.isfinite(weight).all() for weight in weights(steps).values())


def test_the_gradients_are_those_of_float32_whatever_the_factor():
    norms = {}
    for precision, factor in (("fp32", 1.0), ("fp16", 2.0**6), ("fp16", 2.0**16)):
        steps = make_steps(precision=precision, accumulate=2)
        steps.scaler.factor = factor
        norms[precision, factor] = take_step(steps).gradient_norms
    expected = norms.pop(("fp32", 1.0))
    for measured in norms.values():
        close(measured, expected, rtol=2e-2, atol=1e-4)


def test_gradients_that_overflow_with_the_smallest_factor_end_the_run():
    steps = make_steps()
    steps.scaler.factor = MIN_LOSS_SCALE
    before = weights(steps)
    with (
        infinite_gradient(steps),
        pytest.raises(UserError, match=r"step 4: the gradient of token_embedding\.weight"),
    ):
        take_step(steps, 3)
    close(weights(steps), before, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_matrices_of_any_size_are_orthogonalized_in_fp16(size):
    torch.manual_seed(0)
    matrices = torch.randn(3, 20, 12)
    measured = orthogonalize(size * matrices, torch.float16)
    assert measured.dtype == torch.float32
    close(measured, orthogonalize(size * matrices), rtol=0, atol=2e-2)
    assert not orthogonalize(0 * matrices, torch.float16).any()


def test_the_factor_doubles_after_an_interval_without_an_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scaler, factors = LossScaler("fp16"), []
    for has_overflowed in (False, False, True, False, False, False, False, False, False):
        scaler.update(has_overflowed)
        factors.append(scaler.factor / 2**16)
    assert factors == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2]


@pytest.mark.soak
def test_a_resumed_run_has_the_same_bits_and_goes_on_with_its_loss_scale(
    tiny, train_in_process, tmp_path, monkeypatch
):
    # The factor falls in the first steps, and rises in the others.
    monkeypatch.setattr(loss_scale, "INITIAL_LOSS_SCALE", 2.0**22)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 5)
    tiny.checkpoint.keep, tiny.model.dropout = 9, 0.2
    config = replace(tiny, precision="fp16")
    train_in_process(config)
    run = Path(config.run_dir)
    scales = [
        read_manifest(run / "checkpoints" / f"step_{step:08d}").loss_scale for step in (4, 8, 12)
    ]
    assert scales[1][0] < 2.0**22 and 0 < scales[1][1] < 5
    skipped = [row["step"] for row in rows(run) if row["step"] and "train/grad_norm" not in row]
    assert skipped[0] == 1 and 8 < skipped[-1] <= 12

    resumed = copy_after_8_steps(run, tmp_path / "resumed")
    train_in_process(replace(config, run_dir=str(resumed)), resume=True)
    assert_same_run(run, resumed)
    last = read_manifest(resumed / "checkpoints" / "step_00000012")
    assert last.loss_scale == scales[2]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, soak(1)])
def test_an_overflow_in_one_rank_skips_the_step_in_all(tmp_path, shard):
    def work(world: World) -> list:
        steps = make_steps(world, shard=shard)
        take_step(steps)
        before = weights(steps)
        with infinite_gradient(steps) if world.rank == 1 else nullcontext():
            take_step(steps, 1)
        is_unchanged = all(torch.equal(before[name], w) for name, w in weights(steps).items())
        loss = take_step(steps, 2).loss.item()
        sums = [weight.double().sum().item() for weight in weights(steps).values()]
        return [is_unchanged, steps.scaler.factor, loss, *sums]

    first, second = in_ranks(tmp_path, 2, work)
    assert first == second
    assert first[:2] == [True, 2.0**15] and all(map(math.isfinite, first))
