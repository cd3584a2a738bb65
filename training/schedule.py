"""Learning-rate schedules."""

import math

from torch.optim import Optimizer

from config import Config, OptimConfig
from training.optimizers import Muon


def lr_factor(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Compute the learning rate of an optimizer step as a fraction of its peak.

    The rate rises linearly during the warm-up. Then it follows a cosine down to
    `optim.min_lr_ratio` ("cosine"), stays at its peak and falls linearly at the end ("wsd"), or
    stays at its peak ("constant").

    `step` is the number of optimizer steps taken before this one. Steps from `max_steps` on get the
    final rate.

    Reference:
        Loshchilov and Hutter 2017 (cosine); Hu et al. 2024 (warm-up–stable–decay).
    """
    warmup = optim.count_warmup_steps(max_steps)
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


def describe_rate_change(before: Config, now: Config, step: int) -> str | None:
    """Return a sentence about the learning rate of a run whose length changes when it is resumed.

    Returns None if the length is the same, or if it does not change the next step's rate.
    """
    old, new = (lr_factor(step, config.optim, config.max_steps) for config in (before, now))
    old_lr, new_lr = before.optim.lr * old, now.optim.lr * new
    is_resized = now.max_steps != before.max_steps and step < now.max_steps
    if not is_resized or math.isclose(old_lr, new_lr):
        return None
    change = (
        f"with max_steps={now.max_steps} in place of {before.max_steps}, the schedule continues at "
        f"a learning rate of {new_lr:.3g} in place of {old_lr:.3g}"
    )
    if not old_lr:
        return change
    settings = f"optim.schedule=constant optim.warmup_steps=0 optim.lr={old_lr:.3g}"
    if now.optim.name == "muon":
        settings += f" optim.muon_lr={before.optim.muon_peak_lr * old:.3g}"
    return f"{change}; to stay at {old_lr:.3g}, add {settings}"


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


def is_due(every: int, step: int, config: Config) -> bool:
    """Return whether an activity is due: at multiples of `every` (0: none) and at the last step."""
    return step == config.max_steps or (every > 0 and step % every == 0)


def is_attention_due(step: int, config: Config) -> bool:
    """Return whether a regular snapshot of attention is due, or a check for an extra one."""
    every, check_every = config.attention.every, config.attention.check_every
    return is_due(every, step, config) or (every > 0 and is_due(check_every, step, config))


def count_due(every: int, after: int, config: Config) -> int:
    """Return how often an activity is due after a step; -1 for all of the run: see `is_due`."""
    last = config.max_steps
    if after >= last:
        return 0
    return 1 + ((last - 1) // every - after // every if every else 0)


def count_evaluations(after: int, config: Config) -> int:
    """Return how many measurements of a loss follow a step; -1 for all of the run.

    At the last step two splits are measured: see `training.evaluate.evaluate`.
    """
    evaluations = count_due(config.eval.every, after, config)
    return evaluations + 1 if evaluations else 0
