"""The state of a training run: what a step changes and a checkpoint saves."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from config import ResolvedConfig
from kernels import autocast
from model import GPT
from training.loss_scale import LossScaler
from training.nonfinite import NonFiniteGuard
from training.optimizers import build_optimizers
from training.world import World
from variants import build_model


class MeanLoss:
    """Mean training loss since the last reading, summed on the device without waiting for it."""

    def __init__(self, device: torch.device | str) -> None:
        self._sum = torch.zeros((), device=device)
        self._steps = 0

    def add(self, loss: Tensor) -> None:
        """Add the loss () of one step."""
        self._sum += loss
        self._steps += 1

    def read(self) -> float:
        """Return the mean loss of the steps since the last reading."""
        total, steps = self.state()
        self.restore((0.0, 0))
        return total / steps

    def state(self) -> tuple[float, int]:
        """Return the sum of the losses since the last reading and their number."""
        return self._sum.item(), self._steps

    def restore(self, state: tuple[float, int]) -> None:
        """Continue from what `state` returned."""
        total, self._steps = state
        self._sum.fill_(total)


@dataclass(frozen=True)
class TrainingState:
    """Everything that a training step reads or changes, besides its batch."""

    config: ResolvedConfig
    world: World
    model: GPT  # on its device, and sharded if `config.shard` says so
    forward: Callable  # the model's forward pass, compiled if `config.compile` says so
    optimizers: list[Optimizer]  # together they update each parameter once
    scaler: LossScaler
    guard: NonFiniteGuard
    mean_loss: MeanLoss  # since the last logged row

    def compile_ahead(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Have torch.compile compile both passes on a batch (batch_size, T), unless a signal comes.

        This takes a minute or two. In a step, which must not end halfway, a signal would have to
        wait for it. With several processes it does, because the others could not be stopped.
        """
        if self.world.size > 1:
            return
        rows = self.config.micro_batch_size(self.world.size)
        batch = [torch.from_numpy(ids[:rows]).to(self.config.device) for ids in (inputs, targets)]
        with self.world.interruptible():
            with autocast(self.config.device, self.config.precision):
                loss = self.forward(*batch)[1]
            loss.backward()
        self.model.zero_grad()
        self.world.check_stop()


def build_state(
    config: ResolvedConfig, world: World, init: Callable[[GPT], None] = lambda model: None
) -> TrainingState:
    """Build a placed model and its optimizers; `init` changes the weights before it is placed."""
    torch.manual_seed(config.seed)
    model = build_model(config.model)
    init(model)
    world.wait()
    model.checkpoint_activations = config.checkpoint_activations
    forward = world.place_model(model, config)
    optimizers = build_optimizers(model, config.optim, config.precision)
    scaler = LossScaler(config.precision == "fp16")
    guard, mean_loss = NonFiniteGuard(model), MeanLoss(config.device)
    return TrainingState(config, world, model, forward, optimizers, scaler, guard, mean_loss)
