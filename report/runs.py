"""The runs of a folder, such as runs/: read, in a table, and in index.html, where they are sorted,
filtered and compared. Does not import torch.
"""

import os
import re
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from rich import box
from rich.table import Table
from rich.text import Text

from config import UserError, read_experiment
from files import METRICS, printable
from report import page
from report.page import curve, number
from report.sweep import JOB, Run, is_held, is_sweep, read_run, step_saved

INDEX = "index.html"
MOST_POINTS, ALL_POINTS = 300, 300_000  # of a curve, and of all curves
# The folder of a run that was given no name.
DATED = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_(.+?)(?:_\d+)?")
FIGURES = ("val/loss", "val/bits_per_byte", "parameters", "train_seconds")


def run_of(folder: Path) -> Path:
    """The run that a folder is of: itself, or the one that a checkpoint belongs to."""
    return folder if step_saved(folder) is None else Path(os.path.normpath(folder / "../.."))


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs in a folder and in the sweeps there, newest first, and in words what
    cannot be read.

    Raises:
        UserError: there is no run.
    """
    found = [path.parent for pattern in ("*/config.yaml", "*/*/config.yaml")
             for path in folder.glob(pattern) if step_saved(path.parent) is None]
    runs, troubles = [], []
    for path in found:
        try:
            runs.append(read_run(path))
        except (UserError, OSError) as e:
            troubles.append(str(e))
    if not found:
        raise UserError(f"there is no run in {folder}: train one with python train.py, "
                        "or name the folder that holds yours: python -m report FOLDER")
    return sorted(runs, key=written, reverse=True), troubles


def written(run: Run) -> float:
    """When the run last recorded something, in seconds since 1970."""
    record = run.path / METRICS
    return (record if record.exists() else run.path / "config.yaml").stat().st_mtime


def experiment(run: Run) -> str:
    """The experiment of a run, or that it is of a sweep; empty where an older run with a name of
    its own does not tell."""
    named = DATED.fullmatch(run.path.name)
    return ("sweep" if (run.path / JOB).exists() else read_experiment(run.path / "config.yaml")
            or (named[1] if named else ""))


def state(run: Run) -> str:
    """Its status, or that it is running: its process holds the folder's lock."""
    running = run.status == "unfinished" and is_held(run.path / ".lock")
    return "running" if running else run.status


def steps(run: Run) -> str:
    taken, asked, now = run.measures.get("step", 0), run.config.max_steps, state(run)
    if now == "finished":
        return f"{taken:,}"
    return f"{taken:,} of {asked:,}{', running' if now == 'running' else ''}"


def table(folder: Path, runs: list[Run]) -> Table:
    """The runs, a line each, within 80 columns where their names allow."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("run", overflow="fold")
    for heading in ("steps", "val/loss", "bits/byte", "last written"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        figures = (run.measures.get(key) for key in ("val/loss", "val/bits_per_byte"))
        name, of = run.path.relative_to(folder).as_posix(), experiment(run)
        name = printable(name if of in name else f"{name} ({of})", one_line=True)
        drawn.add_row(Text(name), steps(run), *("–" if x is None else f"{x:.4f}" for x in figures),
                      f"{datetime.fromtimestamp(written(run)):%d %b %H:%M}")
    return drawn


def write_index(folder: Path, runs: list[Run]) -> Path:
    """Write folder/index.html from what the runs' folders hold so far, and return its path."""
    most = max(10, min(MOST_POINTS, ALL_POINTS // max(1, 2 * len(runs))))
    content = {"title": folder.resolve().name, "points": most,
               "runs": [about(folder, run, most) for run in runs]}
    return page.put_together(folder / INDEX, "runs.html", content, [])


def about(folder: Path, run: Run, most: int) -> dict:
    """What the page knows of a run."""
    name = run.path.relative_to(folder).as_posix()
    report = run.path / "report.html"
    return {
        "name": page.clipped(name, page.LONGEST_TOKEN), "experiment": experiment(run),
        "page": quote(f"{name}/report.html") if report.exists() else None,
        "sweep": quote(f"{run.path.parent.name}/sweep.html") if is_sweep(run.path.parent) else None,
        "status": state(run), "step": run.measures.get("step", 0), "maxSteps": run.config.max_steps,
        "written": int(written(run)), **{key: number(run.measures.get(key)) for key in FIGURES},
        "curves": {key: curve(run.rows, key, most) for key in ("val/loss", "val/bits_per_byte")},
    }
