"""A model on several ranks, replicated by FSDP2 as on GPUs or sharded: the same losses as one
process, the collectives of a step, and what torch.compile compiles. Gloo, on this machine."""

from functools import partial

import pytest
import torch
from ranks import in_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import training.world
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
    """The losses of the first steps, with FSDP2 also for a replicated model on a CPU."""
    training.world.FSDP_DEVICES = ("cuda", "cpu")
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
        pytest.param(4, {"optim": "muon", "n_layer": 4}, marks=soak),
        pytest.param(4, {"optim": "muon", "n_layer": 4, "shard": 2}, marks=soak),
        pytest.param(3, {"optim": "muon", "shard": 3}, marks=soak),
        pytest.param(4, {"optim": "muon", "shard": 2, "accumulate": 3}, marks=soak),
    ],
)
def test_fsdp_takes_the_steps_of_one_process(tmp_path, size, settings):
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
    training.world.FSDP_DEVICES = ("cuda", "cpu")
    state, generator = build_state(config, world), torch.Generator().manual_seed(0)
    train_step(state, 0, *own_batch(world, generator))
    with CollectiveCounter() as counter:
        train_step(state, 1, *own_batch(world, generator))
    return counter.counts


@slow
def test_a_replicated_model_averages_each_block_once_per_step_whatever_the_micro_steps(tmp_path):
    for accumulate in (1, 3):
        work = partial(collectives_of, config=config_of("adamw", accumulate=accumulate))
        # 3 blocks, what is outside of them, the vectors; the norms and the loss
        assert in_ranks(tmp_path, 2, work)[0] == {"allreduce": 7}


@slow
def test_muon_sends_the_gradients_and_updates_of_each_stack_once_per_step(tmp_path):
    work = partial(collectives_of, config=config_of("muon", accumulate=3))
    # 3 shapes; the other gradients, the norms and the loss
    expected = {"reduce_scatter_tensor": 3, "all_gather_into_tensor": 3, "allreduce": 3}
    counts = in_ranks(tmp_path, 2, work)[0]
    assert {name: counts[name] for name in expected} == expected


@soak
def test_copies_of_a_sharded_model_are_averaged_once_per_step(tmp_path):
    for accumulate in (1, 3):
        config = config_of("adamw", accumulate=accumulate, shard=2)
        counts = in_ranks(tmp_path, 4, partial(collectives_of, config=config))[0]
        assert counts["allreduce"] == 7
        assert counts["reduce_scatter_base"] == 4 * accumulate


def graphs_of(world, config):
    """The losses of two steps, and the functions that each compiled graph calls."""
    training.world.FSDP_DEVICES = ("cuda", "cpu")
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
@pytest.mark.parametrize("optim, shard", [("adamw", 1), pytest.param("muon", 2, marks=soak)])
def test_one_graph_is_compiled_for_all_blocks_and_one_for_the_prediction(tmp_path, optim, shard):
    eager = partial(losses_of, config=config_of(optim, shard=shard), steps=2)
    work = partial(graphs_of, config=config_of(optim, shard=shard, compile=True))
    losses, (block, prediction) = in_ranks(tmp_path, 2, work)[0]
    assert losses == pytest.approx(in_ranks(tmp_path, 2, eager)[0], abs=1e-6)
    assert block.count("layer_norm") == 2 and "scaled_dot_product_attention" in block
    assert "layer_norm" in prediction and "cross_entropy" in prediction
