"""A model on several ranks, complete in each or sharded: the same losses as one process, the
collectives of a step, and what torch.compile compiles. Gloo, on this machine."""

from functools import partial

import pytest
import torch
from conftest import soak
from ranks import in_ranks

from config import GPTConfig, OptimConfig, ResolvedConfig
from train import train_step
from training.state import build_state

slow = pytest.mark.slow


def config_of(optim: str = "muon", n_layer: int = 3, **settings) -> ResolvedConfig:
    """A small model whose sizes no number of ranks divides, and a batch of 12 sequences."""
    return ResolvedConfig(
        device="cpu",
        batch_size=12,
        model=GPTConfig(97, block_size=16, n_layer=n_layer, n_head=2, n_embd=36),
        optim=OptimConfig(name=optim, warmup_steps=1),
        **({"precision": "fp32", "shard": 1} | settings),
    )


def own_batch(world, generator):
    tokens = torch.randint(97, (12, 17), generator=generator)
    tokens = tokens.chunk(world.size)[world.rank].numpy()
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(world, config, steps=10):
    """The losses of the first steps."""
    state, generator = build_state(config, world), torch.Generator().manual_seed(0)
    return [
        train_step(state, step, *own_batch(world, generator)).loss.item() for step in range(steps)
    ]


@slow
@pytest.mark.parametrize(
    "size, settings",
    [
        (2, {"optim": "adamw", "accumulate": 3}),
        (3, {"optim": "muon", "accumulate": 2}),
        soak(3, {"optim": "adamw", "checkpoint_activations": True}),
        soak(4, {"optim": "muon", "shard": 2, "accumulate": 3}),
    ],
)
def test_several_ranks_take_the_steps_of_one_process(tmp_path, size, settings):
    work = partial(losses_of, config=config_of(**settings))
    one = in_ranks(tmp_path, 1, partial(losses_of, config=config_of(**settings | {"shard": 1})))
    for losses in in_ranks(tmp_path, size, work):
        assert losses == pytest.approx(one[0], abs=1e-6)


def graphs_of(world, config):
    """The losses of two steps, and the functions that each compiled graph calls."""
    graphs = []

    def note_graph(module, inputs):
        calls = (node.target for node in module.graph.nodes if node.op.startswith("call"))
        graphs.append([call if isinstance(call, str) else call.__name__ for call in calls])
        return module.forward

    torch.compile = partial(torch.compile, backend=note_graph)
    state, generator = build_state(config, world), torch.Generator().manual_seed(0)
    losses = [train_step(state, step, *own_batch(world, generator)).loss.item() for step in (0, 1)]
    return losses, graphs


@slow
@pytest.mark.parametrize("optim", ["adamw", soak("muon")])
def test_a_sharded_model_compiles_one_graph_for_its_blocks_and_one_for_the_prediction(
    tmp_path, optim
):
    eager = partial(losses_of, config=config_of(optim, shard=2), steps=2)
    work = partial(graphs_of, config=config_of(optim, shard=2, compile=True))
    losses, (block, prediction) = in_ranks(tmp_path, 2, work)[0]
    assert losses == pytest.approx(in_ranks(tmp_path, 2, eager)[0], abs=1e-6)
    assert block.count("layer_norm") == 2 and "scaled_dot_product_attention" in block
    assert "layer_norm" in prediction and "cross_entropy" in prediction
