"""Write the results of a sweep or of several runs: a table, and a page that works offline."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from common.files import exists
from common.terminal import print_stderr, tolerate_errors
from glass.heads.metrics import read_head_values
from glass.page.html import write_html
from glass.page.values import clip_text, finite_number, metric_curve
from studies.verdicts import ARM, StudyResults, verdicts
from sweeps.runs import (
    Run,
    find_best_run,
    find_tied_variant,
    has_several_texts,
    is_comparison,
    lacks_error_estimate,
    output_file,
    rank_variants,
    ranking_metric,
    reproduce_command,
    shorten_number,
)
from sweeps.table import write_csv

MIN_CURVE_POINTS, MAX_CURVE_POINTS = 10, 300
MAX_POINTS = 300_000  # of all curves together: about 5 MB
CURVES_PER_RUN = 10  # roughly: losses, and one per score
# Scores of which the mean over the heads is shown; of the others, the strongest head.
AVERAGED_SCORES = ("entropy", "distance")
FIGURES = (
    "step",
    "parameters",
    "kv_cache_bytes",
    "tokens_per_second",
    "train_seconds",
    "val/loss",
    "val/bits_per_byte",
)
FORMATION_FIGURES = (
    "pairs_again",
    "copying_gain",
    "tokens_at_emergence/induction",
    "heads/induction",
    "tokens_at_emergence/previous_token",
    "heads/previous_token",
)
CURVES = ("val/loss", "val/bits_per_byte", "train/loss")

clip = partial(clip_text, max_length=500)  # characters of a setting's value or of a failure


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write the table (.csv) and the page of a sweep or of several runs into a folder."""
    write_csv(output_file(folder, runs, ".csv"), runs)
    with tolerate_errors("drawing the page", print_stderr):
        write_sweep_page(folder, runs)


def write_sweep_page(folder: Path, runs: Sequence[Run]) -> Path:
    """Write sweep.html or comparison.html from the runs as they are now, and return its path."""
    variants, metric, best = rank_variants(runs), ranking_metric(runs), find_best_run(runs)
    tied = find_tied_variant(variants, metric)
    points = _curve_points(len(runs))
    all_keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    compares_runs, results = is_comparison(runs), verdicts(runs)
    keys = [key for key in all_keys if key != "seed" or compares_runs] or all_keys
    if results:
        keys = [ARM]
    values = {key: [_setting_text(run, key) for run in runs] for key in keys}
    content = {
        "title": folder.resolve().name,
        "metric": metric,
        "points": points,
        "keys": [{"name": clip(key), "values": list(dict.fromkeys(values[key]))} for key in keys],
        "isComparison": compares_runs,
        "hasSeveralTexts": has_several_texts(runs),
        "hasResult": best is not None,
        "command": reproduce_command(best) if best and not compares_runs else None,
        "asGood": tied.name if best and tied else None,
        "oneSeed": compares_runs or lacks_error_estimate(variants),
        "study": results.page_content() if results else None,
        "averagedScores": AVERAGED_SCORES,
        "runs": [
            _run_data(folder, run, keys, points, results) | {"setting": index}
            for index, variant in enumerate(variants)
            for run in variant.runs
        ],
    }
    return write_html(output_file(folder, runs, ".html"), "sweep.html", content, [])


def _curve_points(n_runs: int) -> int:
    affordable = MAX_POINTS // (1 + CURVES_PER_RUN * n_runs)
    return max(MIN_CURVE_POINTS, min(MAX_CURVE_POINTS, affordable))


def _setting_text(run: Run, key: str) -> str:
    return clip(shorten_number(run.settings.get(key, "")))


def _run_data(
    folder: Path, run: Run, keys: Sequence[str], points: int, results: StudyResults | None
) -> dict:
    curves = (*CURVES, *(results.study.plot if results else ()))
    page = run.path / "report.html"
    seed = run.settings.get("seed", run.config.seed if run.config else "")
    rows = [{"step": row["step"], **_scores_of_row(row)} for row in run.rows]
    scores = dict.fromkeys(score for row in rows for score in row if score != "step")
    return {
        "name": clip(run.name),
        "page": _relative_url(folder, page) if exists(page) else None,
        "values": [_setting_text(run, key) for key in keys],
        "seed": clip(str(seed)),
        "status": run.status,
        "reason": clip(run.failure),
        "maxSteps": run.config.max_steps if run.config else None,
        "figures": {key: finite_number(run.figures.get(key)) for key in FIGURES},
        "curves": {key: metric_curve(run.rows, key, points) for key in curves},
        "events": results.steps_by_metric(run) if results else {},
        "heads": {score: metric_curve(rows, score, points) for score in scores},
        "emerged": {
            name.removeprefix("emerged/"): step
            for name, step in run.figures.items()
            if name.startswith("emerged/")
        },
        "formed": {
            name: finite_number(run.figures[name])
            for name in FORMATION_FIGURES
            if name in run.figures
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
