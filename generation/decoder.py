"""Cached decoding: a model's next-token logits in few calls."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from config import cached_number_bytes
from generation.known_settings import find_unknown_setting
from model import GPT, Block, KVCache

# Values of settings that `DecoderLayer` computes. Other models decode through `GPT.run_blocks`.
FAST_SETTINGS = {
    "mlp": ("gelu", "gelu_exact", "swiglu", "relu2", "none"),
    "parallel_mlp": (False, True),
    "norm": ("layernorm", "rmsnorm"),
    "norm_embedding": (False, True),
    "position": ("learned", "rope"),
    "qk_norm": (False, True, "gains"),
    "bias": (False, True, "attention", "qkv", "mlp"),
    "tie_embeddings": (False, True),
}


def allocate_cache(model: GPT, batch_size: int, length: int | None = None) -> KVCache:
    """Allocate an empty cache for a model that decodes at most `length` tokens.

    Its capacity is at most block_size. It is on the model's device and in its precision, or in
    float32 if `cached_number_bytes` says so.
    """
    weight = model.token_embedding.weight
    dtype = weight.dtype
    if cached_number_bytes(weight.device.type, dtype.itemsize) > dtype.itemsize:
        dtype = torch.float32
    block_size = model.config.block_size
    capacity = min(block_size, length or block_size)
    return KVCache(model.config, batch_size, capacity, weight.device, dtype)


class Decoder:
    """Next-token logits of a model with a cache, equal to those of `GPT.forward`.

    After a prompt, plain models read each token with bare functions and weights: module calls, and
    not the arithmetic, take most of the time of a small model's step (LOG.md).
    """

    @torch.no_grad()
    def __init__(self, model: GPT, batch_size: int, length: int | None = None) -> None:
        """Bind the weights, partly as copies: create a new decoder after they change."""
        self.model = model
        self.cache = allocate_cache(model, batch_size, length)
        self.start = 0  # of the window that is in the cache
        rotary = model.rotary_at(0, self.cache.capacity)
        self.rotary = None if rotary is None else rotary.to(model.token_embedding.weight.dtype)
        self.norm = as_function(model.norm)
        self.head = as_function(model.head)
        self.layers: list[DecoderLayer] = []
        has_plain_layers = all(block.attention.is_plain for block in model.blocks)
        if has_plain_layers and find_unknown_setting(model.config, FAST_SETTINGS) is None:
            self.layers = [DecoderLayer(block, self.cache) for block in model.blocks]

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after all tokens (B, T) so far.

        Only new ones are read. When the `window_start` moves, positions count from there and the
        whole window is read, so that decoding with and without a cache see the same tokens at the
        same positions. A begin-of-text token stays the first of the window. Smeared keys cannot be
        continued, so the window is read for each token.
        """
        start = window_start(tokens.shape[1], self.model.config.block_size)
        if start != self.start or self.model.config.smear_keys:
            self.start, self.cache.length = start, 0
        window = cut(tokens, start, self.model.begin_of_text)
        return self.read(window[:, self.cache.length :])

    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens (B, T) and return the logits (B, V) of the next token."""
        if self.layers and tokens.shape[1] == 1:
            return self._step(tokens)
        with self.model.evaluating():
            x = self.model.run_blocks(tokens, self.cache)[:, -1]  # (B, C)
            return self.model.head(self.model.norm(x))

    def _step(self, tokens: Tensor) -> Tensor:
        """Read one token (B, 1) and return the logits (B, V) of the next token."""
        position = self.cache.length
        rotary = None if self.rotary is None else self.rotary[:, position]  # (2, d_k)
        x = self.model.embed(tokens, self.cache.previous_tokens).squeeze(1)  # (B, C)
        for layer in self.layers:
            y = x + layer.attend(layer.norm_1(x), position, rotary)
            if layer.norm_2 is not None:
                y = y + layer.feed_forward(layer.norm_2(x if layer.config.parallel_mlp else y))
            x = y
        self.cache.advance(tokens)
        return self.head(self.norm(x))


class DecoderLayer:
    """A block as functions with its weights and its part of the cache."""

    def __init__(self, block: Block, cache: KVCache) -> None:
        self.config = block.attention.config
        self.keys, self.values = cache.keys[block.layer], cache.values[block.layer]
        self.qkv = block.attention.join_projections()
        self.gains_and_eps = block.attention.qk_gains_and_eps()
        self.W_O = as_function(block.attention.W_O)
        self.norm_1 = as_function(block.norm_1)
        self.norm_2 = None
        if block.mlp is not None:
            self.norm_2 = as_function(block.norm_2)
            self.activate = block.mlp.activate
            self.W_in, self.W_out = as_function(block.mlp.W_in), as_function(block.mlp.W_out)
            has_gate = block.mlp.W_gate is not None
            self.W_gate = as_function(block.mlp.W_gate) if has_gate else None

    def attend(self, x: Tensor, position: int, rotary: Tensor | None) -> Tensor:
        """Store one token's key and value, and return the update (B, C) by attention.

        `x` (B, C) is its normalized residual stream, `position` the number of tokens in the cache,
        and `rotary` (2, d_k) holds the cosines and sines of the angles there.
        """
        c, T = self.config, position + 1
        qkv = F.linear(x, *self.qkv)  # (B, (H + G) d_k + G d_v)
        heads = c.n_head + c.kv_heads
        qk, v = qkv.split_with_sizes((heads * c.key_dim, c.kv_heads * c.value_dim), dim=-1)
        qk = qk.view(-1, heads, c.key_dim)  # (B, H + G, d_k)
        if c.qk_norm:
            qk = kernels.rms_norm(qk, *self.gains_and_eps)
        if rotary is not None:
            cos, sin = rotary
            qk = torch.addcmul(qk * cos, qk.roll(c.key_dim // 2, dims=-1), sin)
        q, k = qk.split_with_sizes((c.n_head, c.kv_heads), dim=1)
        self.keys.select(2, position).copy_(k)
        self.values.select(2, position).copy_(v.view(-1, c.kv_heads, c.value_dim))
        q = q.to(self.keys.dtype)  # the cache may be more precise than the weights
        y = attend_from_last_token(q, self.keys.narrow(2, 0, T), self.values.narrow(2, 0, T))
        return self.W_O(y.to(x.dtype))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Compute the update (B, C) by the MLP, whose normalized input x is (B, C)."""
        gate = None if self.W_gate is None else self.W_gate(x)
        return self.W_out(self.activate(self.W_in(x), gate))


def attend_from_last_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention of one token to all keys without repeating them for grouped queries.

    q (B, H, d_k), k (B, G, T_k, d_k) and v (B, G, T_k, d_v) give (B, H · d_v). The query heads that
    share a key/value head enter torch's kernel as several queries of that head.
    """
    (B, H, d_k), G = q.shape, k.shape[1]
    return F.scaled_dot_product_attention(q.view(B, G, H // G, d_k), k, v).flatten(1)


def as_function(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a linear layer or a norm as the function that torch.nn.functional calls for it."""
    assert isinstance(layer, (nn.Linear, nn.LayerNorm, kernels.RMSNorm))
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(layer, nn.Linear):
        return lambda x: F.linear(x, weight, bias)
    shape, eps = layer.normalized_shape, layer.eps
    if isinstance(layer, nn.LayerNorm):
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def window_start(length: int, block_size: int) -> int:
    """Return the first token that the prediction after `length` tokens reads.

    It is 0 while the tokens fit the block. After that the window moves by a quarter of a block at a
    time, because each move changes all positions and empties the KV cache.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def cut(tokens: Tensor, start: int, begin_of_text: int | None) -> Tensor:
    """Return the tokens from index `start` on of tokens (B, T) that exceed a model's context.

    If a text begins with begin-of-text, this token replaces the first one that remains: models
    that were trained with it expect it there.
    """
    window = tokens[:, start:]
    if start <= 0 or begin_of_text is None:
        return window
    first = torch.where(tokens[:, :1] == begin_of_text, begin_of_text, window[:, :1])
    return torch.cat((first, window[:, 1:]), dim=1)
