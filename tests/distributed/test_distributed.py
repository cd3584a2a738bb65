"""Several ranks train one run: in the steps of one process, whatever their number and mesh, through
deaths, signals and mistakes. Gloo, on this machine."""

import os
import re
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import soak
from processes import assert_same_run, fault_at_call
from ranks import Ranks, assert_same_steps, in_ranks, odd, trained
from steps import Steps

import distributed.world
import training.checkpoint
import training.device
import training.evaluate
from common.errors import UserError
from common.terminal import explain_error
from config import Config, GPTConfig, OptimConfig, ResolvedConfig
from distributed.world import join
from run.run_dir import RunDir
from training.plan import check_batch_size, check_shard
from training.sharding import is_distributed, local_part
from training.world import World

slow = pytest.mark.slow
NGRAMS = ["model.ngrams=3", "model.ngram_size=6"]
VARIANTS = ["model.attention_sink=true", "model.smear_keys=true", "model.attention_gate=head"]


# (processes, shard) to step 10, and from there on
@slow
@pytest.mark.parametrize(
    "optim, first, then, more",
    [
        ("muon", (2, 1), (2, 2), ["accumulate=4", *NGRAMS]),
        soak("adamw", (4, 2), (2, 1), ["model.tie_embeddings=false"]),
        soak("muon", (1, 1), (4, 4), ["accumulate=4"]),
        soak("muon", (2, 2), (1, 1), VARIANTS),
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
        compile=True,
        model=GPTConfig(97, block_size=16, n_layer=3, n_head=2, n_embd=36),
        optim=OptimConfig(name="muon"),
    )


def random_batch(world: World, batch_size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    tokens = torch.randint(97, (batch_size // world.size, 17)).numpy()
    return tokens[:, :-1], tokens[:, 1:]


@slow
@pytest.mark.parametrize("size, shard", [(2, 2), soak(4, 2)])
def test_each_rank_stores_its_share_of_the_model_and_measures_the_same_loss(tmp_path, size, shard):
    def work(world):
        torch.compile = partial(torch.compile, backend="eager")  # which traces as any other
        steps = Steps(small_config(shard), world)
        loss, norms = steps.take(0, *random_batch(world))
        gpt = steps.model
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
def test_a_dry_run_takes_its_steps_on_all_ranks(tmp_path, text_file):
    said = trained(tmp_path, 2, *odd(text_file), "shard=2", "dry_run=true")
    assert said.count("ms/step") == said.count("2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_a_batch_or_shard_that_the_processes_do_not_divide_is_refused():
    with pytest.raises(UserError, match="batch_size=12"):
        check_batch_size(Config(batch_size=12, accumulate=3), processes=3)
    with pytest.raises(UserError, match="shard=3"):
        check_shard(3, processes=4)


def test_several_processes_without_enough_memory_are_told_of_shard(monkeypatch):
    for processes in ("1", "2"):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(MemoryError) as error:
            bytearray(1 << 60)
        assert ("shard" in explain_error(error.value)) == (processes == "2")


@pytest.mark.parametrize("local_rank, gpu", [("0", "cuda:0"), (None, "cuda:1")])
def test_each_process_takes_a_gpu_of_its_own_whatever_started_it(monkeypatch, local_rank, gpu):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank}.items():
        if value:
            monkeypatch.setenv(name, value)
    devices, zeros = [], torch.zeros(1)
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    training.device.pick_device("cuda", 8)
    assert devices == [gpu]


def test_processes_that_cannot_find_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="MASTER_ADDR"), join(alone=False):
        pass
    with join(alone=True) as world:
        assert world.size == 1


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


@pytest.fixture
def undisturbed(shared, text_file) -> Path:
    """A finished run of two ranks."""
    return shared("ranks", lambda folder: trained(folder, 2, *sharded(text_file))) / "run"


# In a step, in the first save, in an evaluation.
@slow
@pytest.mark.parametrize(
    "rank, fault",
    [
        (1, (training.device, "seed_micro_step", 8, kill())),
        soak(0, (training.checkpoint, "full_tensor", 12, kill())),
        soak(1, (training.evaluate, "autocast", 3, fail)),
    ],
)
def test_a_rank_that_ends_ends_the_others_and_a_resumed_run_has_the_same_bits(
    tmp_path, text_file, undisturbed, rank, fault
):
    ranks = Ranks(tmp_path, 2, *sharded(text_file), fault=of(rank, *fault))
    statuses = ranks.wait()
    assert statuses.pop(rank) in (1, -9) and set(statuses) == {1}, ranks.output()
    assert ranks.output().count("Traceback") == (fault[-1] is fail)
    trained(tmp_path, 2, *sharded(text_file), "resume=auto")
    assert_same_run(undisturbed, tmp_path / "run", 20)


@slow
def test_a_signal_to_one_rank_saves_once_and_all_leave_with_its_status(tmp_path, text_file):
    def begin(here):
        distributed.world.SECONDS_BETWEEN_CHECKS = 0  # after every step
        of(1, training.evaluate, "autocast", 3, kill(signal.SIGTERM))(here)

    ranks = Ranks(tmp_path, 2, *sharded(text_file, "checkpoint.every=0"), fault=begin)
    assert ranks.wait() == [143, 143], ranks.output()
    assert ranks.output().count("resume=true") == 1
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step in (10, 11)


@pytest.mark.soak
def test_a_rank_that_hangs_ends_the_run(tmp_path, text_file):
    def begin(here):
        distributed.world.STEP_TIMEOUT = timedelta(seconds=3)
        of(1, training.device, "seed_micro_step", 8, signal.pause)(here)

    ranks = Ranks(tmp_path, 2, *odd(text_file), fault=begin)
    assert ranks.processes[0].wait(300) == 1
    ranks.processes[1].signal(signal.SIGKILL)  # as torchrun does at last
    trained(tmp_path, 2, *odd(text_file), "resume=true")


@slow
@pytest.mark.parametrize("mistake", ["batch_size=4", soak("device=gloo")])
def test_a_mistake_that_the_first_rank_finds_is_said_once(tmp_path, text_file, mistake):
    ranks = Ranks(tmp_path, 3, *odd(text_file), "batch_size=6", mistake)
    assert ranks.wait() == [1, 1, 1], ranks.output()
    (said,) = re.findall("^error: .*", ranks.output(), re.MULTILINE)
    assert mistake.partition("=")[2] in said and "Traceback" not in ranks.output()
    assert not (tmp_path / "run").exists()


def other_machine(folder: Path, text: str):
    """Return a fault that moves rank 1 to a folder and a cache that hold only this text."""
    folder.mkdir()
    (folder / "text.txt").write_text(text)

    def fault(rank: int) -> None:
        if rank == 1:
            os.chdir(folder)
            os.environ["GLASSGPT_CACHE"] = str(folder / "cache")

    return fault


@slow
def test_machines_with_caches_of_their_own_train_on_the_same_text(tmp_path, text_file):
    text = text_file.read_text()
    (tmp_path / "text.txt").write_text(text)
    argv = odd(Path("text.txt"), "max_steps=2")
    trained(tmp_path, 2, *argv, fault=other_machine(tmp_path / "same", text))
    assert len(list((tmp_path / "same" / "cache").glob("*/train.bin"))) == 1

    fault = other_machine(tmp_path / "other", text.replace("e", "a"))
    ranks = Ranks(tmp_path, 2, *argv, "run_dir=none", fault=fault)
    assert ranks.wait() == [1, 1], ranks.output()
    (error,) = re.findall("^error: .*", ranks.output(), re.MULTILINE)
    assert "process 1" in error and "text.txt" in error
    assert "Traceback" not in ranks.output()
