"""Ablations: measure how the loss changes without a head's output, or without a token.

Each effect is measured by running the model; earlier layers and tokens are not recomputed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from common.statistics import ratio_with_error
from generation.scoring import max_logit_rows, token_losses
from glass.heads.measure.capture import ForwardPass, next_tokens, rerun
from glass.heads.measure.interventions import (
    NO_INTERVENTIONS,
    Interventions,
    chain_taps,
    mask_hidden,
    replace_heads,
)
from kernels import autocast, in_float32_or_finer
from model import GPT

MAX_TOKENS_PER_PASS = 4096
# A pass recomputes all tokens after its first hidden one. Hiding a quarter as many tokens in one
# pass limits this; with fewer than 8 hidden tokens the overhead of a pass dominates.
RECOMPUTED_PER_HIDDEN_TOKEN = 4
MIN_HIDDEN_TOKENS = 8


def rows_per_pass(model: GPT, length: int) -> int:
    """Return the maximum number of rows of `length` tokens in one batch."""
    return max(1, min(MAX_TOKENS_PER_PASS, max_logit_rows(model)) // length)


# --- head ablation --------------------------------------------------------------------------------


@torch.no_grad()
def ablate_heads(
    model: GPT, x: Tensor, y: Tensor, precision: str = "fp32"
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the losses in nats for inputs x and targets y (W, T); nan without a target.

    Those with the output of one head zeroed, (L, H, W, T), follow those of the model, (W, T).
    """
    losses = []
    losses_without = []
    with autocast(x.device.type, precision):
        for tokens, targets in zip(x[:, None], y[:, None]):  # (1, T)
            _, values = model.run_with_cache(tokens, "embedding", "residual")
            residuals = list(values.values())  # L + 1 of (1, T, C)
            losses.append(token_losses(model, residuals[-1], targets))
            by_layer = _iterate_losses_without_heads(model, tokens, targets, residuals)
            losses_without.append(torch.stack(list(by_layer)))  # (L, H, T)
    loss_without_head = torch.stack(losses_without, dim=2)  # (L, H, W, T)
    return torch.cat(losses).cpu().numpy(), loss_without_head.cpu().numpy()


def head_importance(
    loss: np.ndarray, loss_without_head: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the increase (L, H) of the mean loss in nats/token when a head's output is zeroed.

    Its standard error (L, H), over windows, follows. The losses are those of `ablate_heads`.

    Reference: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """
    difference = loss_without_head.astype(np.float64) - loss
    increases = np.nansum(difference, axis=-1)  # (L, H, W)
    return ratio_with_error(increases, (~np.isnan(loss)).sum(axis=-1))


@torch.no_grad()
def iterate_head_effects(
    model: GPT,
    forward: ForwardPass,
    targets: Tensor,
    interventions: Interventions = NO_INTERVENTIONS,
) -> Iterator[np.ndarray]:
    """Yield, for each layer, the loss increases (H, n) in nats without each of its heads.

    They are those of `targets` (1, n) after the last n tokens; nan for a target of -1. `forward`
    ran with the same `interventions`.
    """
    residuals = list(forward.residuals)
    losses = token_losses(model, residuals[-1][:, -targets.shape[1] :], targets)
    for losses_without in _iterate_losses_without_heads(
        model, forward.tokens, targets, residuals, interventions
    ):
        yield (losses_without - losses).cpu().numpy()


def _iterate_losses_without_heads(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    residuals: Sequence[Tensor],
    interventions: Interventions = NO_INTERVENTIONS,
) -> Iterator[Tensor]:
    """Yield, for each layer, the losses (H, n) of the last n tokens with each head ablated.

    `tokens` is (1, T), `targets` (1, n). `residuals` has the layers' inputs (1, T, C).
    """
    T = tokens.shape[1]
    n = targets.shape[1]
    mask = mask_hidden(interventions.is_hidden(T, tokens.device))
    # One head in each row of a batch
    batches = torch.arange(model.config.n_head)[:, None].split(rows_per_pass(model, T))
    for layer in range(model.config.n_layer):
        entry = layer, residuals[layer]
        value = interventions.means.get(("heads", layer), 0.0)
        losses = []
        for heads in batches:
            taps = chain_taps(replace_heads(layer, heads.tolist(), value), interventions.taps())
            with model.evaluating():
                x = model.run_blocks(tokens, mask=mask, taps=taps, entry=entry)
            losses.append(token_losses(model, x[:, -n:], targets.expand(len(x), -1)))
        yield torch.cat(losses)


@torch.no_grad()
def mean_outputs(model: GPT, ids: Sequence[int]) -> dict[tuple[str, int], Tensor]:
    """Return the means over the tokens of a text by which outputs are replaced (mean ablation).

    They have the keys of taps, in each layer: "heads" (H, d_v), "attention" and "mlp" (C,).
    """
    tokens = torch.tensor([ids], device=model.head.weight.device)
    _, outputs = model.run_with_cache(tokens, "heads", "attention", "mlp")
    return {key: output.mean(dim=(0, 1)) for key, output in outputs.items()}


# --- attention knockout of tokens -----------------------------------------------------------------


@torch.no_grad()
def measure_token_effects(
    model: GPT,
    forward: ForwardPass,
    interventions: Interventions = NO_INTERVENTIONS,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Measure how each prediction of one text depends on each earlier token (attention knockout).

    Returns the increase of the loss, and KL(p ‖ p with token j hidden), (T, T) each, in nats. In
    row i is the effect on the prediction after token i of hiding token j from later queries: 0 if
    j ≥ i. Tokens before `first` are neither hidden nor explained: nan, as is the loss after the
    last token, whose target is unknown. `forward` ran with the `interventions`.

    Reference: Geva et al. 2023, "Dissecting Recall of Factual Associations".
    """
    T = forward.tokens.shape[1]
    dtype = torch.promote_types(forward.residuals.dtype, torch.float32)
    effects = torch.full((2, T, T), torch.nan, dtype=dtype).numpy()
    effects[:, first:, first:] = 0
    for hidden, loss, kl in iterate_token_effects(model, forward, interventions, first):
        effects[:, hidden.start + 1 :, hidden.start : hidden.stop] = loss, kl
    effects[0, -1] = np.nan
    return effects[0], effects[1]


@torch.no_grad()
def iterate_token_effects(
    model: GPT,
    forward: ForwardPass,
    interventions: Interventions = NO_INTERVENTIONS,
    first: int = 0,
) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
    """Yield effects like `measure_token_effects`, the last tokens first, under `interventions`.

    Yields R tokens hidden in turn, and their effects on the loss and on the prediction (KL) after
    each of the S tokens that follow the first of them, (S, R) each. The last loss is nan.
    """
    T = forward.tokens.shape[1]
    log_p = _log_probabilities(model, forward.residuals[-1, 0, first:])  # (T - first, V)
    targets = next_tokens(forward.tokens)[0]  # (T,)
    positions = torch.arange(T, device=forward.tokens.device)
    for hidden in reversed(list(_plan_passes(model, first, T))):
        after = hidden.start + 1
        is_hidden = positions == positions[hidden.start : hidden.stop, None]  # (R, T)
        is_hidden[:, list(interventions.hidden)] = True
        start = 0 if model.config.smear_keys else after  # smeared keys cannot be continued
        x = rerun(model, forward, start, taps=interventions.taps(), is_hidden=is_hidden)
        log_q = _log_probabilities(model, x[:, after - start :])  # (R, S, V)
        effects = _compare_predictions(log_p[after - first :], log_q, targets[after:])
        effects[0, -1] = torch.nan
        loss, kl = effects.cpu().numpy()
        yield hidden, loss, kl


def _plan_passes(model: GPT, start: int, length: int) -> Iterator[range]:
    """Yield the tokens from `start` to the last but one, in those that one pass hides in turn."""
    while start < length - 1:
        recomputed = length - start - 1
        rows = min(
            rows_per_pass(model, recomputed),
            max(MIN_HIDDEN_TOKENS, recomputed // RECOMPUTED_PER_HIDDEN_TOKEN),
        )
        hidden = range(start, min(length - 1, start + rows))
        yield hidden
        start = hidden.stop


def _compare_predictions(log_p: Tensor, log_q: Tensor, targets: Tensor) -> Tensor:
    """Return the loss increase and the KL divergence, stacked (2, S, R), in nats.

    `log_p` (S, V) is of the unchanged text; row r of `log_q` (R, S, V) hides the r-th token.
    """
    R, S, _ = log_q.shape
    ids = targets.clamp(min=0)[:, None]  # (S, 1)
    loss = log_p.gather(1, ids)[:, 0] - log_q.gather(2, ids.expand(R, -1, 1))[..., 0]  # (R, S)
    p = log_p.exp()
    kl = (p * log_p).sum(-1) - torch.einsum("sv,rsv->rs", p, log_q)  # (R, S)
    # A token affects only predictions after later ones. The first one follows the second token.
    offsets = torch.arange(max(R, S), device=log_q.device)
    is_unaffected = offsets[:S] < offsets[:R, None]  # (R, S)
    return torch.stack((loss, kl)).masked_fill(is_unaffected, 0).mT


def _log_probabilities(model: GPT, x: Tensor) -> Tensor:
    return in_float32_or_finer(model.head(model.norm(x))).log_softmax(dim=-1)
