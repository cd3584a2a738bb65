"""A model on several ranks, complete in each or sharded: the same losses as one process, the
collectives of a step, and what torch.compile compiles. Gloo, on this machine."""

from functools import partial

import pytest
import torch
from ranks import in_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from config import GPTConfig, OptimConfig, ResolvedConfig
from train import train_step
from training.state import build_state

slow, soak = pytest.mark.slow, pytest.mark.soak


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
        pytest.param(3, {"optim": "adamw", "checkpoint_activations": True}, marks=soak),
        pytest.param(2, {"optim": "muon"}, marks=soak),
        pytest.param(4, {"optim": "muon"}, marks=soak),
        pytest.param(4, {"optim": "muon", "n_layer": 4, "shard": 2}, marks=soak),
        pytest.param(3, {"optim": "muon", "shard": 3}, marks=soak),
        pytest.param(4, {"optim": "muon", "shard": 2, "accumulate": 3}, marks=soak),
    ],
)
def test_several_ranks_take_the_steps_of_one_process(tmp_path, size, settings):
    work = partial(losses_of, config=config_of(**settings))
    one = in_ranks(tmp_path, 1, partial(losses_of, config=config_of(**settings | {"shard": 1})))
    for losses in in_ranks(tmp_path, size, work):
        assert losses == pytest.approx(one[0], abs=1e-6)


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by name. torch's CommDebugMode fails with several forward passes."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:  # of torch.distributed, and of its functional collectives
            name = func._schema.name.partition("::")[2].strip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **kwargs or {})


def collectives_of(world, config):
    state, generator = build_state(config, world), torch.Generator().manual_seed(0)
    train_step(state, 0, *own_batch(world, generator))
    with CollectiveCounter() as counter:
        train_step(state, 1, *own_batch(world, generator))
    return counter.counts


@slow
@pytest.mark.parametrize(
    "optim, expected",
    [
        ("adamw", {"allreduce": 3}),  # the gradients, the norms and the loss
        ("muon", {"allreduce": 3, "reduce_scatter": 3, "allgather": 3}),  # 3 shapes
    ],
)
def test_complete_models_average_their_gradients_once_per_step(tmp_path, optim, expected):
    work = partial(collectives_of, config=config_of(optim, accumulate=3))
    assert in_ranks(tmp_path, 2, work)[0] == expected


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
@pytest.mark.parametrize("optim", ["adamw", pytest.param("muon", marks=soak)])
def test_a_sharded_model_compiles_one_graph_for_its_blocks_and_one_for_the_prediction(
    tmp_path, optim
):
    eager = partial(losses_of, config=config_of(optim, shard=2), steps=2)
    work = partial(graphs_of, config=config_of(optim, shard=2, compile=True))
    losses, (block, prediction) = in_ranks(tmp_path, 2, work)[0]
    assert losses == pytest.approx(in_ranks(tmp_path, 2, eager)[0], abs=1e-6)
    assert block.count("layer_norm") == 2 and "scaled_dot_product_attention" in block
    assert "layer_norm" in prediction and "cross_entropy" in prediction
