"""A model on several ranks, complete in each or sharded, has the losses of one process. Gloo, on
this machine."""

from functools import partial

import pytest
import torch
from conftest import soak
from ranks import in_ranks

from config import GPTConfig, OptimConfig, ResolvedConfig
from train import train_step
from training.state import build_state

SIMPLE = {"shard": 1, "compile": False}


def config_of(optim: str = "muon", n_layer: int = 3, **settings) -> ResolvedConfig:
    """A small model whose sizes no number of ranks divides, and a batch of 12 sequences."""
    return ResolvedConfig(
        device="cpu",
        batch_size=12,
        model=GPTConfig(97, block_size=16, n_layer=n_layer, n_head=2, n_embd=36),
        optim=OptimConfig(name=optim, warmup_share=0.001),
        **({"precision": "fp32", "shard": 1} | settings),
    )


def own_batch(world, generator):
    tokens = torch.randint(97, (12, 17), generator=generator)
    tokens = tokens.chunk(world.size)[world.rank].numpy()
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(world, config, steps=10):
    """The losses of the first steps; torch.compile traces them and generates no code."""
    torch.compile = partial(torch.compile, backend="eager")
    state, generator = build_state(config, world), torch.Generator().manual_seed(0)
    return [
        train_step(state, step, *own_batch(world, generator)).loss.item() for step in range(steps)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, settings",
    [
        (3, {"optim": "muon", "accumulate": 2}),
        (2, {"optim": "adamw", "shard": 2, "compile": True}),
        soak(2, {"optim": "adamw", "accumulate": 3}),
        soak(3, {"optim": "adamw", "checkpoint_activations": True}),
        soak(4, {"optim": "muon", "shard": 2, "accumulate": 3}),
    ],
)
def test_several_ranks_take_the_steps_of_one_process(tmp_path, size, settings):
    work = partial(losses_of, config=config_of(**settings))
    one = in_ranks(tmp_path, 1, partial(losses_of, config=config_of(**settings | SIMPLE)))
    for losses in in_ranks(tmp_path, size, work):
        assert losses == pytest.approx(one[0], abs=1e-6)
