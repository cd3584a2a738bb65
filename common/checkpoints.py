"""Find, name and verify the checkpoints in a run's folder."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from common.errors import UserError
from common.files import (
    atomic_write,
    exists,
    is_folder,
    list_folder,
    ordinary_file,
    parse_step,
    step_name,
    sync,
)
from common.manifest import CONFIG_FILE, Manifest, read_manifest, verify_checkpoint
from common.metrics import best_row


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


def check_checkpoint(which: str) -> None:
    """Raise `UserError` unless the setting `checkpoint` is "best", "last" or a step."""
    is_step = which.isascii() and which.isdigit()
    if which not in ("best", "last") and not is_step:
        raise UserError(f"checkpoint={which} must be best, last or a step number")


def find_newest_run(folder: Path) -> Path:
    """Return the run in a folder, or in a sweep there, that saved a checkpoint last."""
    folders = [path for path in list_folder(folder) if is_folder(path)]
    folders += [path for sweep in folders for path in list_folder(sweep) if is_folder(path)]
    pointers = [path for run in folders if exists(path := run / "checkpoints" / "last")]
    if not pointers:
        raise UserError(
            f"{folder}/ has no run yet: train one with python train.py, or name one with "
            "run_dir=PATH"
        )
    newest = max(pointers, key=lambda path: path.stat().st_mtime)
    return newest.parent.parent


def set_aside(folder: Path) -> Path:
    """Rename an unreadable checkpoint to an unused name that no step has; return the new path."""
    paths = (folder.with_name(f"aside_{number}_{folder.name}") for number in count(1))
    unused = next(path for path in paths if not exists(path, follow_links=False))
    return folder.rename(unused)


def best_saved_row(run_dir: Path) -> dict[str, float] | None:
    """Return the metrics of the checkpoint with the lowest validation loss, or None.

    They are those of the manifests, which have a hash; metrics.jsonl and `best` have none.
    """
    candidates = []
    for step in saved_steps(run_dir):
        with suppress(ValueError):  # reported if this checkpoint is to be loaded
            metrics = read_manifest(step_folder(run_dir, step)).metrics
            candidates.append({**metrics, "step": step})
    return best_row(candidates)


def write_pointer(run_dir: Path, name: str, step: int) -> None:
    """Make the file checkpoints/`name` hold the name of a step's folder, durably."""
    with atomic_write(run_dir / "checkpoints" / name) as part:
        part.write_text(f"{step_name(step)}\n")
    sync(run_dir / "checkpoints")


def read_pointer(run_dir: Path, name: str) -> int | None:
    """Return the step that the file checkpoints/`name` names, or None."""
    try:
        text = ordinary_file(run_dir / "checkpoints" / name, 100).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return parse_step(text.strip())


def find_checkpoint(
    run_dir: Path, which: str | int = "last", log: Callable[[str], None] = print
) -> tuple[Path, Manifest]:
    """Find a checkpoint and verify it; if it is damaged, take an earlier one and say so.

    Args:
        run_dir: Folder of the run.
        which: "last", "best" or a step. For a damaged "best", later checkpoints are tried too.
        log: Prints a line about a damaged checkpoint.

    Returns:
        The folder of the checkpoint and its manifest.

    Raises:
        UserError: If there is none, or it and all alternatives are damaged, or the first intact one
            is of another format.
    """
    if not is_folder(run_dir):
        problem = "is not the folder of a run" if exists(run_dir) else "does not exist"
        raise UserError(f"{run_dir} {problem}.")
    steps = saved_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} has no checkpoint.")
    preferred = _preferred_step(run_dir, which, steps)
    candidates = [step for step in reversed(steps) if step <= preferred]
    if which == "best":
        candidates += [step for step in steps if step > preferred]
    for index, step in enumerate(candidates):
        folder = step_folder(run_dir, step)
        try:
            return folder, verify_checkpoint(folder)
        except ValueError as e:
            note = f"checkpoint {folder} is damaged or cannot be read ({e})"
            if index + 1 < len(candidates):
                note += f": loading the checkpoint of step {candidates[index + 1]} instead"
            log(note)
    raise UserError(
        f"every checkpoint of {run_dir} up to step {max(candidates)} is damaged or unreadable; "
        "restore one, or start a new run."
    )


def _preferred_step(run_dir: Path, which: str | int, steps: list[int]) -> int:
    """Return the saved step that "last", "best" or a number names."""
    if which == "best":
        row = best_saved_row(run_dir)
        best = int(row["step"]) if row else steps[-1]
        named = read_pointer(run_dir, "best")
        if named not in steps:
            return best
        try:
            read_manifest(step_folder(run_dir, named))
        except ValueError:  # maybe the best one: it is reported that another one is taken
            return named
        return best
    if not str(which).isdecimal():
        return steps[-1]
    if int(which) not in steps:
        existing = ", ".join(str(step) for step in steps)
        raise UserError(f"{run_dir} has no checkpoint of step {which}; it has {existing}.")
    return int(which)


def remove_path(path: Path) -> None:
    """Remove a folder, a file or a link, but never the target of a link, as far as possible."""
    with suppress(OSError):
        if is_folder(path, follow_links=False):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
