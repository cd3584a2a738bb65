"""Compute the loss of each token of a text, measured as the validation loss is."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from generation.sampling import NON_FINITE_PREDICTIONS
from kernels import in_float32_or_finer
from model import GPT

TOKENS_AT_ONCE = 8192  # in a forward pass: enough to keep a processor busy
LOGITS_AT_ONCE = 1 << 25  # 128 MB in float32


@torch.no_grad()
def score_tokens(model: GPT, ids: Sequence[int]) -> np.ndarray:
    """Return the losses in nats of all N + 1 tokens except the first: (N,) in float64.

    They are predicted in the windows of `cut_windows`, of block_size tokens. A loss that is not
    finite raises `UserError`.
    """
    N = len(ids) - 1
    T = min(model.config.block_size, N)
    device = model.head.weight.device
    windows = cut_windows(np.array(ids), T, model.begin_of_text)
    inputs, targets = (torch.from_numpy(ids).split(max(1, TOKENS_AT_ONCE // T)) for ids in windows)
    losses = []
    with model.evaluating():
        for x, y in zip(inputs, targets):
            residual = model.run_blocks(x.to(device))  # (windows, T, C)
            losses.append(token_losses(model, residual, y.to(device)).flatten().cpu())
    of_tokens = torch.cat(losses)[:N].double().numpy()
    if not np.isfinite(of_tokens).all():
        raise UserError(NON_FINITE_PREDICTIONS)
    return of_tokens


def cut_windows(
    tokens: np.ndarray, T: int, begin_of_text: int | None, max_windows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut token ids (N,) into independent windows; return inputs and targets, (windows, T).

    The windows do not overlap, and the last one is padded: there its targets are -1. If there are
    more than `max_windows`, the chosen ones are spread evenly. A model with begin-of-text reads it
    in place of the first token of each window, as when it samples.
    """
    windows = math.ceil((len(tokens) - 1) / T)
    chosen = np.linspace(0, windows - 1, min(windows, max_windows or windows)).round().astype(int)
    inputs = np.zeros((len(chosen), T), np.int64)
    targets = np.full((len(chosen), T), -1, np.int64)
    for row, start in enumerate(chosen * T):
        window = tokens[start : start + T + 1]
        inputs[row, : len(window) - 1] = window[:-1]
        targets[row, : len(window) - 1] = window[1:]
    if begin_of_text is not None:
        inputs[:, 0] = begin_of_text
    return inputs, targets


@torch.no_grad()
def token_losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss in nats of targets (…, T) from a residual stream x (…, T, C).

    The loss is nan where the target is -1.
    """
    rows = max_logit_rows(model)
    losses = []
    for some, ids in zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows)):
        logits = in_float32_or_finer(model.head(model.norm(some)))  # (rows, V)
        losses.append(F.cross_entropy(logits, ids, ignore_index=-1, reduction="none"))
    return torch.cat(losses).view(targets.shape).masked_fill(targets < 0, torch.nan)


def max_logit_rows(model: GPT) -> int:
    """Return the maximum number of tokens whose logits are computed at once, to limit memory."""
    return max(1, LOGITS_AT_ONCE // len(model.head.weight))
