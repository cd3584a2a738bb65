"""The runs of a folder, such as runs/: read, in a table, and in index.html, where they are sorted,
filtered and compared. Does not import torch."""

import os
from datetime import datetime
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from config import UserError, read_experiment
from files import METRICS, ordinary, printable
from report.page import put_together
from report.sweep import JOB, PAGE, Run, is_sweep, named, read_run, vocabulary
from report.sweep_page import about, link, most_points

INDEX = "index.html"
OURS, MARKED = b'<meta name="generator" content="GlassGPT">', 2000  # a page of ours begins so


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs in a folder and in the sweeps there, newest first, and what cannot be read."""
    found = [path.parent for pattern in ("*/config.yaml", "*/*/config.yaml")
             for path in folder.glob(pattern) if path.parent.parent.name != "checkpoints"]
    runs, troubles = [], []
    for path in found:
        try:
            runs.append(read_run(path))
        except (UserError, OSError) as e:
            troubles.append(str(e))
    if not found:
        raise UserError(f"there is no run in {folder}: train one with python train.py, "
                        "or name the folder that holds yours: python -m report FOLDER")
    return [run for group in by_sweep(runs) for run in group], troubles


def by_sweep(runs: list[Run]) -> list[list[Run]]:
    """The runs, those of a sweep together, newest first."""
    groups: dict[Path, list[Run]] = {}
    for run in sorted(runs, key=written, reverse=True):
        is_job = (run.path / JOB).exists()
        groups.setdefault(run.path.parent if is_job else run.path, []).append(run)
    return list(groups.values())


def written(run: Run) -> float:
    """When the run last recorded something, in seconds since 1970."""
    record = run.path / METRICS
    return (record if record.exists() else run.path / "config.yaml").stat().st_mtime


def experiment(run: Run) -> str:
    """The experiment of a run, or that it is of a sweep; empty where its settings do not tell."""
    is_job = (run.path / JOB).exists()
    return "sweep" if is_job else read_experiment(run.path / "config.yaml") or ""


def steps(run: Run) -> str:
    taken, asked = run.measures.get("step", 0), run.config.max_steps
    return f"{taken:,}" if run.status == "finished" else f"{taken:,} of {asked:,}"


def table(folder: Path, runs: list[Run]) -> Table:
    """The runs, a line each, within 80 columns where their names allow."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("run", overflow="fold")
    for heading in ("steps", "val/loss", "bits/byte", "last written"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for group in by_sweep(runs):
        if is_job := (group[0].path / JOB).exists():
            name = os.path.relpath(group[0].path.parent, folder)
            drawn.add_row(Text(printable(f"{name} (sweep)", one_line=True)))
        for run in group:
            figures = (run.measures.get(key) for key in ("val/loss", "val/bits_per_byte"))
            name, of = run.path.relative_to(folder).as_posix(), experiment(run)
            name = name if of in name else f"{name} ({of})"
            name = f"  {named(run.settings)}" if is_job else name
            drawn.add_row(Text(printable(name, one_line=True)), steps(run),
                          *("–" if x is None else f"{x:.4f}" for x in figures),
                          f"{datetime.fromtimestamp(written(run)):%d %b %H:%M}")
    return drawn


def write_index(folder: Path, runs: list[Run]) -> Path:
    """Write folder/index.html from what the runs' folders hold so far, and return its path. Raises
    `UserError` where it is another's page."""
    path = folder / INDEX
    if path.exists() and OURS not in ordinary(path).read_bytes()[:MARKED]:
        raise UserError(f"{path} is there already, and no page of GlassGPT's: move it, or copy the "
                        "runs to another folder")
    content = {"title": folder.resolve().name,
               "runs": [entry(folder, run, most_points(2 * len(runs))) for run in runs]}
    return put_together(path, "runs.html", content, [])


def entry(folder: Path, run: Run, most: int) -> dict:
    """What the page knows of a run."""
    sweep = link(folder, run.path.parent / PAGE) if is_sweep(run.path.parent) else None
    return about(folder, run, most) | {"experiment": experiment(run), "sweep": sweep,
                                       "vocabulary": vocabulary(run.config),
                                       "written": int(written(run))}
