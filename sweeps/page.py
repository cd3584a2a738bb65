"""Write the results of a sweep or of several runs: a table, and a page that works offline."""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from common.files import exists
from common.terminal import print_stderr, tolerate_errors
from glass.heads.metrics import read_head_values
from glass.page.html import write_html
from glass.page.values import finite_number, metric_curve
from sweeps.figures import FIGURES, Figure
from sweeps.ranking import Ranking, reproduce_command, shorten_number
from sweeps.runs import Run
from sweeps.table import write_csv

MIN_CURVE_POINTS, MAX_CURVE_POINTS = 10, 300
MAX_POINTS = 300_000  # of all curves together: about 5 MB
CURVES_PER_RUN = 10  # roughly: losses, and one per score
# Scores of which the mean over the heads is shown; of the others, the strongest head.
AVERAGED_SCORES = ("entropy", "distance")
CURVES = ("val/loss", "val/bits_per_byte", "train/loss")
SHOWN = [figure for figure in FIGURES if figure.title]


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write the table (.csv) and the page of a sweep or of several runs into a folder."""
    ranking = Ranking(runs)
    write_csv(folder / f"{ranking.file_name}.csv", ranking)
    with tolerate_errors("drawing the page", print_stderr):
        write_sweep_page(folder, ranking)


def write_sweep_page(folder: Path, ranking: Ranking) -> Path:
    """Write sweep.html or comparison.html from the runs as they are now, and return its path."""
    runs = ranking.runs
    best, tied = ranking.best_run, ranking.tied_variant
    affordable = MAX_POINTS // (1 + CURVES_PER_RUN * len(runs))
    points = max(MIN_CURVE_POINTS, min(MAX_CURVE_POINTS, affordable))
    all_keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    keys = [key for key in all_keys if key != "seed" or ranking.compares_runs] or all_keys
    values = {key: [_setting_text(run, key) for run in runs] for key in keys}
    content = {
        "title": folder.resolve().name,
        "metric": ranking.metric,
        "points": points,
        "keys": [{"name": key, "values": list(dict.fromkeys(values[key]))} for key in keys],
        "figures": [_figure_data(figure) for figure in SHOWN],
        "isComparison": ranking.compares_runs,
        "hasSeveralTexts": ranking.has_several_texts,
        "hasResult": best is not None,
        "command": reproduce_command(best) if best and not ranking.compares_runs else None,
        "asGood": tied.name if best and tied else None,
        "oneSeed": ranking.compares_runs or ranking.lacks_error_estimate,
        "averagedScores": AVERAGED_SCORES,
        "runs": [
            _run_data(folder, run, keys, points) | {"setting": index}
            for index, variant in enumerate(ranking.variants)
            for run in variant.runs
        ],
    }
    return write_html(folder / f"{ranking.file_name}.html", "sweep.html", content, [])


def _figure_data(figure: Figure) -> dict:
    return {
        "name": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "isLarge": figure.is_large,
        "isTime": figure.is_time,
        "section": figure.section,
    }


def _setting_text(run: Run, key: str) -> str:
    return shorten_number(run.settings.get(key, ""))


def _run_data(folder: Path, run: Run, keys: Sequence[str], points: int) -> dict:
    page = run.path / "report.html"
    seed = run.settings.get("seed", run.config.seed if run.config else "")
    rows = [{"step": row["step"], **_scores_of_row(row)} for row in run.rows]
    scores = dict.fromkeys(score for row in rows for score in row if score != "step")
    return {
        "name": run.name,
        "page": _relative_url(folder, page) if exists(page) else None,
        "values": [_setting_text(run, key) for key in keys],
        "seed": str(seed),
        "status": run.status,
        "reason": run.failure,
        "step": run.steps,
        "maxSteps": run.config.max_steps if run.config else None,
        "figures": {figure.name: finite_number(run.figures.get(figure.name)) for figure in SHOWN},
        "curves": {key: metric_curve(run.rows, key, points) for key in CURVES},
        "heads": {score: metric_curve(rows, score, points) for score in scores},
        "emerged": {
            name.removeprefix("emerged/"): step
            for name, step in run.figures.items()
            if name.startswith("emerged/")
        },
    }


def _relative_url(folder: Path, page: Path) -> str:
    """Return the URL of a page relative to `folder`; its name may be bytes that are not UTF-8."""
    return quote(os.fsencode(Path(os.path.relpath(page, folder)).as_posix()))


def _scores_of_row(row: dict) -> dict[str, float]:
    """Return one value per score: of the strongest head, or the mean over the heads."""
    values = {}
    for score, by_head in read_head_values(row, "heads").items():
        combine = fmean if score in AVERAGED_SCORES else max
        values[score] = combine(by_head.values())
    return values
