"""The figures of a run in tables and on the page, and how its folder gives them.

Does not import torch.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from common.text import format_fixed, format_magnitude, format_with_error
from config import MIN_BF16_DECODING_WIDTH, Config
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
    unit: str = ""
    decimals: int | None = None  # None: as many as the standard error leaves
    is_large: bool = False  # written with the prefix of its unit: 115 k

    @property
    def is_time(self) -> bool:
        """True if it is the time of an event; runs without the event are censored."""
        return self.name.startswith(("emerged/", "tokens_at_emergence/"))

    def format(self, value: float, error: float | None) -> str:
        """Format a value with its standard error, if that is known."""
        if self.is_large:
            return format_magnitude(value, error, self.unit if self.unit == "B" else "")
        if self.decimals is None:
            return format_with_error(value, error)
        return format_fixed(value, error, self.decimals)


# In the order of the terminal's columns, which shows as many as fit.
FIGURES = (
    Figure("val/loss", "val/loss", "Validation loss", "nats/token", 4),
    Figure("copying_gain", "copying gain", "Copying gain", "nats"),
    Figure(
        "tokens_at_emergence/induction",
        "induction at",
        "Tokens until an induction head emerged",
        is_large=True,
    ),
    Figure("parameters", "parameters", "Parameters", is_large=True),
    Figure("kv_cache_bytes", "KV cache", "KV cache", "B", is_large=True),
    Figure("val/bits_per_byte", "bits/byte", "Bits per byte", "", 4),
    Figure("tokens_per_second", "tok/s", "Throughput", "tokens/s", is_large=True),
    Figure("train_seconds", "train s", "Training time", "s", 0),
    Figure("val/in_context_score", "in-context", "In-context learning score", "nats"),
    Figure("heads/induction", "heads/induction", "Highest prefix-matching score"),
    Figure(
        "tokens_at_emergence/previous_token",
        "previous token at",
        "Tokens until a previous-token head emerged",
        is_large=True,
    ),
    Figure("heads/previous_token", "heads/previous_token", "Highest previous-token score"),
)
BY_NAME = {figure.name: figure for figure in FIGURES}


def describe_figure(name: str) -> Figure:
    """Return the description of a figure; that of a task's or a head's measure is its name."""
    heading = name.removeprefix("task/")
    is_time = name.startswith("emerged/")
    return BY_NAME.get(name) or Figure(name, heading, heading, is_large=is_time)


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


def _read_parameter_count(run: RunDir) -> int | None:
    with suppress(Exception):  # of a damaged checkpoint
        for step in run.steps()[-1:]:
            with safe_open(run.checkpoint_folder(step) / MODEL_FILE, "np") as tensors:
                names = set(tensors.keys()) - {"ngrams.keys"}
                return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
    return None


def kv_cache_bytes(config: Config) -> int:
    """Return the KV cache's bytes for `block_size` tokens, in the precision of sample.py."""
    model = config.model
    elements = model.n_layer * model.kv_heads * model.block_size * (model.key_dim + model.value_dim)
    is_on_gpu = config.device != "cpu"
    decodes_in_bf16 = config.precision == "bf16" and (
        is_on_gpu or model.n_embd >= MIN_BF16_DECODING_WIDTH
    )
    decodes_in_fp16 = config.precision == "fp16" and is_on_gpu
    return elements * (2 if decodes_in_bf16 or decodes_in_fp16 else 4)
