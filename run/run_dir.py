"""The folder of a run: the names in it, and how it is read. No other module knows these names.

A run may go on while its folder is read: it appends rows, and removes old checkpoints.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import count
from math import inf
from pathlib import Path
from typing import TypeVar

from common.errors import UserError
from common.files import atomic_write, exists, is_folder, list_folder, part_path
from common.text import pluralize
from config import Config
from run.checkpoints import (
    CHECKPOINT_FILES,
    CONFIG_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    Start,
    read_manifest,
    verify_checkpoint,
)
from run.config_file import read_config
from run.loss_history import trained_loss
from run.row import Row

Result = TypeVar("Result")
Log = Callable[[str], None]

RUNS = Path("runs")  # where runs are unless their folders are named
HF_CONFIG_FILE = "config.json"  # in the folder of a model of Hugging Face's format, which is no run
HYDRA_FOLDER = ".hydra"  # in a run's folder: what was typed and composed; then .hydra_2 and so on
SWEEP_FILE = "multirun.yaml"  # in a sweep's folder: what its jobs share, which Hydra writes
CHECKPOINTS = "checkpoints"
SNAPSHOT_SUFFIXES = (".npz", ".png", ".safetensors")  # arrays, attention grid, float16 weights
CHECKPOINT_NAME = re.compile(r"step_0*(\d+)|(last|best)")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint and, without a suffix, of its snapshot's files."""
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step whose `step_name` this is, or None."""
    match = re.fullmatch(r"step_(\d{8,})", name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


class RunDir:
    """The folder of a run, which may be empty. Nothing is kept but parsed configurations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"  # held while the run is trained
        self.config_file = path / CONFIG_FILE  # resolved; with it the run has begun
        self.tokenizer_file = path / TOKENIZER_FILE
        self.metrics_file = path / "metrics.jsonl"  # one row per logged step
        self.samples_file = path / "samples.jsonl"  # texts generated during training
        self.page = path / "report.html"
        self.page_version = path / "report.html.js"  # tells an open page the step of the newest
        self.checkpoints = path / CHECKPOINTS
        self.part_checkpoint = self.checkpoints / ".step.part"  # one that is being written
        self.snapshots = path / "attention"
        self.trace_file = path / "trace.json.gz"  # of profiled steps
        self.wandb = path / "wandb"  # written by W&B
        self.wandb_id_file = self.wandb / "glassgpt-run-id"
        # Of a job of a sweep:
        self.job_file = path / "job.json"  # its record
        self.job_lock = path / ".job.lock"  # held while the job runs
        self.job_log = path / "log.txt"  # what the job prints
        self.failure_file = path / "failure.txt"  # why its last attempt failed or was refused

    def files_before_start(self) -> list[Path]:
        """Return the files that may lie in the folder before the run begins."""
        job = [self.job_file, part_path(self.job_file), self.job_lock, self.job_log]
        hydra = [self.path / "train.log", *self.hydra_folders()]
        return [self.lock, part_path(self.config_file), *job, self.failure_file, *hydra]

    def hydra_folders(self) -> list[Path]:
        """Return the folders in which Hydra has recorded the calls that started or resumed it."""
        return list_folder(self.path, f"{HYDRA_FOLDER}*")

    def typed_settings(self) -> str:
        """Return Hydra's records of what was typed in these calls, as text; "" without any."""
        records = self.path.glob(f"{HYDRA_FOLDER}*/overrides.yaml")
        return "".join(record.read_text(encoding="utf-8", errors="replace") for record in records)

    @property
    def has_begun(self) -> bool:
        """True if there is a configuration or a checkpoint."""
        return exists(self.config_file) or bool(self.steps())

    @property
    def config(self) -> Config | None:
        """The resolved configuration, None before the run has begun; `UserError` if damaged."""
        if not exists(self.config_file):
            return None
        version = self.config_file.stat()
        return _read_config(self.config_file, version.st_mtime_ns, version.st_size)

    def rows(self, log: Log | None = None) -> list[Row]:
        """Read the rows of metrics.jsonl; see `read_rows`."""
        return read_rows(self.metrics_file, log)

    def samples(self) -> list[Row]:
        """Read the texts of samples.jsonl with their steps; see `read_rows`."""
        return read_rows(self.samples_file)

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot(self, step: int, suffix: str) -> Path:
        """Return the path of a file of a snapshot, which has one of `SNAPSHOT_SUFFIXES`."""
        return self.snapshots / f"{step_name(step)}{suffix}"

    def snapshot_files(self, suffix: str) -> dict[int, Path]:
        """Return the files of the snapshots that end with a suffix, in the order of their steps."""
        paths = list_folder(self.snapshots, f"*{suffix}")
        files = {step: path for path in paths if (step := parse_step(path.stem)) is not None}
        return dict(sorted(files.items()))

    def remove_snapshots_after(self, step: int) -> None:
        """Remove the snapshots after a step, from which a resumed run may differ."""
        for suffix in SNAPSHOT_SUFFIXES:
            for saved_step, path in self.snapshot_files(suffix).items():
                if saved_step > step:
                    path.unlink()

    # --- checkpoints ------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        steps = (parse_step(path.name) for path in list_folder(self.checkpoints))
        return sorted(step for step in steps if step is not None)

    def checkpoint_folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.checkpoints / step_name(step)

    def checkpoint(self, which: str | int = "last", log: Log = print) -> Checkpoint:
        """Verify a checkpoint ("last", "best" or a step) and return it; see `open_checkpoint`."""
        return self.open_checkpoint(which, lambda checkpoint: checkpoint, log)

    def open_checkpoint(
        self,
        which: str | int,
        read: Callable[[Checkpoint], Result],
        log: Log,
        names: Sequence[str] = CHECKPOINT_FILES,
    ) -> Result:
        """Verify the files `names` of a checkpoint ("last", "best" or a step); return `read` of it.

        Instead of a damaged "best" the next best one is taken, and otherwise the one before; `log`
        prints a line about it. If a running job removes a checkpoint before it is read, the choice
        is made again.

        Raises:
            UserError: If no intact one of this format is left.
            OSError: If a file cannot be read for another reason than damage.
        """
        damaged: set[int] = set()
        while steps := [step for step in self.preferred_steps(which) if step not in damaged]:
            folder = self.checkpoint_folder(steps[0])
            try:
                content = read(verify_checkpoint(folder, names))
            except (ValueError, UserError, OSError) as e:
                if steps[0] not in self.steps():
                    continue  # a running job has removed it
                if not isinstance(e, ValueError):
                    raise
                log(f"checkpoint {folder} is damaged ({e})")
                damaged.add(steps[0])
            else:
                if damaged:
                    log(f"the checkpoint of step {steps[0]} is taken instead")
                return content
        raise UserError(
            f"every checkpoint of {self.path} up to step {max(damaged)} is damaged: restore one, "
            "or start a new run"
        )

    def preferred_steps(self, which: str | int) -> list[int]:
        """Return the steps to try for "last", "best" or a step; `UserError` if there is none."""
        steps = self.steps()
        if not steps:
            raise self.missing_checkpoint()
        if which == "best":
            return self._best_first()
        newest = steps[-1] if which == "last" else int(which)
        if newest not in steps:
            existing = sorted({*steps, *self.snapshot_files(".safetensors")})
            raise UserError(
                f"{self.path} has no weights of step {newest}: choose one of "
                f"{', '.join(map(str, existing))}"
            )
        return [step for step in reversed(steps) if step <= newest]

    def find_start(self, log: Log) -> Start:
        """Return the newest intact checkpoint as the start of a resume; a new one without any."""
        if not self.steps():
            return Start()
        checkpoint = self.checkpoint("last", log)
        rows = self.rows(lambda note: None)  # the record prints it
        is_recorded = any(row["step"] == checkpoint.step for row in rows)
        return Start(checkpoint, checkpoint.step if is_recorded else checkpoint.step - 1)

    def missing_checkpoint(self) -> UserError:
        """Return the error for a folder without a checkpoint."""
        if not self.has_begun:
            problem = "contains no run" if exists(self.path) else "does not exist"
            return UserError(f"{self.path} {problem}: name the folder of a run")
        return UserError(
            f"{self.path} has no checkpoint, because the run stopped before its first one or has "
            "not started: repeat its command with "
            f"run_dir={shlex.quote(str(self.path))} resume=auto"
        )

    def saved_config(self) -> Config:
        """Return the configuration in the newest intact checkpoint, verified by its hash."""

        def read(checkpoint: Checkpoint) -> Config:
            return read_config(checkpoint.folder / CONFIG_FILE)

        return self.open_checkpoint("last", read, lambda note: None, [CONFIG_FILE])

    def fingerprint(self, across_seeds: bool = False) -> str:
        """Return the fingerprint of its text from a readable manifest; "" without a checkpoint.

        `across_seeds` leaves out the seed, for runs that differ by it on purpose.
        """
        if not self.steps():
            return ""
        text = self.open_checkpoint("last", lambda at: at.manifest.fingerprint, lambda _: None, [])
        return text.partition("-")[0] if across_seeds else text

    def _best_first(self) -> list[int]:
        """Return the saved steps by validation loss, those without one last, newest first.

        A checkpoint with a damaged manifest comes first, because it may be the best one.
        """

        def order(step: int) -> tuple[float, int]:
            try:
                loss = trained_loss(read_manifest(self.checkpoint_folder(step)).row)
            except ValueError:
                return -inf, step
            return loss, step if loss < inf else -step

        return sorted(self.steps(), key=order)

    def write_pointer(self, name: str, step: int) -> None:
        """Make the file checkpoints/`name` hold the name of a step's folder, for people."""
        path = self.checkpoints / name
        content = f"{step_name(step)}\n"
        if not exists(path) or path.read_bytes() != content.encode():
            with atomic_write(path) as part:
                part.write_text(content)

    def remove_checkpoints(self, steps: Iterable[int]) -> None:
        """Remove checkpoints, for readers at once, and what is left of an earlier removal."""
        for step in steps:
            folder = self.checkpoint_folder(step)
            folder.rename(part_path(folder))
        for folder in list_folder(self.checkpoints, ".step_*.part"):
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint to an unused name that no step has; return its path."""
        folder = self.checkpoint_folder(step)
        paths = (folder.with_name(f"aside_{number}_{folder.name}") for number in count(1))
        return folder.rename(next(path for path in paths if not exists(path)))


@lru_cache(maxsize=1000)
def _read_config(path: Path, modified_ns: int, size: int) -> Config:
    """Read a file once per version: parsing takes longer than all other reading of a run."""
    return read_config(path)


def read_rows(path: Path, log: Log | None = None) -> list[Row]:
    """Read the rows of a metrics or samples file in order; none if it does not exist.

    A line that is not a row with a step, as after a power loss, is skipped with a note to `log`.
    Without `log`, a file of which no line is a row raises `UserError`.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(Row(row))
    if log and len(rows) < len(lines):
        log(f"note: skipped {pluralize(len(lines) - len(rows), 'invalid line')} of {path}")
    elif lines and not rows:
        raise UserError(f"{path} has no row that can be read: restore it, or remove it")
    return rows


# --- the folders of runs --------------------------------------------------------------------------


def new_run_dir(name: str) -> Path:
    """Create runs/<date>_<time>_<name>, with a number if a run of the same second has that name."""
    base = RUNS / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}_{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("count() does not end")


def find_run(path: Path) -> tuple[RunDir | None, str | None]:
    """Return the run at a path and, if the path is in a checkpoint of it, the checkpoint's name."""
    for folder in (path.absolute(), path.absolute().parent):
        match = CHECKPOINT_NAME.fullmatch(folder.name)
        if match and folder.parent.name == CHECKPOINTS:
            return RunDir(folder.parents[1]), match[1] or match[2]
    if not is_folder(path) or exists(path / HF_CONFIG_FILE) or exists(path / MANIFEST_FILE):
        return None, None
    run_dir = RunDir(path)
    return (run_dir, None) if run_dir.has_begun else (None, None)


def find_newest_run() -> RunDir:
    """Return the run in `RUNS`, or in a sweep there, that saved a checkpoint last."""
    folders = [path for path in list_folder(RUNS) if is_folder(path)]
    folders += [path for sweep in folders for path in list_folder(sweep) if is_folder(path)]
    candidates = [RunDir(path) for path in folders]
    trained = [run_dir for run_dir in candidates if run_dir.steps()]
    if not trained:
        if begun := [run_dir for run_dir in candidates if run_dir.has_begun]:
            raise begun[-1].missing_checkpoint()
        raise UserError(
            f"{RUNS}/ has no run yet: train one with python train.py, or name one with run_dir=PATH"
        )
    return max(trained, key=lambda run_dir: run_dir.checkpoints.stat().st_mtime)
