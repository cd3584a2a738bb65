"""Write the page of a run, report.html: one file that works offline."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.files import atomic_write
from common.settings import format_value, iterate_settings
from config import GPTConfig
from glass.page.describe import describe_run_scores
from glass.page.embedded_model import find_embedded_model
from glass.page.fitting import format_with_attention
from glass.page.html import write_html
from glass.page.snapshots import list_snapshots
from glass.page.values import finite_number, metric_curve
from run.loss_history import best_row, loss_warning, overfitting
from run.row import Row
from run.run_dir import RunDir
from training.intervals import is_snapshot_due

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
# Experiment → step around which an induction head forms, unless a decisive setting was typed.
INDUCTION_STEPS = {"default": 550, "induction": 500}
DECISIVE = re.compile(r"^- ['\"]?(model|data|tokenizer|optim|batch|max_steps|init)", re.MULTILINE)


def write_page(run_dir: RunDir) -> Path:
    """Write report.html of a run, and return its path."""
    rows = run_dir.rows()
    page = write_html(run_dir.page, format_page(run_dir, rows))
    step = rows[-1]["step"] if rows else 0
    # After the page, so that a page that asks for the newest step finds that of this step.
    with atomic_write(run_dir.page_version) as part:
        part.write_text(f"document.currentScript.dataset.step = {step};\n")
    return page


def format_page(run_dir: RunDir, rows: Sequence[Row]) -> Iterator[str]:
    """Return the parts of the page of a run, from its rows and what else its folder holds."""
    config = run_dir.config
    assert config  # a page is that of a run, which has begun
    latest = Row()
    for row in rows:
        latest |= row
    step = latest.get("step", 0)
    later = range(step + 1, config.max_steps + 1)
    typed = run_dir.typed_settings()
    is_known = typed and not DECISIVE.search(typed)
    best = best_row(rows)
    opening_step = best["step"] if best and overfitting(rows) else None
    content = {
        "kind": "run",
        "title": run_dir.path.resolve().name,
        "modelConfig": asdict(GPTConfig.from_settings(config.model)),
        "step": step,
        "nextSnapshot": next((step for step in later if is_snapshot_due(step, config)), None),
        "inductionStep": INDUCTION_STEPS.get(config.experiment or "") if is_known else None,
        "maxSteps": config.max_steps,
        "best": best and {"step": best["step"], "loss": finite_number(best["val/loss"])},
        "openingStep": opening_step,
        "lossWarning": loss_warning(rows),
        "tokens": finite_number(latest.get("tokens")),
        **_describe_training(rows, latest),
        "samples": run_dir.samples(),
        "config": [[name, format_value(value)] for name, _, value in iterate_settings(config)],
        **describe_run_scores(rows),
    }
    model = find_embedded_model(run_dir, config.model, latest, opening_step)
    return format_with_attention(content, list_snapshots(run_dir), model)


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
