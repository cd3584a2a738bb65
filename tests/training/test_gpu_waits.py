"""The training loop on a GPU, without one: it waits for the device at the steps that it logs alone.
The CPU's tensors are taken for a GPU's."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import training.device
from config import Config
from training.optim import NonFiniteGuard

# What makes the host wait for a GPU's numbers, or for how many there are.
WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select",
         "unique", "_unique2")


class Waits(TorchDispatchMode):
    """Notes after how many steps of a run a number of a tensor is read."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.step, self.steps = 0, []
        seed = training.device.seed_micro_step

        def seeded(of_run, step, *more):
            self.step = step + 1
            seed(of_run, step, *more)

        monkeypatch.setattr(training.device, "seed_micro_step", seeded)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in WAITS:
            self.steps.append(self.step)
        return function(*args, **(kwargs or {}))


class Event:
    """As torch.cuda.Event: of a step whose flags are being copied to the host."""

    def record(self):
        pass

    synchronize = record


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_loop_waits_at_the_steps_that_it_logs_alone(tiny: Config, train_here, monkeypatch,
                                                        name, device):
    config = replace(tiny, max_steps=10)
    config.optim.name, config.log.every = name, 4
    config.eval.every = config.checkpoint.every = config.attention.every = 0
    flush = NonFiniteGuard.flush

    def copied(guard):  # the flags of the step before are on the host
        with _disable_current_modes():
            flush(guard)

    if device == "cuda":
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(NonFiniteGuard, "flush", copied)
    with Waits(monkeypatch) as waits:
        train_here(config)
    steps = [step for step in waits.steps if 0 < step < 10]
    if device == "cuda":
        assert steps == [4, 4, 8, 8]  # the loss, the norm
    else:
        assert set(steps) == set(range(1, 10))  # which is noticed
