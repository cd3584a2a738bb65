"""Cached decoding: the key/value cache, and a model's next-token logits in few calls."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import attend_from_last_token
from config import GPTConfig
from kernels import RMSNorm
from layers import Layer, feed_forward, head_gates, project, transformer_block

if TYPE_CHECKING:
    from model import GPT, Block


class KVCache:
    """Preallocated keys and values of the tokens read so far, and these tokens.

    For d_k = d_v = d, it holds 2 · n_layer · B · G · length · d numbers: H/G times fewer than
    multi-head attention needs.

    Reference: Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need"; Ainslie et
    al. 2023, "GQA".
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate an empty cache for B sequences of at most `length` tokens; None: block_size.

        `GPT.make_cache` chooses device and dtype.
        """
        capacity = length or config.block_size
        shape = (config.n_layer, batch_size, config.kv_heads, capacity)  # (L, B, G, capacity)
        self.keys = torch.empty(*shape, config.key_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, config.value_dim, device=device, dtype=dtype)
        # Of smeared keys: the keys of the last token before they were mixed
        self.last_keys = torch.empty(
            *shape[:3], config.key_dim if config.smear_keys else 0, device=device, dtype=dtype
        )
        self.tokens = torch.empty(batch_size, capacity, device=device, dtype=torch.int64)
        self.length = 0  # number of tokens that the cache holds in every layer

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return self.keys.nbytes + self.values.nbytes + self.last_keys.nbytes

    @property
    def previous_tokens(self) -> Tensor:
        """Ids (B, length) of the tokens that the cache holds."""
        return self.tokens.narrow(1, 0, self.length)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys (B, G, T, d_k) and values (B, G, T, d_v) of T new tokens in one layer.

        `length` does not change until `advance` is called, when every layer has stored them.

        Returns:
            All keys (B, G, length + T, d_k) and values (B, G, length + T, d_v) of the layer.
        """
        keys, values, T = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, self.length + T), values.narrow(2, 0, self.length + T)

    def replace_last_key(self, layer: int, k: Tensor) -> Tensor:
        """Store the unmixed key (B, G, d_k) of the last new token, and return the one before it."""
        last = self.last_keys[layer]
        previous = last.to(k.dtype, copy=True) if self.length else torch.zeros_like(k)
        last.copy_(k)
        return previous

    def advance(self, tokens: Tensor) -> None:
        """Add tokens (B, T), whose keys and values every layer has stored, to the cache."""
        T = tokens.shape[1]
        self.tokens.narrow(1, self.length, T).copy_(tokens)
        self.length += T


class Decoder:
    """Next-token logits of a model with a cache, equal to those of `GPT.forward`.

    It calls the functions of layers.py with bare weights: module calls, and not the arithmetic,
    take most of the time of a small model's step (LOG.md).
    """

    @torch.inference_mode()
    def __init__(self, model: "GPT", cache: KVCache) -> None:
        """Read the weights of the model now; a later change of them has no effect."""
        weight = model.token_embedding.weight
        self.model = model
        self.cache = cache
        self.device = weight.device
        self.block_size = model.config.block_size
        self.vocab_size = weight.shape[0]
        rotary = model.rotary_at(0, cache.capacity)
        self.rotary = None if rotary is None else rotary.to(weight.dtype)
        self.norm = as_function(model.norm)
        self.head = as_function(model.head)
        self.layers = [DecoderLayer(block, cache) for block in model.blocks]

    def reset(self) -> None:
        """Reset the cache to length 0."""
        self.cache.length = 0

    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens (B, T) and return the logits (B, V) of the next token."""
        if tokens.shape[1] == 1:
            return self.step(tokens[:, 0])
        with self.model.evaluating():
            return self.head(self.norm(self.model.run_blocks(tokens, self.cache)[:, -1]))

    def step(self, token: Tensor) -> Tensor:
        """Read one token (B,) and return the logits (B, V) of the next token."""
        position = self.cache.length
        rotary = None if self.rotary is None else self.rotary[:, position]  # (2, d_k)
        tokens = token.unsqueeze(1)  # (B, 1)
        x = self.model.embed(tokens, self.cache.previous_tokens).squeeze(1)  # (B, C)
        for layer in self.layers:
            attention = partial(layer.attend, position=position, rotary=rotary)
            x = transformer_block(x, layer.norm_1, attention, layer.norm_2, layer.mlp)
        self.cache.advance(tokens)
        return self.head(self.norm(x))


class DecoderLayer:
    """The functions of a block, with its weights and its part of the cache."""

    def __init__(self, block: "Block", cache: KVCache) -> None:
        """Read the weights, and keep the layer's part of the cache."""
        mlp, W_gate = block.mlp, block.attention.W_gate
        self.keys, self.values = cache.keys[block.layer], cache.values[block.layer]
        self.previous_keys = partial(cache.replace_last_key, block.layer)
        self.sink = block.attention.sink_logits()
        self.W_gate = None if W_gate is None else as_function(W_gate)
        self.projection = block.attention.join_projections()
        self.W_O = as_function(block.attention.W_O)
        self.norm_1 = as_function(block.norm_1)
        self.norm_2 = self.mlp = None
        if mlp is None:
            return
        self.norm_2 = as_function(block.norm_2)
        self.mlp = partial(
            feed_forward,
            activation=mlp.config.mlp,
            W_in=as_function(mlp.W_in),
            W_gate=None if mlp.W_gate is None else as_function(mlp.W_gate),
            W_out=as_function(mlp.W_out),
        )

    def attend(self, x: Tensor, position: int, rotary: Tensor | None) -> Tensor:
        """Store the key and value of one token, and compute the update (B, C) by attention.

        `x` (B, C) is the token's normalized residual stream. `position` is the number of tokens in
        the cache, and `rotary` (2, d_k) holds the rotary angles there.
        """
        keys, values, T = self.keys, self.values, position + 1
        # (B, H, d_k), (B, G, d_k), (B, G, d_v)
        q, k, v = project(x, self.projection, rotary, x.dtype, self.previous_keys)
        keys.select(2, position).copy_(k)
        values.select(2, position).copy_(v)
        cache_is_finer = keys.dtype != x.dtype
        if cache_is_finer:
            q = q.to(keys.dtype)
        keys, values = keys.narrow(2, 0, T), values.narrow(2, 0, T)
        y = attend_from_last_token(q, keys, values, self.sink)  # (B, H · d_v)
        if cache_is_finer:
            y = y.to(x.dtype)
        if self.W_gate is not None:
            gates = head_gates(x, self.W_gate, q.shape[1])  # (B, H, 1 or d_v)
            y = (y.unflatten(1, (q.shape[1], -1)) * gates).flatten(1)
        return self.W_O(y)


def as_function(layer: nn.Module) -> Layer:
    """Return a linear layer or a norm as the function that torch.nn.functional calls for it."""
    if isinstance(layer, nn.Linear):
        return partial(F.linear, weight=layer.weight, bias=layer.bias)
    if isinstance(layer, nn.LayerNorm):
        return partial(
            torch.layer_norm,
            normalized_shape=layer.normalized_shape,
            weight=layer.weight,
            bias=layer.bias,
            eps=layer.eps,
        )
    if isinstance(layer, RMSNorm):
        return partial(
            torch.rms_norm,
            normalized_shape=layer.normalized_shape,
            weight=layer.weight,
            eps=layer.eps,
        )
    raise TypeError(f"{type(layer).__name__} has no function here")
