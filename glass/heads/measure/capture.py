"""Record the activations of a forward pass, and run it again with changes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glass.heads.measure.interventions import (
    NO_INTERVENTIONS,
    Interventions,
    chain_taps,
    mask_hidden,
)
from kernels import in_float32_or_finer
from model import GPT, Context, KVCache, SelfAttention, Taps


@dataclass(frozen=True)
class ForwardPass:
    """Activations of one forward pass over B rows of T tokens, in L layers with H heads."""

    tokens: Tensor  # (B, T)
    residuals: Tensor  # the embeddings, then the output of each block, (L + 1, B, T, C)
    k: Tensor  # (L, B, G, T, d_k) for G key/value heads
    v: Tensor  # (L, B, G, T, d_v)
    heads: Tensor  # output of each head before W_O, (L, B, T, H, d_v)
    weights: Tensor  # attention patterns, zero above the diagonal, (L, B, H, T, T)

    def rows(self, which: slice | Sequence[int]) -> "ForwardPass":
        """Select some of the B rows in every array."""
        by_layer = (self.residuals, self.k, self.v, self.heads, self.weights)
        return ForwardPass(self.tokens[which], *(values[:, which] for values in by_layer))

    def first_tokens(self, length: int) -> "ForwardPass":
        """Select the first `length` tokens in every array."""
        return ForwardPass(
            self.tokens[:, :length],
            self.residuals[:, :, :length],
            self.k[:, :, :, :length],
            self.v[:, :, :, :length],
            self.heads[:, :, :length],
            self.weights[:, :, :, :length, :length],
        )


@torch.no_grad()
def capture(
    model: GPT,
    ids: np.ndarray,
    interventions: Interventions = NO_INTERVENTIONS,
    taps: Taps | None = None,
) -> ForwardPass:
    """Run the model on ids (B, T) and record the activations. `taps` act before `interventions`."""
    forward = allocate_pass(model, *ids.shape)
    forward.tokens.copy_(torch.from_numpy(ids))
    record(model, forward, interventions, taps)
    return forward


def allocate_pass(model: GPT, rows: int, length: int) -> ForwardPass:
    """Allocate the arrays of a forward pass over B rows of T tokens."""
    c = model.config
    L = c.n_layer
    H = c.n_head
    new = model.head.weight.new_zeros
    return ForwardPass(
        tokens=new(rows, length, dtype=torch.int64),
        residuals=new(L + 1, rows, length, c.n_embd),
        k=new(L, rows, c.kv_heads, length, c.key_dim),
        v=new(L, rows, c.kv_heads, length, c.value_dim),
        heads=new(L, rows, length, H, c.value_dim),
        weights=in_float32_or_finer(new(L, rows, H, length, length)),
    )


def record(
    model: GPT,
    forward: ForwardPass,
    interventions: Interventions,
    taps: Taps | None = None,
    start: int = 0,
) -> None:
    """Compute the activations of the tokens from `start` on, and store them in `forward`."""
    stores: Taps = {("embedding", 0): partial(_store, forward.residuals[0, :, start:])}
    for layer in range(model.config.n_layer):
        stores["k", layer] = partial(_store, forward.k[layer, :, :, start:])
        stores["v", layer] = partial(_store, forward.v[layer, :, :, start:])
        stores["weights", layer] = partial(_store, forward.weights[layer, :, :, start:])
        stores["heads", layer] = partial(_store, forward.heads[layer, :, start:])
        stores["residual", layer] = partial(_store, forward.residuals[layer + 1, :, start:])
    is_hidden = interventions.is_hidden(forward.tokens.shape[1], forward.tokens.device)
    taps = chain_taps(taps or {}, interventions.taps(), stores)
    rerun(model, forward, start, taps=taps, is_hidden=is_hidden)


def _store(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


@torch.no_grad()
def rerun(
    model: GPT,
    forward: ForwardPass,
    start: int = 0,
    entry: tuple[int, Tensor] | None = None,
    taps: Taps | None = None,
    is_hidden: Tensor | None = None,
) -> Tensor:
    """Rerun a recorded pass from a token and a layer on; return the final residual stream.

    Args:
        model: The model, which runs in evaluation mode.
        forward: The pass, which has the keys and values of the tokens before `start`.
        start: First of the S tokens that are run.
        entry: A layer and n inputs (n, S, C) of it. None: the embeddings of the tokens.
        taps: Functions that record or replace values of the S tokens.
        is_hidden: Boolean (n or 1, T), True for tokens that no later token may read.

    Returns:
        The final residual stream (n, S, C) of the S tokens.
    """
    if entry is None:
        n = len(forward.tokens if is_hidden is None else is_hidden)
        before, tokens = forward.tokens.expand(n, -1).tensor_split([start], dim=1)
        entry = 0, Context(taps=taps).tap("embedding", 0, model.embed(tokens, before, is_hidden))
    x = entry[1]
    cache = _cache_before(model, forward, start, len(x)) if start else None
    tokens = forward.tokens[:, start:].expand(len(x), -1)  # (n, S)
    with model.evaluating():
        return model.run_blocks(tokens, cache, mask_hidden(is_hidden, start), taps, entry)


def _cache_before(model: GPT, forward: ForwardPass, start: int, rows: int) -> KVCache:
    """Return a cache with the keys and values of the tokens before `start`, in equal rows."""
    k = forward.k
    cache = KVCache(model.config, rows, forward.tokens.shape[1], k.device, k.dtype)
    cache.keys[:, :, :, :start] = k[:, :, :, :start]
    cache.values[:, :, :, :start] = forward.v[:, :, :, :start]
    cache.length = start
    return cache


def in_float32(model: GPT) -> GPT:
    """Return the model, or a float32 copy if lower precision would hide small effects."""
    if torch.finfo(model.head.weight.dtype).bits >= 32:
        return model
    return copy.deepcopy(model).float()


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the id after each token of (…, T); -1 after the last."""
    return F.pad(tokens[..., 1:], (0, 1), value=-1)


def residual_writes(
    attention: SelfAttention, heads: Tensor, matrix: Tensor | None = None
) -> Tensor:
    """Return what each head adds to the residual stream: heads (…, H, d_v) → (…, H, C).

    With a `matrix` (C, D), what it adds is multiplied by it: (…, H, D).
    """
    W_O = attention.W_O.weight.to(heads.dtype).T  # (H · d_v, C)
    W = W_O if matrix is None else W_O @ matrix
    return torch.einsum("...hd,hdc->...hc", heads, W.unflatten(0, heads.shape[-2:]))


@torch.no_grad()
def value_norms(model: GPT, v: Tensor, gram: Tensor | None = None) -> Tensor:
    """Return ‖v_j W_O‖ (L, B, H, T) for each head and token j, from values v (L, B, G, T, d_v).

    A value-weighted attention map is the weights times these norms, which ignore gates.

    Reference: Kobayashi et al. 2020, "Attention is Not Only a Weight".
    """
    v = v.repeat_interleave(model.config.n_head // v.shape[2], dim=2)  # (L, B, H, T, d_v)
    gram = output_gram(model) if gram is None else gram
    squares = torch.einsum("lbhtd,lhde,lbhte->lbht", v, gram, v)  # ‖W v‖² = vᵀ (WᵀW) v
    return squares.clamp(min=0).sqrt()


@torch.no_grad()
def output_gram(model: GPT) -> Tensor:
    """Return WᵀW (L, H, d_v, d_v) of the part W of W_O that each head's output is multiplied by."""
    of_layers = []
    for block in model.blocks:
        W_O = block.attention.W_O.weight.unflatten(1, (model.config.n_head, -1))  # (C, H, d_v)
        of_layers.append(torch.einsum("chd,che->hde", W_O, W_O))
    return torch.stack(of_layers)
