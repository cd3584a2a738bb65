"""Write the results of a sweep or of several runs: a table, and a page that works offline."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from cli.folders import name_settings
from common.files import exists
from common.terminal import print_stderr, tolerate_errors
from glass.page.html import format_html, write_html
from glass.page.values import finite_number, metric_curve
from run.row import Row
from run.run_dir import RunDir
from sweeps.figures import BY_NAME, describe_figure
from sweeps.ranking import Ranking, Variant, reproduce_command
from sweeps.runs import RUN, Run
from sweeps.table import (
    conclusion,
    figure_names,
    format_cell,
    format_steps,
    setting_columns,
    write_csv,
)

MAX_POINTS_OF_RUN = 100  # so that the page of 100 runs has a few megabytes
# Scores of which the mean over the heads is shown; of the others, the strongest head.
AVERAGED_SCORES = ("entropy", "distance")
# Curves by the metric that ranks the runs. With several tokenizers the training losses, which are
# per token, are not comparable.
LOSS_CURVES = {
    "val/loss": {"val/loss": "Validation loss", "train/loss": "Training loss"},
    "val/bits_per_byte": {"val/bits_per_byte": "Bits per byte"},
}


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write the table (.csv) and the page of a sweep or of several runs into a folder."""
    ranking = Ranking(runs)
    write_csv(folder / f"{ranking.file_name}.csv", ranking)
    with tolerate_errors("drawing the page", print_stderr):
        write_sweep_page(folder, ranking)


def write_sweep_page(folder: Path, ranking: Ranking) -> Path:
    """Write sweep.html or comparison.html from the runs as they are now, and return its path."""
    variants = ranking.variants
    best = ranking.best_run
    # The other scores of heads are lines in the charts
    figures = [
        name
        for name in figure_names(variants, ranking.metric)
        if name in BY_NAME or name.startswith("task/")
    ]
    losses = LOSS_CURVES[ranking.metric]
    content = {
        "title": folder.resolve().name,
        "isComparison": ranking.compares_runs,
        "conclusion": conclusion(ranking),
        "command": reproduce_command(best) if best and not ranking.compares_runs else None,
        "settings": [variant.name for variant in variants],
        "keys": [
            {"name": column.heading, "values": column.cells} for column in setting_columns(variants)
        ],
        "figures": [_figure_data(name, variants) for name in figures],
        "losses": losses,
        "averagedScores": AVERAGED_SCORES,
        "runs": [
            _run_data(folder, run, figures, losses) | {"setting": index}
            for index, variant in enumerate(variants)
            for run in variant.runs
        ],
    }
    return write_html(folder / f"{ranking.file_name}.html", format_html("sweep.html", content))


def _figure_data(name: str, variants: Sequence[Variant]) -> dict:
    figure = describe_figure(name)
    summaries = [variant.typical_value(name) for variant in variants]
    return {
        "name": name,
        "title": figure.title,
        "unit": figure.unit,
        "values": [finite_number(value) for value, _ in summaries],
        "errors": [finite_number(error) for _, error in summaries],
        "texts": [format_cell(variant, name) for variant in variants],
    }


def _run_data(folder: Path, run: Run, figures: Sequence[str], losses: Iterable[str]) -> dict:
    page = RunDir(run.path).page
    # Its name may be bytes that are not UTF-8
    url = quote(os.fsencode(Path(os.path.relpath(page, folder)).as_posix()))
    rows = [{"step": row["step"], **_scores_of_row(row)} for row in run.rows]
    scores = dict.fromkeys(score for row in rows for score in row if score != "step")
    return {
        "name": run.name,
        "title": run.settings.get(RUN) or name_settings(run.settings) or run.name,
        "page": url if exists(page) else None,
        "label": run.settings.get("seed", "page"),
        "status": run.status,
        "reason": run.failure,
        "steps": format_steps(run),
        "figures": {name: finite_number(run.figures.get(name)) for name in figures},
        "curves": {name: metric_curve(run.rows, name, MAX_POINTS_OF_RUN) for name in losses},
        "heads": {score: metric_curve(rows, score, MAX_POINTS_OF_RUN) for score in scores},
        "emerged": {
            name.removeprefix("emerged/"): step
            for name, step in run.figures.items()
            if name.startswith("emerged/")
        },
    }


def _scores_of_row(row: Row) -> dict[str, float]:
    """Return one value per score: of the strongest head, or the mean over the heads."""
    values = {}
    for score, by_head in row.scores().items():
        combine = fmean if score in AVERAGED_SCORES else max
        values[score] = combine(by_head.values())
    return values
