"""Taps: functions that read or replace values inside a forward pass."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

# Functions by (name, layer) that a forward pass calls with a value: they return its replacement, or
# None to keep it.
Taps = dict[tuple[str, int], Callable[[Tensor], Tensor | None]]
# weights: attention is written out instead of fused only if they are tapped; heads: of each head
# before W_O; attention, mlp: updates ΔE, mlp only if the model has MLPs; residual: after the block;
# embedding: in layer 0 only.
TAP_NAMES = ("embedding", "q", "k", "v", "weights", "heads", "attention", "mlp", "residual")


def tap(taps: Taps | None, name: str, layer: int, value: Tensor) -> Tensor:
    """Return the value, or its replacement by the tap of this name and layer.

    Raises:
        ValueError: If the replacement has another shape; only the number of rows may differ.
    """
    if not taps or (name, layer) not in taps:
        return value
    if value.requires_grad:
        value = value.clone()  # autograd may have saved the value, which a tap may change in place
    replacement = taps[name, layer](value)
    if replacement is None:
        return value
    if not isinstance(replacement, Tensor) or replacement.shape[1:] != value.shape[1:]:
        returned = getattr(replacement, "shape", type(replacement).__name__)
        raise ValueError(
            f"the tap {(name, layer)} returned {returned}; return a tensor of the shape of its "
            f"value, {tuple(value.shape)}, or None to keep it"
        )
    return replacement


def chain_taps(*some: Taps) -> Taps:
    """Return taps that apply those of each argument, one after the other."""
    keys = {key for taps in some for key in taps}
    return {key: partial(_apply_all, [taps for taps in some if key in taps], key) for key in keys}


def _apply_all(chained: list[Taps], key: tuple[str, int], value: Tensor) -> Tensor:
    for taps in chained:
        value = tap(taps, *key, value)
    return value
