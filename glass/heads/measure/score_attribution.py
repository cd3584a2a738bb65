"""Attention-score attribution: which components of the model produced one attention score.

Reference: Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions".
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError
from generation.known_settings import find_unknown_setting
from glass.heads.measure.capture import ForwardPass
from glass.heads.measure.components import iterate_components
from glass.heads.measure.logit_attribution import norm_scales
from kernels import in_float32_or_finer
from model import GPT, SelfAttention, rotate
from run.row import Head

# Values of settings that `attribute_score` computes, and settings that do not enter the scores of a
# layer whose input is known.
ATTRIBUTED_SETTINGS = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rope"),
    "qk_norm": (False, True, "gains"),
    "bias": (False, True, "attention", "qkv", "mlp"),
}
IRRELEVANT_SETTINGS = (
    "mlp",
    "parallel_mlp",
    "attention_sink",
    "attention_gate",
    "norm_embedding",
    "tie_embeddings",
)


class ScoreTerm(NamedTuple):
    """The part of a score that comes from one pair of components."""

    query: str  # the component that wrote the query's part, such as "embedding" or "L0MLP"
    key: str  # the one that wrote the key's
    value: float


@torch.no_grad()
def attribute_score(
    model: GPT, forward: ForwardPass, head: Head, i: int, j: int, hidden: Sequence[int] = ()
) -> list[ScoreTerm]:
    """Attribute the pre-softmax score of query i and key j ≤ i to pairs of components.

    Norms have the scales of the whole residual stream, so that queries and keys are sums over the
    components below the head's layer: the embedding, heads, biases of W_O, and MLPs, and last the
    biases of the norm and of the projection, if there are any. `hidden` are the tokens that were
    hidden in the pass.

    The terms, of which the key's components vary fastest, sum to the score minus its mean over the
    tokens that the query may attend to.

    Raises:
        UserError: A setting of the model may change scores in a way that is not attributed.
    """
    c = model.config
    if unknown := find_unknown_setting(c, ATTRIBUTED_SETTINGS, IRRELEVANT_SETTINGS):
        raise UserError(f"scores of a model with {unknown} cannot be attributed to components")
    group = head.number // (c.n_head // c.kv_heads)
    query_names, queries = _project(model, forward, head.layer, "Q", head.number, slice(i, i + 1))
    key_names, keys = _project(model, forward, head.layer, "K", group, slice(i + 1))
    rotary = model.rotary_at(0, i + 1)
    if rotary is not None:
        queries = rotate(queries, rotary[:, i:])  # (N, 1, d_k)
        keys = rotate(keys, rotary)  # (K, i + 1, d_k)
    visible = [t for t in range(i + 1) if t == i or t not in hidden]
    centered = keys[:, j] - keys[:, visible].mean(dim=1)  # (K, d_k)
    values = queries[:, 0] @ centered.T / c.key_dim**0.5  # (N, K)
    return [
        ScoreTerm(query, key, value)
        for query, row in zip(query_names, values.tolist())
        for key, value in zip(key_names, row)
    ]


def _project(
    model: GPT,
    forward: ForwardPass,
    layer: int,
    which: Literal["Q", "K"],
    number: int,
    tokens: slice,
) -> tuple[list[str], Tensor]:
    """Return N components below a layer, and what they wrote to the head's q or k, (N, T, d_k).

    The vectors are those before rotation. They sum to the head's queries or keys.
    """
    block = model.blocks[layer]
    key_dim = model.config.key_dim
    x = in_float32_or_finer(forward.residuals[layer, 0, tokens])  # (T, C)
    linear = getattr(block.attention, f"W_{which}")
    rows = slice(number * key_dim, (number + 1) * key_dim)  # of the head
    W = linear.weight[rows].to(x.dtype)  # (d_k, C)

    # With its scale fixed, the norm is linear: it becomes a part of the matrix.
    matrix = (W * block.norm_1.weight).T  # (C, d_k)
    if isinstance(block.norm_1, nn.LayerNorm):
        matrix = matrix - matrix.mean(dim=0)
    names = []
    vectors = []
    for component, written in iterate_components(model, forward, layer, tokens, matrix):
        names.append(str(component))
        vectors.append(written[0])  # (T, d_k)
    stacked = torch.stack(vectors) * norm_scales(block.norm_1, x)

    # Of zeros, the norm and the projection leave their biases.
    zeros = torch.zeros_like(block.norm_1.weight)  # (C,)
    biases = linear(block.norm_1(zeros))[rows].to(x.dtype)  # (d_k,)
    if biases.any():
        names.append("biases")
        stacked = torch.cat((stacked, biases.expand(1, *stacked.shape[1:])))

    if model.config.qk_norm:
        stacked = stacked * _qk_norm_factors(block.attention, which, stacked.sum(dim=0))
    return names, stacked


def _qk_norm_factors(attention: SelfAttention, which: Literal["Q", "K"], x: Tensor) -> Tensor:
    """Return the factors (T, d_k) by which QK-norm scales the queries or keys x (T, d_k)."""
    has_gains = attention.config.qk_norm == "gains"
    eps = attention.config.norm_eps if has_gains else torch.finfo(x.dtype).eps
    factors = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    if not has_gains:
        return factors.expand_as(x)
    norm = attention.norm_q if which == "Q" else attention.norm_k
    return factors * norm.weight
