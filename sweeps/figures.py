"""The figures of a run in tables and on the page, and how its folder gives them.

Does not import torch.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from safetensors import safe_open

from common.text import format_fixed, format_magnitude, format_with_error
from config import Config, cached_number_bytes
from run.checkpoints import MODEL_FILE
from run.loss_history import best_row
from run.row import Row, last_scored_row
from run.run_dir import RunDir

SCORES_WITH_TIMING = ("previous_token", "induction")  # the heads that in-context copying needs


@dataclass(frozen=True)
class Figure:
    """A number of a run: how sweep.csv, the terminal and the page name and format it."""

    name: str  # column of sweep.csv
    heading: str  # column in the terminal
    title: str = ""  # on the page
    unit: str = ""  # in the title
    format: Callable[[float, float | None], str] = format_with_error  # a value and its error

    @property
    def is_time(self) -> bool:
        """True if it is the time of an event; runs without the event are censored."""
        return self.name.startswith(("emerged/", "tokens_at_emergence/"))


FOUR_DECIMALS = partial(format_fixed, decimals=4)
# In the order of the terminal's columns, which shows as many as fit.
FIGURES = (
    Figure("val/loss", "val/loss", "Validation loss", "nats/token", FOUR_DECIMALS),
    Figure("copying_gain", "copying gain", "Copying gain", "nats"),
    Figure(
        "tokens_at_emergence/induction",
        "induction at",
        "Tokens until an induction head emerged",
        format=format_magnitude,
    ),
    Figure("parameters", "parameters", "Parameters", format=format_magnitude),
    Figure("kv_cache_bytes", "KV cache", "KV cache", format=partial(format_magnitude, unit="B")),
    Figure("val/bits_per_byte", "bits/byte", "Bits per byte", format=FOUR_DECIMALS),
    Figure("tokens_per_second", "tok/s", "Throughput", "tokens/s", format_magnitude),
    Figure("train_seconds", "train s", "Training time", "s", partial(format_fixed, decimals=0)),
    Figure("val/in_context_score", "in-context", "In-context learning score", "nats"),
    Figure("heads/induction", "heads/induction", "Highest prefix-matching score"),
    Figure(
        "tokens_at_emergence/previous_token",
        "previous token at",
        "Tokens until a previous-token head emerged",
        format=format_magnitude,
    ),
    Figure("heads/previous_token", "heads/previous_token", "Highest previous-token score"),
)
BY_NAME = {figure.name: figure for figure in FIGURES}


def describe_figure(name: str) -> Figure:
    """Return the description of a figure; that of a task's or a head's measure is its name."""
    heading = name.removeprefix("task/")
    format = format_magnitude if name.startswith("emerged/") else format_with_error
    return BY_NAME.get(name) or Figure(name, heading, heading, format=format)


def compute_figures(run_dir: Path, config: Config | None, rows: Sequence[Row]) -> dict[str, float]:
    """Compute the figures of a run that sweep.csv has as columns, as far as they were measured.

    Of each score these are the first emergence, the tokens at that step, and the highest last one.
    """
    last_snapshot = last_scored_row(rows)
    figures = _progress(rows)
    if parameters := _read_parameter_count(RunDir(run_dir)):
        figures["parameters"] = parameters
    if config is not None:
        figures["kv_cache_bytes"] = kv_cache_bytes(config)
    if "probe/copying_gain" in last_snapshot:
        figures["copying_gain"] = last_snapshot["probe/copying_gain"]
    for score, steps in last_snapshot.scores("emerged").items():
        figures[f"emerged/{score}"] = min(steps.values())
    for score, values in last_snapshot.scores("heads").items():
        figures[f"heads/{score}"] = max(values.values())
    for score in SCORES_WITH_TIMING:
        has_emerged = f"emerged/{score}" in figures
        if has_emerged and figures.get("step") and "tokens" in figures:
            tokens_per_step = figures["tokens"] / figures["step"]
            figures[f"tokens_at_emergence/{score}"] = figures[f"emerged/{score}"] * tokens_per_step
    return figures


def _progress(rows: Sequence[Row]) -> dict[str, float]:
    """Return the losses of the best step, the last evaluation's metrics, length and speed."""
    figures = {}
    if best := best_row(rows):
        figures = {key: best[key] for key in ("val/loss", "val/bits_per_byte") if key in best}
        figures["best_step"] = best["step"]
    if rows:
        last = rows[-1]
        figures |= {key: last[key] for key in ("step", "tokens", "train_seconds") if key in last}
    evaluated: dict = next((row for row in reversed(rows) if "val/loss" in row), {})
    for name, value in evaluated.items():
        if name.startswith(("task/", "val/in_context")) and not name.endswith("_se"):
            figures[name] = value
    if figures.get("train_seconds") and "tokens" in figures:
        figures["tokens_per_second"] = figures["tokens"] / figures["train_seconds"]
    return figures


def _read_parameter_count(run_dir: RunDir) -> int | None:
    with suppress(Exception):  # of a damaged checkpoint
        for step in run_dir.steps()[-1:]:
            with safe_open(run_dir.checkpoint_folder(step) / MODEL_FILE, "np") as tensors:
                names = set(tensors.keys()) - {"ngrams.keys"}
                return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
    return None


def kv_cache_bytes(config: Config) -> int:
    """Return the bytes of a KV cache of `block_size` tokens for weights in the run's precision."""
    model = config.model
    elements = model.n_layer * model.kv_heads * model.block_size * (model.key_dim + model.value_dim)
    return elements * cached_number_bytes(config.device, 4 if config.precision == "fp32" else 2)
