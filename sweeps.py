"""The jobs of `python train.py -m …`, and what they come to: `python -m sweeps DIR`.

Hydra starts the jobs. Their table, sweep.csv and sweep.html are read from the folder, so they are
the same whatever started the jobs and whichever of them are left to do. Does not import torch.
"""

import gc
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
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import cli
from config import Config, UserError
from files import atomic_write, printable
from report import sweep
from report.sweep import CSV, JOB, PAGE, PLAN, Run, ranked, read_job, read_sweep
from report.sweep_page import write_sweep_page
from report.sweep_table import notes, table, write_csv
from training.record import new_run_dir

WRITTEN = (".lock", "multirun.yaml", PLAN, CSV, PAGE)  # in the sweep's folder, beside the jobs'
SUMMARY_SHARE = 0.05  # of the time, at most, for summaries between jobs
MOST_SHOWN = 30  # settings in the printed table; sweep.csv has all


# --- the jobs -------------------------------------------------------------------------------------


def run_sweep(main: Callable[[], object]) -> None:
    """Have Hydra, by `main`, run the jobs of the sweep that is typed; then print what came of them.

    Raises:
        SystemExit: 1 where not all jobs of this command are finished; 130 or 143 after a stop.
        UserError: the sweep cannot start, or not all that it prints could be written.
    """
    typed, stdout = sys.argv[1:], os.fstat(sys.stdout.fileno())
    given = arguments(typed)
    plan = planned(given)
    folder = open_sweep(cli.typed_value("hydra.sweep.dir", typed),
                        resume=cli.typed_value("resume", typed) == "auto")
    write_note(folder / PLAN, {"jobs": plan})
    constant = ["--config-dir", *(o.key_or_group for o in given if not o.is_sweep_override())]
    # For Hydra (configs/config.yaml), and for jobs in processes of their own, which also have to
    # find the modules from wherever they are started.
    os.environ["GLASSGPT_SWEEP_DIR"] = str(folder)
    os.environ["GLASSGPT_SWEEP_CONSTANT"] = ",".join(constant)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    failed = False
    try:
        with stoppable(folder):
            main()
    except SystemExit:
        print("the sweep was stopped; to go on: the same command with resume=auto "
              f"hydra.sweep.dir={shlex.quote(str(folder))}", file=sys.stderr)
        with suppress(UserError):
            summarise(folder)
        raise
    except Exception as e:
        if removed_if_empty(folder):
            raise
        failed = True  # not a job, but what starts them, as where a job's process was killed
        print(f"error: {type(e).__name__}: {cli.sentence(e)}", file=sys.stderr)
    runs = summarise(folder)
    print_sweep(cli.Terminal(), folder, runs)
    check_output(stdout, folder)
    own = [run for run in runs if not plan or run.path.name in plan]
    if failed or any(run.reason or run.status != "finished" for run in own):
        sys.exit(1)


def run_job(cfg, job, train: Callable[[], float]) -> float:
    """Run a job in a folder of its own by `train`, which reads `cfg`; `job` is Hydra's
    configuration of it.

    One that fails says why, in its folder too, and gives nan: an exception would end the sweep,
    with some of Hydra's sweepers.
    """
    typed = cli.own_config_dir(job) | cli.typed(cfg, job.overrides.task)
    folder = Path(job.sweep.dir)
    constant = os.environ["GLASSGPT_SWEEP_CONSTANT"].split(",")
    swept = [key for key in typed if key not in constant]
    path = folder / job_name({key: typed[key] for key in swept})
    cfg.run_dir = str(path)
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
    best, reason = float("nan"), ""
    of = f" of {len(plan)}" if (plan := sweep.read_plan(folder)) else ""
    title = " ".join([f"job {job.job.num + 1}{of}:", *(f"{key}={typed[key]}" for key in swept)])
    cli.printer(cli.Terminal())(f"\n{printable(title, one_line=True)}")
    try:
        begin_job(path, typed, swept)
        best = train()
    except Exception as e:
        reason, foreseen = cli.sentence(e), isinstance(e, (UserError, OmegaConfBaseException))
        if not foreseen and str(e):
            reason = f"{type(e).__name__}: {reason}"
        with suppress(OSError):  # where stderr is full, the reason is in the folder
            if not foreseen:
                traceback.print_exc()
            print(printable(f"error in {path}: {reason}", one_line=True), file=sys.stderr)
    gc.collect()  # what is left of the job refers to itself, and may hold a model
    with suppress(UserError):  # the end of the sweep meets with it again
        end_job(path, reason)
        if summary_is_due(folder):
            summarise(folder)
    return best


def arguments(typed: list[str]) -> list[Override]:
    """The checked arguments and what the preset of a sweep adds to them, parsed."""
    options = cli.hydra_options(typed)
    given = {arg.partition("=")[0]: arg for arg in options.overrides
             if not arg.startswith("hydra")}
    preset = cli.typed_value("sweep", typed)
    if preset:
        path = cli.groups(options.config_dir)["sweep"][preset]
        params = OmegaConf.select(OmegaConf.create(cli.read_preset(path)), "hydra.sweeper.params",
                                  default={})
        given = {key: f"{key}={value}" for key, value in params.items()} | given
    return OverridesParser.create().parse_overrides(list(given.values()))


def planned(given: list[Override]) -> dict[str, dict[str, str]]:
    """The jobs that a grid has: folder's name → what is swept. Empty where it is no grid.

    Raises:
        OmegaConfBaseException: a value does not fit its setting.
    """
    swept = [override for override in given if override.is_sweep_override()]
    if not all(override.is_discrete_sweep() for override in swept):
        return {}
    cfg = OmegaConf.structured(Config)
    choices = [[(o.key_or_group, text) for text in swept_values(o, cfg)] for o in swept]
    return {job_name(dict(job)): dict(job) for job in product(*choices)}


def swept_values(override: Override, cfg) -> list[str]:
    """The values of a swept key as jobs, whose configuration is like `cfg`, will name them."""
    key, shown = override.key_or_group, []
    if isinstance(override.value(), Glob):
        return override.value().filter(cli.groups()[key])
    for text in override.sweep_string_iterator():
        one = f"{key}={text}"
        if key not in cli.groups():
            OmegaConf.update(cfg, key, OverridesParser.create().parse_override(one).value())
        shown.append(cli.typed(cfg, [one])[key])
    return shown


def open_sweep(typed: str | None, resume: bool) -> Path:
    """The folder of a sweep that starts, or goes on; by default a new one in runs/.

    Raises:
        UserError: it holds a sweep already, or something else, or cannot be made.
    """
    if typed is None:
        return new_run_dir("sweep", setting="hydra.sweep.dir")
    folder = Path(typed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as e:
        raise UserError(f"hydra.sweep.dir={folder} cannot be made or read ({e.strerror}): "
                        "choose another folder") from None
    if not empty:
        if not sweep.is_sweep(folder):
            raise UserError(f"hydra.sweep.dir={folder} is not empty and holds no sweep: "
                            "choose another folder")
        if not resume:
            raise UserError(f"hydra.sweep.dir={folder} holds a sweep: go on with it by "
                            "resume=auto, or choose another folder")
        refuse_links(folder)
        read_sweep(folder)  # before anything is written beside notes that are not a sweep's
    return folder


def refuse_links(folder: Path) -> None:
    """Raise `UserError` where what a sweep writes in its folder would be written elsewhere."""
    for path in (folder / name for name in WRITTEN):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path} is a link, or not a file: remove it")


def removed_if_empty(folder: Path) -> bool:
    """Leave no folder of a sweep that was refused before its first job; whether it was."""
    if any(folder.glob(f"*/{JOB}")):
        return False
    if {path.name for path in folder.iterdir()} <= {"multirun.yaml", PLAN}:
        for name in ("multirun.yaml", PLAN):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    return True


def check_output(stdout: os.stat_result, folder: Path) -> None:
    """Raise `UserError` where something was not printed, for which a `Terminal` closes stdout."""
    if not os.path.samestat(stdout, os.fstat(sys.stdout.fileno())):
        raise UserError("not all that the sweep prints could be written (the disk is full, or "
                        f"nobody reads): python -m sweeps {shlex.quote(str(folder))} prints it")


@contextmanager
def stoppable(folder: Path):
    """While this lasts Ctrl-C and SIGTERM reach the jobs in processes of their own too, and wait
    until those have saved. A job in this process sees to itself (`runtime.StopSignal`).
    """
    def stop(number, frame):
        running = [lock for lock in folder.glob("*/.lock") if sweep.is_held(lock)]
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        while any(map(sweep.is_held, running)) and any(process.is_alive() for process in processes):
            time.sleep(0.05)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def job_name(settings: dict[str, str]) -> str:
    """The name of the folder of the job with these settings: the same whatever their order."""
    named = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    name = re.sub(r"[^\w.,=+-]", "_", named, flags=re.ASCII)[:120]
    return name if name == named else f"{name}_{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def begin_job(path: Path, overrides: dict[str, str], swept: list[str]) -> None:
    """Note in a job's folder what it is given. A run that has trained keeps the note of what it
    trained under: this attempt may be refused, or find the run finished.
    """
    trained = (path / "config.yaml").exists() and (path / JOB).exists()
    new = {"overrides": overrides, "swept": swept, "until": []}
    write_job(path, read_job(path) if trained else new, "")


def end_job(path: Path, reason: str) -> None:
    """Note why a job's last attempt failed, or that it did not ("")."""
    write_job(path, read_job(path), reason)


def write_job(path: Path, job: dict, reason: str) -> None:
    if path.is_symlink():
        raise UserError(f"{path} is a link: remove it")
    until = sweep.until_now(path, job["until"])
    write_note(path / JOB, {**job, "failed": reason, "until": until})


def write_note(path: Path, note: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path.parent} cannot be written ({e.strerror}): "
                        "choose another folder by hydra.sweep.dir=PATH") from None


# --- what came of them ----------------------------------------------------------------------------


def summary_is_due(folder: Path) -> bool:
    """Whether the last summary is so long ago that another keeps to `SUMMARY_SHARE`."""
    try:
        began, ended = ((folder / name).stat().st_mtime for name in (CSV, PAGE))
    except OSError:
        return True
    return time.time() - ended >= (ended - began) / SUMMARY_SHARE


def summarise(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html anew from what is in the folder; jobs that end at the same
    time wait for each other.

    Raises:
        UserError: it is no sweep's folder, or cannot be read or written.
    """
    sweep.require_sweep(folder)  # before a lock is left in a folder that is none of ours
    refuse_links(folder)
    began = time.time()
    try:
        with FileLock(folder / ".lock"):
            runs = read_sweep(folder)
            write_csv(folder / CSV, runs)
            write_sweep_page(folder, runs)
            os.utime(folder / CSV, (began, began))  # for `summary_is_due`, in any process
    except OSError as e:
        raise UserError(f"{e.filename or folder} cannot be written: {e.strerror or e}") from None
    return runs


def print_sweep(console: Console, folder: Path, runs: list[Run]) -> None:
    """Print the table of the settings, and below it what to do next."""
    say, settings = cli.printer(console), [s for s in ranked(runs) if s.finished]
    say("")
    if settings:
        with console.capture() as drawn:
            console.print(table(settings[:MOST_SHOWN], sweep.compared_by(runs), console.width))
        say(drawn.get().rstrip("\n"))
    if len(settings) > MOST_SHOWN:
        say(f"… and {len(settings) - MOST_SHOWN} more, in sweep.csv")
    say("")
    for name, value in notes(folder, runs):
        say(printable(f"{name:<12}{value}", one_line=True))


def summary_command() -> None:
    """`python -m sweeps DIR`"""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise UserError("give the folder of a sweep: python -m sweeps DIR")
    folder, stdout = Path(sys.argv[1]), os.fstat(sys.stdout.fileno())
    print_sweep(cli.Terminal(), folder, summarise(folder))
    check_output(stdout, folder)


if __name__ == "__main__":
    cli.start(summary_command, lambda: __doc__)
