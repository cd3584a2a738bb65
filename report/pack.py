"""Attention maps, and what predictions needed → compressed bytes for the page. A map is a (T, T)
table of weights, query row by key column; only its lower triangle is kept, row after row, in a byte
a weight."""

import base64
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from attention_maps.scores import without_first_token

PROBES = ("text", "repeated")
LEVELS = 255  # steps of a byte between zero and the row's largest weight
LONGEST_TOKEN = 100  # characters shown
TRIANGLES = ("token_effect", "token_effect_kl")  # of which the lower triangles come first
FLOATS = ("head_effect", "logit_lens", "logit_attribution", "predicted_probs")
IDS = ("predicted_ids", "promoted_and_suppressed_ids")


class Probe(NamedTuple):
    """What a snapshot holds of a probe beside its maps."""

    shape: tuple[int, int, int]  # L, H, T
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    period: int | None


class Packed(NamedTuple):
    """Two parts of a snapshot in base64, and the top of the scale of their colours."""

    parts: tuple[str, str]
    largest: float
    words: dict[int, str]  # tokens that they name by their ids

    @property
    def size(self) -> int:
        return sum(map(len, self.parts)) + 200


class Shot:
    """A snapshot to pack; `held()` opens what its .npz holds. What was packed is cached: the page
    after the next snapshot costs the work of that one alone."""

    def __init__(self, step: int, load: Callable[[], AbstractContextManager]):
        self.step, self.held, self._cache = step, load, {}

    @cached_property
    def probes(self) -> dict[str, Probe]:
        """The probes it has; none where the file cannot be read, or holds something else."""
        try:
            with self.held() as held:
                if isinstance(held, np.lib.npyio.NpzFile) and held.zip.testzip():
                    return {}  # a part is not what was written
                return {name: describe(held, name) for name in PROBES if name in held}
        except Exception:  # of many kinds: numpy and zipfile have none of their own
            return {}

    def packed(self, name: str, what: str) -> Packed | None:
        """What `pack` gives, from the cache where it was packed before."""
        if (name, what) not in self._cache:
            self._cache[name, what] = self.pack(name, what)
        return self._cache[name, what]

    def pack(self, name: str, what: str) -> Packed | None:
        """A probe's `maps`; `rest`, these without the first token; or its `needs`, None where they
        were not measured."""
        with self.held() as held:
            if what in ("maps", "rest"):
                maps = shown(held, name)
                if what == "rest":
                    maps = np.pad(without_first_token(maps), ((0, 0), (0, 0), (1, 0), (1, 0)))
                return pack_maps(maps, shown(held, f"{name}_value_norms"))
            with suppress(KeyError, ValueError, TypeError):  # it holds something else
                return pack_needs(held, name)


def shown(held, key: str) -> np.ndarray:
    """What a snapshot holds under a key; of the repeats the row with the longest period."""
    if not key.startswith("repeated"):
        return held[key]
    row = np.argmax(held["repeated_periods"])
    return held[key][row] if key in ("repeated_tokens", "repeated_ids") else held[key][:, row]


def describe(held, name: str) -> Probe:
    """What a snapshot holds of a probe; a ValueError where it is something else."""
    period = int(held["repeated_periods"].max()) if name == "repeated" else None
    tokens = tuple(map(str, shown(held, f"{name}_tokens")))
    maps, norms = shown(held, name), shown(held, f"{name}_value_norms")
    shape, is_float = maps.shape[:3], {maps.dtype.kind, norms.dtype.kind} == {"f"}
    if not (
        is_float
        and maps.size
        and maps.shape == (*shape, len(tokens))
        and shape[2:] == maps.shape[3:]
        and norms.shape == shape
    ):
        raise ValueError(f"its {name} is no maps")
    ids = shown(held, f"{name}_ids") if f"{name}_ids" in held else ()
    return Probe(shape, tokens, tuple(map(int, ids)), period)


# --- packed ---------------------------------------------------------------------------------------


def pack_maps(maps: np.ndarray, norms: np.ndarray) -> Packed:
    """Pack maps (L, H, T, T) and value norms (L, H, T): the rows' largest weights (L, H, T) as
    little-endian float32, then the codes of the weights; the scale ends at the largest product."""
    T = maps.shape[-1]
    lower = np.tri(T, dtype=bool)
    largest, scales, codes = 0.0, [], []
    # One head at a time: in float64 all of them can be many gigabytes.
    for head, norm in zip(maps.reshape(-1, T, T), norms.reshape(-1, T)):
        largest = max(largest, float(np.nan_to_num(head * norm).max()))
        code, scale = to_bytes(head)
        scales.append(scale.astype("<f4").tobytes())
        codes.append(code[lower].tobytes())
    parts = b"".join(scales + codes), norms.astype("<f4").tobytes()
    return Packed(tuple(map(in_base64, parts)), largest, {})


def to_bytes(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps (…, T, T) → codes (…, T, T) uint8 and each row's largest weight (…, T) float32:
    weight ≈ code · largest / LEVELS.

    The running sum is rounded, not the weights: each is off by less than a level, and so is the
    row's sum, however many small weights it has."""
    A = np.nan_to_num(A.astype(np.float64))
    largest = A.max(axis=-1).astype(np.float32)  # exact: a captured weight
    scale = np.where(largest > 0, largest, 1).astype(np.float64)
    running = np.floor(np.cumsum(A * (LEVELS / scale)[..., None], axis=-1) + 0.5)
    return np.diff(running, axis=-1, prepend=0).clip(0, LEVELS).astype(np.uint8), largest


def pack_needs(held, name: str) -> Packed | None:
    """Pack what the predictions of a probe needed, and the cards of its tokens: numbers, ids."""
    prefix = "" if name == "text" else f"{name}_"
    if f"{prefix}token_effect" not in held:
        return None
    need = held[f"{prefix}token_effect"]
    numbers = [
        *(held[prefix + key][np.tri(len(need), dtype=bool)] for key in TRIANGLES),
        *(held[prefix + key] for key in FLOATS),
    ]
    floats = halves(np.concatenate([part.ravel() for part in numbers]))
    ids = np.concatenate([held[prefix + key].ravel() for key in IDS]).astype("<i4")
    words = dict(zip(held[f"{prefix}named_ids"].tolist(), map(str, held[f"{prefix}named_tokens"])))
    largest = float(np.abs(need[np.isfinite(need)]).max(initial=1e-3))
    return Packed((in_base64(floats), in_base64(ids.tobytes())), largest, words)


def pack_weights(tensors: dict[str, np.ndarray]) -> tuple[list, str]:
    """Weights as float16, one after the other, then n-grams' keys as float64: the name and shape of
    each, and all in base64."""
    numbers = [tensor.ravel() for name, tensor in tensors.items() if name != "ngrams.keys"]
    keys = tensors.get("ngrams.keys", np.empty(0)).astype("<f8")
    packed = halves(np.concatenate(numbers)) + keys.tobytes()
    return [[name, tensor.shape] for name, tensor in tensors.items()], in_base64(packed)


def halves(numbers: np.ndarray) -> bytes:
    """Numbers as float16: the low bytes of all, then the high ones, since like bytes compress
    better. What is too large for float16 shows as unknown."""
    with np.errstate(over="ignore"):
        return numbers.ravel().astype("<f2").view(np.uint8).reshape(-1, 2).T.tobytes()


def in_base64(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


# --- as much as fits ------------------------------------------------------------------------------


class Blobs(list):
    """What is in the page in base64, an element each; the page's data has their places."""

    def put(self, packed: Packed) -> list:
        """Add what is packed: [the place of its first part, of its second, its largest]."""
        self.extend(packed.parts)
        return [len(self) - 2, len(self) - 1, float(f"{packed.largest:.6g}")]


def thin(items: list, most: int) -> list:
    """At most `most` of the items, evenly, with the last, and the first where two have room."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def maps_that_fit(
    shots: list[Shot], names: tuple[str, ...], room: int, blobs: Blobs
) -> dict | None:
    """Add as much of the snapshots' maps to `blobs` as fits into `room` bytes, evenly, and give
    what the page needs to know of those; None where there is none, or no room for it."""
    # As the newest has them: another page would show other tokens.
    left = [shot for shot in shots if shot.probes == shots[-1].probes]
    names = [name for name in names if shots and name in shots[-1].probes]
    most, tokens = len(left), sum(len(str(shots[-1].probes[name].tokens)) for name in names)
    while most:
        chosen = thin(left, most)
        sizes = (shot.packed(name, "maps").size for shot in chosen for name in names)
        if all(total <= room for total in accumulate(sizes, initial=tokens)):
            return put_maps(chosen, names, blobs) | {"snapshotCount": len(shots)}
        most //= 2
    return None


def put_maps(shots: list[Shot], names: tuple[str, ...], blobs: Blobs) -> dict:
    """Add the maps of a run's snapshots to `blobs`; return what the page needs to know of them."""
    probes = [
        {
            "name": name,
            "period": probe.period,
            "T": probe.shape[2],
            "tokens": [clipped(token, LONGEST_TOKEN) for token in probe.tokens],
            "ids": probe.ids,
            "maps": [blobs.put(shot.packed(name, "maps")) for shot in shots],
        }
        for name, probe in shots[-1].probes.items()
        if name in names
    ]
    shape = next(iter(shots[-1].probes.values())).shape[:2]
    return {"steps": [shot.step for shot in shots], "shape": shape, "probes": probes}


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
