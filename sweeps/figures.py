"""Compute the figures of a run for a table of runs, from its folder. Does not import torch."""

from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import fmean

import numpy as np
from safetensors import safe_open

from common.files import list_folder, ordinary_file
from common.metrics import best_row, is_scored
from config import MIN_BF16_DECODING_WIDTH, Config
from glass.heads.metrics import read_head_values

SCORES_WITH_TIMING = ("previous_token", "induction")  # the heads that in-context copying needs


def summarize_run(run_dir: Path, config: Config | None, rows: list[dict]) -> dict[str, float]:
    """Compute the figures of a run that sweep.csv has as columns, as far as they were measured.

    These are, by the names of metrics.jsonl: the losses of the best step, size, training speed,
    bytes of one sequence's KV cache, the last in-context copying gain, in-context score and metrics
    of a task; for each score the first emergence (`emerged/induction`), the tokens at that step,
    and the highest last score (`heads/induction`); and `pairs_again`, the share of repeated token
    pairs.
    """
    last_snapshot: dict = next(filter(is_scored, reversed(rows)), {})
    figures = _progress(rows)
    if parameters := _count_parameters(run_dir):
        figures["parameters"] = parameters
    if config is not None:
        figures["kv_cache_bytes"] = kv_cache_bytes(config)
    if "probe/copying_gain" in last_snapshot:
        figures["copying_gain"] = last_snapshot["probe/copying_gain"]
    figures |= _best_of_heads(last_snapshot, "emerged", min)
    figures |= _best_of_heads(last_snapshot, "heads", max)
    for score in SCORES_WITH_TIMING:
        if f"emerged/{score}" in figures and figures.get("step") and "tokens" in figures:
            tokens_per_step = figures["tokens"] / figures["step"]
            figures[f"tokens_at_emergence/{score}"] = figures[f"emerged/{score}"] * tokens_per_step
    if share := _share_of_repeated_pairs(run_dir):
        figures["pairs_again"] = share
    return figures


def _progress(rows: list[dict]) -> dict[str, float]:
    best, last = best_row(rows) or {}, rows[-1] if rows else {}
    figures = {key: best[key] for key in ("val/loss", "val/bits_per_byte") if key in best}
    if best:
        figures["best_step"] = best["step"]
    figures |= {key: last[key] for key in ("step", "tokens", "train_seconds") if key in last}
    evaluated: dict = next((row for row in reversed(rows) if "val/loss" in row), {})
    names = [key for key in evaluated if key.startswith(("task/", "val/in_context"))]
    figures |= {name: evaluated[name] for name in names if not name.endswith("_se")}
    if figures.get("train_seconds") and "tokens" in figures:
        figures["tokens_per_second"] = figures["tokens"] / figures["train_seconds"]
    return figures


def _best_of_heads(row: dict, group: str, choose: Callable[..., float]) -> dict[str, float]:
    return {
        f"{group}/{score}": choose(values.values())
        for score, values in read_head_values(row, group).items()
    }


def _share_of_repeated_pairs(run_dir: Path) -> float | None:
    """Return how often a pair of adjacent tokens occurred earlier in the same validation window.

    This is what a text offers induction heads. The windows are those of the newest snapshot.
    """
    with suppress(Exception):  # numpy and zipfile raise many types for damaged files
        for path in list_folder(run_dir / "attention", "step_*.npz")[-1:]:
            with np.load(ordinary_file(path)) as snapshot:
                ids = snapshot["window_ids"].astype(np.int64)  # (W, T)
            pairs = (ids[:, :-1] * (ids.max() + 1) + ids[:, 1:]).tolist()
            return fmean(pair in row[:k] for row in pairs for k, pair in enumerate(row))
    return None


def _count_parameters(run_dir: Path) -> int | None:
    with suppress(Exception):
        for folder in list_folder(run_dir / "checkpoints", "step_*")[-1:]:
            with safe_open(ordinary_file(folder / "model.safetensors"), "np") as tensors:
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
