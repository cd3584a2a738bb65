"""The jobs of `python train.py -m …`, and what they come to: `python -m sweeps DIR`. Hydra starts
the jobs. Their table, sweep.csv and sweep.html are read from the folder, so they are the same
whatever started the jobs and whichever of them are left to do. Does not import torch."""

import contextlib
import gc
import hashlib
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from math import nan, prod
from pathlib import Path

from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import OmegaConf
from rich.console import Console

import cli
from cli.command import explained
from common.errors import UserError
from common.files import atomic_write
from common.settings import format_value
from common.text import printable
from report import sweep
from report.sweep import CSV, JOB, Run, named, ranked, read_job, read_run, read_sweep
from report.sweep_page import write_sweep_page
from report.sweep_table import notes, table, write_csv
from training.record import new_run_dir

MAY_CHANGE = ("max_steps", "wandb.")  # of a job's settings, when a sweep goes on


def run_sweep(main: Callable[[], object]) -> None:
    """Have Hydra, by `main`, run the jobs of the sweep that is typed; then print what came of them.
    Exits with 1 where not all of these jobs are finished, with 130 or 143 after a stop."""
    options = cli.hydra_options(sys.argv[1:])
    given = arguments(options)
    typed = {
        o.key_or_group: o.value()
        for o in OverridesParser.create().parse_overrides(options.settings)
    }
    folder = open_sweep(typed.get("hydra.sweep.dir"), resume=typed.get("resume") == "auto")
    # For Hydra (configs/config.yaml), and for jobs in processes of their own, which also have to
    # find the modules from wherever they are started.
    constant = [o.key_or_group for o in given if not o.is_sweep_override()]
    jobs = jobs_in_grid(given)
    os.environ["GLASSGPT_SWEEP_DIR"] = str(folder)
    os.environ["GLASSGPT_SWEEP"] = json.dumps([options.config_dir, constant, jobs])
    log = cli.printer(cli.Terminal())
    log(f"sweep    {f'{jobs} jobs, ' * bool(jobs)}in {folder}")
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    failed = False
    try:
        main()
    except SystemExit:
        again = [arg for arg in sys.argv[1:] if not arg.startswith(("resume=", "hydra.sweep.dir="))]
        again = ["python", "train.py", *again, "resume=auto", f"hydra.sweep.dir={folder}"]
        cli.tell(f"the sweep was stopped; to go on:\n{shlex.join(again)}")
        if not removed_if_empty(folder):
            summarise(folder)
        raise
    except Exception as e:
        if removed_if_empty(folder):
            raise
        failed = True  # not a job, but what starts them, as where a job's process was killed
        cli.tell(f"error: {type(e).__name__}: {cli.sentence(e)}")
    if removed_if_empty(folder):  # where the jobs were only planned
        return
    runs = summarise(folder)
    print_sweep(cli.Terminal(), folder, runs)
    if failed or any(run.reason or run.status != "finished" for run in runs):
        sys.exit(1)


def run_job(cfg, job, train: Callable[[], float]) -> float:
    """Run a job in a folder of its own by `train`, which reads `cfg`; `job` is Hydra's
    configuration of it. What it says goes to log.txt there; at its end a line is printed.

    One that fails says why, in its folder too, and gives nan: an exception would end the sweep,
    with some of Hydra's sweepers."""
    config_dir, constant, jobs = json.loads(os.environ["GLASSGPT_SWEEP"])
    console, start = cli.Terminal(file=sys.stdout), time.time()
    log = cli.printer(console)
    typed = given_to(cfg, job.overrides.task)
    swept = [key for key in typed if key not in constant]
    folder = Path(job.sweep.dir)
    path = folder / job_name({key: typed[key] for key in swept})
    output = path / "log.txt"
    cfg.run_dir = str(path)
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
    best, reason, number = nan, "", job.job.num + 1
    of, settings = f"/{jobs}" if jobs else "", named({key: typed[key] for key in swept})
    title = printable(f"{number}{of}  {settings}", one_line=True)
    try:
        path.mkdir(parents=True, exist_ok=True)
        given = ({"--config-dir": config_dir} if config_dir else {}) | typed
        given.pop("resume", None)  # which is of the command
        refuse_another(path, given)
        write_note(path, {"overrides": given, "swept": swept, "failed": ""})
        log(title)
        with (
            output.open("a", encoding="utf-8") as said,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            best = train()
    except Exception as e:
        reason = explained(e)
        if reason is None:
            reason = ": ".join(dict.fromkeys([type(e).__name__, cli.sentence(e)]))
            with contextlib.suppress(OSError), output.open("a", encoding="utf-8") as said:
                traceback.print_exc(file=said)
        cli.tell(printable(f"{title}  failed: {reason}", one_line=True))
    gc.collect()  # what is left of the job refers to itself, and may hold a model
    with contextlib.suppress(UserError, OSError):  # the end of the sweep meets with it again
        write_note(path, {**read_job(path), "failed": reason})
        summarise(folder)
        if not reason:
            loss = read_run(path).measures.get("val/loss", nan)
            log(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return best


def refuse_another(path: Path, given: dict[str, str]) -> None:
    """Raise `UserError` where a job has trained under other settings than it is given now."""
    if not (path / "config.yaml").exists():
        return
    before = read_job(path)["overrides"]
    other = [
        f"{key}={before.get(key)}"
        for key in before.keys() | given.keys()
        if before.get(key) != given.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if other:
        raise UserError(
            f"{path} was begun with other settings ({', '.join(sorted(other))}): go on "
            "with those, or give the sweep another hydra.sweep.dir"
        )


def given_to(cfg, overrides: list[str]) -> dict[str, str]:
    """What a job was given, by key, as a user types it."""
    pairs = (override.partition("=")[::2] for override in overrides)
    return {
        key: value if key in cli.groups() else format_value(OmegaConf.select(cfg, key))
        for key, value in pairs
    }


def arguments(given) -> list[Override]:
    """The settings that are typed and those that the preset of a sweep adds to them, parsed."""
    typed = {arg.partition("=")[0]: arg for arg in given.settings if not arg.startswith("hydra")}
    preset = [typed["sweep"]] if "sweep" in typed else []
    params = cli.composed(preset, given.config_dir, return_hydra_config=True).hydra.sweeper.params
    typed = {key: f"{key}={value}" for key, value in (params or {}).items()} | typed
    return OverridesParser.create().parse_overrides(list(typed.values()))


def jobs_in_grid(given: list[Override]) -> int:
    """How many jobs there are, 0 where something else than a grid decides that."""
    swept = [override for override in given if override.is_sweep_override()]
    if not all(override.is_discrete_sweep() for override in swept):
        return 0
    return prod(
        len(o.value().filter(cli.groups()[o.key_or_group]))
        if isinstance(o.value(), Glob)
        else len(list(o.sweep_string_iterator()))
        for o in swept
    )


def open_sweep(typed: str | None, resume: bool) -> Path:
    """The folder of a sweep that starts, or goes on; by default a new one in runs/."""
    if typed is None:
        return new_run_dir("sweep")
    folder = Path(typed)
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} <= {"multirun.yaml"}:  # Hydra's, before a first job
        return folder
    if not sweep.is_sweep(folder):
        raise UserError(
            f"hydra.sweep.dir={folder} is not empty and holds no sweep: choose another folder"
        )
    if not resume:
        raise UserError(
            f"hydra.sweep.dir={folder} holds a sweep: go on with it by resume=auto, or "
            "choose another folder"
        )
    read_sweep(folder)  # before anything is written beside notes that are not a sweep's
    return folder


def removed_if_empty(folder: Path) -> bool:
    """Leave no folder of a sweep that was refused before its first job; whether it was."""
    if any(folder.glob(f"*/{JOB}")):
        return False
    (folder / "multirun.yaml").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # where there is more in it
        folder.rmdir()
    return True


def job_name(settings: dict[str, str]) -> str:
    """The name of the folder of the job with these settings: the same whatever their order."""
    named = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    name = re.sub(r"[^\w.,=+-]", "_", named, flags=re.ASCII)[:120]
    return name if name == named else f"{name}_{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def write_note(path: Path, note: dict) -> None:
    """Note in a job's folder what it is given, and why its last attempt failed ("")."""
    with atomic_write(path / JOB) as part:
        part.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def summarise(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html anew from the folder, one process at a time."""
    sweep.require_sweep(folder)  # before a lock is left in a folder that is none of ours
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_csv(folder / CSV, runs)
        write_sweep_page(folder, runs)
    return runs


def print_sweep(console: Console, folder: Path, runs: list[Run]) -> None:
    """Print the table of the settings, and below it what to do next."""
    log, settings = cli.printer(console), [s for s in ranked(runs) if s.finished]
    log("")
    if settings:
        log(table(settings, sweep.compared_by(runs), console.width))
    log("")
    for name, value in notes(folder, runs):
        log(printable(f"{name:<12}{value}", one_line=True))


def main() -> None:
    """`python -m sweeps DIR`"""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise UserError("give the folder of a sweep: python -m sweeps DIR")
    folder = Path(sys.argv[1])
    print_sweep(cli.Terminal(), folder, summarise(folder))


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
