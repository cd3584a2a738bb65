"""What a head is good for: the loss without it."""

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from model import GPT

ABLATION_TOKENS = 4096  # of validation, on which importance is measured at the end of a run


@torch.no_grad()
def importance(model: GPT, x: Tensor, y: Tensor, rows: int) -> np.ndarray:
    """Increase of the mean loss on x, y (B, T) when a head's output is zeroed, for each head: (L, H), in nats per token.

    `rows` sequences go through the model at once; a y of -1 is left out. The model stays as it is: a call with a copy of
    one matrix, of which the head's columns are zero, stands for the model without the head.
    """
    training = model.training
    model.eval()
    c, whole = model.config, loss(model, {}, x, y, rows)
    without = np.zeros((c.n_layer, c.n_head))
    for layer, block in enumerate(model.blocks):
        for head in range(c.n_head):
            W_O = block.attention.W_O.weight.clone()  # (C, H · d_v)
            W_O[:, head * c.value_dim:(head + 1) * c.value_dim] = 0
            without[layer, head] = loss(model, {f"blocks.{layer}.attention.W_O.weight": W_O}, x, y, rows)
    model.train(training)
    return without - whole


def loss(model: GPT, weights: dict[str, Tensor], x: Tensor, y: Tensor, rows: int) -> float:
    """The mean loss on x, y with these weights in place of the model's own."""
    total = 0.0
    for xs, ys in zip(x.split(rows), y.split(rows)):
        total += functional_call(model, weights, (xs, ys))[1].item() * int((ys >= 0).sum())
    return total / int((y >= 0).sum())
