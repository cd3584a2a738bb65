"""The arithmetic of a transformer block as plain functions.

Training (model.py) and cached decoding (decoder.py) both call these functions. They take layers,
such as W_O or a norm, as functions: modules in training, but bare functions in decoding, because
module calls take most of the time of a small model's step. Shapes are written with the letters of
attention.py.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import rotate
from common.errors import UserError, not_one_of
from config import GPTConfig
from kernels import rms_norm

Layer = Callable[..., Tensor]

MLPS = ("gelu", "swiglu", "relu2")  # values of `mlp` that `feed_forward` computes


def transformer_block(
    x: Tensor, norm_1: Layer, attention: Layer, norm_2: Layer | None, mlp: Layer | None
) -> Tensor:
    """Compute E' = E + ΔE twice: by attention, then by the MLP, each of a normalized E (…, C).

    A block without an MLP has no second norm.

    Reference: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", for models
    of attention only.
    """
    x = x + attention(norm_1(x))
    if norm_2 is None or mlp is None:
        return x
    return x + mlp(norm_2(x))


def recomputed(block: Layer, has_dropout: bool) -> Layer:
    """Return a block that keeps its input only, and computes the rest again in the backward pass.

    With dropout, the same activations are dropped again.

    Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=has_dropout)


class Projection(NamedTuple):
    """W_Q, W_K and W_V of a layer, joined for one matrix product."""

    config: GPTConfig
    matrix: Tensor  # joined matrices ((H + G) d_k + G d_v, C)
    bias: Tensor | None  # joined biases
    gains: Tensor | None  # factors (H + G, d_k) of the normalized queries and keys
    smear: Tensor | None = None  # logits (G,) of each key's own share in its smeared key


def project(
    x: Tensor,
    projection: Projection,
    rotary: Tensor | None,
    dtype: torch.dtype,
    previous_keys: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries (…, H, d_k), keys (…, G, d_k) and values (…, G, d_v) of tokens.

    `x` (…, C) is the normalized residual stream. `rotary` is the part of `rotary_table` for these
    tokens, which broadcasts to (2, …, H + G, d_k); it is not read unless positions are rotary.
    Queries and keys have `dtype` if they were normalized or rotated. `previous_keys` returns the
    keys of the tokens before those whose keys it is given, (…, G, d_k); it is called only if keys
    are smeared.

    Reference: Henry et al. 2020, "Query-Key Normalization for Transformers"; Su et al. 2021,
    "RoFormer"; Olsson et al. 2022, "In-context Learning and Induction Heads", for smeared keys.
    """
    config = projection.config
    H, G, d_k, d_v = config.n_head, config.kv_heads, config.key_dim, config.value_dim
    qkv = F.linear(x, projection.matrix, projection.bias)  # (…, (H + G) d_k + G d_v)
    # split_with_sizes takes a third of the time of split.
    qk, v = qkv.split_with_sizes(((H + G) * d_k, G * d_v), dim=-1)
    leading = x.shape[:-1]
    qk = qk.view(*leading, H + G, d_k)
    v = v.view(*leading, G, d_v)
    if config.qk_norm:
        # Without gains, ε is the machine epsilon.
        eps = None if projection.gains is None else config.norm_eps
        qk = rms_norm(qk.to(dtype), projection.gains, eps)
    if projection.smear is not None:
        q, k = qk.split_with_sizes((H, G), dim=-2)
        own_share = projection.smear.sigmoid()[:, None].to(k.dtype)  # (G, 1)
        k = own_share * k + (1 - own_share) * previous_keys(k)
        qk = torch.cat((q, k), dim=-2)
    if config.is_rotary:
        if rotary is None:
            raise ValueError("rotary positions need their angles (GPT.rotary_at)")
        qk = rotate(qk.to(dtype), rotary)
    q, k = qk.split_with_sizes((H, G), dim=-2)  # (…, H, d_k), (…, G, d_k)
    return q, k, v


def head_gates(x: Tensor, W_gate: Layer, n_head: int) -> Tensor:
    """Compute the factors (…, H, 1 or d_v) of the heads' outputs from the attention's input.

    `x` (…, C) is the normalized residual stream.

    Reference: Qiu et al. 2025, "Gated Attention for Large Language Models".
    """
    return W_gate(x).sigmoid().unflatten(-1, (n_head, -1))


def padded_logits(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Compute the logits (…, V + padding) of x (…, C) by the output layer's weight (V, C).

    The logits of the added ids are -∞, so that their probability and their gradients are 0, and a
    loss over all columns is that over the first V.
    """
    bias = F.pad(weight.new_zeros(len(weight)), (0, padding), value=-math.inf)
    return F.linear(x, F.pad(weight, (0, 0, 0, padding)), bias)


def feed_forward(
    x: Tensor, activation: str, W_in: Layer, W_gate: Layer | None, W_out: Layer
) -> Tensor:
    """Compute the MLP's update (…, C) from the normalized residual stream x (…, C).

    Only SwiGLU has a gate.

    Reference: Hendrycks & Gimpel 2016 (GELU, here its tanh approximation); So et al. 2021 (ReLU²);
    Shazeer 2020 (SwiGLU).
    """
    if activation == "gelu":
        return W_out(F.gelu(W_in(x), approximate="tanh"))
    if activation == "relu2":
        return W_out(F.relu(W_in(x)).square())
    if activation == "swiglu" and W_gate is not None:
        return W_out(F.silu(W_gate(x)) * W_in(x))
    raise UserError(not_one_of("model.mlp", activation, MLPS))
