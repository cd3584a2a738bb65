"""Ablations: the loss without a head, and without seeing a token.

Every effect is measured on the real model; only what lies above or after the change is recomputed.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_maps import scores
from attention_maps.capture import ForwardPass, max_logit_rows, next_tokens, token_losses
from attention_maps.results import Estimates
from model import GPT, KVCache, autocast, store

MAX_TOKENS_PER_PASS = 4096
# A pass recomputes all tokens after its first hidden one. Hiding a quarter as many in one pass
# costs little recomputation; below 8 tokens the cost of starting a pass dominates.
RECOMPUTED_PER_HIDDEN_TOKEN = 4
MIN_HIDDEN_TOKENS = 8


def rows_per_pass(model: GPT, length: int) -> int:
    """Return how many rows of `length` tokens go through the model at once."""
    return max(1, min(MAX_TOKENS_PER_PASS, max_logit_rows(model)) // length)


# --- without a head -------------------------------------------------------------------------------


class HeadAblation(NamedTuple):
    """Loss of every token in nats, nan where there is no target.

    Attributes:
        loss: Of the whole model, (W, T).
        loss_without_head: With each head's output zeroed, (L, H, W, T).
    """

    loss: np.ndarray
    loss_without_head: np.ndarray


@torch.no_grad()
def ablate_heads(model: GPT, x: Tensor, y: Tensor, precision: str = "fp32") -> HeadAblation:
    """Measure the loss of windows x with targets y (W, T), with and without each head."""
    losses, losses_without = [], []
    with model.evaluating(), autocast(x.device.type, precision):
        for tokens, targets in zip(x[:, None], y[:, None]):  # (1, T)
            residuals: list[Tensor] = []
            keep = partial(store, residuals)
            model.run_blocks(tokens, taps={"embedding": keep, "residual": keep})
            losses.append(token_losses(model, residuals[-1], targets))
            losses_without.append(_losses_without_heads(model, tokens, targets, residuals))
    return HeadAblation(
        torch.cat(losses).cpu().numpy(), torch.stack(losses_without, dim=2).cpu().numpy()
    )


def head_importance(ablation: HeadAblation) -> Estimates:
    """Compute head importance: the increase of the mean loss when a head's output is zeroed.

    Returns:
        Increases in nats and their standard errors over windows, (L, H). They are ratios of sums,
        because windows may have different numbers of tokens.

    Reference: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """
    difference = ablation.loss_without_head.astype(np.float64) - ablation.loss
    increases = np.nansum(difference, axis=-1)  # (L, H, W)
    return scores.ratio(increases, (~np.isnan(ablation.loss)).sum(axis=-1))


@torch.no_grad()
def measure_head_effects(
    model: GPT, forward: ForwardPass, max_rows: int | None = None
) -> np.ndarray:
    """Return by how much the loss of each prediction rises when a head's output is zeroed.

    Args:
        model: The model of the pass.
        forward: A pass over one text.
        max_rows: Rows per pass; None for as many as fit.

    Returns:
        Head effects (L, H, T) in nats: of the prediction after token i; nan for the last.
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
    """Return the loss (L, H, T) of targets (1, T) without each head, from each layer's input."""
    c = model.config
    max_rows = max_rows or rows_per_pass(model, tokens.shape[1])
    losses = []
    for layer in range(c.n_layer):
        for heads in torch.arange(c.n_head).split(max_rows):
            x = model.run_blocks(
                tokens,
                taps={"heads": partial(_zero_heads, layer, heads)},
                entry=(layer, residuals[layer]),
            )  # (n, T, C)
            losses.append(token_losses(model, x, targets.expand(len(heads), -1)))
    return torch.cat(losses).unflatten(0, (c.n_layer, c.n_head))


def _zero_heads(ablated_layer: int, heads: Tensor, layer: int, y: Tensor) -> Tensor:
    """Tap that turns one text (1, T, H, d_v) into n texts that lack one of n heads each."""
    if layer != ablated_layer:
        return y
    y = y.repeat(len(heads), 1, 1, 1)
    y[torch.arange(len(heads)), :, heads] = 0
    return y


# --- without a token ------------------------------------------------------------------------------


class TokenEffects(NamedTuple):
    """Effects of hiding a token on later predictions, in nats.

    Attributes:
        loss: Element [i, j] is the increase of the loss of the token after i when token j is
            hidden, (T, T); 0 for j ≥ i; nan in the last row, after which no token is known.
        kl: Element [i, j] is KL(p ‖ p with j hidden) of the whole prediction, (T, T).
    """

    loss: np.ndarray
    kl: np.ndarray


@torch.no_grad()
def measure_token_effects(
    model: GPT, forward: ForwardPass, max_rows: int | None = None
) -> TokenEffects:
    """Measure how every prediction depends on every earlier token (attention knockout).

    A hidden token is masked from all later queries, in all layers and heads, and from later
    n-grams. Queries up to the hidden token are not affected: each pass recomputes only what follows
    its first hidden token, over the cached keys and values of the tokens before.

    Args:
        model: The model of the pass.
        forward: A pass over one text.
        max_rows: Rows per pass; None for as many as fit.

    Reference: Geva et al. 2023, "Dissecting Recall of Factual Associations".
    """
    T = forward.tokens.shape[1]
    log_p = _log_probabilities(model, forward.residuals[-1, 0])  # (T, V)
    effects = log_p.new_zeros(2, T, T)  # loss, KL
    for hidden in _plan_passes(model, T, max_rows):
        log_q = _predict_with_hidden_tokens(model, forward, hidden)
        after = slice(hidden.start + 1, T)
        targets = next_tokens(forward.tokens)[0, after]
        effects[:, after, hidden.start : hidden.stop] = _compare_predictions(
            log_p[after], log_q, targets, hidden
        )
    effects[0, -1] = torch.nan
    loss, kl = effects.cpu().numpy()
    return TokenEffects(loss, kl)


def _plan_passes(model: GPT, length: int, max_rows: int | None) -> Iterator[range]:
    """Yield consecutive ranges of tokens to hide in one pass, a row for each token."""
    start = 0
    while start < length - 1:
        recomputed = length - start - 1
        rows = min(
            max_rows or rows_per_pass(model, recomputed),
            max(MIN_HIDDEN_TOKENS, recomputed // RECOMPUTED_PER_HIDDEN_TOKEN),
        )
        hidden = range(start, min(length - 1, start + rows))
        yield hidden
        start = hidden.stop


def _predict_with_hidden_tokens(model: GPT, forward: ForwardPass, hidden: range) -> Tensor:
    """Return log-probabilities (R, S, V) after the S tokens that follow the first hidden token.

    Row r is computed with token hidden[r] out of sight of all later queries and n-grams.
    """
    tokens, R, first = forward.tokens, len(hidden), hidden.start + 1
    T = tokens.shape[1]
    positions = torch.arange(T, device=tokens.device)
    queries = positions[first:, None]  # (S, 1)
    hidden_positions = positions[hidden.start : hidden.stop, None, None]  # (R, 1, 1)
    is_hidden = positions == hidden_positions[:, :, 0]  # (R, T)
    is_out_of_sight = is_hidden[:, None] & (queries > hidden_positions)  # (R, S, T)
    mask = (positions <= queries) & ~is_out_of_sight  # (R, S, T)

    cache = KVCache(model.config, R, T, tokens.device, forward.k.dtype)
    cache.keys.copy_(forward.k)
    cache.values.copy_(forward.v)
    cache.length = first

    cached, recomputed = tokens.expand(R, -1).tensor_split([first], dim=1)  # (R, first), (R, S)
    with model.evaluating():
        x = model.embed(recomputed, cached, is_hidden)
        x = model.run_blocks(recomputed, cache, mask[:, None], entry=(0, x))
    return _log_probabilities(model, x)


def _compare_predictions(log_p: Tensor, log_q: Tensor, targets: Tensor, hidden: range) -> Tensor:
    """Return loss increase and KL (2, S, R) of S predictions for R hidden tokens.

    Args:
        log_p: Log-probabilities (S, V) of the predictions with all tokens in sight.
        log_q: The same with token hidden[r] hidden in row r, (R, S, V).
        targets: Ids (S,) of the tokens that follow; -1 for none.
        hidden: The hidden tokens; the first prediction is after token hidden.start + 1.
    """
    R, S, _ = log_q.shape
    ids = targets.clamp(min=0)[:, None]  # (S, 1)
    loss = log_p.gather(1, ids)[:, 0] - log_q.gather(2, ids.expand(R, -1, 1))[..., 0]  # (R, S)
    p = log_p.exp()
    kl = (p * log_p).sum(-1) - torch.einsum("sv,rsv->rs", p, log_q)  # (R, S)
    # Row r hides a token r places later than row 0: predictions up to it are not affected.
    place = torch.arange(max(R, S), device=log_q.device)
    is_unaffected = place[:S] < place[:R, None]
    return torch.stack((loss, kl)).masked_fill(is_unaffected, 0).mT


def _log_probabilities(model: GPT, x: Tensor) -> Tensor:
    """Return ln p (…, V) of the next token from the residual stream x (…, C)."""
    logits = model.head(model.norm(x))
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
