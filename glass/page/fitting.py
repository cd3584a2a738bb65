"""Format a page with as much attention as fits: weights, predictions and maps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from glass.heads.measure.snapshot_files import order_by_importance
from glass.page.embedded_model import EmbeddedModel, embed_weights
from glass.page.html import embed_json, expand_template, format_html
from glass.page.pack import Blobs, Packed
from glass.page.snapshots import Snapshot
from run.row import Row

MAX_PAGE_BYTES = 24_500_000

PackedPredictions = dict[tuple[str, int], Packed]  # by probe and step


def format_with_attention(
    content: dict[str, Any], snapshots: Sequence[Snapshot], model: EmbeddedModel | None
) -> Iterator[str]:
    """Return the parts of a page with as much of the attention of its snapshots as fits.

    The weights take at most two thirds of the room, the predictions half of what is left, and the
    maps the rest.
    """
    readable = [snapshot for snapshot in snapshots if snapshot.probes]
    content["unreadableSnapshots"] = len(snapshots) - len(readable)
    room = MAX_PAGE_BYTES - len(expand_template("run.html")) - len(embed_json(content))
    blobs = Blobs()
    weights = embed_weights(model, 2 * room // 3, blobs)
    room -= blobs.size
    predictions = pack_fitting_predictions(readable, room // 2)
    room -= sum(packed.size for packed in predictions.values())
    steps_with_weights = weights.get("blobs", ()) if weights else ()
    maps = embed_maps(readable, room, blobs, steps_with_weights)

    words: dict[int, str] = {}
    for packed in predictions.values():
        words |= packed.words
    for probe in maps["probes"]:
        explained = [predictions.get((probe["name"], step)) for step in maps["steps"]]
        probe["tokenEffects"] = [packed and blobs.put(packed) for packed in explained]
    content |= {"weights": weights, **maps, "words": words}
    return format_html("run.html", content, blobs)


def embed_maps(
    snapshots: Sequence[Snapshot], room: int, blobs: Blobs, steps_with_weights: Iterable[int]
) -> dict[str, Any]:
    """Add the maps of as many snapshots as fit in `room` bytes to `blobs`, and describe them.

    Besides the newest and those whose weights are in the page, they are evenly spaced.
    """
    names = _choose_probes(snapshots[-1], room) if snapshots else []
    if not names:
        return {"steps": [], "snapshotCount": len(snapshots), "shape": None, "probes": []}
    chosen = _choose_snapshots(snapshots, names, room, steps_with_weights)
    probes = [
        {
            "name": name,
            "period": probe.period,
            "T": probe.shape[2],
            "tokens": probe.tokens,
            "ids": probe.ids,
            "maps": [blobs.put(snapshot.pack_maps(name)) for snapshot in chosen],
        }
        for name, probe in snapshots[-1].probes.items()
        if name in names
    ]
    return {
        "steps": [snapshot.step for snapshot in chosen],
        "snapshotCount": len(snapshots),
        "shape": snapshots[-1].probes[names[0]].shape[:2],
        "probes": probes,
    }


def _choose_probes(newest: Snapshot, room: int) -> list[str]:
    """Return the first probes of the newest snapshot whose maps fit."""
    names = [*newest.probes]
    while _size_of_maps(newest, names) > room:
        names.pop()
    return names


def _choose_snapshots(
    snapshots: Sequence[Snapshot], names: list[str], room: int, steps_with_weights: Iterable[int]
) -> list[Snapshot]:
    """Return those that fit of the snapshots with the tokens of the newest, by steps."""
    newest = snapshots[-1]
    alike = {snapshot.step: snapshot for snapshot in snapshots if snapshot.probes == newest.probes}
    evenly_spaced = order_by_importance([*alike], Row())
    chosen = []
    for step in dict.fromkeys([newest.step, *steps_with_weights, *evenly_spaced]):
        if step not in alike:
            continue
        room -= _size_of_maps(alike[step], names)
        if room < 0:
            break
        chosen.append(alike[step])
    return sorted(chosen, key=lambda snapshot: snapshot.step)


def _size_of_maps(snapshot: Snapshot, names: list[str]) -> int:
    return sum(snapshot.pack_maps(name).size for name in names)


def pack_fitting_predictions(snapshots: Sequence[Snapshot], room: int) -> PackedPredictions:
    """Pack the predictions that fit in `room` bytes, those of the newest snapshots first."""
    fitting = {}
    for snapshot in reversed(snapshots):
        for name in snapshot.probes:
            packed = snapshot.pack_predictions(name)
            if packed is not None and packed.size <= room:
                room -= packed.size
                fitting[name, snapshot.step] = packed
    return fitting
