"""The bound of a run's memory is between the peak resident memory of real steps and twice that."""

import ctypes
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import soak
from ranks import in_ranks
from steps import Steps

import cli
from benchmarks.scaling import read_memory_status, reset_peak_memory
from config import GPTConfig, OptimConfig, ResolvedConfig
from training.memory import memory_bound
from training.world import World

LLAMA = {"n_kv_head": 2, "norm": "rmsnorm", "position": "rope", "mlp": "swiglu"}
CONFIG = ResolvedConfig(
    device="cpu",
    precision="fp32",
    batch_size=8,
    model=GPTConfig(1000, block_size=256, n_layer=6, n_head=4, n_embd=256),
)
WIDE = replace(
    CONFIG,
    batch_size=2,
    model=GPTConfig(4000, block_size=128, n_layer=6, n_head=8, n_embd=512),
)


def change(config: ResolvedConfig, model: dict, **settings) -> ResolvedConfig:
    return replace(config, **settings, model=replace(config.model, **model))


def two_steps(world: World, config: ResolvedConfig) -> None:
    """The optimizer has its state from the second one on."""
    rows = config.batch_size // world.size
    tokens = torch.randint(config.model.vocab_size, (rows, config.model.block_size)).numpy()
    steps = Steps(config, world)
    for step in range(2):
        steps.take(step, tokens, tokens)


def measure_peak(world: World, config: ResolvedConfig) -> float:
    """How much two steps raise the resident memory, relative to the bound."""
    # What is freed goes back to the system. The heap that earlier tests left is taken, because
    # tensors in it would not.
    reset_peak_memory()
    libc = ctypes.CDLL("libc.so.6")
    for _ in range(25_000):
        libc.malloc(60_000)
    tiny = {"vocab_size": 50, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 32}
    two_steps(world, change(config, tiny | {"n_kv_head": None}))  # what torch takes for itself
    gc.collect()
    libc.malloc_trim(0)
    before = reset_peak_memory()
    two_steps(world, config)
    return (read_memory_status("VmHWM") - before) / memory_bound(config, world.size)


def preset(settings: str, **sizes: int) -> ResolvedConfig:
    """A preset as one process of a CPU trains it, on a text with these sizes."""
    config = cli.read_job([settings], pytest.fail).config
    model = GPTConfig.from_settings(replace(config.model, **sizes))
    return ResolvedConfig(
        **vars(config)
        | {"model": model, "device": "cpu", "precision": "fp32", "compile": False, "shard": 1}
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="only Linux forgets the most memory that a process had",
    ),
]


@pytest.mark.parametrize(
    "size, config",
    [
        (1, preset("experiment=default", vocab_size=2048)),
        soak(1, preset("experiment=speedrun_ngrams", vocab_size=65, ngram_rows=99_999)),
        soak(1, change(CONFIG, LLAMA, precision="bf16")),
        soak(1, change(CONFIG, {"vocab_size": 9999}, checkpoint_activations=True)),
        soak(2, replace(WIDE, batch_size=4, optim=OptimConfig(name="muon"))),
        (2, replace(WIDE, batch_size=4, shard=2, checkpoint_activations=True)),
    ],
)
def test_the_peak_memory_of_each_process_is_between_half_the_bound_and_the_bound(
    tmp_path, size, config
):
    for share_of_bound in in_ranks(tmp_path, size, partial(measure_peak, config=config)):
        assert 0.5 < share_of_bound < 1
