"""Write the page of a run (report.html) or of a prompt: one file that works offline."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from common.settings import format_value, iterate_settings
from config import GPTConfig
from glass.heads.say.findings import Finding
from glass.page.describe import describe_model, describe_run_scores, describe_scores
from glass.page.embedded_model import EmbeddedModel, find_embedded_model
from glass.page.fitting import embed_attention
from glass.page.html import embed_json, expand_template, write_html
from glass.page.pack import Blobs
from glass.page.snapshots import Snapshot, list_snapshots
from glass.page.values import MAX_TITLE_LENGTH, clip_text, finite_number, metric_curve
from run.losses import best_row, loss_warning, overfitting
from run.row import Row
from run.run_dir import RunDir

MAX_PAGE_BYTES = 24_500_000
MAX_CURVE_POINTS = 1500
CURVES = (
    "train/loss",
    "val/loss",
    "val/bits_per_byte",
    "val/in_context_score",
    "val/in_context_score_se",
    "train/lr",
    "train/muon_lr",
    "train/grad_norm",
    "train/tokens_per_second",
)
# The figures of the training speed, and their metrics.
SPEED_FIGURES = {"msPerStep": "train/ms_per_step", "mfu": "train/mfu", "peakGib": "memory/peak_gib"}
# Where the time of a run went: the activity and its metric.
ACTIVITIES = {
    "train": "train_seconds",
    "evaluate": "seconds/evaluate",
    "attention": "seconds/attention",
    "save": "seconds/save",
}


def write_page(run_dir: Path) -> Path:
    """Write report.html of a run from what its folder holds so far, and return its path."""
    run = RunDir(Path(run_dir))
    rows, config = run.rows(), run.config
    latest = Row()
    for row in rows:
        latest |= row
    best = best_row(rows)
    opening_step = best["step"] if best and overfitting(rows) else None
    settings = iterate_settings(config) if config else ()
    content = {
        "kind": "run",
        "title": run.path.resolve().name,
        **describe_model(GPTConfig.from_settings(config.model) if config else None),
        "step": latest.get("step"),
        "maxSteps": config.max_steps if config else None,
        "best": best and {"step": best["step"], "loss": finite_number(best["val/loss"])},
        "openingStep": opening_step,
        "lossWarning": loss_warning(rows),
        "tokens": finite_number(latest.get("tokens")),
        **_describe_training(rows, latest),
        "samples": run.samples(),
        "config": [[name, format_value(value)] for name, _, value in settings],
        **describe_run_scores(rows),
    }
    model = find_embedded_model(run, latest.columns("emerged"), opening_step)
    snapshots = list_snapshots(run)
    return _write_with_attention(run.page, content, snapshots, model)


def _describe_training(rows: Sequence[Row], latest: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the curves of a run, its speed, and where its time went."""
    task_metrics = [key for key in latest if key.startswith("task/")]
    # Of one row: another machine, on which an earlier part of the run ran, has other figures.
    speed: dict = next((row for row in reversed(rows) if "train/ms_per_step" in row), {})
    return {
        "maxCurvePoints": MAX_CURVE_POINTS,
        "curves": {
            key: metric_curve(rows, key, MAX_CURVE_POINTS) for key in [*CURVES, *task_metrics]
        },
        "speed": {name: finite_number(speed.get(key)) for name, key in SPEED_FIGURES.items()},
        "seconds": {name: finite_number(latest.get(key)) for name, key in ACTIVITIES.items()},
    }


def write_prompt_page(
    path: Path,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    model: EmbeddedModel,
    metrics: Mapping[str, float] | None = None,
    findings: Sequence[Finding] = (),
) -> Path:
    """Write the page of the attention over one text, and return its path.

    `arrays` and `metrics` are those of an `Analysis`. The page runs the model if it is
    small enough. `facts` hold the `title`, and either the number of `promptTokens`, after which the
    model generated the text, and the `tokenCount` of the whole text, or the `losses` of a scored
    text.
    """
    step = int(arrays.get("step", 0))
    snapshot = Snapshot(step, lambda: nullcontext(arrays))
    content = {
        "kind": "prompt",
        **facts,
        "title": clip_text(facts["title"], MAX_TITLE_LENGTH),
        **describe_model(model.config),
        **describe_scores(step, metrics or {}, findings),
    }
    return _write_with_attention(Path(path), content, [snapshot], model)


def _write_with_attention(
    path: Path, content: dict[str, Any], snapshots: Sequence[Snapshot], model: EmbeddedModel | None
) -> Path:
    readable = [snapshot for snapshot in snapshots if snapshot.probes]
    content["unreadableSnapshots"] = len(snapshots) - len(readable)
    room = MAX_PAGE_BYTES - len(expand_template("run.html")) - len(embed_json(content))
    blobs = Blobs()
    content |= embed_attention(readable, model, room, blobs)
    return write_html(path, "run.html", content, blobs)
