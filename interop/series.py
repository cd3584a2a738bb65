"""A model at several steps of its training: a run's, those in a folder, or the hub's branches."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from math import log1p
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.terminal import print_stderr
from interop import hub
from interop.loading import find_model, locate
from interop.stored import open_run
from run.run_dir import HF_CONFIG_FILE, RunDir, find_run
from training.stored_model import StoredModel

# Where a name has its step: after this word or, if no name has the word, in its first number.
STEP_PATTERNS = (r"step\D?(\d+)", r"(\d+)")
ALL = "all"  # steps

# What opens the model of a step; several if several names have its number.
Openers = dict[int, list[Callable[[], StoredModel]]]


@dataclass
class Series:
    """A model at several steps, in ascending order, each of which is opened when it is needed."""

    source: str  # its path, or its name on the hub
    steps: list[int]
    _openers: Openers = field(repr=False)
    # The step that was opened first, its settings and its tokenizer, with which others are compared
    _first: tuple[int, dict, dict] | None = field(default=None, repr=False)
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)

    def open(self, step: int) -> StoredModel:
        """Open the model of a step, after downloading it if necessary.

        Raises:
            UserError: It cannot be read, or its shape or tokenizer is not that of the other steps.
        """
        stored = self._openers[step][0]()
        tokenizer = stored.read_tokenizer()
        opened = step, asdict(stored.config), tokenizer.to_json() if tokenizer else {}
        self._first = self._first or opened
        for name, ours, theirs in zip(("shape", "tokenizer"), opened[1:], self._first[1:]):
            if ours != theirs:
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
        """Return the steps that count, each with the earlier ones that have equal weights.

        The last of them counts, because some models on the hub serve their final weights as those
        of earlier steps. All steps are downloaded and read.
        """
        groups: dict[str, list[int]] = {}
        for step in self.steps:
            groups.setdefault(self.hash(step), []).append(step)
        return dict(sorted((steps[-1], steps[:-1]) for steps in groups.values()))


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of tensors by their names, in any order; floats count as float32."""
    lines = []
    for name, tensor in tensors:
        values = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        lines.append(f"{name} {list(values.shape)} {sha256(values.numpy()).hexdigest()}")
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


def name_repeats(groups: dict[int, list[int]]) -> list[str]:
    """Return a sentence for each group of steps with equal weights; see `Series.group_equal`."""
    return [
        f"step {', '.join(map(str, repeats))}: the weights are those of step {step}, and count once"
        for step, repeats in groups.items()
        if repeats
    ]


# --- finding the steps ----------------------------------------------------------------------------


def find_series(
    path_or_name: str | os.PathLike,
    steps: str | int | Sequence[int] = ALL,
    log: Callable[[str], Any] = print_stderr,
    key: str = "path_or_name",
) -> Series:
    """Find a model at several steps, none of which is opened or downloaded yet.

    Args:
        path_or_name: A run, whose checkpoints and snapshots with weights are steps, a folder whose
            subfolders hold models and have numbers in their names, or a name on the Hugging Face
            hub whose branches have them.
        steps: "all", a number of steps that are spread over the logarithm of the step, or a list of
            steps. Numbers may also be a text: "12", "0,512,1000".
        log: Called with the size of each download.
        key: The setting that errors name.

    Raises:
        UserError: There are no steps, or not these.
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
            raise UserError(
                f"{source} has {len(openers[step])} models of step {step}: leave it out of steps"
            )
    return Series(source, chosen, openers)


def choose_steps(source: str, existing: list[int], steps: str | int | Sequence[int]) -> list[int]:
    """Return what `steps` chooses of the steps that a source has; see `find_series`."""
    if steps == ALL:
        return existing
    numbers: Any = steps
    if isinstance(steps, str) and "," in steps:
        numbers = steps.strip(",").split(",")
    try:
        if isinstance(numbers, (str, int)):
            return spread_steps(existing, int(numbers))
        chosen = sorted({int(step) for step in numbers})
        if not chosen:
            raise ValueError("there is no step")
    except (TypeError, ValueError):
        raise UserError(
            f"steps={steps!r} names no steps: give all, a number of steps such as 12, or a list "
            "such as 0,512,1000"
        ) from None
    for step in chosen:
        if step not in existing:
            before = [each for each in existing if each < step][-1:]
            after = [each for each in existing if each > step][:1]
            neighbors = " or ".join(map(str, before + after))
            raise UserError(f"{source} has no step {step}: choose {neighbors}")
    return chosen


def spread_steps(existing: list[int], count: int) -> list[int]:
    """Return steps that lie evenly on a logarithmic scale, with the first and the last one."""
    if count < 1:
        raise ValueError("there is no step")
    first, *rest = existing
    chosen = [existing[-1], first][:count]
    width = log1p(existing[-1]) - log1p(first)
    for number in range(1, count - 1):
        target = log1p(first) + width * number / (count - 1)
        unused = [step for step in rest if step not in chosen]
        if unused:
            chosen.append(min(unused, key=lambda step: abs(log1p(step) - target)))
    return sorted(set(chosen))


def _find_openers(source: str, log: Callable[[str], Any], key: str) -> Openers:
    path, on_hub = locate(source, key)
    if on_hub:
        repository, revision = on_hub.groups()
        with hub.explain_errors(key, path):
            branches = [] if revision else hub.list_branches(repository)
        names = {branch: f"{repository}@{branch}" for branch in branches}
    elif run_dir := find_run(Path(path))[0]:
        steps = {*run_dir.steps(), *run_dir.snapshot_files(".safetensors")}
        return {step: [partial(_open_step, run_dir, step)] for step in steps}
    else:
        entries = list_folder(Path(path)) if is_folder(Path(path)) else []
        folders = [entry for entry in entries if is_folder(entry)]
        names = {each.name: str(each) for each in folders if exists(each / HF_CONFIG_FILE)}

    openers: Openers = {}
    for name, step in number_names(names).items():
        openers.setdefault(step, []).append(partial(find_model, names[name], log=log, key=key))
    return openers


def number_names(names: Iterable[str]) -> dict[str, int]:
    """Return the step of each name that has one: after the word "step" if any name has it."""
    for pattern in STEP_PATTERNS:
        matches = {name: re.search(pattern, name) for name in names}
        if steps := {name: int(match[1]) for name, match in matches.items() if match}:
            return steps
    return {}


def _open_step(run_dir: RunDir, step: int) -> StoredModel:
    """Open a step of a run, and no other one in its place."""
    notes: list[str] = []
    stored = open_run(run_dir, step, notes.append)
    if stored.step != step:
        raise UserError(f"{notes[0]}: restore it, or leave step {step} out of steps")
    return stored
