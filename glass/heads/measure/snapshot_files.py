"""The files of a snapshot: its arrays (.npz), and weights with which the page runs the model."""

from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from common.files import atomic_write
from glass.heads.measure.probes import Probes
from model import GPT
from run.row import Row
from run.run_dir import RunDir
from training.safetensors_files import make_stamp

PATTERN_ARRAYS = ("text", "repeated", "control")  # attention patterns, saved as float16
MAX_SAVED_PARAMETERS = 20_000_000  # no weights are saved for larger models
MAX_STORED_BYTES = 250_000_000  # of a run's folder, for the weights of its snapshots
# The weights of the newest snapshots are never removed: a head may be emerging there, which is
# known only at the next snapshot.
NEWEST_SNAPSHOTS = 4
# Scores whose emergence is followed step by step; the first one that has emerged in a run counts.
FOLLOWED_SCORES = ("induction", "previous_token", "duplicate_token")
# Places of those steps, relative to the snapshot at which the head emerged.
FOLLOWED_SNAPSHOTS = (0, -1, 1, -2, 2, -3)


def save_snapshot(path: Path, step: int, probes: Probes, arrays: dict[str, np.ndarray]) -> None:
    """Write a snapshot as .npz: the probes and the arrays, with attention patterns as float16."""
    saved: dict[str, Any] = {
        "step": step,
        "text_ids": probes.text,
        "text_tokens": probes.text_tokens,
        "window_ids": probes.windows,
        **arrays,
    }
    if len(probes.periods):
        saved |= {
            "repeated_ids": probes.repeated,
            "reshuffled_ids": probes.reshuffled,
            "control_ids": probes.control,
            "repeated_tokens": probes.repeated_tokens,
            "repeated_periods": probes.periods,
        }
    saved |= {name: arrays[name].astype(np.float16) for name in PATTERN_ARRAYS if name in arrays}
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, **saved)


def save_weights(path: Path, step: int, model: GPT) -> None:
    """Write the weights as float16 safetensors, unless there are over `MAX_SAVED_PARAMETERS`."""
    if model.num_parameters() <= MAX_SAVED_PARAMETERS:
        tensors = float16_weights(model)
        with atomic_write(path) as part:
            part.write_bytes(safetensors_bytes(tensors, make_stamp(step, tensors)))


def float16_weights(model: GPT) -> dict[str, Tensor]:
    """Copy the weights to the CPU as float16. Tied weights appear once."""
    return {
        name: (tensor.detach().half() if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in model.tensors().items()
    }


def prune_stored_weights(run_dir: RunDir, latest: Row, best_step: int | None = None) -> None:
    """Remove the weights of the least important snapshots until `MAX_STORED_BYTES` are left."""
    paths = run_dir.snapshot_files(".safetensors")
    sizes = {step: path.lstat().st_size for step, path in paths.items()}
    room = MAX_STORED_BYTES
    if sum(sizes.values()) <= room:
        return
    newest = [*paths][-NEWEST_SNAPSHOTS:]
    for step in dict.fromkeys([*newest, *order_by_importance([*paths], latest, best_step)]):
        room -= sizes[step]
        if room < 0 and step not in newest:
            paths[step].unlink()


def order_by_importance(steps: list[int], latest: Row, best_step: int | None = None) -> list[int]:
    """Order steps by importance, so that the first ones are the best choice.

    The order is: the nearest to `best_step`, the last, the first, six around the emergence of the
    first induction head (or of another head of `FOLLOWED_SCORES`), the emergence of other heads,
    then evenly spaced ones. The `latest` row says when heads emerged.
    """
    preferred = _steps_of_emergence(steps, latest)
    if steps and best_step is not None:
        nearest = min(steps, key=lambda step: abs(step - best_step))
        preferred = list(dict.fromkeys([nearest, *preferred]))
    return [*preferred, *_spread_evenly(steps, preferred)]


def _spread_evenly(steps: list[int], preferred: list[int]) -> list[int]:
    """Order the other steps so that the first ones leave no large gaps among the preferred ones.

    The last is the step whose removal leaves the smallest gap, and so on for those that are left.
    The first and the last of all steps are preferred.
    """
    left = list(steps)
    removed = []
    while len(left) > len(preferred):
        others = [k for k, step in enumerate(left) if step not in preferred]
        removed.append(left.pop(min(others, key=lambda k: left[k + 1] - left[k - 1])))
    return removed[::-1]


def _steps_of_emergence(steps: list[int], latest: Row) -> list[int]:
    """Return the last step, the first, and those around the emergence of heads."""
    indices = [len(steps) - 1, 0]
    followed = [latest.heads(f"emerged/{score}").values() for score in FOLLOWED_SCORES]
    emerged = next(filter(None, followed), None)
    if emerged:
        first = bisect_left(steps, min(emerged))
        indices += [first + place for place in FOLLOWED_SNAPSHOTS]
    for step in sorted(latest[f"emerged/{place}"] for place in latest.places("emerged")):
        index = bisect_left(steps, step)
        indices += [index, index - 1]
    return list(dict.fromkeys(steps[k] for k in indices if 0 <= k < len(steps)))
