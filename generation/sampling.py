"""Turn a model's logits into tokens, and tokens into text.

Shapes are written with the letters of model.py.
"""

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from generation.decoder import Decoder
from model import GPT

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

NON_FINITE_PREDICTIONS = (
    "the model's predictions are not finite numbers, because its weights are damaged or its "
    "training diverged; use another checkpoint"
)
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


# --- Tokens ---------------------------------------------------------------------------------------


def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue prompts (B, T), T at least 1: return them with the new tokens appended.

    Beyond block_size tokens the model reads the last ones, and a begin-of-text token before them.
    Ids from `model.token_count` on, with which a vocabulary may be padded, are never drawn. Equal
    seeds give equal tokens; sequence b draws from seed + b. Without a seed, torch's global random
    state gives one. The other arguments are those of `Sampling`.
    """
    model.check_tokens(tokens)
    batch_size, length = tokens.shape
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    seeds = range(seed, seed + batch_size)
    decoder = Decoder(model, batch_size, length + max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p, vocab_size=model.token_count)
    new_tokens = draw_tokens(decoder.next_logits, tokens, max_new_tokens, sampling, seeds)
    return torch.cat((tokens, *(token[:, None] for token in new_tokens)), dim=1)


@torch.inference_mode()
def draw_tokens(
    next_logits: Callable[[Tensor], Tensor],
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence, step by step.

    `next_logits` returns the logits (B, V) of the token after all tokens (B, T) so far, which begin
    with the prompt (B, T), T at least 1. Each sequence has a seed.
    """
    if prompt.shape[1] == 0:
        raise ValueError("generation needs at least one token to start from")
    tokens, seeds = prompt, tuple(seeds)
    for _ in range(max_new_tokens):
        all_logits = next_logits(tokens)
        logits = all_logits[:, : sampling.vocab_size].float()  # (B, V)
        probabilities = next_token_probabilities(logits, sampling)
        # If clocks ring after noise / probability, each rings first as often as its probability
        # says. Rounding errors change the token only if the first two clocks ring within them.
        noise = noise_at(tokens.shape[1], seeds, all_logits.shape[1], tokens.device)
        token = (probabilities / noise[:, : sampling.vocab_size]).argmax(dim=-1)
        yield token
        tokens = torch.cat((tokens, token[:, None]), dim=1)


def next_token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities (B, V) to draw from, given logits (B, V); the best token is kept."""
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


def noise_at(
    position: int, seeds: tuple[int, ...], vocab_size: int, device: torch.device
) -> Tensor:
    """Return positive numbers (B, V) from the exponential distribution of mean 1.

    They depend on the sequence's seed and the position alone: not on the batch, the cache or the
    length of the prompt.
    """
    positions = max(1, NOISE_PER_CALL // vocab_size)
    block_index, place = divmod(position, positions)
    return _noise_block(block_index, seeds, (positions, vocab_size), device)[place]


@lru_cache(maxsize=1)
def _noise_block(
    index: int, seeds: tuple[int, ...], shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the noise (positions, B, V) of consecutive positions."""
    generator = torch.Generator(device)
    numbers = []
    for seed in seeds:
        state = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
        generator.manual_seed(int(state >> 1))
        numbers.append(torch.rand(shape, generator=generator, device=device, dtype=torch.float32))
    # Uniform numbers, multiples of 2⁻²⁴ from 0, become positive exponential ones
    return 2**-25 - torch.log1p(-torch.stack(numbers, dim=1))


# --- Text -----------------------------------------------------------------------------------------


def draw_batch(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> Iterator[Iterator[int]]:
    """Yield, for each seed, the tokens that continue the prompt; all are drawn in one batch."""
    prompts = torch.tensor([prompt] * len(seeds), device=decoder.cache.tokens.device)  # (B, T)
    steps = draw_tokens(decoder.next_logits, prompts, max_new_tokens, sampling, seeds)
    for row, copy in enumerate(tee(map(Tensor.tolist, steps), len(seeds))):
        yield map(itemgetter(row), copy)


def stream_text(
    tokenizer: "Tokenizer", ids: Iterable[int], stops: Sequence[str] = (), has_prompt: bool = True
) -> Iterator[str]:
    """Yield the text of tokens piece by piece, in complete characters.

    It ends before the first complete one of the strings `stops`, and at an end-of-text token.
    Without a prompt, end-of-text tokens before the text are left out.
    """
    has_begun = has_prompt
    utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held_back = ""  # the beginning of what may become a stop string
    for id in ids:
        if id in tokenizer.end_of_text_ids:
            if has_begun:
                break
            continue
        has_begun = True
        text = held_back + utf8_decoder.decode(tokenizer.token_bytes(id))
        shown, rest = _split_at_stop(text, stops)
        yield shown
        if rest is None:
            return
        held_back = rest
    shown, rest = _split_at_stop(held_back + utf8_decoder.decode(b"", final=True), stops)
    yield shown + (rest or "")


def _split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return what is shown of a text, and its end that may become a stop string.

    The second is None if a stop string is complete; the text is shown up to the first of these.
    """
    complete = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if complete:
        _, start = min(complete)
        return text[:start], None
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    shown = len(text) - max(lengths, default=0)
    return text[:shown], text[shown:]
