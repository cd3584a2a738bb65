"""The jobs of a sweep: their folders, what is kept of those that fail, what stops them. Hydra's launchers start them."""

import hashlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf.errors import OmegaConfBaseException

import cli
import sweeps
from config import UserError
from files import atomic_write
from sweeps import JOB
from training.record import Terminal, new_run_dir


def run_sweep(main: Callable[[], object]) -> None:
    """Have Hydra, by `main`, run the jobs of the sweep that is typed; then say what they came to.

    Raises:
        SystemExit: 1 where a job failed, 130 or 143 after a stop signal.
    """
    typed = sys.argv[1:]
    folder = open_sweep(cli.typed_value("hydra.sweep.dir", typed), resume=cli.typed_value("resume", typed) == "auto")
    # For Hydra (configs/config.yaml), and for jobs in processes of their own, which also have to
    # find the modules from wherever they are started.
    os.environ["GLASSGPT_SWEEP_DIR"] = str(folder)
    os.environ["GLASSGPT_SWEEP_CONSTANT"] = ",".join(cli.constant(typed))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    failed = False
    try:
        with stoppable(folder):
            main()
    except SystemExit:
        print(f"the sweep was stopped; to go on: the same command with resume=auto hydra.sweep.dir={shlex.quote(str(folder))}", file=sys.stderr)
        raise
    except Exception as e:
        if removed_if_empty(folder):
            raise
        failed = True  # not a job, but what starts them, as where a job's process was killed
        print(f"error: {type(e).__name__}: {cli.sentence(e)}", file=sys.stderr)
    runs = sweeps.summarise(folder)
    sweeps.print_sweep(Terminal(), folder, runs)
    if failed or any(run.reason for run in runs):
        sys.exit(1)


def run_job(cfg, job, train: Callable[[], float]) -> float:
    """Run a job in a folder of its own by `train`, which reads `cfg`; `job` is Hydra's configuration of it.

    One that fails says why, in its folder too, and gives nan: an exception would end the sweep, with some of Hydra's sweepers.
    """
    typed, folder = cli.typed(cfg, job.overrides.task), Path(job.sweep.dir)
    constant = os.environ["GLASSGPT_SWEEP_CONSTANT"].split(",")
    swept = [key for key in typed if key not in constant]
    path = begin_job(folder, typed, swept)
    cfg.run_dir = str(path)
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
    best = float("nan")
    print(f"\njob {job.job.num + 1}", *(f"{key}={typed[key]}" for key in swept), flush=True)
    try:
        best = train()
    except Exception as e:
        why = cli.sentence(e)
        if not isinstance(e, (UserError, OmegaConfBaseException)):
            traceback.print_exc()
            why = type(e).__name__ + (f": {why}" if str(e) else "")
        print(f"error in {path}: {why}", file=sys.stderr)
        fail_job(path, why)
    sweeps.summarise(folder)
    return best


def open_sweep(typed: str | None, resume: bool) -> Path:
    """The folder of a sweep that starts, or goes on; without one typed, a new one in runs/ that no other sweep has.

    Raises:
        UserError: it holds a sweep already, or cannot be made.
    """
    folder = Path(typed) if typed is not None else new_run_dir("sweep")
    if not resume and any(folder.glob(f"*/{JOB}")):
        raise UserError(f"hydra.sweep.dir={folder} holds a sweep: go on with it by resume=auto, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"hydra.sweep.dir={folder} cannot be made ({e.strerror}): choose another folder") from None
    return folder


def removed_if_empty(folder: Path) -> bool:
    """Leave no folder of a sweep that was refused before its first job; whether it was."""
    if any(folder.glob(f"*/{JOB}")):
        return False
    if {path.name for path in folder.iterdir()} <= {"multirun.yaml"}:
        (folder / "multirun.yaml").unlink(missing_ok=True)
        folder.rmdir()
    return True


@contextmanager
def stoppable(folder: Path):
    """While this lasts Ctrl-C and SIGTERM reach the jobs in processes of their own too, and wait until those have saved.

    A job in this process sees to itself (`runtime.StopSignal`).
    """
    def stop(number, frame):
        running, processes = [lock for lock in folder.glob("*/.lock") if _held(lock)], multiprocessing.active_children()
        for process in processes:
            process.terminate()
        while any(map(_held, running)) and any(process.is_alive() for process in processes):
            time.sleep(0.05)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _held(lock: Path) -> bool:
    """Whether a process has this lock."""
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def begin_job(folder: Path, overrides: dict[str, str], swept: list[str]) -> Path:
    """The folder of the job that has these settings in the sweep in `folder`, with a note of what it was given.

    Jobs are told apart by what was swept, whatever their order and number: the same settings find the same folder again.
    """
    named = ",".join(f"{key}={overrides[key]}" for key in sorted(swept)) or "job"
    name = re.sub(r"[^\w.,=+-]", "_", named, flags=re.ASCII)[:120]
    if name != named:
        name += "_" + hashlib.sha256(named.encode()).hexdigest()[:8]
    _note(folder / name, {"overrides": overrides, "swept": swept})
    return folder / name


def fail_job(path: Path, why: str) -> None:
    """Keep why a job failed, in its folder; its next attempt forgets it."""
    _note(path, {**json.loads((path / JOB).read_text(encoding="utf-8")), "failed": why})


def _note(path: Path, job: dict) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with atomic_write(path / JOB) as part:
            part.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}): choose another folder by hydra.sweep.dir=PATH") from None
