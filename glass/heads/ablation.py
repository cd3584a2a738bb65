"""Ablations: measure how the loss changes without a head's output, or without a token.

Each effect is measured by running the model; earlier layers and tokens are not recomputed.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from generation import KVCache
from generation.scoring import max_logit_rows, token_losses
from glass.heads import scores
from glass.heads.cached_pass import rewind_cache
from glass.heads.capture import ForwardPass, next_tokens
from glass.heads.interventions import NO_INTERVENTIONS, Interventions, chain_taps
from glass.heads.results import Estimates
from kernels import autocast, in_float32_or_finer
from model import GPT, Taps

MAX_TOKENS_PER_PASS = 4096
# A pass recomputes all tokens after its first hidden one. Hiding a quarter as many tokens in one
# pass limits this; with fewer than 8 hidden tokens the overhead of a pass dominates.
RECOMPUTED_PER_HIDDEN_TOKEN = 4
MIN_HIDDEN_TOKENS = 8


def rows_per_pass(model: GPT, length: int) -> int:
    """Return the maximum number of rows of `length` tokens in one batch."""
    return max(1, min(MAX_TOKENS_PER_PASS, max_logit_rows(model)) // length)


# --- head ablation --------------------------------------------------------------------------------


class HeadAblation(NamedTuple):
    """Losses in nats of W windows of T tokens, with and without each head; nan without a target."""

    loss: np.ndarray  # of the unchanged model, (W, T)
    loss_without_head: np.ndarray  # with the output of one head zeroed, (L, H, W, T)


@torch.no_grad()
def ablate_heads(model: GPT, x: Tensor, y: Tensor, precision: str = "fp32") -> HeadAblation:
    """Compute the losses for inputs x and targets y (W, T), with and without each head."""
    losses, losses_without = [], []
    with model.evaluating(), autocast(x.device.type, precision):
        for tokens, targets in zip(x[:, None], y[:, None]):  # (1, T)
            residuals: list[Tensor] = []
            layers = range(model.config.n_layer)
            taps: Taps = {("residual", layer): residuals.append for layer in layers}
            taps["embedding", 0] = residuals.append
            model.run_blocks(tokens, taps=taps)
            losses.append(token_losses(model, residuals[-1], targets))
            losses_without.append(_losses_without_heads(model, tokens, targets, residuals))
    return HeadAblation(
        torch.cat(losses).cpu().numpy(), torch.stack(losses_without, dim=2).cpu().numpy()
    )


def head_importance(ablation: HeadAblation) -> Estimates:
    """Compute head importance (L, H): the increase of the mean loss when a head's output is zeroed.

    In nats/token over all targets, with its standard error over windows.

    Reference: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """
    difference = ablation.loss_without_head.astype(np.float64) - ablation.loss
    increases = np.nansum(difference, axis=-1)  # (L, H, W)
    return scores.ratio(increases, (~np.isnan(ablation.loss)).sum(axis=-1))


@torch.no_grad()
def measure_head_effects(
    model: GPT, forward: ForwardPass, max_rows: int | None = None
) -> np.ndarray:
    """Measure the loss increase (L, H, T) in nats after each token of a text without each head.

    `max_rows` limits the batch size; None chooses one that fits. The last increase is nan.
    """
    targets = next_tokens(forward.tokens)  # (1, T)
    residuals = list(forward.residuals)
    with model.evaluating():
        without = _losses_without_heads(model, forward.tokens, targets, residuals, max_rows)
    return (without - token_losses(model, residuals[-1], targets)).cpu().numpy()


def _losses_without_heads(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    residuals: list[Tensor],
    max_rows: int | None = None,
) -> Tensor:
    """Compute the losses (L, H, T) of one text with each head zeroed."""
    max_rows = max_rows or rows_per_pass(model, tokens.shape[1])
    losses = []
    for layer in range(model.config.n_layer):
        for x in _run_without_heads(model, tokens, residuals[layer], layer, max_rows):
            losses.append(token_losses(model, x, targets.expand(len(x), -1)))
    return torch.cat(losses).unflatten(0, (model.config.n_layer, model.config.n_head))


@torch.no_grad()
def iterate_head_effects(
    model: GPT,
    forward: ForwardPass,
    i: int,
    target: int,
    interventions: Interventions = NO_INTERVENTIONS,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each layer, and the loss increases (H,) in nats at `target` without each of its heads.

    The target is predicted after token i; later tokens are not run. `forward` ran with the same
    `interventions`, whose hidden tokens are at most i.
    """
    forward = forward.first_tokens(i + 1)
    ids = torch.tensor([target], device=forward.tokens.device)
    loss = token_losses(model, forward.residuals[-1, :, -1], ids)  # (1,)
    max_rows = rows_per_pass(model, i + 1)
    with model.evaluating():
        for layer in range(model.config.n_layer):
            effects = []
            for x in _run_without_heads(
                model, forward.tokens, forward.residuals[layer], layer, max_rows, interventions
            ):
                effects.append(token_losses(model, x[:, -1], ids.expand(len(x))) - loss)
            yield layer, torch.cat(effects).cpu().numpy()


def _run_without_heads(
    model: GPT,
    tokens: Tensor,
    x: Tensor,
    layer: int,
    max_rows: int,
    interventions: Interventions = NO_INTERVENTIONS,
) -> Iterator[Tensor]:
    """Yield final residual streams (n ≤ max_rows, T, C), each row without one head of a layer.

    The passes begin with the layer's input x (1, T, C).
    """
    mask = interventions.mask(tokens.shape[1], tokens.device)
    for heads in torch.arange(model.config.n_head).split(max_rows):
        ablate: Taps = {("heads", layer): partial(_zero_heads, heads)}
        taps = chain_taps(ablate, interventions.taps())
        yield model.run_blocks(tokens, mask=mask, taps=taps, entry=(layer, x))


def _zero_heads(heads: Tensor, y: Tensor) -> Tensor:
    """Tap: copy y (1, T, H, d_v) once for each of `heads`, whose output is zero in its copy."""
    y = y.repeat(len(heads), 1, 1, 1)
    y[torch.arange(len(heads)), :, heads] = 0
    return y


# --- attention knockout of tokens -----------------------------------------------------------------


class TokenEffects(NamedTuple):
    """Effect [i, j] of hiding token j from later queries on the prediction after token i, in nats.

    It is 0 if j ≥ i, and nan if token i or j was left out.
    """

    loss: np.ndarray  # increase of the loss, (T, T); nan in the last row, whose target is unknown
    kl: np.ndarray  # KL(p ‖ p with j hidden) between the predicted distributions, (T, T)


@torch.no_grad()
def measure_token_effects(
    model: GPT, forward: ForwardPass, first: int = 0, max_rows: int | None = None
) -> TokenEffects:
    """Measure how each prediction of one text depends on each earlier token (attention knockout).

    A hidden token is masked from all later queries, in all layers and heads, from later n-grams and
    from the smeared key of the next token. Tokens before `first` are neither hidden nor explained.
    `max_rows` limits the batch size; None chooses one that fits.

    Reference: Geva et al. 2023, "Dissecting Recall of Factual Associations".
    """
    T = forward.tokens.shape[1]
    dtype = torch.promote_types(forward.residuals.dtype, torch.float32)
    effects = torch.full((2, T, T), torch.nan, dtype=dtype).numpy()
    effects[:, first:, first:] = 0
    for hidden, loss, kl in iterate_token_effects(model, forward, first=first, max_rows=max_rows):
        effects[:, hidden.start + 1 :, hidden.start : hidden.stop] = loss, kl
    effects[0, -1] = np.nan
    return TokenEffects(*effects)


@torch.no_grad()
def iterate_token_effects(
    model: GPT,
    forward: ForwardPass,
    interventions: Interventions = NO_INTERVENTIONS,
    first: int = 0,
    max_rows: int | None = None,
) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
    """Yield effects like `measure_token_effects`, the last tokens first, under `interventions`.

    Yields:
        The R tokens hidden in turn; and their effects on the loss and on the prediction (KL
        divergence) after each later token, (S, R) with S = T - hidden.start - 1, in nats. The last
        loss is nan.
    """
    T = forward.tokens.shape[1]
    log_p = _log_probabilities(model, forward.residuals[-1, 0, first:])  # (T - first, V)
    targets = next_tokens(forward.tokens)[0]  # (T,)
    for hidden in reversed(list(_plan_passes(model, first, T, max_rows))):
        log_q = _predict_with_hidden_tokens(model, forward, hidden, interventions)
        after = hidden.start + 1
        effects = _compare_predictions(log_p[after - first :], log_q, targets[after:], hidden)
        effects[0, -1] = torch.nan
        loss, kl = effects.cpu().numpy()
        yield hidden, loss, kl


def _plan_passes(model: GPT, start: int, length: int, max_rows: int | None) -> Iterator[range]:
    while start < length - 1:
        recomputed = length - start - 1
        rows = min(
            max_rows or rows_per_pass(model, recomputed),
            max(MIN_HIDDEN_TOKENS, recomputed // RECOMPUTED_PER_HIDDEN_TOKEN),
        )
        hidden = range(start, min(length - 1, start + rows))
        yield hidden
        start = hidden.stop


def _predict_with_hidden_tokens(
    model: GPT, forward: ForwardPass, hidden: range, interventions: Interventions
) -> Tensor:
    """Return log-probabilities (R, S, V) after `hidden.start`; row r also hides token hidden[r]."""
    tokens, R, first = forward.tokens, len(hidden), hidden.start + 1
    T = tokens.shape[1]
    positions = torch.arange(T, device=tokens.device)
    queries = positions[first:, None]  # (S, 1)
    hidden_positions = positions[hidden.start : hidden.stop, None, None]  # (R, 1, 1)
    is_hidden = positions == hidden_positions[:, :, 0]  # (R, T)
    is_hidden_from_query = is_hidden[:, None] & (queries > hidden_positions)  # (R, S, T)
    mask = (positions <= queries) & ~is_hidden_from_query  # (R, S, T)
    if interventions.hidden:
        mask &= interventions.mask(T, tokens.device, first)
        is_hidden |= interventions.is_hidden(T, tokens.device)

    cache = KVCache(model.config, R, T, tokens.device, forward.k.dtype)
    cache.keys.copy_(forward.k)
    cache.values.copy_(forward.v)
    rewind_cache(model, cache, forward.residuals, first)

    cached, recomputed = tokens.expand(R, -1).tensor_split([first], dim=1)  # (R, first), (R, S)
    with model.evaluating():
        x = model.embed(recomputed, cached, is_hidden)
        x = model.run_blocks(recomputed, cache, mask[:, None], interventions.taps(), entry=(0, x))
    return _log_probabilities(model, x)


def _compare_predictions(log_p: Tensor, log_q: Tensor, targets: Tensor, hidden: range) -> Tensor:
    """Return the loss increase and the KL divergence, stacked (2, S, R), in nats.

    `log_p` (S, V) is of the unchanged text, `log_q` (R, S, V) hides token hidden[r] in row r.
    """
    R, S, _ = log_q.shape
    ids = targets.clamp(min=0)[:, None]  # (S, 1)
    loss = log_p.gather(1, ids)[:, 0] - log_q.gather(2, ids.expand(R, -1, 1))[..., 0]  # (R, S)
    p = log_p.exp()
    kl = (p * log_p).sum(-1) - torch.einsum("sv,rsv->rs", p, log_q)  # (R, S)
    # Row r hides token hidden.start + r, which affects only predictions after later tokens. The
    # first prediction follows token hidden.start + 1.
    offsets = torch.arange(max(R, S), device=log_q.device)
    is_unaffected = offsets[:S] < offsets[:R, None]  # (R, S)
    return torch.stack((loss, kl)).masked_fill(is_unaffected, 0).mT


def _log_probabilities(model: GPT, x: Tensor) -> Tensor:
    return in_float32_or_finer(model.head(model.norm(x))).log_softmax(dim=-1)
