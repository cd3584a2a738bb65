"""A sweep's folder → sweep.html, one file that opens offline: its settings compared."""

import os
from functools import partial
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from report import sweep
from report.pack import clipped
from report.page import curve, number, put_together
from report.sweep import Run

MOST_POINTS, ALL_POINTS = 300, 300_000  # of a curve, and of all curves
# Of these scores the strongest head is shown, of others the mean over the heads.
STRONGEST = ("previous_token", "duplicate_token", "induction", "sink", "importance")
FIGURES = (
    "step",
    "parameters",
    "kv_cache_bytes",
    "tokens_per_second",
    "train_seconds",
    "val/loss",
    "val/bits_per_byte",
)
FORMED = (
    "pairs_again",
    "copying_gain",
    *(
        f"{what}/{kind}"
        for kind in ("induction", "previous_token")
        for what in ("tokens_at_emergence", "loss_at_emergence", "heads")
    ),
)
CURVES = ("val/loss", "val/bits_per_byte", "train/loss")

clip = partial(clipped, most=500)  # characters of a value and of a reason


def write_sweep_page(folder: Path, runs: list[Run]) -> Path:
    """Write folder/sweep.html from what the runs' folders hold so far, and return its path."""
    settings, metric, best = sweep.ranked(runs), sweep.compared_by(runs), sweep.best_run(runs)
    second = sweep.no_better(settings, metric)
    most = max(10, min(MOST_POINTS, ALL_POINTS // (1 + 10 * len(runs))))
    every = list(dict.fromkeys(key for run in runs for key in run.settings))
    keys = [key for key in every if key != "seed"] or every
    content = {
        "title": folder.resolve().name,
        "metric": metric,
        "points": most,
        "keys": [
            {
                "name": clip(key),
                "values": list(
                    dict.fromkeys(clip(sweep.brief(run.settings.get(key, ""))) for run in runs)
                ),
            }
            for key in keys
        ],
        "command": best and sweep.command(best),
        "asGood": second.name if best and second else None,
        "oneSeed": sweep.one_seed(settings),
        "runs": [
            about(folder, run, most) | in_sweep(run, keys, most) | {"setting": k}
            for k, setting in enumerate(settings)
            for run in setting.runs
        ],
    }
    return put_together(folder / sweep.PAGE, "sweep.html", content, [])


def about(folder: Path, run: Run, most: int) -> dict:
    """What a page tells of a run in this folder: how it ended, its figures, its curves."""
    name, config = run.path.relative_to(folder).as_posix(), run.config
    page = run.path / "report.html"
    return {
        "name": clip(name),
        "page": link(folder, page) if page.exists() else None,
        "status": run.status,
        "reason": clip(run.reason),
        "maxSteps": config.max_steps if config else None,
        "figures": {key: number(run.measures.get(key)) for key in FIGURES},
        "curves": {key: curve(run.rows, key, most) for key in CURVES},
    }


def link(folder: Path, page: Path) -> str:
    """The address of a page from a page in `folder`; a name may be of bytes that are no UTF-8."""
    return quote(os.fsencode(page.relative_to(folder).as_posix()))


def in_sweep(run: Run, keys: list[str], most: int) -> dict:
    """What was swept in a run, and what its heads became."""
    rows = [
        {
            "step": row["step"],
            **{
                score: (max if score in STRONGEST else fmean)(values.values())
                for score, values in sweep.of_heads(row, "heads").items()
            },
        }
        for row in run.rows
    ]
    scores = dict.fromkeys(score for row in rows for score in row if score != "step")
    seed = run.settings.get("seed", run.config.seed if run.config else "")
    return {
        "values": [clip(sweep.brief(run.settings.get(key, ""))) for key in keys],
        "seed": clip(str(seed)),
        "heads": {score: curve(rows, score, most) for score in scores},
        "emerged": {
            kind: run.measures[f"emerged/{kind}"]
            for kind in STRONGEST
            if f"emerged/{kind}" in run.measures
        },
        "formed": {name: number(run.measures[name]) for name in FORMED if name in run.measures},
    }
