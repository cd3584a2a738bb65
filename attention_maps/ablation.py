"""What a head is good for: the loss without it."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model import GPT, autocast


@torch.no_grad()
def losses_without_heads(
    model: GPT, x: Tensor, y: Tensor, rows: int, precision: str = "fp32",
    between: Callable[[], None] = lambda: None
) -> dict[str, np.ndarray]:
    """The loss of every token of windows x, y (W, T) in nats, nan where y is -1: `loss` (W, T), and
    for each head `loss_without` (L, H, W, T), when its output is zeroed.

    `rows` windows go through the model at once; `between` is called before each head. The model
    stays as it is: a call with a copy of one matrix, of which the head's columns are zero, stands
    for the model without the head.
    """
    c = model.config
    with model.evaluating():
        whole, without = losses(model, {}, x, y, rows, precision), []
        for layer, block in enumerate(model.blocks):
            for head in range(c.n_head):
                between()
                W_O = block.attention.W_O.weight.clone()  # (C, H · d_v)
                W_O[:, head * c.value_dim:(head + 1) * c.value_dim] = 0
                weights = {f"blocks.{layer}.attention.W_O.weight": W_O}
                without.append(losses(model, weights, x, y, rows, precision))
    shape = (c.n_layer, c.n_head, *whole.shape)
    return {"loss": whole, "loss_without": np.stack(without).reshape(shape)}


def losses(model: GPT, weights: dict[str, Tensor], x: Tensor, y: Tensor, rows: int,
           precision: str = "fp32") -> np.ndarray:
    """The loss of every token of x, y (W, T) with these weights for the model's own: (W, T)."""
    found = []
    for xs, ys in zip(x.split(rows), y.split(rows)):
        with autocast(x.device.type, precision):
            logits = functional_call(model, weights, (xs,))[0].float()  # (rows, T, V)
        nats = F.cross_entropy(
            logits.flatten(0, 1), ys.flatten(), ignore_index=-1, reduction="none")  # (rows · T,)
        found.append(nats.view(ys.shape).masked_fill(ys < 0, torch.nan))
    return torch.cat(found).cpu().numpy()


def importance(loss: np.ndarray, loss_without: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Increase of the mean loss without each head and its standard error over windows, (L, H) each.

    loss (W, T) and loss_without (L, H, W, T) are what `losses_without_heads` gives. The error is
    that of a ratio of sums, since a window may have fewer tokens than another; nan for one window.
    """
    gain = loss_without.astype(np.float64) - loss  # (L, H, W, T)
    counts = (~np.isnan(loss)).sum(axis=-1)  # (W,)
    with np.errstate(invalid="ignore", divide="ignore"):  # nan for one window, or losses of nan
        mean = np.nansum(gain, axis=(-2, -1)) / counts.sum()
        apart = np.nansum(gain, axis=-1) - mean[..., None] * counts  # (L, H, W)
        spread = (apart ** 2).sum(axis=-1) / np.float64(1 - 1 / len(counts))
        return mean, np.sqrt(spread) / counts.sum()
