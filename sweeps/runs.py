"""Read runs from their folders: the jobs of a sweep, and any others. Does not import torch."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from common.errors import UserError
from common.files import atomic_write, exists, is_folder, list_folder, read_json_object, seal
from common.settings import format_settings
from common.terminal import error_sentence, explain_error
from config import Config
from run.config_file import PER_COMMAND
from run.row import Row
from run.run_dir import SWEEP_FILE, RunDir
from sweeps.figures import compute_figures

# A pseudo-setting of compared runs: the name of each, so that each is a variant of its own.
RUN = "run"
TEXT_DIGITS = 10  # that tables show of a text's fingerprint
MAX_DEPTH = 2  # of runs below a folder that is compared: in it, or in a sweep in it


@dataclass(frozen=True)
class JobRecord:
    """The record of a job, written when it starts."""

    hash: str = ""  # of its settings; "" of a run outside of a sweep
    row: str = ""  # hash of its settings without the seed
    settings: dict[str, str] = field(default_factory=dict)  # as composed; presets as typed
    typed: list[str] = field(default_factory=list)  # keys of the settings that were typed
    # The step from which each max_steps has counted: more than one if the job was extended.
    schedule: list[list[int]] = field(default_factory=list)

    def continued(self, steps_taken: int, max_steps: int) -> "JobRecord":
        """Return the record of the job when it goes on to `max_steps`."""
        schedule = [[first, steps] for first, steps in self.schedule if first < steps_taken]
        if not schedule or schedule[-1][1] != max_steps:
            schedule.append([steps_taken, max_steps])
        return replace(self, schedule=schedule)

    @property
    def length(self) -> str:
        """Its number of steps: 6, or if it was extended, 6, then 12 from step 6."""
        return ", then ".join(
            f"{max_steps} from step {first}" if first else f"{max_steps}"
            for first, max_steps in self.schedule
        )

    @property
    def shown_settings(self) -> dict[str, str]:
        """Its settings, and its number of steps as far as it has begun."""
        return self.settings | ({"max_steps": self.length} if self.schedule else {})


@dataclass(frozen=True)
class Run:
    """One job of a sweep, or a run outside of any sweep, as its folder records it."""

    path: Path
    # In a sweep: the typed settings in which its jobs differ, such as model.n_kv_head → 2. If runs
    # are compared: the run's name under `RUN`, and all differing settings.
    settings: dict[str, str]
    record: JobRecord  # of a sweep; empty for other runs
    config: Config | None  # resolved; None before it trained
    rows: list[Row]  # rows of metrics.jsonl
    status: str  # finished, failed (in its last attempt), or unfinished (stopped or still running)
    failure: str  # why its last attempt failed or was refused, in one line; "" if neither
    # The fingerprint of its text, in a sweep without the seed; "" before its first checkpoint.
    text: str = ""

    @property
    def name(self) -> str:
        """The name of its folder, or the path that tells it from other compared runs."""
        return self.settings.get(RUN, self.path.name)

    @property
    def steps(self) -> int:
        """Number of steps that it has taken."""
        return self.rows[-1]["step"] if self.rows else 0

    @cached_property
    def figures(self) -> dict[str, float]:
        """The run's numbers in sweep.csv, such as `val/loss`; see `compute_figures`."""
        return compute_figures(self.path, self.config, self.rows)


def read_run(path: Path, across_seeds: bool = False) -> Run:
    """Read a run from its folder. If its files cannot be read, it has failed for that reason."""
    run_dir = RunDir(path)
    record = JobRecord()
    config = None
    rows = []
    failure = text = ""
    try:
        if exists(run_dir.failure_file):
            failure = run_dir.failure_file.read_text(encoding="utf-8", errors="replace")
        if exists(run_dir.job_file):
            record = read_record(run_dir)
        config = run_dir.config
        rows = run_dir.rows()
        text = run_dir.fingerprint(across_seeds)
    except Exception as e:  # damaged files raise errors of many types
        failure = explain_error(e) or error_sentence(e)
    status = "failed" if failure else "unfinished"
    if config is not None and rows:
        max_steps = record.schedule[-1][1] if record.schedule else config.max_steps
        if rows[-1]["step"] >= max_steps:
            status = "finished"
    return Run(path, {}, record, config, rows, status, failure, text)


# --- sweeps ---------------------------------------------------------------------------------------


def write_record(run_dir: RunDir, record: JobRecord) -> None:
    """Write the record of a job into its folder, with its hash."""
    with atomic_write(run_dir.job_file) as part:
        part.write_text(seal(json.dumps(asdict(record), indent=1)), encoding="utf-8")


def read_record(run_dir: RunDir) -> JobRecord:
    """Read the record of a job; raise `UserError` if it is damaged, or of another version."""
    try:
        content = read_json_object(run_dir.job_file, must_be_sealed=True)
        del content["sha256"]
        return JobRecord(**content)
    except (ValueError, TypeError) as e:
        problem = f"{run_dir.job_file} is damaged or of another version ({e})"
        raise UserError(f"{problem}: restore it, or remove the folder of the job") from None


def is_sweep(folder: Path) -> bool:
    """Return whether a sweep has begun in this folder."""
    return exists(folder / SWEEP_FILE)


def read_sweep(folder: Path) -> list[Run]:
    """Read the runs of a sweep, sorted by the names of their folders. Copies of a job count once.

    A row of the table holds runs that differ only by the seed, of one text and one number of steps:
    they have the same values of all settings, however typed.
    """
    runs = _read_jobs(folder)
    keys = _find_swept_settings([run.record for run in runs])
    rows_on_texts = {(run.record.row, run.text) for run in runs if run.text}
    if len(rows_on_texts) > len(dict(rows_on_texts)):  # a text was replaced between two calls
        keys.append("text")
    shown = [run.record.shown_settings | {"text": run.text[:TEXT_DIGITS]} for run in runs]
    return [
        replace(run, settings={key: settings.get(key, "") for key in keys})
        for run, settings in zip(runs, shown)
    ]


def _read_jobs(folder: Path) -> list[Run]:
    """Return the run of each job in a sweep's folder: of copies, the one that has come furthest."""
    jobs = [path for path in list_folder(folder) if is_folder(path)]
    runs = [read_run(path, across_seeds=True) for path in jobs if exists(RunDir(path).job_file)]
    runs.sort(key=lambda run: (run.status == "finished", run.steps))
    furthest = {run.record.hash or run.name: run for run in runs}
    return sorted(furthest.values(), key=lambda run: run.path)


def _find_swept_settings(records: Sequence[JobRecord]) -> list[str]:
    """Return the keys of the typed settings, and of the steps, that differ between jobs."""
    shown = [record.shown_settings for record in records]
    typed = dict.fromkeys(key for record in records for key in record.typed)
    are_extended = any(len(record.schedule) > 1 for record in records)
    keys = []
    for key in {**typed, "max_steps": None}:
        values = {settings[key] for settings in shown if key in settings}
        if len(values) > 1 or (key == "max_steps" and are_extended):
            keys.append(key)
    return keys


# --- comparisons ----------------------------------------------------------------------------------


def read_comparison(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at some paths, with their names and the settings that differ between them.

    A path is the folder of a run, or one that holds runs or sweeps. A run is named by its path
    relative to the deepest folder that contains all of them.
    """
    folders = _find_all_runs(paths)
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder) for folder in folders]
    differing = _find_differing_settings([run.config for run in runs if run.config])
    named = []
    for run in runs:
        settings = {RUN: run.path.relative_to(parent).as_posix()}
        if run.config:
            values = format_settings(run.config)
            settings |= {key: values[key] for key in differing}
        named.append(replace(run, settings=settings))
    return named


def _find_all_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the runs at some paths, each once.

    Raises:
        UserError: If there is no run at one of the paths.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        at_path = _find_runs(Path(os.path.abspath(path)), MAX_DEPTH)
        if not at_path:
            problem = "holds no run" if exists(path) else "does not exist"
            raise UserError(f"{path} {problem}: give folders of runs, or a folder that holds runs")
        folders |= dict.fromkeys(at_path)
    return list(folders)


def _find_runs(folder: Path, depth: int) -> list[Path]:
    """Return the folder if it is that of a run, else the runs in it, including jobs of sweeps."""
    if not is_folder(folder):
        return []
    run_dir = RunDir(folder)
    if run_dir.has_begun or exists(run_dir.job_file):
        return [folder]
    inner = list_folder(folder) if depth else []
    return [found for path in inner for found in _find_runs(path, depth - 1)]


def _find_differing_settings(configs: Sequence[Config]) -> list[str]:
    """Return the keys of the settings that differ, except those of a command."""
    settings = [format_settings(config) for config in configs]
    return [
        key
        for key in format_settings(Config())
        if key not in PER_COMMAND and len({each[key] for each in settings}) > 1
    ]
