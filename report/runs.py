"""The runs of a folder, such as runs/: read, in a table, and in index.html, where they are sorted,
filtered and compared. Does not import torch."""

from datetime import datetime
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from config import UserError, read_experiment
from files import METRICS, ordinary, printable
from report.page import put_together
from report.sweep import JOB, PAGE, Run, is_sweep, read_run
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
    return sorted(runs, key=written, reverse=True), troubles


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
    for run in runs:
        figures = (run.measures.get(key) for key in ("val/loss", "val/bits_per_byte"))
        name, of = run.path.relative_to(folder).as_posix(), experiment(run)
        name = printable(name if of in name else f"{name} ({of})", one_line=True)
        drawn.add_row(Text(name), steps(run), *("–" if x is None else f"{x:.4f}" for x in figures),
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
                                       "written": int(written(run))}
