"""The checkpoints in a run's folder: their manifests and hashes, and which one is last or best.

Does not import torch.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from math import inf, isfinite
from pathlib import Path
from typing import TypeVar

from common.errors import UserError
from common.files import (
    atomic_write,
    exists,
    is_folder,
    list_folder,
    parse_step,
    read_json_object,
    seal,
    sha256_of_file,
    step_name,
)

Result = TypeVar("Result")

CHECKPOINT_FORMAT = 2
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"
HF_CONFIG_FILE = "config.json"  # of a model of Hugging Face's format
CHECKPOINT_NAME = re.compile(r"step_0*(\d+)|(last|best)")
# The files of a checkpoint besides its manifest.
CHECKPOINT_FILES = (MODEL_FILE, OPTIMIZER_FILE, TOKENIZER_FILE, CONFIG_FILE)


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint besides its tensors and settings."""

    step: int  # optimizer steps taken
    seconds: dict[str, float]  # spent so far, by activity
    metrics: dict[str, float]  # of this step
    fingerprint: str  # hash of the text and of how it was prepared
    losses: tuple[float, int]  # sum and number of the losses that no metrics row contains yet
    loss_scale: tuple[float, int] | None = None  # in fp16: the factor, and the steps since a change
    files: dict[str, dict] = field(default_factory=dict, compare=False)  # written: size and hash


# --- one checkpoint -------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose other files are in the folder already."""
    files = {}
    for name in CHECKPOINT_FILES:
        path = folder / name
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
    content = {"format": CHECKPOINT_FORMAT, **asdict(manifest), "files": files}
    (folder / MANIFEST_FILE).write_text(seal(json.dumps(content, indent=1)))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its hash, but not the other files.

    Raises:
        ValueError: If the manifest is damaged; the message says how.
        UserError: If it is of another format.
    """
    try:
        content = read_json_object(folder / MANIFEST_FILE, must_be_sealed=True)
    except ValueError as e:
        raise ValueError(f"{MANIFEST_FILE}: {e}") from None
    found_format = content.pop("format")
    if found_format != CHECKPOINT_FORMAT:
        raise UserError(
            f"the checkpoint {folder} has the format {found_format}, but this version of GlassGPT "
            f"reads format {CHECKPOINT_FORMAT}: use the version that wrote it, or start a new run"
        )
    del content["sha256"]
    for name in ("losses", "loss_scale"):
        if content.get(name):
            content[name] = tuple(content[name])
    return Manifest(**content)


def verify_checkpoint(folder: Path, names: Sequence[str] = CHECKPOINT_FILES) -> Manifest:
    """Verify the hashes of these files too, and return the manifest; see `read_manifest`."""
    manifest = read_manifest(folder)
    for name in names:
        try:
            digest = sha256_of_file(folder / name)
        except OSError as e:
            raise ValueError(f"{name}: {e.strerror}") from None
        if digest != manifest.files[name]["sha256"]:
            raise ValueError(f"{name} was changed: its sha256 differs")
    return manifest


# --- the checkpoints of a run ---------------------------------------------------------------------


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run_dir / "checkpoints" / step_name(step)


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, in ascending order."""
    steps = (parse_step(path.name) for path in list_folder(run_dir / "checkpoints"))
    return sorted(step for step in steps if step is not None)


def contains_run(run_dir: Path) -> bool:
    """Return whether a run has begun in a folder: it has a configuration or a checkpoint."""
    return exists(run_dir / CONFIG_FILE) or bool(saved_steps(run_dir))


def find_run(path: Path) -> tuple[Path | None, str | None]:
    """Return the run at a path and, if the path is in a checkpoint of it, the checkpoint's name."""
    for folder in (path.absolute(), path.absolute().parent):
        match = CHECKPOINT_NAME.fullmatch(folder.name)
        if match and folder.parent.name == "checkpoints":
            return folder.parents[1], match[1] or match[2]
    if not is_folder(path) or exists(path / HF_CONFIG_FILE) or exists(path / MANIFEST_FILE):
        return None, None
    return (path, None) if contains_run(path) else (None, None)


def no_checkpoint(run_dir: Path) -> UserError:
    """Build the error for a folder without a checkpoint."""
    if not contains_run(run_dir):
        return UserError(f"{run_dir} {'contains no run' if exists(run_dir) else 'does not exist'}")
    return UserError(
        f"{run_dir} has no checkpoint: the run stopped before its first one, or is not there yet; "
        f"to start it again, repeat its command with run_dir={shlex.quote(str(run_dir))} "
        "resume=auto"
    )


def find_newest_run(folder: Path) -> Path:
    """Return the run in a folder, or in a sweep there, that saved a checkpoint last."""
    folders = [path for path in list_folder(folder) if is_folder(path)]
    folders += [path for sweep in folders for path in list_folder(sweep) if is_folder(path)]
    runs = [path for path in folders if saved_steps(path)]
    if not runs:
        if begun := [path for path in folders if contains_run(path)]:
            raise no_checkpoint(begun[-1])
        raise UserError(
            f"{folder}/ has no run yet: train one with python train.py, or name one with "
            "run_dir=PATH"
        )
    return max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime)


def find_checkpoint(
    run_dir: Path, which: str | int = "last", log: Callable[[str], None] = print
) -> tuple[Path, Manifest]:
    """Find a checkpoint ("last", "best" or a step) and verify it; see `open_checkpoint`."""
    return open_checkpoint(run_dir, which, lambda *found: found, log)


def open_checkpoint(
    run_dir: Path,
    which: str | int,
    read: Callable[[Path, Manifest], Result],
    log: Callable[[str], None],
    names: Sequence[str] = CHECKPOINT_FILES,
) -> Result:
    """Verify the files `names` of a checkpoint ("last", "best" or a step), and return `read` of it.

    For a damaged "best" the next best one is taken, and otherwise the one before; `log` prints a
    line about it. If a running job removes the checkpoint meanwhile, a newer one is read.
    Raises `UserError` if no intact one of this format is left.
    """
    candidates = preferred_steps(run_dir, which)
    for step in candidates:
        folder = step_folder(run_dir, step)
        try:
            content = read(folder, verify_checkpoint(folder, names))
        except (ValueError, UserError, OSError) as e:
            if not exists(folder):
                return open_checkpoint(run_dir, which, read, log, names)
            if not isinstance(e, ValueError):
                raise
            log(f"checkpoint {folder} is damaged or cannot be read ({e})")
            continue
        if step != candidates[0]:
            log(f"loading the checkpoint of step {step} instead")
        return content
    raise UserError(
        f"every checkpoint of {run_dir} up to step {max(candidates)} is damaged or unreadable; "
        "restore one, or start a new run."
    )


def preferred_steps(run_dir: Path, which: str | int) -> list[int]:
    """Return the saved step that "last", "best" or a step names, and those to be taken instead.

    Raises `UserError` if there is none.
    """
    steps = saved_steps(run_dir)
    if not steps:
        raise no_checkpoint(run_dir)
    if which == "best":
        return _best_first(run_dir)
    newest = steps[-1] if which == "last" else int(which)
    if newest not in steps:
        existing = ", ".join(str(step) for step in steps)
        raise UserError(f"{run_dir} has no checkpoint of step {newest}; it has {existing}.")
    return [step for step in reversed(steps) if step <= newest]


def best_saved_row(run_dir: Path) -> dict[str, float] | None:
    """Return the metrics of the checkpoint with the lowest validation loss, or None.

    They are those of the manifests, which have a hash; metrics.jsonl has none.
    """
    for step in _best_first(run_dir):
        with suppress(ValueError):  # reported if this checkpoint is to be loaded
            metrics = read_manifest(step_folder(run_dir, step)).metrics
            is_evaluated = step > 0 and isfinite(metrics.get("val/loss", inf))
            return {**metrics, "step": step} if is_evaluated else None
    return None


def _best_first(run_dir: Path) -> list[int]:
    """Return the saved steps by validation loss, those without one last, newest first.

    A checkpoint with an unreadable manifest comes first, because it may be the best one.
    """

    def order(step: int) -> tuple[float, int]:
        try:
            loss = read_manifest(step_folder(run_dir, step)).metrics.get("val/loss", inf)
        except ValueError:
            return -inf, step
        return (loss, step) if step and isfinite(loss) else (inf, -step)

    return sorted(saved_steps(run_dir), key=order)


def write_pointer(run_dir: Path, name: str, step: int) -> None:
    """Make the file checkpoints/`name` hold the name of a step's folder, for people."""
    path, content = run_dir / "checkpoints" / name, f"{step_name(step)}\n"
    if not exists(path) or path.read_bytes() != content.encode():
        with atomic_write(path) as part:
            part.write_text(content)


def set_aside(folder: Path) -> Path:
    """Rename an unreadable checkpoint to an unused name that no step has; return the new path."""
    paths = (folder.with_name(f"aside_{number}_{folder.name}") for number in count(1))
    return folder.rename(next(path for path in paths if not exists(path)))
