"""Text out of a model, token by token: the cached step, what is removed from the choice, and the draw."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.tokenizer import first_token
from model import GPT, KVCache, activate, rotate


class Decoder:
    """A model's next-token logits, computed in few calls: what `GPT.forward` does with a cache, one new token at a time.

    The calls, and not the arithmetic, are what a step of a small model takes its time for. So W_Q, W_K and W_V are
    joined, and functions hold the weights in place of modules: twice the tokens per second at 0.8 M parameters (LOG.md).
    """

    def __init__(self, model: GPT, cache: KVCache):
        """Reads the model's weights as they are now; fills and moves on the cache."""
        c = model.config
        self.model, self.cache = model, cache
        self.rotary = None if model.rotary is None else model.rotary.to(model.head.weight.dtype)  # (2, T, d_k)
        self.norm, self.head, self.layers = norm(model.norm), linear(model.head), []
        for block, keys, values in zip(model.blocks, cache.keys, cache.values):
            attention, mlp = block.attention, block.mlp
            self.layers.append((
                norm(block.norm_1), linear(attention.W_Q, attention.W_K, attention.W_V), keys, values, linear(attention.W_O),
                norm(block.norm_2), linear(mlp.W_in), linear(mlp.W_gate) if c.mlp == "swiglu" else None, linear(mlp.W_out)))

    def fill(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, T) more."""
        if tokens.shape[1] == 1:
            return self.step(tokens[:, 0])
        return self.head(self.norm(self.model.hidden(tokens, self.cache)[:, -1]))

    def step(self, token: Tensor) -> Tensor:
        """Logits (B, V) after one token (B,) more."""
        c, n, B = self.model.config, self.cache.length, len(token)
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        x = self.model.token_embedding.weight[token]  # (B, C)
        if self.model.position_embedding is not None:
            x = x + self.model.position_embedding.weight[n]
        if c.norm_embedding:
            x = F.rms_norm(x, (c.n_embd,))
        for norm_1, qkv, keys, values, W_O, norm_2, W_in, W_gate, W_out in self.layers:
            qk, v = qkv(norm_1(x)).split(((H + G) * d_k, G * d_v), dim=-1)
            qk = qk.view(B, H + G, d_k)
            if c.qk_norm:
                qk = F.rms_norm(qk, (d_k,))
            if self.rotary is not None:
                qk = rotate(qk, self.rotary[:, n])
            q, k = qk.split((H, G), dim=1)  # (B, H, d_k), (B, G, d_k)
            keys.select(2, n).copy_(k)
            values.select(2, n).copy_(v.view(B, G, d_v))
            # The query heads that share keys are as many queries to them, each of which may look at all.
            y = F.scaled_dot_product_attention(q.reshape(B, G, H // G, d_k).to(keys.dtype), keys.narrow(2, 0, n + 1), values.narrow(2, 0, n + 1))
            x = x + W_O(y.reshape(B, H * d_v).to(x.dtype))
            h = norm_2(x)
            x = x + W_out(activate(c.mlp, W_in(h), None if W_gate is None else W_gate(h)))
        self.cache.length = n + 1
        return self.head(self.norm(x))


def linear(*modules: nn.Linear) -> partial:
    """The linear maps side by side, as one function."""
    if len(modules) == 1:
        return partial(F.linear, weight=modules[0].weight, bias=modules[0].bias)
    bias = None if modules[0].bias is None else torch.cat([m.bias for m in modules])
    return partial(F.linear, weight=torch.cat([m.weight for m in modules]), bias=bias)


def norm(module: nn.Module) -> partial:
    """A LayerNorm or RMSNorm as a function."""
    if isinstance(module, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)
    return partial(F.layer_norm, normalized_shape=module.normalized_shape, weight=module.weight, bias=module.bias, eps=module.eps)


def stream(model: GPT, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
           top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
           stop_token: int | None = None, cache: KVCache | None = None) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence of tokens (B, T), T at least 1, until the text ends.

    A token is predicted from those since `window_start`. While that start stays, each step feeds one
    token to the cache; when it moves, positions count from the new start and the cache is filled
    again, so that a cached and a full computation see the same tokens at the same positions.

    Args: as `GPT.generate`, and a cache to use, with room for block_size tokens or for all there will be; what it holds is forgotten.
    """
    if tokens.shape[1] == 0:
        raise ValueError("generation starts from at least one token")
    rows, block = len(tokens), model.config.block_size
    if cache is None:
        cache = model.make_cache(rows)
    cache.length = 0
    heights = random_heights(rows, seed, tokens.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=tokens.device)
    start = window_start(tokens.shape[1], block)
    fresh = tokens[:, start:]  # the tokens that the cache has not seen
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decoder = Decoder(model, cache)
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                logits = decoder.fill(fresh)  # (B, V)
                token = draw(next_token_probabilities(logits.float(), temperature, top_k, top_p, min_p), next(heights))
            token = token.clone()  # an ordinary tensor again
            if stop_token is not None:
                token = token.masked_fill(ended, stop_token)
                ended = ended | (token == stop_token)
            yield token
            if stop_token is not None and ended.all():
                return
            tokens = torch.cat((tokens, token[:, None]), dim=1)
            moved = window_start(tokens.shape[1], block)
            if moved == start:
                fresh = token[:, None]
            else:
                start, cache.length, fresh = moved, 0, tokens[:, moved:]
    finally:
        model.train(training)


def sample_text(model: GPT, tokenizer, max_new_tokens: int, seed: int, temperature: float = 0.8) -> str:
    """A text as the model begins one, always the same for the same weights and seed."""
    start = torch.tensor([[first_token(tokenizer)]], device=model.head.weight.device)
    ids = [int(token) for token in stream(model, start, max_new_tokens, temperature, seed=seed, stop_token=tokenizer.end_of_text)]
    return tokenizer.decode(id for id in ids if id != tokenizer.end_of_text)


def window_start(length: int, block_size: int) -> int:
    """The first token that a prediction after `length` tokens sees; it sees all up to the last.

    0 while they fit the block. Beyond, the window moves a quarter block at a time rather than by one:
    every move changes all positions and so empties the KV cache, and this way that happens once in
    block_size/4 tokens, with never fewer than 3/4 of the block in sight. A pure function of the length,
    whatever part of it was a prompt.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None,
                             top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """Probabilities (B, V) to draw the next token from, given logits (B, V). The likeliest is never removed.

    In this order: divide by the temperature (0: all on the likeliest); keep the top_k likeliest (Fan et al.
    2018); the fewest whose probabilities sum to top_p (Holtzman et al. 2020); those with at least min_p
    times the highest probability (Nguyen et al. 2024).

    Raises:
        ValueError: temperature is below 0, top_k below 1, top_p not in (0, 1], or min_p not in [0, 1].
    """
    if not (temperature >= 0 and (top_k is None or top_k >= 1) and (top_p is None or 0 < top_p <= 1) and (min_p is None or 0 <= min_p <= 1)):
        raise ValueError(f"temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p}: one is out of its bounds")
    if temperature < torch.finfo(torch.float32).tiny:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = logits - logits.max(dim=-1, keepdim=True).values  # a tiny temperature then cannot overflow upwards
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        enough = ordered.cumsum(dim=-1) - ordered >= max(top_p, torch.finfo(torch.float32).tiny)  # the sum before a token already reaches top_p
        logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, index, enough), -math.inf)
    probabilities = logits.softmax(dim=-1)
    if min_p is not None:
        low = probabilities < min_p * probabilities.max(dim=-1, keepdim=True).values
        probabilities = probabilities.masked_fill(low, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def random_heights(rows: int, seed: int | None, device: torch.device) -> Iterator[Tensor]:
    """Endless random numbers (rows,) in (0, 1]: each row's are its own, whatever number of rows is beside it."""
    generators = [None if seed is None else torch.Generator(device).manual_seed(seed + row) for row in range(rows)]
    while True:  # some at a time, so that a token does not wait for a call per row
        yield from 1 - torch.stack([torch.rand(64, generator=g, device=device) for g in generators], dim=1)


def draw(probabilities: Tensor, heights: Tensor) -> Tensor:
    """A token (B,) for each row of probabilities (B, V): where their running sum reaches a height (B,) in (0, 1].

    `torch.multinomial` makes a random number for every token of the vocabulary, which takes twenty times as long at GPT-2's.
    """
    sums = probabilities.cumsum(dim=-1)
    return torch.searchsorted(sums, heights[:, None] * sums[:, -1:]).squeeze(1)
