"""What a head is good for: the loss without it."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model import GPT


@torch.no_grad()
def losses_without_heads(
    model: GPT, x: Tensor, y: Tensor, rows: int, between: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of every token of windows x, y (W, T): (W, T), and when a head's output is zeroed,
    for each head: (L, H, W, T), in nats; nan where y is -1.

    `rows` windows go through the model at once; `between` is called before each head. The model
    stays as it is: a call with a copy of one matrix, of which the head's columns are zero, stands
    for the model without the head.
    """
    training, c = model.training, model.config
    model.eval()
    try:
        whole, without = losses(model, {}, x, y, rows), []
        for layer, block in enumerate(model.blocks):
            for head in range(c.n_head):
                between()
                W_O = block.attention.W_O.weight.clone()  # (C, H · d_v)
                W_O[:, head * c.value_dim:(head + 1) * c.value_dim] = 0
                weights = {f"blocks.{layer}.attention.W_O.weight": W_O}
                without.append(losses(model, weights, x, y, rows))
    finally:
        model.train(training)
    return whole, np.stack(without).reshape(c.n_layer, c.n_head, *whole.shape)


def losses(model: GPT, weights: dict[str, Tensor], x: Tensor, y: Tensor, rows: int) -> np.ndarray:
    """The loss of every token of x, y (W, T) with these weights in place of the model's own: (W, T)."""
    found = []
    for xs, ys in zip(x.split(rows), y.split(rows)):
        logits = functional_call(model, weights, (xs,))[0].float()  # (rows, T, V)
        nats = F.cross_entropy(logits.flatten(0, 1), ys.flatten(), ignore_index=-1, reduction="none")
        found.append(nats.view(ys.shape).masked_fill(ys < 0, torch.nan))
    return torch.cat(found).cpu().numpy()


def importance(whole: np.ndarray, without: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Increase of the mean loss without each head, and its standard error over windows: (L, H) each.

    whole (W, T) and without (L, H, W, T) are what `losses_without_heads` gives. The error is that
    of a ratio of sums, since a window may have fewer tokens than another; nan for a single window.
    """
    gain, counts = without.astype(np.float64) - whole, (~np.isnan(whole)).sum(axis=-1)  # (W,)
    with np.errstate(invalid="ignore", divide="ignore"):  # nan for one window, and for losses of nan
        mean = np.nansum(gain, axis=(-2, -1)) / counts.sum()
        apart = np.nansum(gain, axis=-1) - mean[..., None] * counts  # (L, H, W)
        spread = (apart ** 2).sum(axis=-1) / np.float64(1 - 1 / len(counts))
        return mean, np.sqrt(spread) / counts.sum()
