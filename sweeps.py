"""A sweep's folder, read: which jobs there are, what each was given, how each came out. Does not import torch."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from config import Config, UserError, read_config
from data.corpus import written
from training.record import METRICS, read_rows

JOB = "job.json"  # in a job's folder: what it was given, and why its last attempt failed


@dataclass(frozen=True)
class Run:
    """A job of a sweep as its folder has it."""

    path: Path
    settings: dict[str, str]  # what the sweep varied, as typed for this job: model.n_kv_head → 2; `seed` too where it varied
    overrides: dict[str, str]  # all that was typed for this job: what reproduces it
    config: Config | None  # as resolved; None where the job failed or was stopped before it had one
    rows: list[dict]  # metrics.jsonl
    status: str  # finished: all its steps are recorded; failed: its last attempt was; unfinished: stopped, or still running
    reason: str  # why its last attempt failed, in one line; else empty. An attempt to go on with a finished run can fail too


def read_sweep(folder: Path) -> list[Run]:
    """The jobs of a sweep in the order of their folders' names; of one that another process writes now, what is whole.

    Raises:
        UserError: there is no such folder, or a file in it does not fit this version.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not the folder of a sweep: python train.py -m … names it when it ends")
    return [read_run(job.parent) for job in sorted(folder.glob(f"*/{JOB}"))]


def read_run(path: Path) -> Run:
    try:
        job = json.loads((path / JOB).read_text(encoding="utf-8"))
        overrides, swept, reason = dict(job["overrides"]), list(job["swept"]), str(job.get("failed", ""))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path / JOB} cannot be read ({e}): remove {path}, or mend it") from None
    config = read_config(path / "config.yaml") if (path / "config.yaml").exists() else None
    rows = read_rows(path / METRICS)
    done = config is not None and bool(rows) and rows[-1]["step"] >= config.max_steps
    status = "finished" if done else "failed" if reason else "unfinished"
    return Run(path, {key: overrides[key] for key in swept}, overrides, config, rows, status, reason)


def begin_job(folder: Path, overrides: dict[str, str], swept: list[str]) -> Path:
    """The folder of the job that has these settings in the sweep in `folder`, with a note of what it was given.

    Jobs are told apart by what was swept, whatever their order and number: the same settings find the same folder again.
    """
    named = ",".join(f"{key}={overrides[key]}" for key in swept) or "job"
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
        with written(path / JOB) as part:
            part.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}): choose another folder by hydra.sweep.dir=PATH") from None
