"""A checkpoint keeps whatever state an optimizer has, and resumes it bit for bit."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import soak
from ranks import in_ranks
from torch import optim
from torch.optim import Optimizer

from config import GPTConfig, OptimConfig, ResolvedConfig
from training.checkpoint import load_optimizer_state, optimizer_state
from training.optimizers import RowAdagrad, build_optimizers, clip_gradients
from training.tensors import is_distributed, local_part, save_values
from training.world import World
from variants import build_model

SHAPE = GPTConfig(97, block_size=16, n_layer=2, n_head=2, n_embd=36, ngrams=2, ngram_rows=5)


class Odd(Optimizer):
    """An optimizer with state of every kind, each of which its steps depend on."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"calls": 0, "share": 0.1, "is_odd": False, "last": None}
                state["counts"] = torch.zeros_like(p, dtype=torch.int64) + 2**40
                state["coarse"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["fine"] = torch.zeros((), dtype=torch.float64)
                state["few"] = torch.zeros(3)
            state["counts"] += (p.grad > 0).long()
            state["coarse"] += p.grad.bfloat16()
            state["fine"] += state["share"] * 1e-9
            state["few"] += state["calls"]
            state["last"] = 0.5 if state["is_odd"] else None
            state |= {"calls": state["calls"] + 1, "share": state["share"] / 3}
            state["is_odd"] = not state["is_odd"]
            factor = 1 + (state["last"] or 0) + state["few"].sum() + state["fine"].float() * 1e6
            p -= 1e-3 * factor * (state["coarse"].float() + (state["counts"] - 2**40).float())


def build(make: Callable[..., Optimizer], model: torch.nn.Module) -> list[Optimizer]:
    """Build optimizers as `build_optimizers` does: the n-gram table and DTensors apart."""
    groups = defaultdict(list)
    for name, p in model.named_parameters():
        groups[name == "ngrams.table", is_distributed(p)].append(p)
    return [
        RowAdagrad(params, 0.1) if is_table else make(params)
        for (is_table, _), params in groups.items()
    ]


MAKERS = {"sgd": partial(optim.SGD, lr=0.1), "nadam": optim.NAdam, "odd": Odd}


def difference_after_a_resume(name: str, folder: Path, world: World, shard: int = 1) -> float:
    """Return how much weights differ after two steps, a stop, and two more, from four steps."""
    config = ResolvedConfig(
        device="cpu", precision="fp32", batch_size=8, shard=shard, model=SHAPE, compile=False
    )
    weights = []
    for stops in (False, True):
        torch.manual_seed(0)
        model = build_model(SHAPE)
        world.place_model(model, config)
        make = MAKERS.get(name)
        build_all = (
            partial(build, make)
            if make
            else partial(build_optimizers, optim=OptimConfig(name=name))
        )
        optimizers = build_all(model)
        for step in range(4):
            if stops and step == 2:
                path = folder / f"{name}.safetensors"
                state = dict(optimizer_state(optimizers, model))
                if world.rank == 0:
                    save_values(state, path)
                world.wait()
                optimizers = build_all(model)
                load_optimizer_state(optimizers, model, path)
            tokens = torch.randint(97, (8, 17)).chunk(world.size)[world.rank]
            model(tokens[:, :-1], tokens[:, 1:])[1].backward()
            if world.size > 1:
                world.average_gradients(model)
            clip_gradients(model, 0, world.join_norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights.append([local_part(p.detach()).clone() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*weights))


@pytest.mark.parametrize("name", [*MAKERS, "adamw", "muon"])
def test_an_optimizer_resumes_with_equal_bits(tmp_path, name):
    assert difference_after_a_resume(name, tmp_path, World()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "shard, names",
    [(2, ("odd", "muon")), soak(1, ("odd", "muon")), soak(2, (*MAKERS, "adamw"))],
)
def test_an_optimizer_of_several_ranks_resumes_with_equal_bits(tmp_path, shard, names):
    def work(world):
        return [difference_after_a_resume(name, tmp_path, world, shard) for name in names]

    for differences in in_ranks(tmp_path, 2, work):
        assert dict(zip(names, differences)) == dict.fromkeys(names, 0)
