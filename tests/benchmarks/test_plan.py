"""The plan of a run agrees with what runs: bytes with real steps, operations with the model, and
it touches nothing."""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from hypothesis import Phase, given, settings
from models import configs, few

from benchmarks import plan
from config import Config, GPTConfig, OptimConfig, TokenizerConfig, UserError
from model import GPT, autocast
from training.optim import build_optimizers, update


def run_of(model: GPTConfig, **changes) -> Config:
    return Config(**{"device": "cpu", "precision": "fp32", "compile": False, "batch_size": 3,
                     "model": model, **changes})


def kept(config: Config, rows: int) -> int:
    """Bytes that autograd really keeps of a forward pass for its backward pass, beside the
    parameters: the reference."""
    model, found = GPT(config.model), {}
    x = torch.zeros(rows, config.model.block_size, dtype=torch.int64)

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note,
                                                  lambda t: t), autocast("cpu", config.precision):
        logits, loss = model(x, x)
    for tensor in (logits, loss):
        note(tensor)
    for tensor in (x, *model.parameters(), *model.buffers()):
        found.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(found.values())


@pytest.mark.slow
@settings(few, phases=[Phase.generate])
@given(configs)
def test_the_activations_are_what_autograd_keeps(model):
    # kept too, and their log-softmax
    config, logits = run_of(model), 3 * model.block_size * model.vocab_size * 4
    assert plan.measure(config,
                        3).activations == pytest.approx(kept(config, 3) - 2 * logits, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_gradients_and_state_are_those_of_a_real_update(optim, precision):
    config = run_of(GPTConfig(50, block_size=16, n_layer=2, n_head=2, n_embd=32, position="rope"),
                    precision=precision, optim=OptimConfig(name=optim))
    memory, model = plan.measure(config, 3), GPT(config.model)
    optimizers, gradients = build_optimizers(model, config.optim, config.precision), []
    optimizers[0].register_step_pre_hook(
        lambda *_: gradients.append(sum(p.grad.nbytes for p in model.parameters())))
    x = torch.zeros(3, 16, dtype=torch.int64)
    update(model, model, optimizers, x, x, config, 0)
    assert memory.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert memory.gradients == gradients[0]
    assert memory.optimizer == sum(t.nbytes for o in optimizers for state in o.state.values()
                                   for t in state.values())
    assert (memory.update > 0) == (optim == "muon")


def test_memory_goes_with_the_micro_batch():
    model = GPTConfig(300, block_size=128, n_layer=3, n_head=4, n_embd=64)
    one, two = plan.measure(run_of(model), 4), plan.measure(run_of(model), 8)
    assert two.activations == pytest.approx(2 * one.activations, rel=0.02)
    assert two.logits == pytest.approx(2 * one.logits, rel=0.02)
    assert (two.weights, two.gradients,
            two.optimizer) == (one.weights, one.gradients, one.optimizer)


def test_processes_share_the_model_and_the_optimizer_s_state():
    config = run_of(GPTConfig(300, block_size=32, n_layer=4, n_head=4, n_embd=64), shard=4)
    one, four = plan.measure(config, 3), plan.measure(config, 3, processes=4)
    assert one.gathered == 0 and four.gathered > 0
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(four, kind) == pytest.approx(getattr(one, kind) / 4, rel=0.01)
    assert one.checkpoint == pytest.approx(four.checkpoint, rel=0.01)
    copies = plan.measure(replace(config, shard=1), 3, processes=4)
    assert copies.weights == one.weights and copies.gathered == 0
    assert one.at_once < copies.at_once <= one.at_once + one.gradients  # they stay between steps


@pytest.mark.parametrize("shard, bytes", [(1, 2 * 4 * 3 / 4), (4, (4 + 2 + 2) * 3 / 4),
                                          (2, 8 / 2 + 4 / 2)])
def test_what_a_process_receives_is_counted_by_hand(shard, bytes):
    config = run_of(GPTConfig(300), precision="bf16", shard=shard)
    assert plan.communication(config, 1000, 4) == pytest.approx(1000 * bytes)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_gradients_stay_while_the_next_micro_step_runs(compile):
    model = GPTConfig(300, block_size=128, n_layer=3, n_head=4, n_embd=64)
    one, split = (plan.measure(run_of(model, compile=compile, precision="bf16", batch_size=8,
                                      accumulate=n), 4) for n in (1, 2))
    assert split.activations == one.activations
    assert one.at_once < split.at_once <= one.at_once + one.gradients


def test_a_gpu_is_planned_with_fused_attention_and_a_cpu_in_bf16_with_its_own():
    model = GPTConfig(50, block_size=256, n_layer=2, n_head=4, n_embd=64)
    cpu, gpu = (plan.measure(run_of(model, device=device, precision="bf16"), 2).activations
                for device in ("cpu", "cuda"))
    weights = 2 * 2 * 4 * 256 ** 2 * 2  # layers, sequences, heads, pairs of tokens, bytes
    assert cpu - gpu > weights / 2


def test_compiling_keeps_less():
    model = GPTConfig(50, block_size=64, n_layer=2, n_head=4, n_embd=64, norm="rmsnorm",
                      mlp="relu2")
    eager, compiled = (plan.measure(run_of(model, compile=compile), 4) for compile in (False, True))
    assert 0 < compiled.activations < eager.activations and compiled.at_once < eager.at_once


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(),
                    reason="only Linux forgets the most memory that a process had")
@pytest.mark.parametrize("settings",
                         [("fp32", "adamw", 1), ("bf16", "muon", 1), ("fp32", "adamw", 2)], ids=str)
def test_a_real_step_takes_about_what_the_plan_says(settings):
    done = subprocess.run([sys.executable, __file__, *map(str, settings)], capture_output=True,
                          text=True, check=True,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    planned, real = map(float, done.stdout.split())
    # glibc gives back little of what comes and goes
    assert 0.9 < real / planned < 1.5, (planned, real)


def real_step(precision: str, optim: str, accumulate: str) -> None:
    """Print the bytes that the plan says, and by how much real steps enlarged this process."""
    def resident(key: str) -> int:
        return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def step(config: Config, n: int) -> None:
        model = GPT(config.model)
        optimizers = build_optimizers(model, config.optim, config.precision)
        x = torch.randint(config.model.vocab_size, (config.batch_size, config.model.block_size))
        for i in range(n):
            update(model, model, optimizers, x, x, config, i)

    torch.set_num_threads(1)
    shape = {"precision": precision, "optim": OptimConfig(name=optim)}
    # what torch takes for itself
    step(run_of(GPTConfig(50, block_size=16, n_layer=1, n_head=2, n_embd=16), **shape), 1)
    model = GPTConfig(8000, block_size=512, n_layer=6, n_head=6, n_embd=384)
    config = run_of(model, batch_size=8 * int(accumulate), accumulate=int(accumulate), **shape)
    planned = plan.measure(config, 8).at_once
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(config, 3)
    print(planned, resident("VmHWM") - before)


# --- the command ----------------------------------------------------------------------------------


def planned(done) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = [(line[:15].strip(), line[15:].strip()) for line in done.stdout.splitlines()]
    return {name: value for name, value in lines if name}


@pytest.mark.slow
def test_a_plan_touches_no_data_and_writes_nothing(command, tmp_path):
    cache, here = tmp_path / "cache", tmp_path / "here"
    here.mkdir()
    done = command("train.py", "data=text", "data.path=is/not/there.txt", "dry_run=true",
                   "model.n_layer=3", cwd=here,
                   env={"GLASSGPT_CACHE": str(cache)})
    lines = planned(done)
    assert list(here.iterdir()) == [] and not cache.exists() and done.stderr == ""
    shape = GPT(GPTConfig(2048, block_size=256, n_layer=3, n_head=4, n_kv_head=2, n_embd=128,
                          norm="rmsnorm", position="rope",
                          mlp="swiglu", mlp_hidden=352, qk_norm="gains"))
    assert lines["model"].startswith(f"{shape.num_parameters():,} parameters")
    assert lines["operations"].startswith(f"{shape.flops_per_token():,} a token")
    assert lines["run"].startswith(f"2,400 steps, {2400 * 8 * 256:,} tokens")
    assert "measured just now" in lines["time"]


@pytest.mark.slow
def test_a_plan_imports_neither_wandb_nor_what_draws():
    code = ("import sys, benchmarks.plan; "
            "print({'wandb', 'matplotlib', 'transformers'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.parametrize("name, parameters",
                         [("gpt2_124m", 124_439_808), ("gpt2_350m", 354_823_168)])
def test_the_presets_for_gpus_say_what_their_plan_says(command, name, parameters):
    lines = planned(command("train.py", f"experiment={name}", "dry_run=8xH100"))
    header = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text().split("defaults:")[0]
    assert lines["model"].startswith(f"{parameters:,} parameters")
    time, memory = lines["time"].partition(" at ")[0], lines["at once"].partition("  ")[0]
    assert f"{time} and {memory}" in header


def test_processes_split_the_batch_and_the_time(capsys):
    config = Config(dry_run="A100", compile=False, batch_size=32, max_steps=10 ** 6,
                    model=GPTConfig(300, block_size=64))
    plan.print_plan(replace(config, model=replace(config.model)), "test")
    one = capsys.readouterr().out
    plan.print_plan(replace(config, dry_run="4 x A100"), "test")
    four = capsys.readouterr().out
    assert "1 process × 1 micro-step × 32" in one and "4 processes × 1 micro-step × 8" in four
    seconds = [float(re.search(r"time +([\d.]+) (seconds|minutes)",
                               out)[1]) * (60 if "minutes at" in out else 1) for out in (one, four)]
    assert seconds[0] / seconds[1] == pytest.approx(4, rel=0.1)


def test_torchrun_s_processes_count_and_one_of_them_speaks(monkeypatch, capsys):
    config = Config(dry_run=True, device="cpu", precision="fp32", compile=False,
                    model=GPTConfig(300, block_size=64))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    plan.print_plan(config, "test")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    plan.print_plan(config, "test")
    assert "2 processes × 1 micro-step × 16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_vocabulary_that_only_the_text_knows_is_assumed_and_said(capsys):
    for tokenizer, said in (("char", "vocabulary 256 (assumed"), (
        "bpe", "vocabulary 1,024 (fewer where"), ("gpt2", "vocabulary 50,257 (GPT-2's)")):
        plan.print_plan(Config(dry_run="L4", compile=False, tokenizer=TokenizerConfig(tokenizer)),
                        "test")
        assert said in capsys.readouterr().out
    plan.print_plan(Config(dry_run="L4", precision="fp32", compile=False,
                           tokenizer=TokenizerConfig("bpe", 500)), "test")
    out = capsys.readouterr().out
    assert "vocabulary 500" in out and "not known: the data sheets' rates are of bf16" in out


def test_a_run_that_does_not_fit_is_told_how(capsys):
    plan.print_plan(Config(dry_run="L4", batch_size=512, model=GPTConfig(
        50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)), "test")
    assert "more than there is: raise accumulate" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["V100", "yes", "", "0xH100", "8 H100", "false true"])
def test_an_unknown_machine_is_refused_with_those_that_are_known(asked):
    with pytest.raises(UserError, match=r"dry_run=.* is not true, .*8xH100: B200, H200"):
        plan.print_plan(Config(dry_run=asked, model=GPTConfig(300)), "test")


def test_a_batch_that_the_processes_cannot_share_is_refused():
    with pytest.raises(UserError, match="batch_size=32 cannot be divided among 3 processes with "
                                        "accumulate=2: make it a multiple of 6"):
        plan.print_plan(Config(dry_run="3xH100", accumulate=2, model=GPTConfig(300)), "test")


def test_a_sweep_is_not_planned(command):
    done = command("train.py", "-m", "dry_run=true", "seed=1,2")
    assert done.returncode == 1 and "does not go with a sweep" in done.stderr and done.stdout == ""


if __name__ == "__main__":
    real_step(*sys.argv[1:])
