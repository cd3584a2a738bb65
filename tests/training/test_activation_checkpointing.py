"""Recomputed activations and padded products: the same steps in every kind of process."""

from dataclasses import replace

import pytest
import torch
from conftest import soak
from ranks import in_ranks
from steps import Steps

from config import GPTConfig, OptimConfig, ResolvedConfig
from training.sharding import full_tensor
from training.world import World

CONFIG = ResolvedConfig(
    device="cpu",
    precision="fp32",
    batch_size=8,
    accumulate=2,
    model=GPTConfig(97, block_size=16, n_layer=3, n_head=2, n_embd=36, dropout=0.3),
    optim=OptimConfig(name="muon"),
)
CHECKPOINTED = replace(CONFIG, checkpoint_activations=True)
PADDED = replace(CHECKPOINTED, model=replace(CONFIG.model, vocab_multiple=64))


def weights_after_steps(config: ResolvedConfig, world: World, count: int = 3) -> torch.Tensor:
    """All weights of a model after some steps, in one row."""
    steps = Steps(config, world)
    tokens = torch.randint(97, (8, 17), generator=torch.Generator().manual_seed(0))
    rows = tokens.chunk(world.size)[world.rank].numpy()
    for step in range(count):
        steps.take(step, rows[:, :-1], rows[:, 1:])
    return torch.cat([full_tensor(p.detach()).flatten() for p in steps.model.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointed_activations_change_no_bit(precision):
    plain, checkpointed = (
        weights_after_steps(replace(config, precision=precision), World())
        for config in (CONFIG, CHECKPOINTED)
    )
    assert torch.equal(plain, checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, soak(1)])
def test_several_processes_recompute_the_same_bits_and_pad_within_rounding(tmp_path, shard):
    def work(world):
        plain, checkpointed, padded = (
            weights_after_steps(replace(config, shard=shard), world)
            for config in (CONFIG, CHECKPOINTED, PADDED)
        )
        return [torch.equal(plain, checkpointed), (plain - padded).abs().max().item()]

    for is_equal, padding_error in in_ranks(tmp_path, 2, work):
        assert is_equal and padding_error < 1e-5


@pytest.mark.soak
def test_compiled_steps_recompute_the_same_within_rounding():
    model = replace(CONFIG.model, n_layer=2, dropout=0.0)
    eager = weights_after_steps(replace(CONFIG, model=model), World())
    compiled = weights_after_steps(replace(CHECKPOINTED, model=model, compile=True), World())
    assert (compiled - eager).abs().max() < 1e-5
