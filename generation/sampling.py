"""Turn a model's logits into tokens, and tokens into text.

Shapes are written with the letters of model.py.
"""

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from generation.decoder import Decoder

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model import GPT

NON_FINITE_PREDICTIONS = (
    "the model's predictions are not finite numbers, because its weights are damaged or its "
    "training diverged; use another checkpoint"
)
ENDED = -1  # in place of a token of a sequence that has ended
TINY = torch.finfo(torch.float32).tiny  # smallest positive float32 that is not denormal

# Random numbers that one call of torch's generator draws, if the vocabulary is smaller than that:
# a call per position would take longer than a small model's step.
NOISE_PER_CALL = 1 << 14


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing a token from logits, applied in the order of the fields."""

    # Divisor of the logits; 0: always take the most likely token.
    temperature: float = 1.0
    # Keep the k most likely tokens (Fan et al. 2018).
    top_k: int | None = None
    # Keep the fewest tokens whose probabilities sum to p (Holtzman et al. 2020).
    top_p: float | None = None
    # Keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
    min_p: float | None = None
    # If set, draw only ids below this number: higher ones pad the vocabulary and have no text.
    vocab_size: int | None = None


def generate(
    model: "GPT",
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue prompts (B, T), T at least 1: return them with the new tokens appended.

    Ids from `model.token_count` on, with which a vocabulary may be padded, are never drawn.
    `temperature`, `top_k`, `top_p` and `min_p` are those of `Sampling`. Equal seeds give equal
    tokens; sequence b draws from seed + b. Without a seed, torch's global random state is used.
    """
    batch_size, length = tokens.shape
    seeds = None if seed is None else [seed + row for row in range(batch_size)]
    decoder = Decoder(model, batch_size, length + max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p, model.token_count)
    new_tokens = list(stream(decoder, tokens, max_new_tokens, sampling, seeds))  # (B,) each
    if not new_tokens:
        return tokens
    return torch.cat((tokens, torch.stack(new_tokens, dim=1)), dim=1)


def stream(
    decoder: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    has_ended: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each sequence, step by step.

    A prediction reads the tokens since `window_start`. When that start moves, positions count from
    there and the decoder reads the window again, so that decoding with and without a cache see the
    same tokens at the same positions.

    Args:
        decoder: Gives the logits.
        prompt: Tokens (B, T), T at least 1.
        max_new_tokens: Number of steps.
        sampling: How tokens are drawn.
        seeds: Seed of each sequence; None: torch's global random state.
        has_ended: Booleans (B,). The caller sets one to True to end that sequence.

    Yields:
        Tokens (B,); `ENDED` for a sequence that has ended. Stops early when all have.
    """
    (batch_size, T), device = prompt.shape, prompt.device
    if T == 0:
        raise ValueError("generation needs at least one token to start from")
    if has_ended is None:
        has_ended = torch.zeros(batch_size, dtype=torch.bool, device=device)
    noise = Noise(batch_size, seeds, decoder.vocab_size, device)
    tokens = prompt
    start = 0  # of the window
    n_read = 0  # tokens that the decoder has read
    decoder.reset()
    for length in range(T, T + max_new_tokens):
        if has_ended.all():
            return
        if window_start(length, decoder.block_size) != start:
            start = n_read = window_start(length, decoder.block_size)
            decoder.reset()
        with torch.inference_mode():
            logits = decoder.read(tokens[:, n_read:])[:, : sampling.vocab_size].float()  # (B, V)
            probabilities = next_token_probabilities(logits, sampling)
            token = sample_token(probabilities, noise.at(length)[:, : sampling.vocab_size])
        token = token.clone()  # outside inference mode: a tensor that autograd can use
        n_read = length
        yield token.masked_fill(has_ended, ENDED)
        tokens = torch.cat((tokens, token[:, None]), dim=1)


class GeneratedText:
    """A text that grows token by token."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_tokens: Sequence[int],
        seed: int = 0,
        max_documents: int = 1,
        stops: Sequence[str] = (),
    ) -> None:
        """Begin a text with a prompt of at least one token.

        `max_documents` end-of-text tokens end the text. Without a prompt the model may begin with
        one, so that the text needs two. `seed` is that of the random numbers that draw its tokens.
        The text also ends before the first of the strings `stops` that is complete.
        """
        self.prompt_tokens = prompt_tokens
        self.seed = seed
        self.vocab_size = tokenizer.vocab_size
        self.tokens: list[int] = []  # generated so far
        # Generated so far, in complete characters, without an end that may become a stop string
        self.text = ""
        # "end_of_text", "length" or "stop"; None while the text grows
        self.end_reason: str | None = None
        self._stops = stops
        self._held_back = ""  # the start of a stop string, at the end of the text
        self._documents_left = max_documents
        self._tokenizer = tokenizer
        # Holds back the bytes of a character until its last token has come.
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token: int) -> None:
        """Add the next token."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self._documents_left -= 1
            if self._documents_left == 0:
                self.finish("end_of_text")
                return
            self.text += self._held_back + "\n"
            self._held_back = ""
        self._extend(self._utf8_decoder.decode(self._tokenizer.token_bytes(token)))

    def _extend(self, characters: str) -> None:
        """Add characters, and end the text if they complete a stop string."""
        new = self._held_back + characters
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := new.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)  # of the stop string that is complete first
            self.text += new[:start]
            self._held_back = ""
            self.end_reason = "stop"
            return
        lengths = [n for stop in self._stops for n in range(len(stop)) if new.endswith(stop[:n])]
        shown = len(new) - max(lengths, default=0)
        self.text += new[:shown]
        self._held_back = new[shown:]

    def finish(self, reason: str) -> None:
        """Mark the text as finished, and add what was held back."""
        self._extend(self._utf8_decoder.decode(b"", final=True))
        self.text += self._held_back
        self.end_reason = self.end_reason or reason


def generate_texts(
    decoder: Decoder,
    texts: Sequence[GeneratedText],
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[None]:
    """Continue texts in one batch until all have ended; each step adds a token to each.

    The prompts of the texts have the same length. Each text gets at most `max_new_tokens` tokens.
    Ids that their tokenizer lacks, with which a vocabulary may be padded, are never drawn.
    """
    sampling = replace(sampling, vocab_size=texts[0].vocab_size)
    prompt = torch.tensor([text.prompt_tokens for text in texts], device=decoder.device)  # (B, T)
    has_ended = torch.zeros(len(texts), dtype=torch.bool, device=decoder.device)
    seeds = [text.seed for text in texts]
    for tokens in stream(decoder, prompt, max_new_tokens, sampling, seeds, has_ended):
        for row, (text, token) in enumerate(zip(texts, tokens.tolist())):
            if token == ENDED:
                continue
            text.append(token)
            if text.end_reason is None and len(text.tokens) == max_new_tokens:
                text.finish("length")
            if text.end_reason is not None:
                has_ended[row] = True
        yield


def window_start(length: int, block_size: int) -> int:
    """Return the first token that the prediction after `length` tokens reads.

    It is 0 while the tokens fit the block. After that the window moves by a quarter of a block at a
    time, because each move changes all positions and empties the KV cache.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities (B, V) to draw the next token from, given its logits (B, V).

    The most likely token is always kept.

    Raises:
        UserError: If the logits are NaN or infinite.
    """
    highest = logits.amax(dim=-1, keepdim=True)  # (B, 1)
    if not highest.isfinite().all():
        raise UserError(NON_FINITE_PREDICTIONS)
    if sampling.temperature < TINY:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    # Without the maximum, division by a tiny temperature cannot overflow to infinity.
    logits = (logits - highest) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        top = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -math.inf).scatter(-1, top.indices, top.values)
    if sampling.top_p is not None and sampling.top_p < 1:
        p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        sum_before = p.cumsum(dim=-1) - p  # of all more likely tokens
        is_dropped = sum_before >= max(sampling.top_p, TINY)
        is_dropped = torch.zeros_like(is_dropped).scatter(-1, order, is_dropped)
        logits = logits.masked_fill(is_dropped, -math.inf)
    probabilities = logits.softmax(dim=-1)
    if sampling.min_p is not None:
        threshold = sampling.min_p * probabilities.max(dim=-1, keepdim=True).values  # (B, 1)
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


class Noise:
    """Exponential random numbers for every token of the vocabulary.

    They depend on the sequence's seed and the position alone: not on the batch, the cache or the
    length of the prompt.
    """

    def __init__(
        self,
        batch_size: int,
        seeds: Sequence[int] | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Take the seed of each sequence; None: torch's global random state is used."""
        self.batch_size = batch_size
        self.seeds = seeds
        self.vocab_size = vocab_size
        self.device = device
        self.positions_per_call = max(1, NOISE_PER_CALL // vocab_size)
        self._generator = torch.Generator(device)
        self._block_index = -1
        self._block = torch.empty(0)  # (positions_per_call, B, V)

    def at(self, position: int) -> Tensor:
        """Return positive numbers (B, V) from the exponential distribution of mean 1."""
        if self.seeds is None:
            return _exponential(torch.rand(self.batch_size, self.vocab_size, device=self.device))
        block_index, place = divmod(position, self.positions_per_call)
        if block_index != self._block_index:
            uniform = torch.stack([self._uniform(seed, block_index) for seed in self.seeds], dim=1)
            self._block_index, self._block = block_index, _exponential(uniform)
        return self._block[place]

    def _uniform(self, seed: int, block_index: int) -> Tensor:
        """Draw uniform numbers (positions_per_call, V) of one sequence."""
        state = np.random.SeedSequence((seed, block_index)).generate_state(1, np.uint64)[0]
        self._generator.manual_seed(int(state >> 1))
        shape = (self.positions_per_call, self.vocab_size)
        return torch.rand(shape, generator=self._generator, device=self.device)


def _exponential(uniform: Tensor) -> Tensor:
    """Turn uniform numbers, multiples of 2⁻²⁴ from 0, into positive exponential ones."""
    return 2**-25 - torch.log1p(-uniform)


def sample_token(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Draw a token (B,) from each row of probabilities (B, V), given exponential noise (B, V).

    If clocks ring after noise / probability, each rings first as often as its probability says.
    Rounding errors change the token only if the first two clocks ring within them.
    """
    return (probabilities / noise).argmax(dim=-1)
