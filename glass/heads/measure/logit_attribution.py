"""Explain the predictions of a text: their probabilities, and the components behind them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.tokenizer import Tokenizer
from generation.scoring import max_logit_rows, token_losses
from glass.heads.measure.ablation import iterate_head_effects, measure_token_effects
from glass.heads.measure.capture import ForwardPass, next_tokens, residual_writes
from glass.heads.measure.components import iterate_components
from glass.heads.measure.probes import spell_tokens
from glass.heads.measure.scores import mean_and_error
from model import GPT

PREDICTED_TOKENS = 5  # most probable next tokens, listed for each token
PROMOTED_TOKENS = 3  # tokens listed as promoted by a head, and as suppressed
MAX_TOKEN_CHARACTERS = 40  # longer tokens are cut
COPYING_RANKS = 10  # highest (and lowest) logits in which the copying score finds a token
COPYING_TOKENS_PER_ROW = 8  # tokens per row on which copying scores are measured
# Explaining n tokens takes n² · parameters operations: minutes on two CPU cores at this limit. Of a
# longer text only the last tokens are explained.
MAX_EXPLAINED_COST = 5e12
# Head effects take n · heads · parameters operations, because each head changes all tokens.
MAX_HEAD_EFFECT_COST = 5 * MAX_EXPLAINED_COST


class LogitAttribution(NamedTuple):
    """Predictions at T tokens, and contributions of K = 2 + L (H + 1) components to their logits.

    The components are the embedding, then the H heads and the MLP of each of L layers, then all
    biases together. An MLP that the model does not have contributes 0.
    """

    # The five most probable next tokens, (T, 5); -1 if the vocabulary has fewer.
    predicted_ids: np.ndarray
    predicted_probs: np.ndarray  # (T, 5)
    # Next-token loss in nats from the embedding and from the output of each block, through the
    # final norm, (L + 1, T); nan for the last token.
    logit_lens: np.ndarray
    # Contributions (K, T, 6) to six logits at each token: of the actual next token (after the last
    # token, the most probable one), then of the five `predicted_ids`. They sum to the logit minus
    # the mean of all logits, because a shift of all logits does not change the probabilities.
    logit_attribution: np.ndarray


def count_explained_tokens(model: GPT, length: int) -> int:
    """Return how many of the last tokens of a text `explain_predictions` explains."""
    return min(length, max(2, math.isqrt(int(MAX_EXPLAINED_COST) // model.num_parameters())))


def explain_predictions(
    model: GPT, forward: ForwardPass, tokenizer: Tokenizer
) -> dict[str, np.ndarray]:
    """Measure how the predictions of one text depend on its tokens, heads and components.

    Returns snapshot arrays: `token_effect` and `token_effect_kl` (T, T), `head_effect` (L, H, T;
    all nan if it takes too long), the fields of `LogitAttribution`, `promoted_and_suppressed_ids`
    (L, H, T, 6), and `named_ids` and `named_tokens`, which spell the ids in these arrays. Before
    the last `count_explained_tokens` tokens they hold nan, or the id -1.
    """
    c = model.config
    T = forward.tokens.shape[1]
    first = T - count_explained_tokens(model, T)
    loss_effects, kl_effects = measure_token_effects(model, forward, first=first)
    attribution = attribute_logits(model, forward, first)
    head_effects = np.full((c.n_layer, c.n_head, T), np.nan, np.float32)
    if T * c.n_layer * c.n_head * model.num_parameters() <= MAX_HEAD_EFFECT_COST:
        targets = next_tokens(forward.tokens)
        head_effects = np.stack(list(iterate_head_effects(model, forward, targets)))
    promoted = [
        find_promoted_tokens(model, forward, layer, range(c.n_head), first)
        for layer in range(c.n_layer)
    ]
    named_ids = np.union1d(attribution.predicted_ids, promoted)
    named_ids = named_ids[named_ids >= 0]
    named_tokens = [token[:MAX_TOKEN_CHARACTERS] for token in spell_tokens(tokenizer, named_ids)]
    return {
        "token_effect": loss_effects,
        "token_effect_kl": kl_effects,
        "head_effect": head_effects,
        **attribution._asdict(),
        "promoted_and_suppressed_ids": np.stack(promoted),
        "named_ids": named_ids,
        "named_tokens": np.array(named_tokens),
    }


@torch.no_grad()
def attribute_logits(
    model: GPT, forward: ForwardPass, first: int = 0, answer: int | None = None
) -> LogitAttribution:
    """Compute the direct logit attribution and the logit lens of one text, from token `first` on.

    The attribution is that of each next token; after token `first` that of `answer`, if given.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    # Below, T counts the tokens from `first` on.
    tokens = forward.tokens[0, first:]  # (T,)
    residuals = forward.residuals[:, 0, first:]  # (L + 1, T, C)
    logits = model.head(model.norm(residuals[-1]))  # (T, V)
    predicted_ids = _largest_ids(logits, PREDICTED_TOKENS)  # (T, 5)
    following = next_tokens(tokens)
    following = torch.where(following < 0, predicted_ids[:, 0], following)  # (T)

    # With the scale of the final norm fixed, logits are linear in the outputs of embedding, heads
    # and MLPs. The remainder of the logits comes from biases.
    writes = torch.stack(
        [
            written[0]
            for component, written in iterate_components(model, forward, tokens=slice(first, None))
            if component.kind != "bias"
        ]
    )  # (K - 1, T, C)
    writes = scale_like_norm(model.norm, writes, residuals[-1])
    if answer is not None:
        following[0] = answer
    attributed_ids = torch.cat((following[:, None], predicted_ids), dim=1).clamp(min=0)  # (T, 6)
    W_U = model.head.weight
    centered = (W_U[attributed_ids] - W_U.mean(dim=0)).to(writes.dtype)  # (T, 6, C)
    contributions = torch.einsum("ptc,tkc->ptk", writes, centered)
    centered_logits = logits.gather(1, attributed_ids) - logits.mean(dim=1, keepdim=True)
    biases = centered_logits - contributions.sum(dim=0)  # (T, 6)

    contributions = torch.cat((contributions, biases[None]))  # (K, T, 6)
    probabilities = logits.float().softmax(dim=-1).gather(1, attributed_ids[:, 1:])  # (T, 5)
    return LogitAttribution(
        predicted_ids=_to_numpy(predicted_ids, 0, first),
        predicted_probs=_to_numpy(probabilities, 0, first),
        logit_lens=_to_numpy(measure_logit_lens(model, forward, first), 1, first),
        logit_attribution=_to_numpy(contributions, 1, first),
    )


@torch.no_grad()
def measure_logit_lens(model: GPT, forward: ForwardPass, first: int = 0) -> Tensor:
    """Measure the loss in nats of each next token of one text if the model ended after each block.

    Returns (L + 1, T - first): after no block, then after each; nan for the last token.

    Reference: nostalgebraist 2020, "Interpreting GPT: the logit lens".
    """
    residuals = forward.residuals[:, 0, first:]  # (L + 1, T - first, C)
    targets = next_tokens(forward.tokens[0, first:])
    return token_losses(model, residuals, targets.expand(len(residuals), -1))


@torch.no_grad()
def find_promoted_tokens(
    model: GPT, forward: ForwardPass, layer: int, heads: Sequence[int], first: int = 0
) -> np.ndarray:
    """Find the tokens whose logits N heads of a layer directly raise and lower most.

    Returns the ids (N, T, 6) of the three that rise most, then of the three that fall most; -1
    before `first`, or if the vocabulary has fewer than three.
    """
    x = forward.residuals[-1, 0, first:]  # (S, C)
    writes = residual_writes(model.blocks[layer].attention, forward.heads[layer, 0, first:])
    writes = writes.transpose(0, 1)[list(heads)]  # (N, S, C)
    writes = scale_like_norm(model.norm, writes, x)
    ids = []
    for some in writes.flatten(0, 1).split(max_logit_rows(model)):
        logits = some @ model.head.weight.T  # (n, V)
        promoted = _largest_ids(logits, PROMOTED_TOKENS)
        suppressed = _largest_ids(-logits, PROMOTED_TOKENS)
        ids.append(torch.cat((promoted, suppressed), dim=-1))
    return _to_numpy(torch.cat(ids).view(*writes.shape[:2], -1), 1, first)


def _largest_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids (…, count) of the largest logits (…, V), padded with -1."""
    ids = logits.topk(min(count, logits.shape[-1])).indices
    return F.pad(ids, (0, count - ids.shape[-1]), value=-1)


def _to_numpy(values: Tensor, token_axis: int, first: int) -> np.ndarray:
    """Convert values to float32 or int32, and insert `first` tokens with nan or -1 before them."""
    is_float = values.is_floating_point()
    array = (values.float() if is_float else values.int()).cpu().numpy()
    padding = [(first if axis == token_axis else 0, 0) for axis in range(array.ndim)]
    return np.pad(array, padding, constant_values=np.nan if is_float else -1)


def scale_like_norm(norm: nn.Module, writes: Tensor, x: Tensor) -> Tensor:
    """Apply a norm without its bias to writes (…, T, C), with the scale that it gives x."""
    if isinstance(norm, nn.LayerNorm):
        writes = writes - writes.mean(dim=-1, keepdim=True)
    return writes * norm_scales(norm, x) * norm.weight


def norm_scales(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the factors (…, 1) by which LayerNorm or RMSNorm scales x (…, C)."""
    if isinstance(norm, nn.LayerNorm):
        variance = x.var(dim=-1, correction=0, keepdim=True)
    else:
        variance = x.square().mean(dim=-1, keepdim=True)
    return (variance + norm.eps).rsqrt()


@torch.no_grad()
def copying_scores(
    model: GPT, forward: ForwardPass, measured: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute copying scores (L, H) and their errors over rows; nan for heads not in `measured`.

    A head's output v_j W_O for token j goes through the final norm and the output layer. The score
    is the share of tokens whose own logit is among the ten highest, minus the share of those among
    the ten lowest, for about eight evenly spaced tokens of each row.

    Reference: cf. Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    B, T = forward.tokens.shape
    some_tokens = slice(None, None, max(1, T // COPYING_TOKENS_PER_ROW))
    ids = forward.tokens[:, some_tokens].flatten()[:, None, None]  # (N, 1, 1)
    readings = np.full((*measured.shape, B), np.nan, np.float32)
    for layer in np.flatnonzero(measured.any(axis=1)):
        heads = measured[layer]
        v = forward.v[layer][..., some_tokens, :]
        v = v.repeat_interleave(model.config.n_head // v.shape[1], dim=1)  # (B, H, n, d_v)
        writes = residual_writes(model.blocks[layer].attention, v.transpose(1, 2))
        writes = writes.flatten(0, 1)[:, heads]  # (N, heads, C)
        logits = scale_like_norm(model.norm, writes, writes) @ model.head.weight.T  # (N, heads, V)
        own_logit = logits.gather(2, ids.expand(-1, logits.shape[1], 1))
        is_among_highest = (logits > own_logit).sum(dim=-1) < COPYING_RANKS  # (N, heads)
        is_among_lowest = (logits < own_logit).sum(dim=-1) < COPYING_RANKS
        difference = is_among_highest.float() - is_among_lowest.float()
        readings[layer, heads] = difference.unflatten(0, (B, -1)).mean(1).T.cpu().numpy()
    return mean_and_error(readings)
