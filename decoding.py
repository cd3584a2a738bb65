"""Text out of a model, token by token: the cached step, what is removed from the choice, the draw, and what of the text is certain."""

import codecs
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data.tokenizer import Tokenizer, prompt_ids
from model import GPT, KVCache, activate, rotate

SAMPLE_TOKENS = 100  # of the text that a model writes at each snapshot, for the run's page
CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


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


def stream(model: GPT, prompts: Tensor | Sequence[Tensor], max_new_tokens: int, seeds: Sequence[int] | None = None,
           stop_token: int | None = None, ended: Tensor | None = None, cache: KVCache | None = None,
           repetition_penalty: float = 1.0, **choice) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence, step by step, -1 for one that gets none, until all have ended.

    A token is predicted from those since `window_start`. While that start stays, each step feeds one token to the cache;
    when it moves, positions count from the new start and the cache is filled again, so that a cached and a full
    computation see the same tokens at the same positions.

    Prompts of different lengths stand at the same positions in one batch: as many tokens as all prompts have are read
    at once, and from there the longer ones take their next token from themselves. So each gets what it would get alone.

    Args:
        prompts: tokens (B, T), or B prompts (T_b,), each of at least one token.
        seeds: of each sequence; None draws from torch's own state.
        stop_token: ends a sequence that produces it.
        ended: (B,) booleans; a sequence that the caller marks there gets no more tokens.
        cache: one to use, with room for block_size tokens or for all there will be; what it holds is forgotten.
        choice: see `next_token_probabilities`.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError("generation starts from at least one token")
    device, rows, block = prompts[0].device, len(prompts), model.config.block_size
    padded = pad_sequence(list(prompts), batch_first=True)  # (B, longest)
    first = torch.tensor(lengths, device=device)
    may_end = stop_token is not None or ended is not None
    if ended is None:
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
    seen = None
    if repetition_penalty != 1:
        seen = torch.zeros(rows, model.config.vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
    if cache is None:
        cache = model.make_cache(rows, min(block, max(lengths) + max_new_tokens))
    cache.length = 0
    noise = Noise(rows, seeds, model.config.vocab_size, device)
    start, window = 0, padded[:, :0]  # the tokens from `start` on
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decoder = Decoder(model, cache)
        while True:
            T = start + window.shape[1]
            over = ended.tolist() if may_end else [False] * rows
            live = [length for length, done in zip(lengths, over) if not done and max(0, T - length) < max_new_tokens]
            if not live:
                return
            if min(live) > T:  # all that are left know their next tokens
                window = torch.cat((window, padded[:, T:min(live)]), dim=1)
                T = min(live)
            moved = window_start(T, block)
            if moved != start:
                start, window, cache.length = moved, window[:, moved - start:], 0
            with torch.inference_mode():
                logits = decoder.fill(window[:, cache.length:]).float()  # (B, V)
                if seen is not None:
                    logits = penalise_repetition(logits, seen, repetition_penalty)
                token = draw(next_token_probabilities(logits, **choice), noise.at(T))
            token = token.clone()  # an ordinary tensor again
            new = token.masked_fill(ended | (first > T) | (first + max_new_tokens <= T), -1)
            if stop_token is not None:
                ended |= new == stop_token
            yield new
            if padded.shape[1] > T:
                token = torch.where(first > T, padded[:, T], token)
            window = torch.cat((window, token[:, None]), dim=1)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
    finally:
        model.train(training)


class Text:
    """A text that grows by tokens: `text` holds whole characters only, and nothing that may yet become a stop string.

    `ended` says why there is no more: "stop" (a stop string, which is left out; of several the first to be complete),
    "end_of_text", "length"; None while there may be.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str = "", seed: int = 0, stop: Sequence[str] = ()):
        """A text after a prompt; after none, one that begins as `prompt_ids` does.

        Raises:
            UserError: the prompt cannot be encoded.
        """
        self.prompt, self.seed = prompt, seed
        self.prompt_tokens = prompt_ids(tokenizer, prompt)
        self.tokens: list[int] = []
        self.text, self.ended = "", None
        self._tokenizer, self._stop, self._held = tokenizer, stop, ""
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a token may end within a character

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self.end("end_of_text")
            return
        self._held += self._characters.decode(self._tokenizer.token_bytes(token))
        found = [(self._held.index(stop) + len(stop), self._held.index(stop)) for stop in self._stop if stop in self._held]
        if found:
            self.text, self._held, self.ended = self.text + self._held[:min(found)[1]], "", "stop"
            return
        perhaps = max((n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        certain = len(self._held) - perhaps
        self.text, self._held = self.text + self._held[:certain], self._held[certain:]

    def end(self, why: str) -> None:
        """There is no more: what was held back belongs to the text."""
        self.text, self._held, self.ended = self.text + self._held + self._characters.decode(b"", final=True), "", why


def printable(text: str) -> str:
    """The text with its control characters, but for tabs and line ends, as signs: a terminal shows and does not obey them."""
    return text.translate(CONTROLS)


def write(model: GPT, texts: Sequence[Text], max_new_tokens: int, cache: KVCache | None = None, **choice) -> Iterator[None]:
    """Continue the texts in one batch, a token each between two yields, until all have ended.

    Args: as `stream`.
    """
    device = model.head.weight.device
    ended = torch.zeros(len(texts), dtype=torch.bool, device=device)
    prompts = [torch.tensor(text.prompt_tokens, device=device) for text in texts]
    for tokens in stream(model, prompts, max_new_tokens, [text.seed for text in texts], ended=ended, cache=cache, **choice):
        for row, (text, token) in enumerate(zip(texts, tokens.tolist())):
            if token >= 0:
                text.add(token)
                if text.ended is None and len(text.tokens) == max_new_tokens:
                    text.end("length")
                if text.ended is not None:
                    ended[row] = True
        yield


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int, temperature: float = 0.8) -> str:
    """A text as the model begins one, always the same for the same weights and seed."""
    text = Text(tokenizer, seed=seed)
    for _ in write(model, [text], max_new_tokens, temperature=temperature):
        pass
    return text.text


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


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (B, V) with those of the tokens seen, (B, V), divided by the penalty where positive, else multiplied (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class Noise:
    """Exponential random numbers for every token of the vocabulary, a function of the sequence's seed and the position.

    Whatever the batch, the cache, or how much of the text was a prompt.
    """

    def __init__(self, rows: int, seeds: Sequence[int] | None, vocab_size: int, device: torch.device):
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
            self._block, self._made = block, self._exponential(torch.stack([self._uniform(seed, block) for seed in self.seeds], dim=1))
        return self._made[place]

    def _uniform(self, seed: int, block: int) -> Tensor:
        self._generator.manual_seed(int(np.random.SeedSequence((seed, block)).generate_state(1, np.uint64)[0] >> 1))
        return torch.rand(self.together, self.vocab_size, generator=self._generator, device=self.device)

    def _exponential(self, uniform: Tensor) -> Tensor:
        return 2 ** -25 - torch.log1p(-uniform)  # a uniform float32 is a multiple of 2⁻²⁴, 0 included


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """A token (B,) for each row of probabilities (B, V), given exponential noise (B, V).

    Of clocks that ring after noise / probability, each rings first as often as its probability. Where rounding differs, as between
    batches of different sizes, the choice changes only if the first two are as close as that; a running sum compared
    with one random number has a border that rounding can cross at every token.
    """
    return (probabilities / noise).argmax(dim=-1)
