"""One optimizer step, as `train.train_step` takes it, and the steps of a whole run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import rows
from run_folders import load_run
from steps import Steps

import train
from config import GPTConfig, OptimConfig, ResolvedConfig
from data.batches import Batches
from data.tokens import prepare
from training.losses import Losses
from training.plan import resolve
from training.schedule import lr_factor
from training.world import World
from variants import count_ngrams


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_applies_the_clipped_mean_gradient_in_however_many_micro_steps(name):
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    weights = []
    for accumulate in (1, 2, 4):
        config = ResolvedConfig(
            device="cpu",
            precision="fp32",
            batch_size=4,
            accumulate=accumulate,
            max_steps=100,
            optim=OptimConfig(name=name, grad_clip=0.01, warmup_share=0.09),
            model=GPTConfig(11, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True),
        )
        steps = Steps(config)
        parameters = list(steps.model.parameters())
        loss = steps.model(x, y)[1]
        expected_grads = torch.autograd.grad(loss, parameters)
        applied_grads = []
        steps.optimizers[0].register_step_pre_hook(
            lambda *_, to=applied_grads, of=parameters: to.extend(p.grad.clone() for p in of)
        )

        result = steps.take(0, x.numpy(), y.numpy())

        assert result.loss.item() == pytest.approx(loss.item(), abs=1e-6)
        assert not result.loss.requires_grad  # which would keep every step's graph in memory
        expected_norms = torch.stack([grad.norm() for grad in expected_grads])
        assert torch.allclose(result.gradient_norms, expected_norms, atol=1e-6)
        clip = 0.01 / result.gradient_norms.norm()
        for applied, expected in zip(applied_grads, expected_grads):
            assert torch.allclose(applied, expected * clip, atol=1e-6)
        for optimizer in steps.optimizers:
            for group in optimizer.param_groups:
                assert group["lr"] == pytest.approx(group["peak_lr"] / 10)
        weights.append([p.detach().clone() for p in parameters])
    for others in weights[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights[0], others))


class LonelyWorld(World):
    """One of two ranks, whose sums are its own values."""

    def sum(self, values):
        return values


def random_numbers(seed: int, step: int, rank: int) -> list[float]:
    """Return the random number that each of three micro-steps of a rank draws first."""
    config = ResolvedConfig(
        device="cpu",
        precision="fp32",
        seed=seed,
        batch_size=6,
        accumulate=3,
        model=GPTConfig(11, block_size=8, n_layer=1, n_head=1, n_embd=4),
    )
    steps, numbers = Steps(config, LonelyWorld(rank, 2)), []
    steps.model.register_forward_pre_hook(lambda *_: numbers.append(torch.rand(()).item()))
    tokens = torch.ones(3, 8, dtype=torch.int64).numpy()  # this rank's half of the batch
    steps.take(step, tokens, tokens)
    return numbers


def test_dropout_draws_new_numbers_in_each_micro_step_of_each_step_rank_and_seed():
    drawn = [
        number
        for seed in (1, 2)
        for step in (0, 1)
        for rank in (0, 1)
        for number in random_numbers(seed, step, rank)
    ]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 2 * 3
    assert random_numbers(1, 0, 0) == drawn[:3]  # and the same numbers in the same place


@pytest.mark.slow
def test_a_run_takes_the_steps_of_its_batches_from_the_weights_of_its_seed(tiny, train_in_process):
    tiny.seed, tiny.model.dropout, tiny.model.ngrams = 5, 0.2, 2
    train_in_process(tiny)
    logged = [row for row in rows(tiny.run_dir) if row["step"]]
    trained, _, _ = load_run(tiny.run_dir)

    text = prepare(tiny.data, tiny.tokenizer, lambda line: None)
    keys = count_ngrams(text.train, text.tokenizer.vocab_size, trained.config)
    config = resolve(tiny, 1, replace(text, ngrams=keys))
    steps = Steps(config, change=lambda model: model.ngrams.keys.copy_(torch.from_numpy(keys)))
    batches = Batches(text.train, block_size=32, batch_size=4, seed=5)
    for step, row in enumerate(logged):
        result = steps.take(step, *batches.batch(step))
        assert row["train/loss"] == result.loss.item()
        assert row["train/grad_norm"] == result.gradient_norms.norm().item()
        current = lr_factor(step, config.optim, config.max_steps) * config.optim.lr
        assert row["train/lr"] == current == steps.optimizers[0].param_groups[0]["lr"]
    assert len(logged) == 12
    expected = steps.model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in trained.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda:0"])
def test_only_pinned_memory_is_copied_while_the_device_works(device, monkeypatch):
    """Of other memory, torch's copy to MPS may be read after it has changed."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.int())  # in place of it
    copies = []

    def copy(tensor, to, non_blocking=False):
        copies.append((non_blocking, tensor.dtype == torch.int32))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", copy)
    config = ResolvedConfig(device=device, batch_size=4, accumulate=2, model=GPTConfig(11))
    batch = np.zeros((4, 8), np.int64), np.zeros((4, 8), np.int64)
    assert len(list(train.micro_batches(batch, config, World()))) == 2
    assert len(copies) == 4 and {*copies} == {(device == "cuda:0",) * 2}


def test_the_mean_of_losses_goes_on_from_its_state_and_begins_again_when_it_is_read():
    first, restored = (Losses(torch.nn.Linear(1, 1), "cpu") for _ in range(2))
    no_norms = torch.zeros(0)
    first.add(0, torch.tensor(2.0), no_norms, is_skipped=False)
    restored.restore(first.state())
    restored.add(1, torch.tensor(4.0), no_norms, is_skipped=False)
    assert restored.read_metrics()["train/loss"] == 3.0
    restored.add(2, torch.tensor(5.0), no_norms, is_skipped=False)
    assert restored.read_metrics()["train/loss"] == 5.0
