"""A forward pass over a text that is edited: only tokens from the first change on are computed."""

from collections.abc import Sequence

import torch

from glass.heads.capture import ForwardPass, allocate_pass, record
from glass.heads.interventions import Interventions
from glass.heads.results import Head
from model import GPT

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
        self._ids: list[int] = []  # whose activations the buffers hold
        self._buffers = allocate_pass(model, 1, CAPACITY_STEP)

    def read(self, ids: Sequence[int], hidden: Sequence[int] = ()) -> ForwardPass:
        """Run the model on at most block_size ids, with some tokens hidden from later ones.

        The tensors of the pass are views of buffers that the next read overwrites.
        """
        start = self._find_first_change(ids, hidden)
        if len(ids) > self._buffers.tokens.shape[1]:
            self._grow(len(ids), start)
        self._ids = list(ids[:start])
        self.interventions = self.interventions._replace(hidden=tuple(hidden))
        self.first_changed = start
        forward = self._buffers.first_tokens(len(ids))
        if start < len(ids):
            forward.tokens[0, start:] = torch.tensor(ids[start:])
            record(self.model, forward, self.interventions, start=start)
        self._ids = list(ids)
        return forward

    def _find_first_change(self, ids: Sequence[int], hidden: Sequence[int]) -> int:
        changed = set(hidden) ^ set(self.interventions.hidden)
        end = min(len(self._ids), len(ids), *(j + 1 for j in changed))
        for t in range(end):
            if ids[t] != self._ids[t]:
                return t
        return end

    def _grow(self, length: int, kept: int) -> None:
        capacity = -(-length // CAPACITY_STEP) * CAPACITY_STEP
        old = self._buffers.first_tokens(kept)
        self._buffers = allocate_pass(self.model, 1, capacity)
        for name, values in vars(self._buffers.first_tokens(kept)).items():
            values.copy_(getattr(old, name))
