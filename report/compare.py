"""Two runs, two checkpoints, or one model on two prompts → one page, side by side over one slider.
Does not import torch."""

from contextlib import nullcontext
from pathlib import Path

from config import UserError
from report import page
from report.encode import Shot
from report.page import curve, snapshots, step_of
from report.runs import run_of
from report.sweep import read_run, step_saved, steps_saved
from report.sweep_page import MOST_POINTS, first_head, load_text, side_by_side


def compare_folders(folders: list[Path], path: Path) -> Path:
    """Write the page of two runs, or of two checkpoints of runs.

    Raises:
        UserError: one is neither, or has no snapshot of its attention; or the page cannot be
            written.
    """
    found = [read_side(folder) for folder in folders]
    return write([about for about, _ in found], [shots for _, shots in found], path)


def read_side(folder: Path) -> tuple[dict, list[Shot]]:
    """What the page tells of a run, or of the checkpoint of one, and its snapshots."""
    step, run = step_saved(folder), run_of(folder)
    if not (run / "config.yaml").exists():
        raise UserError(f"{folder} is not the folder of a run: give the folders of two runs, or of "
                        "two checkpoints, RUN/checkpoints/step_XXXXXXXX")
    files, of = snapshots(run), read_run(run)
    known = sorted({*steps_saved(run), *map(step_of, files)})
    if step not in (None, *known):
        raise UserError(f"{run} has no checkpoint and no snapshot of step {step}: there are "
                        f"{', '.join(map(str, known)) or 'none'}")
    if step is not None:  # what was seen of it, or last before it
        files = [file for file in files if step_of(file) <= step][-1:]
    if not files:
        raise UserError(f"{folder} has no snapshot of its attention to compare")
    name = run.resolve().name
    about = {"name": name if step is None else f"{name}, step {step:,}",
             "groups": of.config.model.kv_heads, "prompt": False,
             "head": first_head(of.rows[-1] if of.rows else {}),
             "curves": {kind: curve(of.rows, f"{kind}/loss", MOST_POINTS)
                        for kind in ("val", "train")}}
    return about, [page.open_shot(run, file, load_text) for file in files]


def compare_prompts(prompts: list[str], looks: list[tuple[dict, dict, int]], path: Path) -> Path:
    """Write the page of one model on two prompts. looks: of each what `report.page.read_look`
    gives."""
    head = first_head(looks[0][1])
    runs = [{"name": prompt, "groups": groups, "head": head, "prompt": True, "curves": None}
            for prompt, (*_, groups) in zip(prompts, looks)]
    return write(runs, [[Shot(0, lambda found=found: nullcontext(found))] for found, *_ in looks],
                 path)


def write(runs: list[dict], shots: list[list[Shot]], path: Path) -> Path:
    names = [page.clipped(run["name"], page.LONGEST_TITLE) for run in runs]
    content = {"title": " beside ".join(names), "points": MOST_POINTS,
               "runs": [run | {"name": name} for run, name in zip(runs, names)]}
    room = page.room_for_maps("compare.html", content)
    content["maps"], blobs = side_by_side(shots, room, list(range(len(runs))))
    try:
        return page.put_together(path, "compare.html", content, blobs)
    except OSError as e:
        raise UserError(f"to={path} cannot be written: {e.strerror or e}") from None
