"""Tokens out of a model: its cache, the cached decoder, logits → tokens → text.

Shapes are written with the letters of model.py.
"""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import GPTConfig
from kernels import RMSNorm, activate, linear, rms_norm, rotate


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: what grouped heads make small.

    2 · n_layer · B · G · length · d numbers for d_k = d_v = d: H/G times fewer than multi-head.
    """

    def __init__(self, config: GPTConfig, batch_size: int, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """Room for `length` tokens (block_size when None); `GPT.make_cache` knows the rest."""
        shape = (config.n_layer, batch_size, config.kv_heads, length or config.block_size)
        self.keys = torch.empty(*shape, config.key_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, config.value_dim, device=device, dtype=dtype)
        self.length = 0  # tokens that every layer holds

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k (B, G, T, d_k) and v (B, G, T, d_v) behind the tokens held; return all of them.

        `length` stays: GPT moves it once every layer has stored the same tokens.
        """
        keys, values, count = self.keys[layer], self.values[layer], k.shape[2]
        keys.narrow(2, self.length, count).copy_(k)
        values.narrow(2, self.length, count).copy_(v)
        return keys.narrow(2, 0, self.length + count), values.narrow(2, 0, self.length + count)


class Decoder:
    """A model's next-token logits with a cache, as `GPT.forward` gives them, in fewer calls.

    The calls, not the arithmetic, take the time of a small model's step: twice the speed at 0.8 M
    parameters (LOG.md).
    """

    @torch.inference_mode()
    def __init__(self, model, cache: KVCache):
        """Reads the weights of a `model.GPT` as they are now; fills and moves on the cache."""
        weight = model.token_embedding.weight
        self.model, self.cache, self.device = model, cache, weight.device
        self.block_size, self.vocab_size = model.config.block_size, model.config.vocab_size
        self.rotary = None if model.rotary is None else model.rotary.to(weight.dtype)
        self.norm, self.head = function(model.norm), function(model.head)
        # Of each layer: the functions of its modules, in the order of their use; what queries and
        # keys are multiplied by; its part of the cache.
        self.layers = []
        for block, keys, values in zip(model.blocks, cache.keys, cache.values):
            a, mlp = block.attention, block.mlp
            qkv = partial(linear, **dict(zip(("weight", "bias"), a.joined())))
            W_gate = function(mlp.W_gate) if hasattr(mlp, "W_gate") else None
            self.layers.append((function(block.norm_1), qkv, a.gains(), keys, values,
                                function(a.W_O), function(block.norm_2), function(mlp.W_in), W_gate,
                                function(mlp.W_out)))

    def forget(self) -> None:
        """Begin again, before any token."""
        self.cache.length = 0

    def fill(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, T) more."""
        if tokens.shape[1] == 1:
            return self.step(tokens[:, 0])
        with self.model.evaluating():
            return self.head(self.norm(self.model.hidden(tokens, self.cache)[:, -1]))

    def step(self, token: Tensor) -> Tensor:
        """Logits (B, V) after one token (B,) more."""
        c, B, n = self.model.config, len(token), self.cache.length
        H, G, d_k, d_v = c.n_head, c.kv_heads, c.key_dim, c.value_dim
        x = self.model.token_embedding.weight[token]  # (B, C)
        if self.model.position_embedding is not None:
            x = x + self.model.position_embedding.weight[n]
        if c.norm_embedding:
            x = rms_norm(x)
        eps = c.norm_eps if c.qk_norm == "gains" else None
        for norm_1, qkv, gains, keys, values, W_O, norm_2, W_in, W_gate, W_out in self.layers:
            qk, v = qkv(norm_1(x)).split(((H + G) * d_k, G * d_v), dim=-1)
            qk = qk.view(B, H + G, d_k)
            if c.qk_norm:
                qk = rms_norm(qk, gains, eps)
            if self.rotary is not None:
                qk = rotate(qk, self.rotary[:, n])
            q, k = qk.split((H, G), dim=1)  # (B, H, d_k), (B, G, d_k)
            keys.select(2, n).copy_(k)
            values.select(2, n).copy_(v.view(B, G, d_v))
            # Query heads that share keys are as many queries to them, each of which may see all.
            q = q.reshape(B, G, H // G, d_k).to(keys.dtype)
            y = F.scaled_dot_product_attention(q, keys.narrow(2, 0, n + 1),
                                               values.narrow(2, 0, n + 1))
            x = x + W_O(y.reshape(B, H * d_v).to(x.dtype))
            h = norm_2(x)
            x = x + W_out(activate(c.mlp, W_in(h), None if W_gate is None else W_gate(h)))
        self.cache.length = n + 1
        return self.head(self.norm(x))


def function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm or a linear layer as a function with its weights."""
    m = module
    if isinstance(m, RMSNorm):
        return partial(F.rms_norm, normalized_shape=m.normalized_shape, weight=m.weight, eps=m.eps)
    if isinstance(m, nn.LayerNorm):
        return partial(F.layer_norm, normalized_shape=m.normalized_shape, weight=m.weight,
                       bias=m.bias, eps=m.eps)
    return partial(linear, weight=m.weight, bias=m.bias)


def generate(model, tokens: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
             seed: int | None = None, stop_token: int | None = None,
             repetition_penalty: float = 1.0) -> Tensor:
    """Continue tokens (B, T) by up to max_new_tokens each: (B, T + new).

    Args:
        temperature, top_k, top_p, min_p: see `next_token_probabilities`.
        seed: same seed, same tokens (row r draws from seed + r); None: torch's own state.
        stop_token: a sequence that produced it is filled up with it, and all end when all have.
        repetition_penalty: see `penalise_repetition`; of the tokens given and made.
    """
    rows, length = tokens.shape
    seeds = None if seed is None else [seed + row for row in range(rows)]
    decoder = Decoder(model, model.make_cache(rows, length + max_new_tokens))
    new = list(stream(decoder, tokens, max_new_tokens, seeds, stop_token,
                      repetition_penalty=repetition_penalty, temperature=temperature,
                      top_k=top_k, top_p=top_p, min_p=min_p))
    if stop_token is not None:
        new = [token.masked_fill(token < 0, stop_token) for token in new]
    return torch.cat((tokens, torch.stack(new, dim=1)), dim=1) if new else tokens


def stream(decoder: Decoder, prompt: Tensor, max_new_tokens: int,
           seeds: Sequence[int] | None = None, stop_token: int | None = None,
           ended: Tensor | None = None, repetition_penalty: float = 1.0,
           **choice) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence, step by step, -1 for one that has ended.

    A token is predicted from those since `window_start`. When that start moves, positions count
    from there and the decoder reads the window again, so that a cached and a full computation see
    the same tokens at the same positions.

    Args:
        prompt: tokens (B, T), at least one.
        seeds: of each sequence; None draws from torch's own state.
        stop_token: ends a sequence that produces it.
        ended: (B,) booleans; a sequence that the caller marks there gets no more tokens.
        choice: see `next_token_probabilities`.
    """
    (rows, T), device = prompt.shape, prompt.device
    if T == 0:
        raise ValueError("generation starts from at least one token")
    if ended is None:
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
    noise = Noise(rows, seeds, decoder.vocab_size, device)
    tokens, start, read = prompt, 0, 0  # the window begins at `start`; `read` tokens were fed
    decoder.forget()
    for length in range(T, T + max_new_tokens):
        if ended.all():
            return
        if (moved := window_start(length, decoder.block_size)) != start:
            start = read = moved
            decoder.forget()
        with torch.inference_mode():
            logits = decoder.fill(tokens[:, read:]).float()  # (B, V)
            if repetition_penalty != 1:
                logits = penalise_repetition(logits, tokens, repetition_penalty)
            token = draw(next_token_probabilities(logits, **choice), noise.at(length))
        token, read = token.clone(), length  # an ordinary tensor again
        new = token.masked_fill(ended, -1)
        if stop_token is not None:
            ended |= new == stop_token
        yield new
        tokens = torch.cat((tokens, token[:, None]), dim=1)


class Text:
    """A text that grows by tokens: `text` holds whole characters, and no part of a stop string.

    `ended` says why there is no more: "stop" (a stop string, which is left out; of several the
    first to be complete), "end_of_text", "length"; None while there may be.
    """

    def __init__(self, tokenizer, prompt_tokens: Sequence[int], seed: int = 0,
                 stop: Sequence[str] = ()):
        """A text after a prompt of at least one token."""
        self.prompt_tokens, self.seed = prompt_tokens, seed
        self.tokens: list[int] = []
        self.text, self.ended = "", None
        self._tokenizer, self._stop, self._held = tokenizer, stop, ""
        # A token may end within a character.
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self.end("end_of_text")
            return
        self._held += self._characters.decode(self._tokenizer.token_bytes(token))
        found = [(self._held.index(stop) + len(stop), self._held.index(stop))
                 for stop in self._stop if stop in self._held]
        if found:
            self.text, self._held, self.ended = self.text + self._held[:min(found)[1]], "", "stop"
            return
        perhaps = max((n for stop in self._stop for n in range(1, len(stop))
                       if self._held.endswith(stop[:n])), default=0)
        certain = len(self._held) - perhaps
        self.text, self._held = self.text + self._held[:certain], self._held[certain:]

    def end(self, why: str) -> None:
        """There is no more: what was held back belongs to the text."""
        self.text += self._held + self._characters.decode(b"", final=True)
        self._held, self.ended = "", why


def write(decoder: Decoder, texts: Sequence[Text], max_new_tokens: int,
          **choice) -> Iterator[None]:
    """Continue texts of one prompt by `stream`, a token each between two yields, until all end."""
    ended = torch.zeros(len(texts), dtype=torch.bool, device=decoder.device)
    prompt = torch.tensor([text.prompt_tokens for text in texts], device=decoder.device)
    seeds = [text.seed for text in texts]
    for tokens in stream(decoder, prompt, max_new_tokens, seeds, ended=ended, **choice):
        for row, (text, token) in enumerate(zip(texts, tokens.tolist())):
            if token >= 0:
                text.add(token)
                if text.ended is None and len(text.tokens) == max_new_tokens:
                    text.end("length")
                if text.ended is not None:
                    ended[row] = True
        yield


def window_start(length: int, block_size: int) -> int:
    """The first token that a prediction after `length` tokens sees; it sees all up to the last.

    0 while they fit the block. Beyond, the window moves a quarter block at a time rather than by
    one: every move changes all positions and so empties the KV cache.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None,
                             top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """Probabilities (B, V) to draw the next token from, given logits (B, V).

    In this order: divide by the temperature (0: all on the likeliest); keep the top_k likeliest
    (Fan et al. 2018); the fewest whose probabilities sum to top_p (Holtzman et al. 2020); those
    with at least min_p times the highest probability (Nguyen et al. 2024). The likeliest stays.
    """
    if temperature < torch.finfo(torch.float32).tiny:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    # Less the maximum, a tiny temperature cannot overflow upwards.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        # Tokens before which the sum already reaches top_p.
        enough = ordered.cumsum(dim=-1) - ordered >= max(top_p, torch.finfo(torch.float32).tiny)
        logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, index, enough), -math.inf)
    probabilities = logits.softmax(dim=-1)
    if min_p is not None:
        low = probabilities < min_p * probabilities.max(dim=-1, keepdim=True).values
        probabilities = probabilities.masked_fill(low, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def penalise_repetition(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Logits (B, V), those of the tokens (B, T) in the text divided by the penalty where positive,
    else multiplied (Keskar et al. 2019)."""
    seen = logits.gather(1, tokens)  # (B, T)
    return logits.scatter(1, tokens, torch.where(seen > 0, seen / penalty, seen * penalty))


class Noise:
    """Exponential random numbers for every token of the vocabulary, a function of the sequence's
    seed and the position, whatever the batch, the cache, or how much of the text was a prompt."""

    def __init__(self, rows: int, seeds: Sequence[int] | None, vocab_size: int,
                 device: torch.device):
        """Without seeds they come from torch's own random state."""
        self.rows, self.seeds, self.vocab_size, self.device = rows, seeds, vocab_size, device
        self.together = max(1, (1 << 14) // vocab_size)  # positions that share a call
        self._generator, self._block, self._made = torch.Generator(device), -1, None

    def at(self, position: int) -> Tensor:
        """(B, V), each from the exponential distribution of mean 1, and above 0."""
        if self.seeds is None:
            return self._exponential(torch.rand(self.rows, self.vocab_size, device=self.device))
        block, place = divmod(position, self.together)
        if block != self._block:
            uniform = torch.stack([self._uniform(seed, block) for seed in self.seeds], dim=1)
            self._block, self._made = block, self._exponential(uniform)
        return self._made[place]

    def _uniform(self, seed: int, block: int) -> Tensor:
        state = np.random.SeedSequence((seed, block)).generate_state(1, np.uint64)[0]
        self._generator.manual_seed(int(state >> 1))
        return torch.rand(self.together, self.vocab_size, generator=self._generator,
                          device=self.device)

    def _exponential(self, uniform: Tensor) -> Tensor:
        return 2 ** -25 - torch.log1p(-uniform)  # uniform: multiples of 2⁻²⁴, 0 included


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """A token (B,) for each row of probabilities (B, V), given exponential noise (B, V).

    Of clocks that ring after noise / probability, each rings first as often as its probability.
    Rounding changes the choice only where the first two are as close as that.
    """
    return (probabilities / noise).argmax(dim=-1)
