"""Read the snapshots of a run, and choose as many of them as fit a page."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile

from common.files import list_folder, ordinary_file
from glass.heads.scores import without_first_token
from glass.page.pack import Blobs, Packed, pack_maps, pack_predictions
from glass.page.values import clip_text, thin

PROBES = ("text", "repeated")
MAX_TOKEN_LENGTH = 100  # characters

Arrays = Mapping[str, np.ndarray]
Part = Literal["maps", "maps_without_first", "predictions"]


class Probe(NamedTuple):
    """Shape and tokens of one probe in a snapshot."""

    shape: tuple[int, int, int]  # L, H, T
    tokens: tuple[str, ...]  # as text
    ids: tuple[int, ...]  # of the tokens; empty if the snapshot has none
    period: int | None  # tokens after which they repeat; None for text


class Snapshot:
    """A snapshot whose packed parts are cached, so that the next page packs new snapshots only."""

    def __init__(
        self, step: int, open_arrays: Callable[[], AbstractContextManager[Arrays]]
    ) -> None:
        self.step = step
        self.open_arrays = open_arrays
        # Packs a part of a probe; returns None if the snapshot has no such predictions.
        self.pack = cache(self._pack)

    @cached_property
    def probes(self) -> dict[str, Probe]:
        """Return its probes; empty if the file cannot be read or holds something else."""
        try:
            with self.open_arrays() as arrays:
                if isinstance(arrays, NpzFile) and arrays.zip and arrays.zip.testzip():
                    return {}  # a member is damaged
                return {name: read_probe(arrays, name) for name in PROBES if name in arrays}
        except Exception:  # numpy and zipfile raise many types for damaged files
            return {}

    def pack_maps(self, probe: str, part: Part = "maps") -> Packed:
        """Pack the maps of a probe that the snapshot has."""
        packed = self.pack(probe, part)
        assert packed is not None, f"a snapshot with {probe} has its maps"
        return packed

    def _pack(self, probe: str, part: Part) -> Packed | None:
        with self.open_arrays() as arrays:
            if part == "predictions":
                with suppress(Exception):  # the arrays are something else
                    return pack_predictions(arrays, probe)
                return None
            maps = shown_row(arrays, probe)
            if part == "maps_without_first":
                maps = np.pad(without_first_token(maps), ((0, 0), (0, 0), (1, 0), (1, 0)))
            return pack_maps(maps, shown_row(arrays, f"{probe}_value_norms"))


def shown_row(arrays: Arrays, name: str) -> np.ndarray:
    """Return an array of a snapshot; for repeated tokens, only the row with the longest period."""
    array = arrays[name]
    if not name.startswith("repeated"):
        return array
    row = np.argmax(arrays["repeated_periods"])
    return array[row] if name in ("repeated_tokens", "repeated_ids") else array[:, row]


def read_probe(arrays: Arrays, name: str) -> Probe:
    """Return what a snapshot holds of a probe; raise `ValueError` if its arrays do not fit."""
    period = int(arrays["repeated_periods"].max()) if name == "repeated" else None
    tokens = tuple(str(token) for token in shown_row(arrays, f"{name}_tokens"))
    maps = shown_row(arrays, name)
    norms = shown_row(arrays, f"{name}_value_norms")
    is_float = maps.dtype.kind == "f" and norms.dtype.kind == "f"
    if not is_float or maps.ndim != 4 or not maps.size:
        raise ValueError(f"{name} is not a float array of shape (L, H, T, T)")
    L, H, T, keys = maps.shape
    if keys != T or len(tokens) != T or norms.shape != (L, H, T):
        raise ValueError(f"{name} has maps {maps.shape} and norms {norms.shape}")
    ids = shown_row(arrays, f"{name}_ids") if f"{name}_ids" in arrays else []
    return Probe((L, H, T), tokens, tuple(int(token_id) for token_id in ids), period)


# --- the snapshots of a run -----------------------------------------------------------------------


def list_snapshots(run_dir: Path) -> list[Snapshot]:
    """Return the snapshots of a run in the order of their steps."""
    known = _known_snapshots(run_dir)
    snapshots = []
    for path in list_folder(run_dir / "attention", "step_*.npz"):
        match = re.fullmatch(r"step_(\d+)", path.stem)
        if match is None:
            continue
        version = (path, 0, 0)
        with suppress(OSError):  # a link to nothing is a snapshot that cannot be read
            stat = path.stat()
            version = (path, stat.st_mtime_ns, stat.st_size)
        if version not in known:
            known[version] = Snapshot(int(match[1]), partial(_open_arrays, path))
        snapshots.append(known[version])
    return sorted(snapshots, key=lambda snapshot: snapshot.step)


@lru_cache(maxsize=2)
def _known_snapshots(run_dir: Path) -> dict[tuple[Path, int, int], Snapshot]:
    """Return the snapshots that pages of a run have shown, by file version."""
    return {}


def _open_arrays(path: Path) -> NpzFile:
    return np.load(ordinary_file(path))


# --- what fits a page -----------------------------------------------------------------------------


def pack_fitting_maps(
    snapshots: Sequence[Snapshot],
    probes: Sequence[str],
    room: int,
    blobs: Blobs,
    steps_with_weights: Collection[int] = (),
) -> dict[str, Any] | None:
    """Add the maps of as many snapshots as fit in `room` bytes to `blobs`, and describe them.

    They are evenly spaced, besides those whose weights are in the page. None if none fits.
    """
    if not snapshots:
        return None
    newest = snapshots[-1]
    alike = [snapshot for snapshot in snapshots if snapshot.probes == newest.probes]
    names = [name for name in probes if name in newest.probes]
    token_bytes = sum(len(str(newest.probes[name].tokens)) for name in names)
    count = len(alike)
    while count:
        spaced = {snapshot.step for snapshot in thin(alike, count)}.union(steps_with_weights)
        chosen = [snapshot for snapshot in alike if snapshot.step in spaced]
        sizes = (snapshot.pack_maps(name).size for snapshot in chosen for name in names)
        if all(total <= room for total in accumulate(sizes, initial=token_bytes)):
            return {**_describe_maps(chosen, names, blobs), "snapshotCount": len(snapshots)}
        count //= 2
    return None


def _describe_maps(
    snapshots: Sequence[Snapshot], names: Sequence[str], blobs: Blobs
) -> dict[str, Any]:
    newest = snapshots[-1]
    probes = [
        {
            "name": name,
            "period": probe.period,
            "T": probe.shape[2],
            "tokens": [clip_text(token, MAX_TOKEN_LENGTH) for token in probe.tokens],
            "ids": probe.ids,
            "maps": [blobs.put(snapshot.pack_maps(name)) for snapshot in snapshots],
        }
        for name, probe in newest.probes.items()
        if name in names
    ]
    shape = next(iter(newest.probes.values())).shape[:2]
    return {"steps": [snapshot.step for snapshot in snapshots], "shape": shape, "probes": probes}


def pack_fitting_predictions(
    snapshots: Sequence[Snapshot], probes: Sequence[str], room: int
) -> dict[tuple[str, int], Packed]:
    """Pack predictions, newest first, that fit in `room` bytes; return them by probe and step."""
    fitting = {}
    for snapshot in reversed(snapshots):
        for name in probes:
            packed = snapshot.pack(name, "predictions") if name in snapshot.probes else None
            if packed is not None and packed.size <= room:
                room -= packed.size
                fitting[name, snapshot.step] = packed
    return fitting
