"""Learning-rate schedules."""

import math

from torch.optim import Optimizer

from config import Config, OptimConfig
from training.optimizers import Muon


def lr_factor(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Compute the learning rate, after `step` optimizer steps, as a fraction of its peak.

    The rate rises linearly during the warm-up. Then it follows a cosine down to
    `optim.min_lr_ratio` ("cosine"), stays at its peak and falls linearly at the end ("wsd"), or
    stays at its peak ("constant"). Steps from `max_steps` on get the final rate.

    Reference: Loshchilov and Hutter 2017 (cosine); Hu et al. 2024 (warm-up–stable–decay).
    """
    warmup = round(optim.warmup_share * max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    if step >= max_steps:
        return optim.min_lr_ratio
    if optim.schedule == "cosine":
        fraction = (step - warmup) / (max_steps - warmup)
        height = 0.5 * (1 + math.cos(math.pi * fraction))
    else:
        height = min(1.0, (max_steps - step) / (max_steps * optim.decay_share))
    return optim.min_lr_ratio + height * (1 - optim.min_lr_ratio)


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set every learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def learning_rate_metrics(optimizers: list[Optimizer]) -> dict[str, float]:
    """Return the current learning rates by metric name: train/lr, and train/muon_lr with Muon."""
    metrics = {}
    for optimizer in optimizers:
        name = "train/muon_lr" if isinstance(optimizer, Muon) else "train/lr"
        metrics[name] = optimizer.param_groups[0]["lr"]
    return metrics


def is_due(every: int, step: int, config: Config, first: int = 0) -> bool:
    """Return whether an activity is due.

    It is at multiples of `every` (0: none), at the last step, and at `first`, 2 * `first`,
    4 * `first` and so on below `every` (0: none).
    """
    is_early = first > 0 and step < every and is_doubling(step, first)
    return is_early or step == config.max_steps or (every > 0 and step % every == 0)


def is_doubling(step: int, first: int) -> bool:
    """Return whether a step is `first`, 2 * `first`, 4 * `first` or a later doubling."""
    return step % first == 0 and (step // first).bit_count() == 1


def is_evaluation_due(step: int, config: Config) -> bool:
    """Return whether the validation loss is measured at a step."""
    return is_due(config.eval.every, step, config, config.eval.first)


def is_snapshot_due(step: int, config: Config) -> bool:
    """Return whether a snapshot of attention is due at a step, whatever the heads do."""
    return is_due(config.attention.every, step, config, config.attention.first)


def is_attention_due(step: int, config: Config) -> bool:
    """Return whether a snapshot of attention is due, or a check for an extra one."""
    every, check_every = config.attention.every, config.attention.check_every
    return is_snapshot_due(step, config) or (every > 0 and is_due(check_every, step, config))


def is_grid_due(step: int, config: Config) -> bool:
    """Return whether the snapshot at a step gets an attention grid and a sample text.

    Both ends of the run get them, and every `picture_every` steps between; if that is 0, the first,
    second, fourth, eighth, … multiple of `every`.
    """
    every, picture_every = config.attention.every, config.attention.picture_every
    if step in (0, config.max_steps):
        return True
    if picture_every:
        return step % picture_every == 0
    return is_doubling(step, every)
