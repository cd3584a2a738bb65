"""Several ranks train one run: in the steps of one process, whatever their number and mesh, through
deaths, signals and mistakes. Gloo, on this machine."""

import ctypes
import gc
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from processes import assert_same_run, at_call, finished, rows, tiny
from ranks import Ranks, in_ranks, trained
from safetensors.numpy import load_file

import model
import training.checkpoint
import training.evaluate
import training.optim
import training.sharding
from benchmarks import plan
from config import Config, GPTConfig, OptimConfig, UserError
from model import GPT
from training.checkpoint import find_checkpoint
from training.distributed import World, check
from training.optim import build_optimizers, update
from training.sharding import plain_copy, shard_model
from training.tensors import local


def odd(text_file: Path, *more: str) -> list[str]:
    """A run of 20 steps, without dropout, of a model whose sizes no number of ranks divides."""
    return tiny(text_file, "model.dropout=0", "model.n_embd=35", "model.head_dim=10",
                "model.mlp_hidden=51", "batch_size=16", "max_steps=20", "optim.warmup_steps=1",
                "eval.every=5", "attention.every=0", "checkpoint.every=5", *more)


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
@pytest.mark.parametrize("optim, first, then, more", [
    ("muon", (2, 2), (1, 1), []),
    pytest.param("adamw", (2, 1), (2, 2), ["accumulate=4"], marks=slow),
    pytest.param("muon", (4, 2), (2, 1), ["model.tie_embeddings=false"], marks=slow),
    pytest.param("adamw", (4, 4), (4, 1), ["accumulate=4"], marks=slow),
    pytest.param("muon", (1, 1), (4, 4), ["model.tie_embeddings=false", "accumulate=4"],
                 marks=soak),
    pytest.param("adamw", (4, 2), (2, 2), ["model.tie_embeddings=false"], marks=soak)])
def test_any_number_of_ranks_takes_the_steps_of_one_and_another_number_goes_on(
        tmp_path, text_file, optim, first, then, more):
    argv = odd(text_file, f"optim={optim}", "optim.schedule=constant", *more)

    def run(size: int, shard: int, *more: str):
        if size == 1:
            finished(tmp_path, *argv, *more)
        else:
            said = trained(tmp_path, size, *argv, f"shard={shard}", *more)
            assert said.count(f"{size} processes") == 1

    run(*first, "max_steps=10")
    run(*then, "resume=true")
    finished(tmp_path, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@soak
def test_ranks_that_compile_take_the_steps_of_one_that_does_not(tmp_path, text_file):
    said = trained(tmp_path, 2, *odd(text_file, "compile=true", "shard=2"))
    assert "fp32, compiled" in said and "failed" not in said
    finished(tmp_path, *odd(text_file), "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@slow
def test_dropout_is_the_same_in_every_run_and_another_on_every_rank(tmp_path, text_file):
    argv = tiny(text_file, "optim=muon", "model.dropout=0.3", "shard=2", "precision=bf16")
    for name in ("one", "other"):
        trained(tmp_path, 2, *argv, f"run_dir={name}")
    assert_same_run(tmp_path / "one", tmp_path / "other")


def sharded(world: World, shard: int, optim: str = "muon", **changes):
    """A model over the ranks, its optimizers, and what takes a step."""
    torch.manual_seed(0)
    config = Config(device="cpu", precision="fp32", batch_size=8, shard=shard, max_steps=10,
                    model=GPTConfig(**{"vocab_size": 97, "block_size": 16, "n_layer": 3,
                                       "n_head": 2, "n_embd": 36, **changes}),
                    optim=OptimConfig(name=optim))
    gpt = GPT(config.model)
    forward, mesh = shard_model(gpt, config, world.size)
    optimizers = build_optimizers(gpt, config.optim, mesh=mesh)
    tokens = torch.randint(97, (8 // world.size, 17))

    def step(n=0):
        return update(forward, gpt, optimizers, tokens[:, :-1], tokens[:, 1:], config, n, world)

    return gpt, optimizers, step


@slow
@pytest.mark.parametrize("size, shard", [(2, 2), (4, 2), (4, 4)])
def test_a_rank_holds_its_part_of_the_model_and_of_the_state_and_all_agree(tmp_path, size, shard):
    def work(world):
        gpt, optimizers, step = sharded(world, shard)
        loss, norm, finite = step()
        mine = sum(local(p.detach()).numel() for p in gpt.parameters())
        state = sum(local(t).numel() for o in optimizers for s in o.state.values()
                    for t in s.values() if t.dim())
        plain = plain_copy(gpt, world)
        works = plain is not None and plain(torch.zeros(1, 4).long())[0].isfinite().all().item()
        return [mine, state, gpt.num_parameters(), loss.item(), norm.item(), bool(finite.all()),
                works]

    results = in_ranks(tmp_path, size, work)
    total = results[0][2]
    for mine, state, *_ in results:
        assert mine <= 1.1 * total / shard and state <= 2.2 * total / shard
    assert sum(mine for mine, *_ in results) == total * size // shard
    assert len({tuple(result[2:6]) for result in results}) == 1
    assert [result[6] for result in results] == [True] + [False] * (size - 1)


@pytest.mark.soak  # with -n 0: what a worker has from other tests counts with it
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(),
                    reason="only Linux forgets the most memory that a process had")
@pytest.mark.parametrize("optim, accumulate, meshes", [("adamw", 1, [(2, 1), (2, 2), (4, 4)]),
                                                       ("muon", 2, [(2, 1), (4, 2), (2, 2)])])
def test_the_most_memory_of_a_rank_is_as_planned(tmp_path, optim, accumulate, meshes):
    def memory(key):
        return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def work(world, shard):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
        sharded(world, world.size, optim)[-1]()  # what torch takes for itself
        big = Config(device="cpu", precision="fp32", compile=False, accumulate=accumulate,
                     batch_size=2 * accumulate * world.size, shard=shard,
                     model=GPTConfig(4000, block_size=128, n_layer=8, n_head=8, n_embd=512),
                     optim=OptimConfig(name=optim))
        planned = plan.measure(big, 2, world.size).at_once
        gc.collect()
        libc.malloc_trim(0)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        gpt = GPT(big.model)
        forward, mesh = shard_model(gpt, big, world.size)
        optimizers = build_optimizers(gpt, big.optim, mesh=mesh)
        tokens = torch.randint(4000, (2 * accumulate, 128))
        for step in range(3):  # after the second one's forward pass, DDP's memory is all in use
            update(forward, gpt, optimizers, tokens, tokens, big, step, world)
        return planned, memory("VmHWM") - before

    most = {}
    for size, shard in meshes:
        for planned, real in in_ranks(tmp_path, size, partial(work, shard=shard)):
            assert 0.85 < real / planned < 1.15, (size, shard, planned, real)
            most[shard] = real
    assert sorted(most.values(), reverse=True) == list(most.values())


def collectives(world: World, shard: int) -> dict[str, int]:
    """How many of each kind a step takes, once DDP has ordered the gradients as they come."""
    from torch.distributed.tensor.debug import CommDebugMode

    _, _, step = sharded(world, shard)
    step(0)
    step(1)
    with CommDebugMode() as counted:
        step(2)
    return {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}


@slow
@pytest.mark.parametrize("least, groups", [(0, 3), (training.sharding.GROUP, 1)])
def test_a_step_takes_two_collectives_a_group_and_pass_and_two_a_shape_of_muon(
        tmp_path, least, groups):
    def work(world):
        training.sharding.GROUP = least
        return collectives(world, 2)

    counts, _ = in_ranks(tmp_path, 2, work)
    parts, shapes = groups + 1, 3  # blocks, and what is outside them, which stays for the backward
    assert counts == {"_allgather_base_": parts + groups, "_reduce_scatter_base_": parts,
                      "all_gather_into_tensor": 2 * shapes, "allreduce_": 1}


@slow
def test_whole_models_exchange_gradients_and_what_muon_made_of_their_matrices(tmp_path):
    counts, _ = in_ranks(tmp_path, 2, partial(collectives, shard=1))
    assert counts == {"all_gather_into_tensor": 3, "allreduce_": 2}  # shapes; gradients and norms


def test_what_does_not_go_with_so_many_processes_is_refused(monkeypatch):
    check(Config(batch_size=12, accumulate=3), 4)
    with pytest.raises(UserError, match="make it a multiple of 9"):
        check(Config(batch_size=12, accumulate=3), 3)
    with pytest.raises(UserError, match="shard=3 does not divide the 4 processes"):
        check(Config(batch_size=12, shard=3), 4)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    check(Config(run_dir="x", resume="auto"), 2)
    with pytest.raises(UserError, match="resume=auto"):
        check(Config(run_dir="x"), 2)


def test_one_process_alone_is_a_world_that_changes_nothing():
    world, values = World(), torch.tensor([1.0, 2.0])
    assert world.sum(values) is values and world.tell(values) is values
    assert world.first(max, 3, 4) == 4
    world.check()
    with pytest.raises(ValueError), world:
        raise ValueError


def test_nothing_of_several_processes_goes_through_a_pickle():
    wrong = re.compile(r"torch\.(load|save)\b|pickle\.(load|dump)|import pickle|dist\.\w*_object|"
                       r"distributed\.checkpoint")
    for path in [*ROOT.glob("*.py"), *(path for room in ("training", "attention_maps", "data",
                                                         "benchmarks", "interop", "report", "cli")
                                       for path in (ROOT / room).rglob("*.py"))]:
        if path.name != "arguments.py":  # tell a "text" from code
            assert not wrong.search(path.read_text(encoding="utf-8")), path


# Faults. `fault(rank)` runs in each rank before the program.

def of(rank: int, *call) -> callable:
    """`processes.at_call` in one rank."""
    return lambda here: at_call(*call)() if here == rank else None


def kill(number: int = signal.SIGKILL):
    return lambda: os.kill(os.getpid(), number)


MOMENTS = {"a step": (training.optim, "seed_micro_step", 8),
           "a saving": (training.checkpoint, "whole", 40),
           "an evaluation": (training.evaluate, "autocast", 3)}


@slow
@pytest.mark.parametrize("killed, moment", [(1, "a step"), (0, "a saving"), (1, "an evaluation")])
def test_a_rank_that_is_killed_ends_the_others_which_name_it(tmp_path, text_file, killed, moment):
    ranks = Ranks(tmp_path, 2, *odd(text_file), fault=of(killed, *MOMENTS[moment], kill()))
    statuses = ranks.wait(60)
    assert statuses[killed] == -9 and statuses[1 - killed] == 1, ranks.said()
    error = f"error: process {killed} of 2 has ended, and the run with it"
    assert ranks.said().count(error) == 1 and "Traceback" not in ranks.said(), ranks.said()
    run = tmp_path / "run"
    if (run / "checkpoints" / "last").exists():
        find_checkpoint(run, "last", pytest.fail)
    trained(tmp_path, 2, *odd(text_file), "resume=auto")
    finished(tmp_path, *odd(text_file), "run_dir=one")
    assert_same_steps(tmp_path / "one", run)


SIGNALS = {"the second amid a step": (1, training.optim, "seed_micro_step", 8, 8, signal.SIGINT),
           "the second amid an evaluation": (1, training.evaluate, "autocast", 3, 10,
                                             signal.SIGTERM)}


@slow
@pytest.mark.parametrize("moment", SIGNALS)
def test_a_signal_to_one_rank_saves_once_and_all_leave_with_its_status(
        tmp_path, text_file, moment):
    rank, module, name, call, step, number = SIGNALS[moment]
    argv = odd(text_file, "checkpoint.every=0")
    ranks = Ranks(tmp_path, 2, *argv, fault=of(rank, module, name, call, kill(number)))
    assert ranks.wait(60) == [128 + number] * 2, ranks.said()
    said, = re.findall(r"stopped after (\d+) steps; to go on", ranks.said())
    assert int(said) in (step, step + 1)
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == int(said)
    trained(tmp_path, 2, *argv, "resume=true")
    finished(tmp_path, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@slow
def test_a_rank_that_fails_is_named_with_its_reason_while_the_first_draws(tmp_path, text_file):
    def fail():
        raise ValueError("the card is hot")

    def fault(rank):
        import attention_maps.picture

        if rank == 0:
            at_call(attention_maps.picture, "printable", 20, lambda: time.sleep(2))()
        if rank == 2:
            at_call(training.optim, "seed_micro_step", 3, fail)()

    ranks = Ranks(tmp_path, 3, *odd(text_file, "batch_size=6"), fault=fault)
    assert ranks.wait() == [1, 1, 1]
    error = "error: process 2 of 3 has ended (the card is hot)"
    assert ranks.said().count(error) == 1, ranks.said()


@slow
def test_what_is_not_finite_on_one_rank_is_so_for_all(tmp_path, text_file):
    def fault(rank):
        now, seed, forward = 0, training.optim.seed_micro_step, model.GPT.forward

        def seeded(s, step, *more):
            nonlocal now
            now = step + 1
            seed(s, step, *more)

        def poisoned(self, *args, **more):
            logits, loss = forward(self, *args, **more)
            return logits, loss * np.nan if rank == 1 and self.training and now == 7 else loss

        training.optim.seed_micro_step, model.GPT.forward = seeded, poisoned

    ranks = Ranks(tmp_path, 2, *odd(text_file), fault=fault)
    assert ranks.wait() == [1, 1]
    error, = re.findall("^error: .*", ranks.said(), re.M)
    assert error.startswith("error: step 7: the loss and the gradient of")
    trained(tmp_path, 2, *odd(text_file, "run_dir=skip", "on_nonfinite=skip"), fault=fault)
    assert [row["train/skipped"] for row in rows(tmp_path / "skip")[1:]] == [0] * 6 + [1] * 14


@slow
def test_a_run_of_four_that_is_killed_goes_on_as_two(tmp_path, text_file):
    ranks = Ranks(tmp_path, 4, *odd(text_file, "shard=4"))
    ranks.processes[0].wait_for(tmp_path / "run" / "checkpoints" / "step_00000010")
    for process in ranks.processes:
        process.signal(signal.SIGKILL)
    ranks.wait()
    trained(tmp_path, 2, *odd(text_file), "resume=auto")
    finished(tmp_path, *odd(text_file), "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@slow
def test_a_mistake_is_said_once(tmp_path, text_file):
    for wrong, sentence in ((["batch_sise=4"], "batch_sise is not a setting"),
                            (["data.path=nothing"], "nothing"),
                            (["batch_size=3"], "batch_size=3 cannot be divided among 2")):
        ranks = Ranks(tmp_path, 2, *odd(text_file), *wrong)
        assert ranks.processes[0].wait(30) == 1
        ranks.processes[1].signal(signal.SIGTERM)  # as torchrun does
        ranks.wait(30)
        said = re.findall("^error: .*", ranks.said(), re.M)
        assert len(said) == 1 and sentence in said[0], ranks.said()
        assert not (tmp_path / "run").exists()


@slow
def test_a_rank_with_another_text_is_named(tmp_path, text_file):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text("utf-8") + "more", "utf-8")
    argv = [arg for arg in odd(text_file) if not arg.startswith("data.path")]
    (tmp_path / "text.txt").write_text(text_file.read_text("utf-8"), "utf-8")

    def fault(rank):
        import data.tokens as tokens
        import train as _  # noqa: F401
        if rank == 1:
            prepared = tokens.Tokens.__init__

            def changed(self, *args, **more):
                prepared(self, *args, **more)
                object.__setattr__(self, "fingerprint", "0" * 64)

            tokens.Tokens.__init__ = changed

    ranks = Ranks(tmp_path, 2, *argv, f"data.path={tmp_path / 'text.txt'}", fault=fault)
    assert ranks.wait(60) == [1, 1]
    assert "process 1 of 2 has ended (the text here" in ranks.said(), ranks.said()
