"""Read the snapshots of a run, and choose as many of them as fit a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile

from common.files import list_folder, parse_step
from glass.heads.measure.stored_weights import order_by_importance
from glass.page.pack import Blobs, Packed, pack_maps, pack_predictions

PROBES = ("text", "repeated")

Arrays = Mapping[str, np.ndarray]


class Probe(NamedTuple):
    """Shape and tokens of one probe in a snapshot."""

    shape: tuple[int, ...]  # L, H, T
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
        self.pack_maps = cache(self._pack_maps)
        self.pack_predictions = cache(self._pack_predictions)

    @cached_property
    def probes(self) -> dict[str, Probe]:
        """Return its probes; empty if the file cannot be read."""
        try:
            with self.open_arrays() as arrays:
                if isinstance(arrays, NpzFile) and arrays.zip and arrays.zip.testzip():
                    return {}  # a member is damaged
                if arrays.get("step", self.step) != self.step:
                    return {}  # it is a copy of another snapshot
                return {name: read_probe(arrays, name) for name in PROBES if name in arrays}
        except Exception:  # numpy and zipfile raise many types for damaged files
            return {}

    def _pack_maps(self, probe: str) -> Packed:
        with self.open_arrays() as arrays:
            return pack_maps(shown_row(arrays, probe), shown_row(arrays, f"{probe}_value_norms"))

    def _pack_predictions(self, probe: str) -> Packed | None:
        with self.open_arrays() as arrays:
            return pack_predictions(arrays, probe)


def shown_row(arrays: Arrays, name: str) -> np.ndarray:
    """Return an array of a snapshot; for repeated tokens, only the row with the longest period."""
    array = arrays[name]
    if not name.startswith("repeated"):
        return array
    row = np.argmax(arrays["repeated_periods"])
    return array[row] if name in ("repeated_tokens", "repeated_ids") else array[:, row]


def read_probe(arrays: Arrays, name: str) -> Probe:
    """Return what a snapshot holds of a probe."""
    period = int(arrays["repeated_periods"].max()) if name == "repeated" else None
    tokens = tuple(str(token) for token in shown_row(arrays, f"{name}_tokens"))
    ids = shown_row(arrays, f"{name}_ids") if f"{name}_ids" in arrays else []
    shape = shown_row(arrays, f"{name}_value_norms").shape
    return Probe(shape, tokens, tuple(int(token_id) for token_id in ids), period)


# --- the snapshots of a run -----------------------------------------------------------------------


def list_snapshots(run_dir: Path) -> list[Snapshot]:
    """Return the snapshots of a run in the order of their steps."""
    known = _known_snapshots(run_dir)
    snapshots = []
    for path in list_folder(run_dir / "attention", "step_*.npz"):
        step = parse_step(path.stem)
        if step is None:
            continue
        stat = path.stat()
        version = (path, stat.st_mtime_ns, stat.st_size)
        if version not in known:
            known[version] = Snapshot(step, partial(np.load, path))
        snapshots.append(known[version])
    return sorted(snapshots, key=lambda snapshot: snapshot.step)


@lru_cache(maxsize=2)
def _known_snapshots(run_dir: Path) -> dict[tuple[Path, int, int], Snapshot]:
    """Return the snapshots that pages of a run have shown, by file version."""
    return {}


# --- what fits a page -----------------------------------------------------------------------------


def embed_maps(
    snapshots: Sequence[Snapshot],
    probes: Sequence[str],
    room: int,
    blobs: Blobs,
    steps_with_weights: Iterable[int] = (),
) -> dict[str, Any]:
    """Add the maps of as many snapshots as fit in `room` bytes to `blobs`, and describe them.

    Besides the newest and those whose weights are in the page, they are evenly spaced.
    """
    newest = snapshots[-1] if snapshots else None
    names = [name for name in probes if newest and name in newest.probes]
    while newest and sum(newest.pack_maps(name).size for name in names) > room:
        names.pop()
    if not newest or not names:
        return {"steps": [], "snapshotCount": len(snapshots), "shape": None, "probes": []}
    alike = {one.step: one for one in snapshots if one.probes == newest.probes}
    spaced = order_by_importance([*alike], {})
    chosen = []
    for step in dict.fromkeys([newest.step, *steps_with_weights, *spaced]):
        if step not in alike:
            continue
        room -= sum(alike[step].pack_maps(name).size for name in names)
        if room < 0:
            break
        chosen.append(alike[step])
    chosen.sort(key=lambda snapshot: snapshot.step)
    described = [
        {
            "name": name,
            "period": probe.period,
            "T": probe.shape[2],
            "tokens": probe.tokens,
            "ids": probe.ids,
            "maps": [blobs.put(snapshot.pack_maps(name)) for snapshot in chosen],
        }
        for name, probe in newest.probes.items()
        if name in names
    ]
    return {
        "steps": [snapshot.step for snapshot in chosen],
        "snapshotCount": len(snapshots),
        "shape": newest.probes[names[0]].shape[:2],
        "probes": described,
    }


def pack_fitting_predictions(
    snapshots: Sequence[Snapshot], probes: Sequence[str], room: int
) -> dict[tuple[str, int], Packed]:
    """Pack predictions, newest first, that fit in `room` bytes; return them by probe and step."""
    fitting = {}
    for snapshot in reversed(snapshots):
        for name in probes:
            packed = snapshot.pack_predictions(name) if name in snapshot.probes else None
            if packed is not None and packed.size <= room:
                room -= packed.size
                fitting[name, snapshot.step] = packed
    return fitting
