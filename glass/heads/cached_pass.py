"""A forward pass over a text that is edited: only tokens from the first change on are computed."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from generation import KVCache
from glass.heads.capture import ForwardPass
from glass.heads.interventions import Interventions, chain_taps
from glass.heads.results import Head
from model import GPT, Taps

CAPACITY_STEP = 64  # tokens by which the buffers grow


class CachedPass:
    """The activations of one text after the other, of a model with some heads ablated.

    A text shares the activations of the first tokens that it has in common with the text before,
    also if an exception ended the last pass.
    """

    def __init__(self, model: GPT, ablated: Sequence[Head] = ()) -> None:
        self.model = model
        self.interventions = Interventions(tuple(ablated))  # of the last read
        self.first_changed = 0  # first token that the last read computed anew
        self._ids: list[int] = []  # of the last read; the cache holds the first of them
        self._cache, self._buffers = _allocate(model, CAPACITY_STEP)

    @torch.no_grad()
    def read(self, ids: Sequence[int], hidden: Sequence[int] = ()) -> ForwardPass:
        """Run the model on at most block_size ids, with some tokens hidden from later ones.

        The tensors of the pass are views of buffers that the next read overwrites.
        """
        start = self._find_first_change(ids, hidden)
        if len(ids) > self._cache.capacity:
            self._grow(len(ids), start)
        self._ids = list(ids)
        self.interventions = self.interventions._replace(hidden=tuple(hidden))
        self.first_changed = start
        rewind_cache(self.model, self._cache, self._buffers.residuals, start)
        if start < len(ids):
            self._run(start)
        return self._buffers.first_tokens(len(ids))

    def _find_first_change(self, ids: Sequence[int], hidden: Sequence[int]) -> int:
        changed = set(hidden) ^ set(self.interventions.hidden)
        end = min(self._cache.length, len(ids), *(j + 1 for j in changed))
        for t in range(end):
            if ids[t] != self._ids[t]:
                return t
        return end

    def _grow(self, length: int, kept: int) -> None:
        capacity = -(-length // CAPACITY_STEP) * CAPACITY_STEP
        old = self._buffers.first_tokens(kept)
        self._cache, self._buffers = _allocate(self.model, capacity)
        new = self._buffers.first_tokens(kept)
        for name, values in vars(old).items():
            getattr(new, name).copy_(values)

    def _run(self, start: int) -> None:
        device = self._cache.tokens.device
        new = slice(start, len(self._ids))
        tokens = torch.tensor([self._ids[new]], device=device)  # (1, S)
        is_hidden = self.interventions.is_hidden(new.stop, device)

        buffers = self._buffers
        stores: Taps = {}
        for layer in range(self.model.config.n_layer):
            stores["residual", layer] = partial(_store, buffers.residuals[layer + 1, :, new])
            stores["heads", layer] = partial(_store, buffers.heads[layer, :, new])
            weights = buffers.weights[layer, :, :, new, : new.stop]  # (1, H, S, T)
            stores["weights", layer] = partial(_store, weights)

        with self.model.evaluating():
            x = self.model.embed(tokens, self._cache.previous_tokens, is_hidden)  # (1, S, C)
            buffers.residuals[0, :, new] = x
            self.model.run_blocks(
                tokens,
                self._cache,
                self.interventions.mask(new.stop, device, start),
                chain_taps(self.interventions.taps(), stores),
                entry=(0, x),
            )


def _store(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def _allocate(model: GPT, capacity: int) -> tuple[KVCache, ForwardPass]:
    """Allocate a cache of one row of `capacity` tokens, and a pass whose keys are the cache's."""
    c, dtype, device = model.config, model.head.weight.dtype, model.head.weight.device
    L, H = c.n_layer, c.n_head
    cache = KVCache(c, 1, capacity, device, dtype)
    buffers = ForwardPass(
        cache.tokens,
        torch.empty(L + 1, 1, capacity, c.n_embd, dtype=dtype, device=device),
        cache.keys,
        cache.values,
        torch.empty(L, 1, capacity, H, c.value_dim, dtype=dtype, device=device),
        # Above the diagonal nothing but zeros is ever written.
        torch.zeros(
            (L, 1, H, capacity, capacity),
            dtype=torch.promote_types(dtype, torch.float32),
            device=device,
        ),
    )
    return cache, buffers


def rewind_cache(model: GPT, cache: KVCache, residuals: Tensor, length: int) -> None:
    """Let a cache hold only the first `length` tokens of those whose keys and values it has.

    From the residual streams (L + 1, 1, T, C) come the unmixed keys of the last token, which the
    first smeared key of a later pass needs.
    """
    cache.length = length
    if length == 0 or not model.config.smear_keys:
        return
    rotary = model.rotary_at(length - 1, length)
    last = residuals[:, :, length - 1 : length].expand(-1, len(cache.tokens), -1, -1)
    for layer, block in enumerate(model.blocks):
        block.attention.project(block.norm_1(last[layer]), rotary, cache)  # stores these keys
