"""Tokens out of a model: logits → tokens → text. A decoder is `kernels.Decoder`, or what else gives
logits after tokens. Shapes are written with the letters of model.py."""

import codecs
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def generate(
    model,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue tokens (B, T) by up to max_new_tokens each: (B, T + new).

    Args:
        temperature, top_k, top_p, min_p: see `next_token_probabilities`.
        seed: same seed, same tokens (row r draws from seed + r); None: torch's own state."""
    rows, length = tokens.shape
    seeds = None if seed is None else [seed + row for row in range(rows)]
    decoder = model.make_decoder(rows, length + max_new_tokens)
    new = list(
        stream(
            decoder,
            tokens,
            max_new_tokens,
            seeds,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
    )
    return torch.cat((tokens, torch.stack(new, dim=1)), dim=1) if new else tokens


def stream(
    decoder,
    prompt: Tensor,
    max_new_tokens: int,
    seeds: Sequence[int] | None = None,
    stop_token: int | None = None,
    ended: Tensor | None = None,
    **choice,
) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence, step by step, -1 for one that has ended.

    A token is predicted from those since `window_start`. When that start moves, positions count
    from there and the decoder reads the window again, so that a cached and a full computation see
    the same tokens at the same positions.

    Args:
        prompt: tokens (B, T), at least one.
        seeds: of each sequence; None draws from torch's own state.
        stop_token: ends a sequence that produces it.
        ended: (B,) booleans; a sequence that the caller marks there gets no more tokens.
        choice: see `next_token_probabilities`."""
    (rows, T), device = prompt.shape, prompt.device
    if T == 0:
        raise ValueError("generation starts from at least one token")
    if ended is None:
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
    noise = Noise(rows, seeds, decoder.vocab_size, device)
    tokens, start, read = prompt, 0, 0  # the window begins at `start`; `read` tokens were fed
    decoder.reset()
    for length in range(T, T + max_new_tokens):
        if ended.all():
            return
        if (moved := window_start(length, decoder.block_size)) != start:
            start = read = moved
            decoder.reset()
        with torch.inference_mode():
            logits = decoder.read(tokens[:, read:]).float()  # (B, V)
            token = sample_token(next_token_probabilities(logits, **choice), noise.at(length))
        token, read = token.clone(), length  # an ordinary tensor again
        new = token.masked_fill(ended, -1)
        if stop_token is not None:
            ended |= new == stop_token
        yield new
        tokens = torch.cat((tokens, token[:, None]), dim=1)


class Text:
    """A text that grows by tokens: `text` holds whole characters. `ended` says why there is no
    more: "end_of_text", "length"; None while there may be."""

    def __init__(
        self, tokenizer, prompt_tokens: Sequence[int], seed: int = 0, documents: int = 1
    ) -> None:
        """A text after a prompt of at least one token, which ends after so many documents: what a
        model begins by itself may end at once."""
        self.prompt_tokens, self.seed, self._documents = prompt_tokens, seed, documents
        self.tokens: list[int] = []
        self.text, self.ended = "", None
        self._tokenizer = tokenizer
        # A token may end within a character.
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self._documents -= 1
            if self._documents == 0:
                self.end("end_of_text")
                return
            self.text += "\n"
        self.text += self._characters.decode(self._tokenizer.token_bytes(token))

    def end(self, why: str) -> None:
        """There is no more: what was held back belongs to the text."""
        self.text += self._characters.decode(b"", final=True)
        self.ended = why


def generate_texts(decoder, texts: Sequence[Text], max_new_tokens: int, **choice) -> Iterator[None]:
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
    one: every move changes all positions and so empties the KV cache."""
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Probabilities (B, V) to draw the next token from, given logits (B, V). In this order: divide
    by the temperature (0: all on the likeliest); keep the top_k likeliest (Fan et al. 2018); the
    fewest whose probabilities sum to top_p (Holtzman et al. 2020); those with at least min_p times
    the highest probability (Nguyen et al. 2024). The likeliest stays."""
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


class Noise:
    """Exponential random numbers for every token of the vocabulary, a function of the sequence's
    seed and the position, whatever the batch, the cache, or how much of the text was a prompt."""

    def __init__(
        self, rows: int, seeds: Sequence[int] | None, vocab_size: int, device: torch.device
    ) -> None:
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
        return torch.rand(
            self.together, self.vocab_size, generator=self._generator, device=self.device
        )

    def _exponential(self, uniform: Tensor) -> Tensor:
        return 2**-25 - torch.log1p(-uniform)  # uniform: multiples of 2⁻²⁴, 0 included


def sample_token(probabilities: Tensor, noise: Tensor) -> Tensor:
    """A token (B,) for each row of probabilities (B, V), given exponential noise (B, V). Of clocks
    that ring after noise / probability, each rings first as often as its probability. Rounding
    changes the choice only where the first two are as close as that."""
    return (probabilities / noise).argmax(dim=-1)
