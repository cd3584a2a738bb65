"""Logits → tokens → text: which tokens may be drawn, the draw, and where a text ends."""

import codecs
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def stream(decoder, prompts: Tensor | Sequence[Tensor], max_new_tokens: int,
           seeds: Sequence[int] | None = None, stop_token: int | None = None,
           ended: Tensor | None = None, repetition_penalty: float = 1.0,
           **choice) -> Iterator[Tensor]:
    """Yield the next token (B,) of each sequence, step by step, -1 for one that gets none.

    A token is predicted from those since `window_start`. While that start stays, each step feeds
    one token to the decoder; when it moves, positions count from the new start and the decoder
    reads the window again, so that a cached and a full computation see the same tokens at the same
    positions. It ends when all sequences have.

    Prompts of different lengths stand at the same positions in one batch: as many tokens as all
    prompts have are read at once, and from there the longer ones take their next token from
    themselves. So each gets what it would get alone.

    Args:
        decoder: what gives the logits after tokens, such as `model.Decoder`.
        prompts: tokens (B, T), or B prompts (T_b,), each of at least one token.
        seeds: of each sequence; None draws from torch's own state.
        stop_token: ends a sequence that produces it.
        ended: (B,) booleans; a sequence that the caller marks there gets no more tokens.
        choice: see `next_token_probabilities`.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError("generation starts from at least one token")
    device, rows = prompts[0].device, len(prompts)
    padded = pad_sequence(list(prompts), batch_first=True)  # (B, longest)
    first = torch.tensor(lengths, device=device)
    may_end = stop_token is not None or ended is not None
    if ended is None:
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
    seen = None
    if repetition_penalty != 1:
        seen = torch.zeros(rows, decoder.vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
    noise = Noise(rows, seeds, decoder.vocab_size, device)
    start, window, read = 0, padded[:, :0], 0  # the tokens from `start` on, and how many are read
    decoder.forget()
    while True:
        T = start + window.shape[1]
        over = ended.tolist() if may_end else [False] * rows
        live = [length for length, done in zip(lengths, over)
                if not done and max(0, T - length) < max_new_tokens]
        if not live:
            return
        if min(live) > T:  # all that are left know their next tokens
            window = torch.cat((window, padded[:, T:min(live)]), dim=1)
            T = min(live)
        moved = window_start(T, decoder.block_size)
        if moved != start:
            start, window, read = moved, window[:, moved - start:], 0
            decoder.forget()
        with torch.inference_mode():
            logits = decoder.fill(window[:, read:]).float()  # (B, V)
            if seen is not None:
                logits = penalise_repetition(logits, seen, repetition_penalty)
            token = draw(next_token_probabilities(logits, **choice), noise.at(T))
        token, read = token.clone(), window.shape[1]  # an ordinary tensor again
        new = token.masked_fill(ended | (first > T) | (first + max_new_tokens <= T), -1)
        if stop_token is not None:
            ended |= new == stop_token
        yield new
        if padded.shape[1] > T:
            token = torch.where(first > T, padded[:, T], token)
        window = torch.cat((window, token[:, None]), dim=1)
        if seen is not None:
            seen.scatter_(1, token[:, None], True)


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


def write(decoder, texts: Sequence[Text], max_new_tokens: int, **choice) -> Iterator[None]:
    """Continue the texts by `stream`, a token each between two yields, until all have ended."""
    ended = torch.zeros(len(texts), dtype=torch.bool, device=decoder.device)
    prompts = [torch.tensor(text.prompt_tokens, device=decoder.device) for text in texts]
    seeds = [text.seed for text in texts]
    for tokens in stream(decoder, prompts, max_new_tokens, seeds, ended=ended, **choice):
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
    one: every move changes all positions and so empties the KV cache, and this way that happens
    once in block_size/4 tokens, with never fewer than 3/4 of the block in sight. A pure function of
    the length, whatever part of it was a prompt.
    """
    stride = max(1, block_size // 4)
    return max(0, math.ceil((length - block_size) / stride)) * stride


def next_token_probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None,
                             top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """Probabilities (B, V) to draw the next token from, given logits (B, V).

    In this order: divide by the temperature (0: all on the likeliest); keep the top_k likeliest
    (Fan et al. 2018); the fewest whose probabilities sum to top_p (Holtzman et al. 2020); those
    with at least min_p times the highest probability (Nguyen et al. 2024). The likeliest stays.

    Raises:
        ValueError: temperature below 0, top_k below 1, top_p not in (0, 1], min_p not in [0, 1].
    """
    if not (temperature >= 0 and (top_k is None or top_k >= 1)
            and (top_p is None or 0 < top_p <= 1) and (min_p is None or 0 <= min_p <= 1)):
        raise ValueError(f"temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p}: "
                         "one is out of its bounds")
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


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (B, V), those of the tokens seen (B, V) divided by the penalty where positive, else
    multiplied (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


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
    Where rounding differs, as between batches of different sizes, the choice changes only if the
    first two are as close as that; a running sum compared with one random number has a border that
    rounding can cross at every token.
    """
    return (probabilities / noise).argmax(dim=-1)
