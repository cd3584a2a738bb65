"""Attention maps → compressed bytes for the page: exactly, in a byte a weight, or in blocks of
tokens, whichever fits.

A map is a (T, T) table of weights, query row by key column; only its lower triangle is kept, row
after row.
"""

import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from report.explained import Explained, pack_explained

Packed = tuple[bytes, bytes | None]  # maps and value norms, compressed
BLOCKS = {"blocks": 64, "wide blocks": 32}  # of tokens along a side of a map, at most
LEVELS = 255  # steps of a byte between zero and the row's largest weight
SAMPLED_HEADS = 8  # heads that are packed to estimate the size of all
PROBES = ("text", "repeat")

# How the maps of all snapshots, and the full rows of the newest, are kept: the first plan that fits
# is taken. Single tokens at the newest step are worth more than narrow blocks at all steps.
TEXT_ROWS = {"text": "bytes"}
BOTH_ROWS = {"text": "bytes", "repeat": "bytes"}
PLANS = (("float16", {}), ("bytes", {}), ("blocks", {"text": "float16", "repeat": "float16"}),
         ("blocks", BOTH_ROWS), ("blocks", TEXT_ROWS), ("wide blocks", BOTH_ROWS),
         ("wide blocks", TEXT_ROWS), ("blocks", {}), ("wide blocks", {}))


def block_size(T: int, most: int) -> int:
    """Tokens along a side of a block: the smallest power of two for at most `most` blocks."""
    b = 1
    while -(-T // b) > most:
        b *= 2
    return b


def in_blocks(A: np.ndarray, b: int) -> np.ndarray:
    """Maps (…, T, T) → (…, n, n): the weight on the keys of a block, averaged over the queries of a
    block. A row still sums to 1."""
    starts, queries = blocks_of(A.shape[-1], b)
    keys = np.add.reduceat(A.astype(np.float32), starts, axis=-1)  # (…, T, n)
    return np.add.reduceat(keys, starts, axis=-2) / queries[:, None].astype(np.float32)


def mean_in_blocks(norms: np.ndarray, b: int) -> np.ndarray:
    """Norms (…, T) → (…, n), the mean over the tokens of each block."""
    starts, sizes = blocks_of(norms.shape[-1], b)
    return np.add.reduceat(norms, starts, axis=-1) / sizes


def blocks_of(T: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each block and its number of tokens, (n,) each."""
    starts = np.arange(0, T, b)
    return starts, np.minimum(starts + b, T) - starts


def to_bytes(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps (…, T, T) → codes (…, T, T) uint8 and each row's largest weight (…, T) float32:
    weight ≈ code · largest / LEVELS.

    The running sum is rounded, not the weights: each is off by less than a level, and so is the
    row's sum, however many small weights it has.
    """
    A = np.nan_to_num(A.astype(np.float64))
    largest = A.max(axis=-1).astype(np.float32)  # exact: a captured weight
    scale = np.where(largest > 0, largest, 1).astype(np.float64)
    running = np.floor(np.cumsum(A * (LEVELS / scale)[..., None], axis=-1) + 0.5)
    return np.diff(running, axis=-1, prepend=0).clip(0, LEVELS).astype(np.uint8), largest


def pack_maps(A: np.ndarray, kind: str) -> bytes:
    """Maps (L, H, n, n), of tokens or of blocks, as compressed bytes.

    float16: the low bytes of all weights, then the high ones, since like bytes compress better.
    otherwise: the rows' largest weights (L, H, n) as little-endian float32, then the codes.
    """
    lower = np.tri(A.shape[-1], dtype=bool)
    if kind == "float16":
        halves = np.stack([head[lower] for layer in A for head in layer]).astype("<f2")
        return zlib.compress(halves.reshape(-1).view(np.uint8).reshape(-1, 2).T.tobytes())
    scales, codes = [], []
    # One head at a time: in float64 all of them can be many gigabytes.
    for head in A.reshape(-1, *A.shape[-2:]):
        code, largest = to_bytes(head)
        scales.append(largest.astype("<f4"))
        codes.append(code[lower])
    return zlib.compress(np.concatenate(scales).tobytes() + np.concatenate(codes).tobytes())


def as_blocks(A: np.ndarray, b: int) -> np.ndarray:
    """Maps (L, H, T, T) in blocks of b tokens; a head at a time, since float32 takes much."""
    return A if b == 1 else np.stack([[in_blocks(head, b) for head in layer] for layer in A])


def largest_weighted(A: np.ndarray, norms: np.ndarray) -> float:
    """The largest weight times value norm, of maps (L, H, n, n) and norms (L, H, n)."""
    heads = zip(A.reshape(-1, *A.shape[2:]), norms.reshape(-1, A.shape[-1]))
    return max(float(np.nan_to_num(head * norm).max()) for head, norm in heads)


@dataclass(frozen=True)
class Probe:
    """What a snapshot holds of one probe."""

    shape: tuple[int, int, int]  # L, H, T
    tokens: tuple[str, ...] | None  # None where they are not known
    period: int | None
    has_norms: bool
    sizes: dict[str, int] = field(compare=False)  # kind → bytes that packing would take


class Shot:
    """A snapshot to embed; `load()` opens what its .npz holds.

    What was packed is kept: the page after the next snapshot costs the work of that snapshot alone.
    """

    def __init__(self, step: int, load: Callable[[], AbstractContextManager]):
        self.step, self._load, self._kept, self.largest = step, load, {}, {}
        self._explained: dict[str, Explained] | None = None

    def probes(self) -> dict[str, Probe]:
        """The probes it has; none where the file cannot be read."""
        if "probes" not in self._kept:
            try:
                with self._load() as held:
                    self._kept["probes"] = {name: survey(held, name) for name in PROBES
                                            if name in held}
            except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
                self._kept["probes"] = {}
        return self._kept["probes"]

    def pack(self, name: str, kind: str, b: int = 1) -> Packed:
        """The maps and the value norms of a probe; `largest[name, b]` has their largest product."""
        if (name, kind, b) not in self._kept:
            with self._load() as held:
                maps, norms = maps_of(held, name)
            maps, packed = as_blocks(maps, b), None
            if norms is not None:
                norms = mean_in_blocks(norms, b) if b > 1 else norms
                packed = zlib.compress(np.ascontiguousarray(norms, dtype="<f4").tobytes())
                self.largest[name, b] = largest_weighted(maps, norms)
            self._kept[name, kind, b] = pack_maps(maps, kind), packed
        return self._kept[name, kind, b]

    def explained(self) -> dict[str, Explained]:
        """What it tells of the predictions of each probe, as far as it does."""
        if self._explained is None:
            found = {}
            if self.probes():
                with self._load() as held:
                    found = {name: pack_explained(held, name) for name in self.probes()}
            self._explained = {name: one for name, one in found.items() if one}
        return self._explained

    def keep_only(self, kinds: set[str]) -> None:
        """Forget what was packed in other ways: full rows of an older snapshot are large."""
        self._kept = {key: value for key, value in self._kept.items()
                      if key == "probes" or key[1] in kinds}


def maps_of(held, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A probe's maps (L, H, T, T) and value norms (L, H, T); of the repeats, the row with the
    longest period."""
    norms = held.get(f"{name}_value_norms")
    if name == "text":
        return held["text"], norms
    row = int(np.argmax(held["repeat_periods"]))
    return held["repeat"][:, row], None if norms is None else norms[:, row]


def survey(held, name: str) -> Probe:
    maps, norms = maps_of(held, name)
    L, H, T, _ = maps.shape
    row = int(np.argmax(held["repeat_periods"])) if name == "repeat" else None
    tokens = held.get(f"{name}_tokens")
    if tokens is not None:
        tokens = tuple(map(str, tokens if row is None else tokens[row]))
    some = np.unique(np.linspace(0, L * H - 1, SAMPLED_HEADS).astype(int))
    sample = maps.reshape(1, L * H, T, T)[:, some]
    extra = 0 if norms is None else 4 * L * H * T
    blocks = {"bytes": 1, **{kind: block_size(T, most) for kind, most in BLOCKS.items()}}
    by_block = {b: len(pack_maps(as_blocks(sample, b), "bytes")) for b in set(blocks.values())}
    packed = {"float16": (1, len(pack_maps(sample, "float16")))}
    packed |= {kind: (b, by_block[b]) for kind, b in blocks.items()}
    sizes = {kind: size * L * H // len(some) + extra // b for kind, (b, size) in packed.items()}
    period = None if row is None else int(held["repeat_periods"][row])
    return Probe((L, H, T), tokens, period, norms is not None, sizes)


@dataclass(frozen=True)
class Embedded:
    """Maps that fit into a page; each dictionary's keys are the names of probes."""

    steps: list[int]
    of: int  # snapshots there are
    probes: dict[str, Probe]
    kinds: dict[str, tuple[str, int]]  # kind, tokens along a block
    packed: dict[str, list[Packed]]  # one for each step
    rows: dict[str, tuple[str, Packed]]  # kind and full rows of the newest, where they are kept
    largest: dict[tuple[str, int], float]  # probe, tokens in a block → largest value-weighted cell


def embed(shots: list[Shot], room: int, plans=PLANS) -> Embedded | None:
    """Pack the snapshots, in the order of their steps, into at most `room` bytes of base64; None
    where nothing can be shown.

    Goes down the plans until one fits. Where none does, snapshots are thinned evenly, keeping the
    first and the last.
    """
    shots = [shot for shot in shots if shot.probes()]
    if not shots:
        return None
    probes, of = shots[-1].probes(), len(shots)
    # A run that went on under a later version may have changed its repeats: they are left out.
    alike = {name: probe for name, probe in probes.items()
             if all(shot.probes().get(name) == probe for shot in shots)}
    if not alike:
        shots = [shot for shot in shots if shot.probes() == probes]
    probes = alike or probes
    while True:
        for kind, rows in plans:
            if estimate(shots, kind, rows) <= room:
                found = pack_all(shots, of, probes, kind, rows, room)
                if found:
                    return found
        if len(shots) == 1:
            return None
        keep = np.linspace(0, len(shots) - 1, max(2, len(shots) // 2)).round().astype(int)
        shots = [shots[i] for i in keep] if len(shots) > 2 else shots[-1:]


def estimate(shots: list[Shot], kind: str, rows: dict[str, str]) -> float:
    """Bytes of base64 that a plan would take, from some heads of some snapshots."""
    some = {0, len(shots) // 2, len(shots) - 1}
    sizes = [probe.sizes[kind] for i in some for probe in shots[i].probes().values()]
    maps = sum(sizes) / len(some) * len(shots)
    newest = shots[-1].probes()
    full = sum(newest[name].sizes[how] for name, how in rows.items() if name in newest)
    return (maps + full) * 4 / 3


def in_base64(packed: Packed) -> int:
    """Bytes that they take in a page, each in an element of its own."""
    return sum(-(-len(part) // 3) * 4 + 80 for part in packed if part is not None)


def pack_all(shots: list[Shot], of: int, probes: dict[str, Probe], kind: str, rows: dict[str, str],
             room: int) -> Embedded | None:
    """What a plan embeds; None as soon as that is more than `room`."""
    kinds, packed, newest = {}, {name: [] for name in probes}, {}
    for name, probe in probes.items():
        b = block_size(probe.shape[2], BLOCKS[kind]) if kind in BLOCKS else 1
        kinds[name] = "bytes" if kind in BLOCKS and b == 1 else kind, b
        if name in rows and b > 1:
            newest[name] = rows[name], shots[-1].pack(name, rows[name])
            room -= in_base64(newest[name][1])
        for shot in shots:
            packed[name].append(shot.pack(name, *kinds[name]))
            room -= in_base64(packed[name][-1])
            if room < 0:
                return None
    for shot in shots[:-1]:
        shot.keep_only({kind for kind, _ in kinds.values()})
    largest: dict[tuple[str, int], float] = {}
    for key, value in (item for shot in shots for item in shot.largest.items()):
        largest[key] = max(value, largest.get(key, 0.0))
    return Embedded([shot.step for shot in shots], of, probes, kinds, packed, newest, largest)
