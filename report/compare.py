"""Two runs → one page, side by side over one slider. Does not import torch."""

from pathlib import Path

from config import UserError
from report.pack import clipped
from report.page import LONGEST_TITLE, shots_in
from report.sweep import read_run
from report.sweep_page import MOST_POINTS, about, write_sides


def compare_runs(folders: list[Path], path: Path) -> Path:
    """Write the page of two runs to `path`."""
    runs, shots = [], []
    for folder in folders:
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder} is not the folder of a run: give the folders of two runs")
        shots.append(shots_in(folder, folder))
        if not shots[-1]:
            raise UserError(f"{folder} has no snapshot of its attention to compare")
        name = clipped(folder.resolve().name, LONGEST_TITLE)
        runs.append(about(folder.parent, read_run(folder), MOST_POINTS) | {"name": name})
    content = {"title": " beside ".join(run["name"] for run in runs), "runs": runs}
    return write_sides(path, "compare.html", content, shots, max(map(len, shots)))
