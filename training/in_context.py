"""Compute the in-context score: the loss early in a window minus the loss late in it."""

import torch.nn.functional as F
from torch import Tensor

from data.batches import NO_TARGET

# Equal parts of a window; the in-context score compares the second with the last one. In a window
# of 512 tokens their middles are the 48th and the 496th token; Olsson et al. compare the 50th and
# the 500th.
WINDOW_PARTS = 16


def in_context_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the in-context score of each window in nats per token, (B,), in float64.

    It is the mean loss of early positions, the second sixteenth of the window, minus that of late
    ones, the last sixteenth. It is nan if one of the two has no targets, as in a window that ends
    early or has fewer than 16 tokens.

    Reference: Olsson et al. 2022, "In-context Learning and Induction Heads"; they subtract the
    early loss from the late one.
    """
    T = targets.shape[1]
    size = T // WINDOW_PARTS
    means = []
    for part in (slice(size, 2 * size), slice(T - size, T)):
        y = targets[:, part]  # (B, size)
        nats = F.cross_entropy(
            logits[:, part].flatten(0, 1).float(),
            y.flatten(),
            ignore_index=NO_TARGET,
            reduction="none",
        )
        means.append(nats.view(y.shape).double().sum(1) / (y != NO_TARGET).sum(1))  # (B,)
    return means[0] - means[1]
