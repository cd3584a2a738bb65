"""Long and random: 10,000 steps in flat memory; any interleaving of kills, extensions and
intervals gives the same bits."""

import os
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import KILL, Process, at_call, finished, kill_me, rows, same_tensors, tiny

import training.optim
from config import Config, GPTConfig, OptimConfig, UserError
from training.checkpoint import saved_steps


@pytest.mark.soak
def test_over_ten_thousand_steps_memory_open_files_and_the_folder_stay_flat(tmp_path, text_file):
    log = tmp_path / "log"

    def measure():
        memory = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        with log.open("a") as file:
            file.write(f"{memory} {len(os.listdir('/proc/self/fd'))}\n")

    def fault():
        note, calls = training.optim.Watch.note, iter(range(10 ** 9))

        def noted(self, *args):
            note(self, *args)
            if next(calls) % 500 == 499:
                measure()

        training.optim.Watch.note = noted

    argv = tiny(text_file, "max_steps=10000", "checkpoint.every=50", "eval.every=500",
                "attention.every=500", "log.every=50",
                "data.val_max_tokens=500")
    process = Process(tmp_path, *argv, fault=fault)
    assert process.wait(3000) == 0, process.said()
    memory, files = np.array([line.split() for line in log.read_text().splitlines()], int).T
    # by then Matplotlib has as many figures as it keeps until they are collected: some 10 MB each,
    # ten of them
    half = len(memory) // 2
    assert memory[-1] < 1.02 * memory[half] and len(set(files[1:])) == 1, (
        memory.tolist(), files.tolist())
    assert len(saved_steps(tmp_path / "run")) <= 3
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file()
               and p.parent.name != "attention")
    assert size < 2_000_000 and not list((tmp_path / "run").rglob(".*.part"))
    print(f"memory {memory[half]:,} kB halfway and {memory[-1]:,} kB at the end; {files[-1]} files "
          f"open; folder {size:,} bytes")


def interleaved(tmp_path, text_file, seed: int, length: int) -> None:
    """Kill, resume, extend, stop and change intervals at random; the weights are those of one run
    of the same length."""
    choose = random.Random(seed)
    fixed = ["optim.schedule=constant", "optim.warmup_steps=0", "attention.every=0", "log.every=1"]
    finished(tmp_path, *tiny(text_file, *fixed, f"max_steps={length}", "run_dir=whole"))
    steps, end = 3, length
    while steps < end:
        steps = min(end, steps + choose.randint(0, 3))
        every = [f"{key}={choose.choice((0, 1, 2, 5))}"
                 for key in ("eval.every", "checkpoint.every")]
        kind = choose.choice(["kill", "term", "nothing"])
        at = choose.randint(0, steps)
        do = {"kill": kill_me, "term": lambda: os.kill(os.getpid(), 15),
              "nothing": lambda: None}[kind]
        process = Process(tmp_path,
                          *tiny(text_file, *fixed, *every, f"max_steps={steps}", "resume=auto"),
                          fault=at_call(training.optim, "seed_micro_step", 1, do, when=lambda seed,
                                        step, *_, at=at: step == at))
        assert process.wait() in (0, -KILL, 143), process.said()
    finished(tmp_path, *tiny(text_file, *fixed, f"max_steps={end}", "resume=auto"))
    one, other = tmp_path / "whole", tmp_path / "run"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(*(run / "checkpoints" / f"step_{end:08d}" / name
                              for run in (one, other)))
    a, b = ({row["step"]: row["train/loss"] for row in rows(run) if "train/loss" in row}
            for run in (one, other))
    assert a == b


@pytest.mark.slow
def test_any_interleaving_of_kills_stops_and_extensions_gives_the_same_run(tmp_path, text_file):
    interleaved(tmp_path, text_file, 0, 12)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 13))
def test_more_interleavings_give_the_same_run(tmp_path, text_file, seed):
    interleaved(tmp_path, text_file, seed, 24)


models = st.builds(GPTConfig, vocab_size=st.none(), block_size=st.integers(1, 24),
                   n_layer=st.integers(1, 2), n_head=st.integers(1, 4),
                   n_kv_head=st.none() | st.integers(1, 4), n_embd=st.integers(1, 16),
                   head_dim=st.none() | st.integers(1, 6),
                   value_head_dim=st.none() | st.integers(1, 6),
                   mlp=st.sampled_from(["gelu", "swiglu", "relu2"]),
                   norm=st.sampled_from(["layernorm", "rmsnorm"]),
                   position=st.sampled_from(["learned", "rope"]), qk_norm=st.booleans(),
                   bias=st.booleans(), dropout=st.sampled_from([0.0, 0.5]),
                   tie_embeddings=st.booleans(), norm_embedding=st.booleans())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=models, optim=st.builds(OptimConfig, name=st.sampled_from(["adamw", "muon"]),
                                     grad_clip=st.sampled_from([0.0, 1.0])),
       batch_size=st.integers(1, 4), accumulate=st.integers(1, 3))
def test_a_random_configuration_trains_a_step_or_is_refused_in_a_sentence(
        model, optim, batch_size, accumulate):
    import torch

    from model import GPT
    from training.optim import build_optimizers, update

    config = Config(device="cpu", precision="fp32", compile=False, max_steps=3,
                    model=replace(model), optim=replace(optim, warmup_steps=0),
                    batch_size=batch_size, accumulate=accumulate)
    try:
        config.check()
    except UserError as e:
        assert "\n" not in str(e)
        return
    config.model.vocab_size = 11
    small = GPT(config.model)
    tokens = torch.randint(0, 11, (batch_size, config.model.block_size + 1))
    loss, _, finite = update(small, small, build_optimizers(small, config.optim), tokens[:, :-1],
                             tokens[:, 1:], config, 0)
    assert finite.all() and loss > 0, asdict(config)
