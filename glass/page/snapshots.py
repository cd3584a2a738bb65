"""Read the snapshots of a run, and pack what a page shows of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile

from glass.page.pack import Packed, pack_maps, pack_predictions
from run.run_dir import RunDir

PROBES = ("text", "repeated")  # those that a page shows, if a snapshot has them

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
                is_copy_of_another = arrays.get("step", self.step) != self.step
                is_damaged = isinstance(arrays, NpzFile) and arrays.zip and arrays.zip.testzip()
                if is_copy_of_another or is_damaged:
                    return {}
                return {name: read_probe(arrays, name) for name in PROBES if name in arrays}
        except Exception:  # numpy and zipfile raise many types for damaged files
            return {}

    def _pack_maps(self, probe: str) -> Packed:
        with self.open_arrays() as arrays:
            maps = shown_row(arrays, probe, axis=1)
            norms = shown_row(arrays, f"{probe}_value_norms", axis=1)
            return pack_maps(maps, norms)

    def _pack_predictions(self, probe: str) -> Packed | None:
        with self.open_arrays() as arrays:
            return pack_predictions(arrays, probe)


def read_probe(arrays: Arrays, name: str) -> Probe:
    """Return what a snapshot holds of a probe."""
    shape = shown_row(arrays, f"{name}_value_norms", axis=1).shape
    tokens = shown_row(arrays, f"{name}_tokens", axis=0)
    ids = shown_row(arrays, f"{name}_ids", axis=0) if f"{name}_ids" in arrays else []
    period = int(arrays["repeated_periods"].max()) if name == "repeated" else None
    return Probe(shape, tuple(map(str, tokens)), tuple(map(int, ids)), period)


def shown_row(arrays: Arrays, name: str, axis: int) -> np.ndarray:
    """Return an array of a snapshot: of repeated tokens only the row with the longest period.

    `axis` is that of the rows, which other arrays do not have.
    """
    array = arrays[name]
    if not name.startswith("repeated"):
        return array
    row = arrays["repeated_periods"].argmax()
    return array.take(row, axis)


def list_snapshots(run_dir: RunDir) -> list[Snapshot]:
    """Return the snapshots of a run in the order of their steps."""
    paths = run_dir.snapshot_files(".npz")
    return [_open_snapshot(step, path, path.stat().st_mtime_ns) for step, path in paths.items()]


@lru_cache(maxsize=256)  # snapshots of the run in progress
def _open_snapshot(step: int, path: Path, modified_ns: int) -> Snapshot:
    return Snapshot(step, partial(np.load, path))
