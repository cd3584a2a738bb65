"""A checkpoint keeps the state of every optimizer, and resumes it bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import soak
from ranks import in_ranks
from torch.optim import NAdam

from config import GPTConfig, OptimConfig, ResolvedConfig
from training.checkpoint import load_optimizer_state, optimizer_state
from training.optimizers import build_optimizers, clip_gradients
from training.safetensors_files import save_values
from training.sharding import local_part
from training.world import World
from variants import build_model

BUILD = {
    "adamw": lambda model: build_optimizers(model, OptimConfig(name="adamw"), "fp32"),
    "muon": lambda model: build_optimizers(model, OptimConfig(name="muon"), "fp32"),
    "nadam": lambda model: [NAdam(model.parameters())],  # whose state has a product, too
}
SHAPE = GPTConfig(97, block_size=16, n_layer=2, n_head=2, n_embd=36, ngrams=2, ngram_rows=5)


def difference_after_a_resume(name: str, folder: Path, world: World, shard: int = 1) -> float:
    """Return how much weights differ after two steps, a stop, and two more, from four steps."""
    shape = replace(SHAPE, ngrams=0) if name == "nadam" else SHAPE  # it takes no sparse gradients
    config = ResolvedConfig(
        device="cpu", precision="fp32", batch_size=8, shard=shard, model=shape, compile=False
    )
    weights = []
    for stops in (False, True):
        torch.manual_seed(0)
        model = build_model(shape)
        world.place(model, config)
        optimizers = BUILD[name](model)
        for step in range(4):
            if stops and step == 2:
                path = folder / f"{name}.safetensors"
                state = dict(optimizer_state(optimizers, model))
                if world.rank == 0:
                    save_values(state, path)
                world.wait()
                optimizers = BUILD[name](model)
                load_optimizer_state(optimizers, model, path)
            tokens = torch.randint(97, (8, 17)).chunk(world.size)[world.rank]
            model(tokens[:, :-1], tokens[:, 1:])[1].backward()
            if world.size > 1:
                world.average_gradients(model)
            clip_gradients(model, 0, world, loss_scale=1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights.append([local_part(p.detach()).clone() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*weights))


@pytest.mark.parametrize("name", BUILD)
def test_an_optimizer_resumes_with_equal_bits(tmp_path, name):
    assert difference_after_a_resume(name, tmp_path, World()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, soak(1)])
def test_an_optimizer_of_several_ranks_resumes_with_equal_bits(tmp_path, shard):
    def work(world):
        return [difference_after_a_resume(name, tmp_path, world, shard) for name in BUILD]

    for differences in in_ranks(tmp_path, 2, work):
        assert differences == [0, 0, 0]
