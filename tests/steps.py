"""An optimizer step outside a run, as train.py takes it."""

import torch

from config import Config
from model import GPT, autocast
from train import micro_batches
from training.optimizers import build_optimizers, clip_gradients
from training.processes import World, average_gradients, shard_model
from training.schedule import lr_factor, set_learning_rates

ALONE = World()


class Steps:
    """A model and its optimizers on the ranks of a world; a call takes a step."""

    def __init__(self, config: Config, world: World = ALONE):
        torch.manual_seed(0)
        self.config, self.world, self.model = config, world, GPT(config.model)
        self.forward, mesh = shard_model(self.model, config, world.size)
        self.optimizers = build_optimizers(self.model, config.optim, config.precision, mesh)

    def __call__(self, x, y, step: int = 0):
        """x, y (batch_size / processes, T) → the loss (), and each gradient's norm before clipping
        (parameters,)."""
        config, world, loss = self.config, self.world, torch.zeros((), device=self.config.device)
        set_learning_rates(self.optimizers, lr_factor(step, config.optim, config.max_steps))
        for batch in micro_batches(x.numpy(), y.numpy(), config, world):
            with autocast(config.device, config.precision):
                micro_loss = self.forward(*batch)[1]
            (micro_loss / config.accumulate).backward()
            loss += micro_loss.detach() / (config.accumulate * world.size)
        if config.shard == 1:
            average_gradients(self.model, world)
        norms = clip_gradients(self.model, config.optim.grad_clip, world, config.shard)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return world.sum(loss), norms
