"""Open the folder of a run, and lock it against other processes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import list_folder
from common.launcher import count_processes
from common.paths import require_output_folder
from common.text import pluralize
from config import Config
from run.run_dir import RunDir, new_run_dir

# Seconds that a run of several processes waits for the lock, because the process that held it
# before a restart may have been on a machine that was lost. NFS releases it after 90 by default.
LOST_LOCK_SECONDS = 120


@contextmanager
def locked_run_dir(config: Config) -> Iterator[RunDir]:
    """Open the folder of a run, which no other process can open meanwhile.

    A folder that is still empty at the end, but for Hydra's record of the command, is removed.
    """
    path = Path(config.run_dir) if config.run_dir else new_run_dir(config.experiment or "default")
    run_dir = RunDir(path)
    check_run_dir(config, run_dir)
    steps = run_dir.steps()
    path.mkdir(parents=True, exist_ok=True)
    is_alone = count_processes(alone=config.distributed == "none") == 1
    lock = FileLock(run_dir.lock, timeout=0 if is_alone else LOST_LOCK_SECONDS)
    try:
        held = lock.acquire()
    except Timeout:
        raise UserError(
            f"run_dir={path} is in use by another process: wait for it, or choose another folder"
        ) from None
    with held:
        check_run_dir(config, run_dir)  # again, because another process may have begun it
        if run_dir.steps() != steps:
            raise UserError(
                f"run_dir={path} was trained by another process meanwhile: repeat the command"
            )
        try:
            yield run_dir
        finally:
            with suppress(OSError):  # removing an empty folder is best effort
                records = run_dir.hydra_folders()
                if set(list_folder(path)) <= {run_dir.lock, *records}:
                    for record in records:
                        shutil.rmtree(record)
                    run_dir.lock.unlink(missing_ok=True)
                    path.rmdir()


def check_run_dir(config: Config, run_dir: RunDir) -> None:
    """Raise `UserError` unless a run can begin or continue in a folder."""
    path = run_dir.path
    require_output_folder(f"run_dir={path}", path)
    if not run_dir.has_begun:
        if {*list_folder(path)} - {*run_dir.files_before_start()}:
            raise UserError(f"run_dir={path} is not empty: choose another folder")
    elif not config.resume:
        raise UserError(
            f"run_dir={path} is not empty: choose another folder, or resume the run in it with "
            "resume=true"
        )
    elif not run_dir.steps():
        rows = run_dir.rows()
        if any(row.get("seconds/save") for row in rows):
            raise UserError(
                f"{run_dir.metrics_file} records {pluralize(rows[-1]['step'], 'step')}, but "
                f"{run_dir.checkpoints} holds no checkpoint: restore them, or, if none could be "
                "saved, start a new run in another folder"
            )
