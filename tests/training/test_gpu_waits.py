"""The training loop on a GPU, without one: nothing in it waits for the device but what is logged,
and sums are made in one order. Tensors are fake ones, without contents, or the CPU's, taken for a
GPU's."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import train as training_run
from config import Config, GPTConfig, OptimConfig
from model import GPT
from training.compiling import compile_model
from training.optim import Watch, build_optimizers, update
from training.runtime import graphs_are_safe, same_bits

# What makes the host wait for a GPU's numbers, or for how many there are.
WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select",
         "unique", "_unique2")
# On a machine with a GPU its own fake tensors; elsewhere they have no backward pass.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def taken_for_a_gpu(monkeypatch):
    """All tensors say that they are a GPU's, which is what the loop asks them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # none of fake ones


def three_updates(name: str, accumulate: int, device: str) -> torch.Tensor:
    """The loss of the last of three updates on fake tensors, which fail where a number is read."""
    config = Config(device=device, precision="bf16", compile=False, batch_size=4,
                    accumulate=accumulate, optim=OptimConfig(name=name),
                    model=GPTConfig(50, block_size=16, n_layer=2, n_head=2, n_kv_head=1, n_embd=32,
                                    position="rope", mlp="swiglu", dropout=0.1))
    with FakeTensorMode():
        with torch.device(device):
            model = GPT(config.model)
        optimizers = build_optimizers(model, config.optim, config.precision)
        x = torch.zeros(4, 16, dtype=torch.long)
        for step in range(3):
            loss, grad_norm, finite = update(model, model, optimizers, x, x, config, step)
    assert len(finite) == len(list(model.parameters())) + 2 and grad_norm.shape == ()
    return loss


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_reads_no_number_of_a_gpu(taken_for_a_gpu, name, accumulate):
    assert three_updates(name, accumulate, DEVICE).device.type == DEVICE


def test_an_update_on_a_cpu_reads_one_which_is_noticed():
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
        three_updates("adamw", 1, "cpu")


def test_a_gpu_s_sums_are_made_in_one_order_for_an_update_alone():
    strict = torch.are_deterministic_algorithms_enabled
    before = strict()
    with same_bits("cuda"):
        assert strict() and not torch.is_deterministic_algorithms_warn_only_enabled()
    with same_bits("cpu"):
        assert strict() == before
    assert strict() == before


@pytest.mark.parametrize("device, accumulate, safe", [("cuda", 1, True), ("cuda:1", 1, True),
                                                      ("cuda", 2, False), ("cpu", 1, False)])
def test_graphs_are_for_a_gpu_and_one_micro_step(device, accumulate, safe):
    assert graphs_are_safe(Config(device=device, accumulate=accumulate)) == safe


def test_where_graphs_fail_the_run_is_compiled_without_and_where_that_fails_it_is_eager(
        monkeypatch):
    failing = set()

    def compile(model, mode="default"):
        def forward(x, y):
            if mode in failing:
                raise RuntimeError(mode)
            return model(x, y)

        return forward

    monkeypatch.setattr(torch, "compile", compile)
    model, x = GPT(GPTConfig(9, block_size=8, n_embd=8)), torch.zeros(1, 8, dtype=torch.long)
    for mode, worked, said in (("", True, 0), ("reduce-overhead", True, 1), ("default", False, 2)):
        failing.add(mode)
        lines = []
        forward, done = compile_model(model, x, x, "fp32", lines.append, graphs=True)
        assert (done, len(lines), forward is model) == (worked, said, not worked)
        assert all(p.grad is None for p in model.parameters())


class Waits(TorchDispatchMode):
    """Notes at which step of a run a number of a tensor is read."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer, self.steps = trainer, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in WAITS:
            self.steps.append(self.trainer.state.step)
        return function(*args, **(kwargs or {}))


class Event:
    """As torch.cuda.Event: of a step whose numbers are being copied to the host."""

    def record(self):
        pass

    synchronize = record


@pytest.fixture
def waits(monkeypatch) -> list[Waits]:
    """What `Waits` notes of the runs to come, but of flags that `Watch` has waited for by their
    event, when the device had its next step."""
    noted, take_steps, read = [], training_run.take_steps, Watch._read

    def noting(trainer, log, snapshots):
        with Waits(trainer) as mode:
            noted.append(mode)
            take_steps(trainer, log, snapshots)

    def reading(watch, but=0):
        with _disable_current_modes() if but else nullcontext():
            read(watch, but)

    monkeypatch.setattr(training_run, "take_steps", noting)
    monkeypatch.setattr(Watch, "_read", reading)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return noted


def quiet(tiny: Config, every: int) -> Config:
    """The run with nothing but a log until its end."""
    config = replace(tiny, max_steps=10)
    config.log.every, config.eval.every, config.checkpoint.every = every, 0, 0
    config.attention.every = 0
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_loop_waits_at_the_steps_that_it_logs_alone(tiny, train_here, taken_for_a_gpu, waits,
                                                        name):
    tiny.optim.name = name
    train_here(quiet(tiny, every=4))
    assert set(waits[0].steps) == {4, 8, 10}
    assert [waits[0].steps.count(step) for step in (4, 8)] == [2, 2]  # the loss, the norm


@pytest.mark.slow
def test_a_loop_on_a_cpu_waits_at_each_step_which_is_noticed(tiny, train_here, waits):
    train_here(quiet(tiny, every=4))
    assert set(waits[0].steps) == set(range(11))
