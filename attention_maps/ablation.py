"""What a head is good for, and what a prediction needed: the loss without them. Each is the real
model, of which the blocks above what was changed are computed again."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention_maps import scores
from attention_maps.capture import LOGITS, Forward, next_tokens, token_losses
from model import GPT, KVCache, autocast, store

TOKENS = 4096  # that go through the model at once, at most


def at_once(model: GPT, length: int) -> int:
    """Rows of so many tokens that go through the model at once."""
    return max(1, min(TOKENS, LOGITS // model.config.vocab_size) // length)


@torch.no_grad()
def losses_without_heads(
    model: GPT, x: Tensor, y: Tensor, precision: str = "fp32"
) -> dict[str, np.ndarray]:
    """The loss of every token of windows x, y (W, T) in nats, nan where y is -1: `loss` (W, T), and
    for each head `loss_without` (L, H, W, T), when its output is zeroed."""
    whole, without = [], []
    with model.evaluating(), autocast(x.device.type, precision):
        for tokens, targets in zip(x[:, None], y[:, None]):  # (1, T)
            residuals = []
            keep = partial(store, residuals)
            model.run_blocks(tokens, taps={"embedding": keep, "residual": keep})
            whole.append(token_losses(model, residuals[-1], targets))
            without.append(without_heads(model, tokens, targets, residuals))
    return {
        "validation_loss": torch.cat(whole).cpu().numpy(),
        "validation_loss_without_head": torch.stack(without, dim=2).cpu().numpy(),
    }


def without_heads(
    model: GPT, tokens: Tensor, targets: Tensor, residuals: list[Tensor] | Tensor
) -> Tensor:
    """The losses (L, H, T) of targets (1, T) without each head, from each layer's own input."""
    c, found = model.config, []
    for layer in range(c.n_layer):
        for heads in torch.arange(c.n_head).split(at_once(model, tokens.shape[1])):
            x = model.run_blocks(
                tokens,
                taps={"heads": partial(silence, layer, heads)},
                entry=(layer, residuals[layer]),
            )  # (n, T, C)
            found.append(token_losses(model, x, targets.expand(len(heads), -1)))
    return torch.cat(found).unflatten(0, (c.n_layer, c.n_head))


def silence(where: int, heads: Tensor, layer: int, y: Tensor) -> Tensor:
    """A tap, once it has a layer and n of its heads, that makes of what all heads gathered there of
    one text, y (1, T, H, d_v), n texts (n, T, H, d_v) that lack one of the heads each."""
    if layer != where:
        return y
    y = y.repeat(len(heads), 1, 1, 1)
    y[torch.arange(len(heads)), :, heads] = 0
    return y


@torch.no_grad()
def measure_head_effects(model: GPT, whole: Forward) -> np.ndarray:
    """Nats (L, H, T) that the token after i costs more without each head."""
    targets = next_tokens(whole.tokens)  # (1, T)
    with model.evaluating():
        without = without_heads(model, whole.tokens, targets, whole.residuals)
    return (without - token_losses(model, whole.residuals[-1], targets)).cpu().numpy()


@torch.no_grad()
def measure_token_effects(model: GPT, whole: Forward) -> dict[str, np.ndarray]:
    """`token_effect` (T, T) in one text: how many nats the token after i costs more where token j
    is hidden from all later queries, in all layers and heads, and from later n-grams; nan in the
    last row, after which nothing is known. `token_effect_kl`: KL(p‖p hidden) of the whole
    prediction, in nats. Both are 0 for j ≥ i.

    Queries up to j see what they saw: only what follows the first hidden token of a pass is
    computed again, over the keys and values of those before it."""
    tokens, targets = whole.tokens, next_tokens(whole.tokens)  # (1, T)
    T, place, start = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device), 0
    log_p = log_probabilities(model, whole.residuals[-1, 0])  # (T, V)
    found = log_p.new_zeros(2, T, T)  # need, KL
    while start < T - 1:
        rest = place[start + 1 :]
        # As many as are worth that a pass begins at the first of them.
        hidden = place[
            start : min(T - 1, start + at_once(model, len(rest)), start + max(8, len(rest) // 4))
        ][:, None]  # (R, 1)
        later = rest > hidden  # (R, rest)
        is_hidden = place == hidden  # (R, T)
        mask = (place <= rest[:, None]) & ~(is_hidden[:, None] & later[..., None])
        cache = KVCache(model.config, len(hidden), T, tokens.device, whole.k.dtype)
        cache.keys.copy_(whole.k)
        cache.values.copy_(whole.v)
        cache.length = start + 1
        before, again = tokens.expand(len(hidden), -1).tensor_split([start + 1], dim=1)
        with model.evaluating():
            x = model.embed(again, before, is_hidden)
            x = model.run_blocks(again, cache, mask[:, None], entry=(0, x))
        log_q, p = log_probabilities(model, x), log_p[start + 1 :]  # (R, rest, V), (rest, V)
        ids = targets[0, start + 1 :].clamp(min=0)[:, None]  # (rest, 1)
        nats = p.gather(1, ids)[:, 0] - log_q.gather(2, ids.expand(len(hidden), -1, 1))[..., 0]
        kl = (p.exp() * p).sum(-1) - torch.einsum("tv,rtv->rt", p.exp(), log_q)  # (R, rest)
        both = torch.stack((nats, kl)).masked_fill(~later, 0)  # (2, R, rest)
        found[:, start + 1 :, start : start + len(hidden)] = both.mT
        start += len(hidden)
    found[0, -1] = torch.nan
    return dict(zip(("token_effect", "token_effect_kl"), found.cpu().numpy()))


def log_probabilities(model: GPT, x: Tensor) -> Tensor:
    """ln p (…, V) of the next token, of what the last block gives, x (…, C)."""
    logits = model.head(model.norm(x))
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def importance(
    validation_loss: np.ndarray, validation_loss_without_head: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute head importance: the loss increase when a head's output is zeroed.

    Args:
        validation_loss: Loss of each token in nats (W, T); nan where there is no target.
        validation_loss_without_head: The same with each head zeroed (L, H, W, T).

    Returns:
        Mean increase and its standard error over windows, (L, H) each. It is a ratio of sums
        because windows may have different numbers of tokens.

    Reference: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """
    gain = np.nansum(
        validation_loss_without_head.astype(np.float64) - validation_loss, axis=-1
    )  # (L, H, W)
    return scores.ratio(gain, (~np.isnan(validation_loss)).sum(axis=-1))
