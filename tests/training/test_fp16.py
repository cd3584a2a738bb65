"""Training in fp16: a loss scale keeps gradients in range, and steps that overflow are skipped."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import soak
from models import random_tokens, small
from processes import assert_same_run, copy_after_8_steps, rows
from ranks import in_ranks

from common.errors import UserError
from config import OptimConfig, ResolvedConfig
from run.checkpoints import read_manifest
from train import train_step
from training import loss_scale
from training.loss_scale import MIN_LOSS_SCALE, LossScaler
from training.optimizers import orthogonalize
from training.state import TrainingState, build_state
from training.tensors import full_tensor
from training.world import World

close = torch.testing.assert_close


def make_state(world: World | None = None, **settings) -> TrainingState:
    """The state of a small run in fp16 on a CPU."""
    settings = {"precision": "fp16", "batch_size": 4, "model": small()} | settings
    optim = OptimConfig(name="muon", warmup_share=0)
    return build_state(ResolvedConfig(device="cpu", optim=optim, **settings), world or World())


def take_step(state: TrainingState, step: int = 0):
    """Take a step on a batch of the number `step`."""
    tokens = random_tokens(4 // state.world.size, 17, seed=step).numpy()
    return train_step(state, step, tokens[:, :-1], tokens[:, 1:])


def weights(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in state.model.named_parameters()}


def with_infinite_gradient(state: TrainingState) -> TrainingState:
    """The state with the same loss and an infinite gradient of one weight: √x at 0."""

    def forward(*batch):
        logits, loss = state.forward(*batch)
        return logits, loss + (state.model.token_embedding.weight[0, 0] * 0).abs().sqrt()

    return replace(state, forward=forward)


def test_steps_that_overflow_change_no_weight_and_halve_the_factor_until_it_fits():
    state = make_state()
    state.scaler.factor = 2.0**60
    before, losses = weights(state), []
    for step in range(60):
        result = take_step(state)
        losses.append(result.loss.item())
        if step < 5:
            assert not result.gradient_norms.isfinite().all()
            close(weights(state), before, rtol=0, atol=0)
            assert state.scaler.factor == 2.0 ** (59 - step)
    assert 1 < state.scaler.factor < 2.0**30
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.isfinite(weight).all() for weight in weights(state).values())


def test_the_gradients_are_those_of_float32_whatever_the_factor():
    norms = {}
    for precision, factor in (("fp32", 1.0), ("fp16", 2.0**6), ("fp16", 2.0**16)):
        state = make_state(precision=precision, accumulate=2)
        state.scaler.factor = factor
        norms[precision, factor] = take_step(state).gradient_norms
    expected = norms.pop(("fp32", 1.0))
    for measured in norms.values():
        close(measured, expected, rtol=2e-2, atol=1e-4)


def test_gradients_that_overflow_with_the_smallest_factor_end_the_run():
    state = with_infinite_gradient(make_state())
    state.scaler.factor = MIN_LOSS_SCALE
    before = weights(state)
    with pytest.raises(UserError, match=r"step 4: the gradient of token_embedding\.weight"):
        take_step(state, 3)
    close(weights(state), before, rtol=0, atol=0)


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
    scaler, factors = LossScaler(is_enabled=True), []
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
        state = make_state(world, shard=shard)
        take_step(state)
        before = weights(state)
        take_step(with_infinite_gradient(state) if world.rank == 1 else state, 1)
        is_unchanged = all(torch.equal(before[name], w) for name, w in weights(state).items())
        loss = take_step(state, 2).loss.item()
        sums = [weight.double().sum().item() for weight in weights(state).values()]
        return [is_unchanged, state.scaler.factor, loss, *sums]

    first, second = in_ranks(tmp_path, 2, work)
    assert first == second
    assert first[:2] == [True, 2.0**15] and all(map(math.isfinite, first))
