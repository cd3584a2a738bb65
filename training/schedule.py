"""Learning-rate schedules."""

import math

from torch.optim import Optimizer

from config import Config, OptimConfig


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
    fraction = (step - warmup) / (max_steps - warmup)
    heights = {
        "cosine": 0.5 * (1 + math.cos(math.pi * fraction)),
        "wsd": min(1.0, (max_steps - step) / (max_steps * optim.decay_share)),
    }
    return optim.min_lr_ratio + heights[optim.schedule] * (1 - optim.min_lr_ratio)


def describe_rise(step: int, before: Config, now: Config) -> str | None:
    """Return a note if the rate after `step` steps exceeds the one of the settings before."""
    old, new = (lr_factor(step, c.optim, c.max_steps) * c.optim.lr for c in (before, now))
    return f"note: the learning rate rises from {old:.1e} to {new:.1e}" if new > old else None


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set every learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def learning_rate_metrics(step: int, optim: OptimConfig, max_steps: int) -> dict[str, float]:
    """Return the rate of `optim.lr` as train/lr, and with Muon that of Muon as train/muon_lr."""
    factor = lr_factor(step, optim, max_steps)
    muon = {"train/muon_lr": optim.muon_lr_multiple * optim.lr * factor}
    return {"train/lr": optim.lr * factor} | (muon if optim.name == "muon" else {})
