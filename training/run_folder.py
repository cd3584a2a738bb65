"""Open and lock the folder of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from common.checkpoints import contains_run, step_folder
from common.errors import UserError
from common.files import atomic_write, exists, list_folder, ordinary_file, refuse_link
from common.manifest import CONFIG_FILE
from common.paths import require_output_folder
from common.torchrun import count_processes
from config import Config

# Seconds to wait for the lock of a machine that was lost; NFS releases it after 90 by default.
LOST_LOCK_SECONDS = 120
# Files that may lie in a run's folder before the run begins.
ALLOWED_BEFORE_START = {".lock", ".config.yaml.part", "job.json", ".job.lock", "log.txt"}
# Entries of a run's folder in which files are removed, so that they must not be links.
MUST_NOT_BE_LINKS = (".lock", "checkpoints", "attention", "wandb")


def is_resuming(config: Config) -> bool:
    """Return whether the run continues one that its folder contains."""
    if not config.run_dir or not config.resume:
        return False
    return contains_run(Path(config.run_dir))


def restore_config(run_dir: Path, step: int) -> None:
    """Make config.yaml of a run the same as that of its checkpoint of a step."""
    path = run_dir / CONFIG_FILE
    verified = (step_folder(run_dir, step) / CONFIG_FILE).read_bytes()
    with suppress(OSError):  # the file is missing or unreadable
        if ordinary_file(path, len(verified)).read_bytes() == verified:
            return
    with atomic_write(path) as part:
        part.write_bytes(verified)


def check_run_folder(config: Config, path: Path) -> None:
    """Check that a run can begin in a folder, or continue in it.

    Raises:
        UserError: If the folder contains something else.
        OSError: If it cannot be written, or contains a link that would be written through.
    """
    require_output_folder(f"run_dir={path}", path)
    for name in MUST_NOT_BE_LINKS:
        refuse_link(path / name)
    if not is_resuming(config) and _names_in(path) - ALLOWED_BEFORE_START:
        resume = ", or resume the run in it with resume=true" if contains_run(path) else ""
        raise UserError(f"run_dir={path} is not empty: choose another folder{resume}")


@contextmanager
def run_folder(
    config: Config, experiment: str, log: Callable[[str], None] = print
) -> Iterator[Path]:
    """Open the folder of a run, and lock it against other processes.

    A run of several processes waits for the lock, because the process that held it before a
    restart may have been on a machine that was lost.

    A folder that is still empty at the end is removed if it was created here. The name of a new
    folder contains that of the experiment.

    Raises:
        UserError: If the folder is in use or contains something else.
        OSError: If it cannot be written, or contains a link that would be written through.
    """
    path = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
    check_run_folder(config, path)
    is_new = not config.run_dir or not exists(path)
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        _acquire(lock, config, log)
    except Timeout:
        raise UserError(
            f"run_dir={path} is in use by another process: wait for it, or choose another folder"
        ) from None
    try:
        yield path
    finally:
        lock.release()
        with suppress(OSError):  # removing an empty folder is best effort
            if _names_in(path) <= {".lock"}:
                (path / ".lock").unlink(missing_ok=True)
                if is_new:
                    path.rmdir()


def _acquire(lock: FileLock, config: Config, log: Callable[[str], None]) -> None:
    """Lock a run's folder; with several processes, wait for it. Raises `Timeout`."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if count_processes(alone=config.distributed == "none") == 1:
            raise
        log(f"waiting up to {LOST_LOCK_SECONDS} s for another process to leave the run's folder")
        lock.acquire(timeout=LOST_LOCK_SECONDS)


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in list_folder(folder)}


def new_run_dir(name: str) -> Path:
    """Create runs/<date>_<time>_<name>, with a number if a run of the same second has that name."""
    base = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")
    require_output_folder(f"the default folder {base}", base)
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}_{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("count() does not end")
