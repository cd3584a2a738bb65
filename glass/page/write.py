"""Write the page of a run (report.html) or of a prompt: one file that works offline."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.settings import format_value, iterate_settings
from config import GPTConfig
from glass.heads.say.findings import Finding, format_emergence, summarize_run
from glass.heads.say.metrics import SNAPSHOT_PREFIXES, read_emergence
from glass.page.embedded_model import EmbeddedModel, find_embedded_model
from glass.page.fitting import embed_attention
from glass.page.html import embed_json, expand_template, format_html, write_html
from glass.page.pack import Blobs
from glass.page.snapshots import Snapshot, list_snapshots
from glass.page.values import clip_text, finite_number, metric_curve, thin
from run.checkpoints import CONFIG_FILE
from run.config_file import read_config
from run.losses import (
    METRICS,
    SAMPLES,
    best_row,
    is_scored,
    loss_warning,
    overfitting,
    read_rows,
    snapshot_steps,
)

MAX_PAGE_BYTES = 24_500_000
MAX_CURVE_POINTS = 1500
MAX_SCORED_STEPS = 200  # steps of which the page has the scores of every head
MAX_TITLE_LENGTH = 200  # characters
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


@dataclass(frozen=True)
class ExploredModel:
    """The facts that a page of explore.py shows without asking the model."""

    title: str
    config: GPTConfig
    step: int = 0  # of the checkpoint; 0 for a model outside of a run
    max_steps: int | None = None  # of the run; None for a model outside of a run
    prompt: str = ""  # the text that is shown first
    begin_of_text: int | None = None  # id of the token that begins every text
    is_small: bool = False  # then the page has its heads measured without being asked
    scores: dict[str, Any] | None = None  # see `describe_scores`


def write_page(run_dir: Path) -> Path:
    """Write report.html of a run from what its folder holds so far, and return its path."""
    run_dir = Path(run_dir)
    rows = read_rows(run_dir / METRICS)
    config_file = run_dir / CONFIG_FILE
    config = read_config(config_file) if config_file.exists() else None
    latest = {key: value for row in rows for key, value in row.items()}
    # Of one row: another machine, on which an earlier part of the run ran, has other figures.
    speed: dict = next((row for row in reversed(rows) if "train/ms_per_step" in row), {})
    curves = [*CURVES, *(key for key in latest if key.startswith("task/"))]
    best = best_row(rows)
    opening_step = best["step"] if best and overfitting(rows) else None
    content = {
        "kind": "run",
        "title": run_dir.resolve().name,
        **_describe_model(GPTConfig.from_settings(config.model) if config else None),
        "step": latest.get("step"),
        "maxSteps": config.max_steps if config else None,
        "best": best and {"step": best["step"], "loss": finite_number(best["val/loss"])},
        "openingStep": opening_step,
        "lossWarning": loss_warning(rows),
        "tokens": finite_number(latest.get("tokens")),
        "maxCurvePoints": MAX_CURVE_POINTS,
        "curves": {key: metric_curve(rows, key, MAX_CURVE_POINTS) for key in curves},
        "speed": {name: finite_number(speed.get(key)) for name, key in SPEED_FIGURES.items()},
        "seconds": {name: finite_number(latest.get(key)) for name, key in ACTIVITIES.items()},
        "samples": read_rows(run_dir / SAMPLES),
        "config": [
            [name, format_value(value)]
            for name, _, value in (iterate_settings(config) if config else ())
        ],
        "emergenceIntervals": _emergence_intervals(rows),
        "scored": _head_metrics(rows),
        "findings": [finding._asdict() for finding in summarize_run(rows)],
    }
    model = find_embedded_model(run_dir, latest, opening_step)
    snapshots = list_snapshots(run_dir)
    return _write_with_attention(run_dir / "report.html", content, snapshots, model)


def write_prompt_page(
    path: Path,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    model: EmbeddedModel,
    metrics: Mapping[str, float] | None = None,
    findings: Sequence[Finding] = (),
) -> Path:
    """Write the page of the attention over one text, and return its path.

    `arrays`, `metrics` and `findings` are those of an `Analysis`. The page runs the model if it is
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
        **_describe_model(model.config),
        **describe_scores(step, metrics or {}, findings),
    }
    return _write_with_attention(Path(path), content, [snapshot], model)


def render_explore_page(explored: ExploredModel, max_tokens: int) -> str:
    """Return the HTML of a page that asks its server, with texts of at most `max_tokens` tokens."""
    content = {
        "kind": "explore",
        "title": clip_text(explored.title, MAX_TITLE_LENGTH),
        **_describe_model(explored.config),
        "step": explored.step,
        "maxSteps": explored.max_steps,
        "steps": [explored.step],
        "shape": [explored.config.n_layer, explored.config.n_head],
        "snapshotCount": 0,
        "unreadableSnapshots": 0,
        "probes": [],
        "words": {},
        "weights": None,
        **(explored.scores or describe_scores(explored.step, {}, [])),
        "server": {
            "maxTokens": max_tokens,
            "prompt": explored.prompt,
            "beginOfText": explored.begin_of_text,
            "canMeasure": explored.scores is None,
            "isSmall": explored.is_small,
        },
    }
    return "".join(format_html("run.html", content, is_served=True))


def read_scores(rows: list[dict]) -> dict[str, Any] | None:
    """Describe the latest scores in rows of a run's metrics.jsonl; None without any."""
    row = next(filter(is_scored, reversed(rows)), None)
    return None if row is None else describe_scores(row["step"], row, summarize_run(rows))


def describe_scores(
    step: int, metrics: Mapping[str, float], findings: Sequence[Finding]
) -> dict[str, Any]:
    """Describe the scores of one step for a page, without the steps at which heads emerged."""
    row = {key: value for key, value in metrics.items() if not key.startswith("emerged/")}
    return {
        "emergenceIntervals": {},
        "scored": _head_metrics([{**row, "step": step}]),
        "findings": [finding._asdict() for finding in findings],
    }


def _describe_model(config: GPTConfig | None) -> dict[str, Any]:
    return {
        "groups": config and config.kv_heads,
        "tiedEmbeddings": config and config.tie_embeddings,
        "modelConfig": config and asdict(config),
    }


def _head_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = thin([row for row in rows if is_scored(row)], MAX_SCORED_STEPS)
    keys = dict.fromkeys(key for row in scored for key in row if key.startswith(SNAPSHOT_PREFIXES))
    return {
        "steps": [row["step"] for row in scored],
        "columns": {key: [finite_number(row.get(key), 4) for row in scored] for key in keys},
    }


def _emergence_intervals(rows: Sequence[dict]) -> dict[str, str]:
    snapshots = snapshot_steps(rows)
    latest: dict = next((row for row in reversed(rows) if is_scored(row)), {})
    return {
        f"emerged/{score}/{head}": format_emergence(step, snapshots)
        for score, emerged in read_emergence(latest).items()
        for head, step in emerged.items()
    }


def _write_with_attention(
    path: Path, content: dict[str, Any], snapshots: Sequence[Snapshot], model: EmbeddedModel | None
) -> Path:
    readable = [snapshot for snapshot in snapshots if snapshot.probes]
    content["unreadableSnapshots"] = len(snapshots) - len(readable)
    room = MAX_PAGE_BYTES - len(expand_template("run.html")) - len(embed_json(content))
    blobs = Blobs()
    content |= embed_attention(readable, model, room, blobs)
    return write_html(path, "run.html", content, blobs)
