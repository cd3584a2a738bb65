"""Take single steps of a run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import ResolvedConfig
from model import GPT
from train import train_step
from training.compiler import compile_model
from training.loss_scale import LossScaler
from training.losses import Losses
from training.optimizers import build_optimizers
from training.world import World
from variants import build_model


class StepResult(NamedTuple):
    """What a step has measured."""

    loss: Tensor  # mean over the global batch: ()
    gradient_norms: Tensor  # of each parameter, before clipping: (parameters,)


class Steps:
    """The model of a seed, placed and compiled as configured, and what else a step changes."""

    def __init__(
        self,
        config: ResolvedConfig,
        world: World | None = None,
        change: Callable[[GPT], object] = lambda model: None,
    ) -> None:
        """Build the model; `change` is called before it is placed."""
        self.config = config
        self.world = world or World()
        torch.manual_seed(config.seed)
        self.model = build_model(config.model)
        self.model.checkpoint_activations = config.checkpoint_activations
        change(self.model)
        self.world.place(self.model, config)
        self.compiled_model = compile_model(self.model, config)
        self.optimizers = build_optimizers(self.model, config.optim, config.precision)
        self.scaler = LossScaler(config.precision)
        self.losses = Losses(self.model, config.device)

    def take(self, step: int, inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        """Take the step after `step` others, on ids (batch_size / processes, T)."""
        self.losses.restore((0.0, 0))
        train_step(
            step,
            (inputs, targets),
            self.compiled_model,
            self.optimizers,
            self.scaler,
            self.losses,
            self.config,
            self.world,
        )
        return StepResult(self.losses._sum.clone(), self.losses.gradient_norms)
