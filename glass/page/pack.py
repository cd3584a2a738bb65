"""Compress arrays of a snapshot and a model's weights for a page, in base64.

An attention map is a (T, T) table of weights, query row by key column. Only its lower triangle is
stored, row after row, one byte per weight.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LEVELS = 255  # levels of a byte between zero and the largest weight of a row
# Arrays of a snapshot that explain predictions, in the order in which they are packed.
TRIANGLES = ("token_effect", "token_effect_kl")  # only their lower triangles are stored
FLOATS = ("head_effect", "logit_lens", "logit_attribution", "predicted_probs")
IDS = ("predicted_ids", "promoted_and_suppressed_ids")


class PackedWeights(NamedTuple):
    """A model's compressed weights."""

    tensors: list[tuple[str, tuple[int, ...]]]  # names and shapes
    numbers: str  # in base64


class Packed(NamedTuple):
    """Two compressed parts of a snapshot."""

    parts: tuple[str, str]  # in base64
    largest: float  # top of their color scale
    words: dict[int, str]  # texts of the token ids that they contain

    @property
    def size(self) -> int:
        """Return the bytes that the parts take in a page."""
        return sum(len(part) for part in self.parts) + 200


class Blobs(list[str]):
    """The elements of compressed data in a page, in the order of their numbers."""

    @property
    def size(self) -> int:
        """Return the bytes that they take in a page."""
        return sum(map(len, self))

    def put(self, packed: Packed) -> list[float]:
        """Add both parts; return their numbers and the top of their color scale."""
        self.extend(packed.parts)
        return [len(self) - 2, len(self) - 1, float(f"{packed.largest:.6g}")]


def pack_maps(maps: np.ndarray, norms: np.ndarray) -> Packed:
    """Compress the attention patterns (L, H, T, T) and value norms (L, H, T) of one text.

    The first part has the weight of each query on the first token, (L, H, T), and the largest one
    on other tokens, (L, H, T), as float32; then one byte per weight on another token: its share of
    that largest weight; see `quantize`. So rows are as precise without the first token, which is
    often an attention sink. The second part has the norms as float32. `largest` is the largest
    product of a weight and a norm.
    """
    T = maps.shape[-1]
    lower = np.tri(T, dtype=bool)
    largest = 0.0
    first_weights = []
    row_maxima = []
    levels = []
    # One head at a time: in float64 all of them can take many gigabytes.
    for head_map, head_norms in zip(maps.reshape(-1, T, T), norms.reshape(-1, T)):
        known = zero_unknown(head_map)
        largest = max(largest, float((known * zero_unknown(head_norms)).max()))
        first_weights.append(known[:, 0].astype("<f4").tobytes())
        known[:, 0] = 0
        head_levels, head_maxima = quantize(known)
        row_maxima.append(head_maxima.astype("<f4").tobytes())
        levels.append(head_levels[lower].tobytes())
    weights = b"".join(first_weights + row_maxima + levels)
    return Packed((to_base64(weights), to_base64(norms.astype("<f4").tobytes())), largest, {})


def zero_unknown(values: np.ndarray) -> np.ndarray:
    """Replace NaN and infinite values, which a diverged model has, by 0."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def quantize(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize attention maps to one byte per weight: weight ≈ level · row maximum / LEVELS.

    The running sum is rounded instead of the weights. So each weight is off by less than a level,
    and so is the sum of a row, however many small weights it has. Levels (…, T, T) are uint8, row
    maxima (…, T) float32.
    """
    A = zero_unknown(A.astype(np.float64))
    maxima = A.max(axis=-1).astype(np.float32)  # exact, because weights are captured in float16
    scale = np.where(maxima > 0, maxima, 1).astype(np.float64)
    running = np.floor(np.cumsum(A * (LEVELS / scale)[..., None], axis=-1) + 0.5)
    return np.diff(running, axis=-1, prepend=0).clip(0, LEVELS).astype(np.uint8), maxima


def pack_predictions(arrays: Mapping[str, np.ndarray], probe: str) -> Packed | None:
    """Pack what explains a probe's predictions: numbers, then ids; None without token effects."""
    prefix = "" if probe == "text" else f"{probe}_"
    if f"{prefix}token_effect" not in arrays:
        return None
    effect = arrays[f"{prefix}token_effect"]
    lower = np.tri(len(effect), dtype=bool)
    numbers = [arrays[prefix + name][lower] for name in TRIANGLES]
    numbers += [arrays[prefix + name].ravel() for name in FLOATS]
    ids = np.concatenate([arrays[prefix + name].ravel() for name in IDS]).astype("<i4")
    named = zip(arrays[f"{prefix}named_ids"], arrays[f"{prefix}named_tokens"])
    words = {int(token_id): str(word) for token_id, word in named}
    largest = float(np.abs(effect[np.isfinite(effect)]).max(initial=1e-3))
    parts = (to_base64(pack_float16(np.concatenate(numbers))), to_base64(ids.tobytes()))
    return Packed(parts, largest, words)


def pack_weights(tensors: Mapping[str, Any]) -> PackedWeights | None:
    """Pack names, shapes and weights, of arrays or of tensors, as float16; None if not finite."""
    numbers = [np.ravel(tensor) for tensor in tensors.values()]
    largest_float16 = np.finfo(np.float16).max
    if not all((np.abs(some) <= largest_float16).all() for some in numbers):
        return None
    shapes = [(name, tensor.shape) for name, tensor in tensors.items()]
    return PackedWeights(shapes, to_base64(pack_float16(np.concatenate(numbers))))


def pack_float16(numbers: np.ndarray | Sequence[float]) -> bytes:
    """Return numbers as float16: all low bytes, then all high bytes, which compresses better."""
    with np.errstate(over="ignore"):
        halves = np.ravel(numbers).astype("<f2")
    return halves.view(np.uint8).reshape(-1, 2).T.tobytes()


def to_base64(data: bytes) -> str:
    """Compress bytes and encode them in base64."""
    return base64.b64encode(zlib.compress(data)).decode()
