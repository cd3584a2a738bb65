"""Several ranks train one run: in the steps of one process, whatever their number and mesh, through
deaths, signals and mistakes. Gloo, on this machine."""

import hashlib
import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import assert_same_run, fault_at_call, rows
from ranks import Ranks, in_ranks, odd, trained
from safetensors.torch import load_file, save_file

import data.tokens
import distributed.world
import training.checkpoint
import training.device
import training.evaluate
from common.checkpoints import find_checkpoint
from common.errors import UserError
from config import Config, GPTConfig, OptimConfig, ResolvedConfig
from train import train_step
from training.checkpoint import load_optimizer_tensors, optimizer_tensors
from training.memory import memory_needed
from training.optimizers import Muon
from training.plan import check_batch_size, check_shard, pick_shard
from training.state import build_state
from training.tensors import is_distributed, local_part
from training.world import World
from variants import build_model


def assert_same_steps(one: Path, other: Path, steps: int = 20):
    """The losses of every step are within 1e-5, the checkpoints' tensors equal but for rounding."""
    a, b = rows(one), rows(other)
    assert [row["step"] for row in a] == [row["step"] for row in b] == list(range(steps + 1))
    for key, near in (("train/loss", 1e-5), ("val/loss", 1e-5), ("train/grad_norm", 1e-4)):
        mine, its = ({row["step"]: row[key] for row in run if key in row} for run in (a, b))
        assert mine.keys() == its.keys()
        assert max(abs(mine[step] - its[step]) for step in mine) < near
    heads = [key for key in a[-1] if key.startswith("heads/")]
    assert {key[6:16] for key in heads} > {"importance", "induction/"}
    assert np.allclose(*([row[key] for key in heads] for row in (a[-1], b[-1])), atol=2e-3)
    folders = [run / "checkpoints" / f"step_{steps:08d}" for run in (one, other)]
    assert len({tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}) == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = (load_file(folder / name) for folder in folders)
        assert list(x) == list(y) and all(x[k].dtype == y[k].dtype for k in x)
        assert all(np.allclose(x[k], y[k], rtol=1e-3, atol=1e-4) for k in x)


slow, soak = pytest.mark.slow, pytest.mark.soak


# (processes, shard) to step 10, and from there on
@pytest.mark.parametrize(
    "optim, first, then, more",
    [
        pytest.param("muon", (2, 2), (1, 1), [], marks=soak),
        pytest.param(
            "adamw",
            (2, 1),
            (2, 2),
            ["accumulate=4", "model.ngrams=3", "model.ngram_size=6"],
            marks=slow,
        ),
        pytest.param("muon", (4, 2), (2, 1), ["model.tie_embeddings=false"], marks=soak),
        pytest.param("adamw", (4, 4), (4, 1), ["accumulate=4"], marks=soak),
        pytest.param(
            "muon", (1, 1), (4, 4), ["model.tie_embeddings=false", "accumulate=4"], marks=soak
        ),
        pytest.param("adamw", (4, 2), (2, 2), ["model.tie_embeddings=false"], marks=soak),
        pytest.param(
            "muon",
            (2, 2),
            (2, 1),
            ["model.attention_sink=true", "model.smear_keys=true", "model.attention_gate=head"],
            marks=soak,
        ),
    ],
)
def test_any_number_of_ranks_takes_the_steps_of_one_and_another_number_goes_on(
    tmp_path, text_file, optim, first, then, more
):
    argv = odd(text_file, f"optim.name={optim}", "optim.schedule=constant", *more)

    for (size, shard), changed in ((first, "max_steps=10"), (then, "resume=true")):
        said = trained(tmp_path, size, *argv, f"shard={shard}", changed)
        assert said.count(f"{size} processes") == (size > 1)
    trained(tmp_path, 1, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


def small_config(shard: int) -> ResolvedConfig:
    """A small model whose sizes no number of ranks divides."""
    return ResolvedConfig(
        device="cpu",
        precision="fp32",
        batch_size=8,
        shard=shard,
        model=GPTConfig(97, block_size=16, n_layer=3, n_head=2, n_embd=36),
        optim=OptimConfig(name="muon"),
    )


def random_batch(world: World, batch_size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    tokens = torch.randint(97, (batch_size // world.size, 17)).numpy()
    return tokens[:, :-1], tokens[:, 1:]


@slow
@pytest.mark.parametrize("size, shard", [(2, 2), pytest.param(4, 2, marks=soak)])
def test_each_rank_stores_its_share_of_the_model_and_measures_the_same_loss(tmp_path, size, shard):
    def work(world):
        training = build_state(small_config(shard), world)
        loss, norms = train_step(training, 0, *random_batch(world))
        gpt = training.model
        mine, whole = 0, 0  # numbers of weights: of this rank, and of vectors that every rank has
        for p in gpt.parameters():
            mine += local_part(p.detach()).numel()
            whole += 0 if is_distributed(p) else p.numel()
        plain = world.plain_copy(gpt)
        works = plain is not None and plain(torch.zeros(1, 4).long())[0].isfinite().all().item()
        if works:  # it has the same parameters, a shared one once
            assert plain.tensors().keys() == gpt.tensors().keys()
        return [mine, gpt.num_parameters(), whole, loss.item(), *norms.tolist(), works]

    results = in_ranks(tmp_path, size, work)
    total, whole = results[0][1:3]
    assert max(mine for mine, *_ in results) <= 1.1 * total / shard
    assert sum(mine for mine, *_ in results) == (total - whole) * size // shard + whole * size
    assert len({tuple(result[1:-1]) for result in results}) == 1
    assert [result[-1] for result in results] == [True] + [False] * (size - 1)


@slow
@pytest.mark.parametrize(
    "size, shard", [(3, 1), pytest.param(4, 1, marks=soak), pytest.param(4, 2, marks=soak)]
)
def test_each_matrix_has_its_state_on_one_owner_and_all_copies_of_the_model_are_equal(
    tmp_path, size, shard
):
    def work(world):
        config = replace(small_config(shard), batch_size=12, precision="bf16")
        training = build_state(config, world)
        for step in range(4):
            train_step(training, step, *random_batch(world, 12))
        (muon,) = [o for o in training.optimizers if isinstance(o, Muon)]
        names = {p: name for name, p in training.model.named_parameters()}
        owned = [names[p] for p in muon.state]
        rows = [local_part(p.detach()) for p in names]
        return owned, hashlib.sha256(b"".join(part.numpy().tobytes() for part in rows)).hexdigest()

    results = in_ranks(tmp_path, size, work)
    with torch.device("meta"):
        named = dict(build_model(small_config(shard).model).named_parameters())
    matrices = [name for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2]
    names_of_states = [name for owned, _ in results for name in owned]
    assert sorted(names_of_states) == sorted(matrices * (1 if shard == 1 else size))
    for first in range(shard):  # these ranks have the same rows
        assert len({weights for _, weights in results[first::shard]}) == 1


@slow
@pytest.mark.parametrize(
    "size, shard", [(3, 1), pytest.param(4, 1, marks=soak), pytest.param(4, 2, marks=soak)]
)
def test_other_ranks_load_exactly_the_saved_optimizer_state(tmp_path, size, shard):
    def save(world):
        training = build_state(small_config(1), world)
        for step in range(3):
            train_step(training, step, *random_batch(world))
        tensors = dict(optimizer_tensors(training.optimizers, training.model))
        if world.rank == 0:
            save_file(tensors, tmp_path / "saved.safetensors")

    def load(world):
        training = build_state(small_config(shard), world)
        path = tmp_path / "saved.safetensors"
        load_optimizer_tensors(training.optimizers, training.model, path)
        loaded = dict(optimizer_tensors(training.optimizers, training.model))
        saved = load_file(path)
        assert list(loaded) == sorted(saved)
        return all(torch.equal(loaded[name], saved[name]) for name in saved)

    in_ranks(tmp_path, 2, save)
    assert all(in_ranks(tmp_path, size, load))


def test_shard_auto_takes_the_smallest_number_of_processes_whose_memory_suffices():
    config = ResolvedConfig(batch_size=12, accumulate=3, model=GPTConfig(300), precision="fp32")
    needed = {shard: memory_needed(replace(config, shard=shard), 4) for shard in (1, 2, 4)}
    for memory, shard in ((1e9, 1), (None, 1), (needed[2] * 1.2, 2), (1.0, 4)):
        assert pick_shard(config, 4, memory, machine_processes=2) == shard


def test_a_batch_or_shard_that_the_processes_do_not_divide_is_refused():
    with pytest.raises(UserError) as error:
        check_batch_size(Config(batch_size=12, accumulate=3), processes=3)
    assert "batch_size=12" in str(error.value) and "9" in str(error.value)
    with pytest.raises(UserError) as error:
        check_shard(3, processes=4)
    assert "shard=3" in str(error.value)


# Faults. `fault(rank)` runs in each rank before the program.


def of(rank: int, *call):
    """`processes.at_call` in one rank."""
    return lambda here: fault_at_call(*call)() if here == rank else None


def kill(number: int = signal.SIGKILL):
    return lambda: os.kill(os.getpid(), number)


def fail():
    raise ValueError("the card is hot")


def sharded(text_file: Path, *more: str) -> list[str]:
    return odd(
        text_file, "shard=2", "optim.name=muon", "precision=bf16", "model.dropout=0.3", *more
    )


def three(text_file: Path, *more: str) -> list[str]:
    """For three ranks, each with the whole model."""
    return odd(text_file, "shard=1", "optim.name=muon", "batch_size=15", "model.dropout=0.3", *more)


@pytest.fixture
def alone(shared, text_file):
    """alone(ranks, settings) → a run of so many ranks that nothing befell."""
    return lambda size, argv: (
        shared(
            f"ranks{size}{argv.__name__}", lambda folder: trained(folder, size, *argv(text_file))
        )
        / "run"
    )


# In a step, in the first save, in an evaluation.
@pytest.mark.parametrize(
    "size, argv, rank, fault",
    [
        pytest.param(2, sharded, 1, (training.device, "seed_micro_step", 8, kill()), marks=slow),
        pytest.param(3, three, 1, (training.device, "seed_micro_step", 8, kill()), marks=slow),
        pytest.param(2, sharded, 0, (training.checkpoint, "full_tensor", 12, kill()), marks=soak),
        pytest.param(2, sharded, 1, (training.evaluate, "autocast", 3, fail), marks=soak),
    ],
)
def test_a_rank_that_ends_ends_the_others_and_a_resumed_run_has_the_same_bits(
    tmp_path, text_file, alone, size, argv, rank, fault
):
    ranks = Ranks(tmp_path, size, *argv(text_file), fault=of(rank, *fault))
    statuses = ranks.wait()
    assert statuses.pop(rank) in (1, -9) and set(statuses) == {1}, ranks.output()
    if rank == 1:
        said = ranks.processes[0].output()
        assert said.count("error: another process of the run has ended") == 1
        assert "Traceback" not in said

    def begin_again(here):
        if here:  # the first rank alone reads the whole text again
            data.tokens.corpus_fingerprint = fail

    trained(tmp_path, size, *argv(text_file), "resume=auto", fault=begin_again)
    assert_same_run(alone(size, argv), tmp_path / "run", 20)


@pytest.mark.parametrize(
    "number, step, call",
    [
        pytest.param(signal.SIGTERM, 10, (training.evaluate, "autocast", 3), marks=slow),
        pytest.param(signal.SIGINT, 8, (training.device, "seed_micro_step", 8), marks=soak),
    ],
)
def test_a_signal_to_one_rank_saves_once_and_all_leave_with_its_status(
    tmp_path, text_file, number, step, call
):
    def begin(here):
        distributed.world.SECONDS_BETWEEN_CHECKS = 0  # after every step
        of(1, *call, kill(number))(here)

    ranks = Ranks(tmp_path, 2, *sharded(text_file, "checkpoint.every=0"), fault=begin)
    assert ranks.wait() == [128 + number] * 2, ranks.output()
    assert ranks.output().count("resume=true") == 1
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1].step in (step, step + 1)


@slow
def test_a_rank_that_hangs_ends_the_run(tmp_path, text_file):
    def begin(here):
        distributed.world.STEP_TIMEOUT = timedelta(seconds=3)
        of(1, training.device, "seed_micro_step", 8, partial(time.sleep, 60))(here)

    ranks = Ranks(tmp_path, 2, *odd(text_file), fault=begin)
    assert ranks.processes[0].wait(30) == 1
    ranks.processes[1].signal(signal.SIGKILL)  # as torchrun does at last
    said = ranks.processes[0].output()
    assert "does not answer" in said and "Traceback" not in said
    trained(tmp_path, 2, *odd(text_file), "resume=true")


@slow
def test_a_mistake_is_said_once(tmp_path, text_file):
    ranks = Ranks(tmp_path, 2, *odd(text_file), "tokenizer=char", "batch_size=3", script=True)
    assert ranks.processes[0].wait() == 1
    ranks.processes[1].signal(signal.SIGTERM)  # as torchrun does
    ranks.wait()
    (said,) = re.findall("^error: .*", ranks.output(), re.M)
    assert "batch_size=3 cannot be divided among 2" in said
    assert not (tmp_path / "run").exists()
