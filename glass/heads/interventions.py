"""Interventions on a forward pass: heads that are ablated and tokens that are hidden."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from glass.heads.results import Head
from model import Taps, tap


class Interventions(NamedTuple):
    """Changes of a forward pass over one text.

    A hidden token is masked from all later queries, in all layers and heads, and from later
    n-grams and smeared keys.
    """

    ablated: tuple[Head, ...] = ()  # heads whose output is set to zero
    hidden: tuple[int, ...] = ()  # tokens hidden from all later ones

    def taps(self) -> Taps:
        """Return the taps that ablate the heads."""
        numbers: dict[int, list[int]] = {}
        for layer, number in self.ablated:
            numbers.setdefault(layer, []).append(number)
        return {("heads", layer): partial(_zero_heads, heads) for layer, heads in numbers.items()}

    def is_hidden(self, length: int, device: torch.device) -> Tensor | None:
        """Return which of `length` tokens are hidden, boolean (1, T); None if none is."""
        if not self.hidden:
            return None
        is_hidden = torch.zeros(1, length, dtype=torch.bool, device=device)
        is_hidden[0, [j for j in self.hidden if j < length]] = True
        return is_hidden

    def mask(self, length: int, device: torch.device, start: int = 0) -> Tensor | None:
        """Return the mask (T - start, T) of queries from `start` on; None if no token is hidden."""
        is_hidden = self.is_hidden(length, device)
        if is_hidden is None:
            return None
        positions = torch.arange(length, device=device)
        queries = positions[start:, None]  # (T - start, 1)
        return (positions < queries) & ~is_hidden | (positions == queries)


NO_INTERVENTIONS = Interventions()


def _zero_heads(heads: list[int], y: Tensor) -> Tensor:
    y = y.clone()
    y[:, :, heads] = 0
    return y


def chain_taps(*some: Taps) -> Taps:
    """Return taps that apply those of each argument, one after the other."""
    keys = {key for taps in some for key in taps}
    return {key: partial(_apply_all, [taps for taps in some if key in taps], key) for key in keys}


def _apply_all(chained: list[Taps], key: tuple[str, int], value: Tensor) -> Tensor:
    for taps in chained:
        value = tap(taps, *key, value)
    return value
