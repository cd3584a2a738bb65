"""Compute the loss of each token of a text, measured as the validation loss is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import UserError
from generation.sampling import NON_FINITE_PREDICTIONS

if TYPE_CHECKING:
    from model import GPT

TOKENS_AT_ONCE = 8192  # in a forward pass: enough to keep a processor busy
LOGITS_AT_ONCE = 1 << 25  # 128 MB in float32


@torch.no_grad()
def score_tokens(model: GPT, ids: Sequence[int]) -> np.ndarray:
    """Return the loss of each of N + 1 tokens but the first, in nats: (N,) in float64.

    The tokens are predicted in independent windows of block_size tokens.

    Raises:
        UserError: If a loss is not finite.
    """
    N, V = len(ids) - 1, len(model.head.weight)
    T = min(model.config.block_size, N)
    device = model.head.weight.device
    padded = F.pad(torch.tensor(ids), (0, -N % T))  # later tokens do not change earlier losses
    inputs, targets = padded[:-1].view(-1, T), padded[1:].view(-1, T)  # (windows, T)
    windows, rows = max(1, TOKENS_AT_ONCE // T), max(1, LOGITS_AT_ONCE // V)
    losses = []
    with model.evaluating():
        for x, y in zip(inputs.split(windows), targets.split(windows)):
            residual = model.run_blocks(x.to(device)).flatten(0, 1)  # (windows · T, C)
            for some, following in zip(residual.split(rows), y.flatten().split(rows)):
                logits = model.head(model.norm(some)).float()  # (rows, V)
                nats = F.cross_entropy(logits, following.to(device), reduction="none")  # (rows,)
                losses.append(nats.cpu())
    of_tokens = torch.cat(losses)[:N].double().numpy()
    if not np.isfinite(of_tokens).all():
        raise UserError(NON_FINITE_PREDICTIONS)
    return of_tokens
