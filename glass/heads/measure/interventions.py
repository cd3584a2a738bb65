"""Interventions on a forward pass: outputs that are replaced or ablated, and hidden tokens."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model import Context, Taps
from run.row import Head

# The output of a head, or the value of a tap: ("mlp", 1), or ("attention", 1) with its bias.
Output = Head | tuple[str, int]


class Interventions(NamedTuple):
    """Changes of a forward pass over one text.

    A hidden token is masked from all later queries, in all layers and heads, and from later
    n-grams.
    """

    ablated: tuple[Output, ...] = ()  # outputs that are replaced
    hidden: tuple[int, ...] = ()  # tokens hidden from all later ones
    means: Mapping[tuple[str, int], Tensor] = {}  # by which they are, by tap; without them, by 0

    def taps(self) -> Taps:
        """Return the taps that ablate the outputs."""
        taps: Taps = {}
        heads: dict[int, list[int]] = {}  # numbers by layer
        for output in self.ablated:
            if isinstance(output, Head):
                heads.setdefault(output.layer, []).append(output.number)
            else:
                taps[output] = partial(replace_at, (), self.means.get(output, 0.0))
        for layer, numbers in heads.items():
            taps |= replace_heads(layer, [numbers], self.means.get(("heads", layer), 0.0))
        return taps

    def is_hidden(self, length: int, device: torch.device) -> Tensor | None:
        """Return which of `length` tokens are hidden, boolean (1, T); None if none is."""
        if not self.hidden:
            return None
        is_hidden = torch.zeros(1, length, dtype=torch.bool, device=device)
        is_hidden[0, [j for j in self.hidden if j < length]] = True
        return is_hidden


NO_INTERVENTIONS = Interventions()


def replace_heads(layer: int, heads: Sequence[Sequence[int]], values: Tensor | float) -> Taps:
    """Return the tap that replaces the outputs of some heads by `values`, up to (B, T, H, d_v).

    The heads heads[r] are replaced in row r of a batch; a single list applies to all rows. A batch
    of one row is expanded to a row for each list.
    """

    def replace(y: Tensor) -> Tensor:
        is_replaced = torch.zeros(len(heads), y.shape[2], dtype=torch.bool, device=y.device)
        for row, numbers in enumerate(heads):
            is_replaced[row, list(numbers)] = True
        return torch.where(is_replaced[:, None, :, None], values, y)

    return {("heads", layer): replace}


def replace_at(at: tuple[slice | int, ...], values: Tensor | float, x: Tensor) -> Tensor:
    """Return x with x[at] replaced by values: a tap, with its first two arguments bound."""
    x = x.clone()
    x[at] = values
    return x


def mask_hidden(is_hidden: Tensor | None, start: int = 0) -> Tensor | None:
    """Return the mask (R, 1, T - start, T) of queries from `start` on; None: causal.

    In row r, no later query may attend to a token that is hidden, `is_hidden` (R, T).
    """
    if is_hidden is None:
        return None
    positions = torch.arange(is_hidden.shape[1], device=is_hidden.device)
    queries = positions[start:, None]  # (S, 1)
    return (positions < queries) & ~is_hidden[:, None, None] | (positions == queries)


def chain_taps(*some: Taps) -> Taps:
    """Return taps that apply those of each argument, one after the other."""
    keys = {key for taps in some for key in taps}
    return {key: partial(_apply_all, [taps for taps in some if key in taps], key) for key in keys}


def _apply_all(chained: list[Taps], key: tuple[str, int], value: Tensor) -> Tensor:
    for taps in chained:
        value = Context(taps=taps).tap(*key, value)
    return value
