"""A model at several steps of its training: a run's, those in a folder, or the hub's branches."""

import os
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import sha256
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.terminal import print_stderr
from interop import hub
from interop.loading import locate, open_pinned, pin_model
from interop.stored import open_run
from run.run_dir import HF_CONFIG_FILE, RunDir, find_run
from training.stored_model import StoredModel

# Where a name has its step: after this word or, if no name has the word, in its first number.
STEP_PATTERNS = (r"step\D?(\d+)", r"(\d+)")
Openers = dict[int, list[Callable[[], StoredModel]]]  # of each step: one, or it is ambiguous


@dataclass
class Series:
    """A model at several steps, in ascending order, each of which is opened when it is needed."""

    source: str  # its path, or its name on the hub
    steps: list[int]
    log: Callable[[str], Any] = field(repr=False)
    _openers: Openers = field(repr=False)
    # The step that was opened first, its settings and its tokenizer, which others must have, too
    _first: tuple[int, dict, dict] | None = field(default=None, repr=False)
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)

    def open(self, step: int) -> StoredModel:
        """Open the model of a step, after downloading it if necessary.

        Raises:
            UserError: It cannot be read, or its shape or tokenizer is not that of the other steps.
        """
        try:
            stored = self._openers[step][0]()
            tokenizer = stored.read_tokenizer()
        except UserError as e:
            raise UserError(f"step {step} of {self.source}: {e}") from None
        opened = step, asdict(stored.config), tokenizer.to_json() if tokenizer else {}
        self._first = self._first or opened
        for name, its, first in zip(("shape", "tokenizer"), opened[1:], self._first[1:]):
            if its != first:
                raise UserError(
                    f"step {step} of {self.source} has another {name} than step {self._first[0]}: "
                    "leave it out of steps"
                )
        return stored

    def hash(self, step: int) -> str:
        """Return the hash of a step's weights, whatever the format of their files."""
        if step not in self._hashes:
            self._hashes[step] = hash_tensors(self.open(step).read_tensors())
        return self._hashes[step]

    def group_equal(self) -> dict[int, list[int]]:
        """Download all steps; return those that count, each with earlier ones of equal weights.

        The last of them counts, because some models on the hub serve their final weights as those
        of earlier steps. `log` names the others.
        """
        by_hash: dict[str, list[int]] = {}
        for step in self.steps:
            by_hash.setdefault(self.hash(step), []).append(step)
        groups = dict(sorted((steps[-1], steps[:-1]) for steps in by_hash.values()))
        for sentence in name_repeats(groups):
            self.log(f"note: {sentence}")
        return groups


def name_repeats(groups: dict[int, list[int]]) -> list[str]:
    """Return a sentence for each group of steps with equal weights; see `Series.group_equal`."""
    return [
        f"left out, because the weights are those of step {step}: step "
        f"{', '.join(map(str, repeats))}"
        for step, repeats in groups.items()
        if repeats
    ]


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of tensors by their names, in any order; floats count as float32."""
    lines = []
    for name, tensor in tensors:
        values = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        lines.append(f"{name} {list(values.shape)} {sha256(values.numpy()).hexdigest()}")
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


def find_series(
    path_or_name: str | os.PathLike,
    steps: str | int | Sequence[int] = "all",
    log: Callable[[str], Any] = print_stderr,
    key: str = "path_or_name",
) -> Series:
    """Find a model at several steps, none of which is opened or downloaded yet.

    Args:
        path_or_name: A run, whose checkpoints and snapshots with weights are steps, or a folder or
            a name on the hub whose subfolders or branches have numbers in their names.
        steps: "all", a list of steps, or a number of steps that are spread over the logarithm of
            the step. Lists and numbers may be texts: "0,512,1000", "12".
        log: Called with the size of each download, and with the steps that have equal weights.
        key: The setting that errors name.
    """
    source = os.fspath(path_or_name)
    openers = _find_openers(source, log, key)
    if not openers:
        raise UserError(
            f"{key}={source} is no series of steps: give a run, a folder with subfolders such as "
            "checkpoint-500, or OWNER/NAME, a model on the hub with branches such as step1000"
        )
    chosen = choose_steps(source, sorted(openers), steps)
    for step in chosen:
        if len(openers[step]) > 1:
            raise UserError(f"{source} has several models of step {step}: leave it out of steps")
    return Series(source, chosen, log, openers)


def choose_steps(source: str, existing: list[int], steps: Any) -> list[int]:
    """Return what `steps` chooses of the steps that a source has; see `find_series`."""
    if steps == "all":
        return existing
    if str(steps).isdecimal():
        chosen = spread_steps(existing, int(steps))
    else:
        listed = steps.strip(",").split(",") if isinstance(steps, str) else steps
        try:
            chosen = sorted({int(step) for step in listed})
        except (TypeError, ValueError):
            chosen = []
    if not chosen:
        raise UserError(
            f"steps={steps!r} names no steps: give all, a number of steps such as 12, or a list "
            "such as 0,512,1000"
        )
    for step in chosen:
        if step not in existing:
            place = bisect(existing, step)
            neighbors = " or ".join(map(str, existing[max(0, place - 1) : place + 1]))
            raise UserError(f"{source} has no step {step}: choose {neighbors}")
    return chosen


def spread_steps(existing: list[int], count: int) -> list[int]:
    """Return steps that lie evenly on a logarithmic scale, with the first and the last one."""
    chosen: list[int] = []
    for target in np.geomspace(existing[-1] + 1, existing[0] + 1, count):
        unused = [step for step in existing if step not in chosen]
        chosen += sorted(unused, key=lambda step: abs(log((step + 1) / target)))[:1]
    return sorted(chosen)


def _find_openers(source: str, log: Callable[[str], Any], key: str) -> Openers:
    path, on_hub = locate(source, key)
    if on_hub:
        repository, revision = on_hub.groups()
        with hub.explain_errors(key, path):
            branches = [] if revision else hub.list_branches(repository)
        places = {branch: f"{repository}@{branch}" for branch in branches}
    elif run_dir := find_run(Path(path))[0]:
        steps = {*run_dir.steps(), *run_dir.snapshot_files(".safetensors")}
        return {step: [partial(_open_step, run_dir, step)] for step in steps}
    else:
        entries = list_folder(Path(path)) if is_folder(Path(path)) else []
        folders = [entry for entry in entries if is_folder(entry)]
        places = {each.name: str(each) for each in folders if exists(each / HF_CONFIG_FILE)}

    openers: Openers = {}
    for name, step in number_names(places).items():
        openers.setdefault(step, []).append(_make_opener(places[name], log, key))
    return openers


def _make_opener(place: str, log: Callable[[str], Any], key: str) -> Callable[[], StoredModel]:
    """Return a function that opens the model at a path or of the hub, which is asked once."""
    pin = cache(partial(pin_model, place, key, log))
    return lambda: open_pinned(pin(), log=log)


def number_names(names: Iterable[str]) -> dict[str, int]:
    """Return the step of each name that has one; see `STEP_PATTERNS`."""
    for pattern in STEP_PATTERNS:
        matches = {name: re.search(pattern, name) for name in names}
        if steps := {name: int(match[1]) for name, match in matches.items() if match}:
            return steps
    return {}


def _open_step(run_dir: RunDir, step: int) -> StoredModel:
    """Open a step of a run, and no other one in the place of a damaged one."""
    notes: list[str] = []
    stored = open_run(run_dir, step, notes.append)
    if stored.step != step:
        raise UserError(f"{notes[0]}: restore it, or leave it out of steps")
    return stored
