"""The training step of train.py with a new model, for measurements."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from config import ResolvedConfig

if TYPE_CHECKING:
    from model import GPT
    from training.world import World


def make_train_step(
    config: ResolvedConfig, world: "World | None" = None
) -> "tuple[GPT, Callable[[int, tuple], Any]]":
    """Build and place a model; return it, and a function of a step's number and batch."""
    from train import train_step
    from training.compiler import compile_model
    from training.loss_scale import LossScaler
    from training.losses import Losses
    from training.optimizers import build_optimizers
    from training.world import World
    from variants import build_model

    world = world or World()
    model = build_model(config.model)
    model.checkpoint_activations = config.checkpoint_activations
    world.place(model, config)
    compiled_model = compile_model(model, config)
    optimizers = build_optimizers(model, config.optim, config.precision)
    scaler, losses = LossScaler(config.precision), Losses(model, config.device)

    def take_step(step: int, batch: tuple) -> Any:
        return train_step(step, batch, compiled_model, optimizers, scaler, losses, config, world)

    return model, take_step
