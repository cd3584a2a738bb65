"""Embed a model in a page, which runs it on the reader's text."""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import read_json_object
from config import GPTConfig, ModelConfig
from generation.known_settings import find_unknown_setting
from glass.heads.measure.snapshot_files import order_by_importance
from glass.page.pack import Blobs, PackedWeights, pack_weights, to_base64
from run.row import Row
from run.run_dir import RunDir
from training.safetensors_files import read_weights
from training.stored_model import tensor_shapes

# Values of settings that the page's JavaScript computes. A model with other values or settings is
# explored with explore.py.
CAN_RUN = {
    "mlp": ("gelu", "gelu_exact", "swiglu", "relu2", "none"),
    "parallel_mlp": (False, True),
    "attention_sink": (False, True),
    "attention_gate": ("none", "head", "channel"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_embedding": (False, True),
    "position": ("learned", "rope"),
    "qk_norm": (False, True, "gains"),
    "bias": (False, True, "attention", "qkv", "mlp"),
    "tie_embeddings": (False, True),
}
TOKENIZERS = ("char", "bpe")  # kinds that a page can run


class EmbeddedModel(NamedTuple):
    """A model that a page can run."""

    config: GPTConfig
    tokenizer: dict[str, Any]  # contents of tokenizer.json
    # For each step a function that packs its weights, or returns None if they cannot be read; the
    # most important steps first.
    weights: Mapping[int, Callable[[], PackedWeights | None]]


def find_embedded_model(
    run_dir: RunDir, settings: ModelConfig, latest: Row, opening_step: int | None
) -> EmbeddedModel | None:
    """Return a run's model with its stored weights; None if its tokenizer cannot be read.

    The `latest` row says when heads emerged. The page opens on `opening_step`, or on the last step.
    """
    try:
        tokenizer = read_json_object(run_dir.tokenizer_file)
    except (OSError, UserError, ValueError):
        return None
    paths = run_dir.snapshot_files(".safetensors")
    weights = {
        step: partial(_pack_file, paths[step], paths[step].stat().st_mtime_ns)
        for step in order_by_importance([*paths], latest, opening_step)
    }
    return EmbeddedModel(GPTConfig.from_settings(settings), tokenizer, weights)


@lru_cache(maxsize=128)  # steps of the run in progress
def _pack_file(path: Path, modified_ns: int) -> PackedWeights | None:
    try:
        return pack_weights(read_weights(path))
    except UserError:
        return None


def embed_weights(model: EmbeddedModel | None, room: int, blobs: Blobs) -> dict[str, Any] | None:
    """Add the tokenizer and the most important weights that fit to `blobs`, and describe them.

    If none fit or the page cannot run the model, the description says why; None without a model.
    Weights that are damaged or not finite are left out and counted.
    """
    if model is None:
        return None
    if reason := _find_unsupported(model):
        return {"cannotRun": reason}
    shapes = tensor_shapes(model.config)
    n_bytes = 2 * sum(map(math.prod, shapes.values()))  # in float16
    if n_bytes > room:
        return {"bytes": n_bytes}

    fitting: dict[int, PackedWeights] = {}
    unreadable = 0
    for step, pack in model.weights.items():
        packed = pack()
        if packed is None or {name: list(shape) for name, shape in packed.tensors} != shapes:
            unreadable += 1
            continue
        room -= len(packed.numbers)
        if room < 0:
            break
        fitting[step] = packed
    if fitting:
        return {**_embed_fitting(fitting, model.tokenizer, blobs), "unreadable": unreadable}
    if room < 0:
        return {"bytes": n_bytes}
    return {"unreadable": unreadable} if unreadable else None


def _embed_fitting(
    fitting: Mapping[int, PackedWeights], tokenizer: dict[str, Any], blobs: Blobs
) -> dict[str, Any]:
    blob_of_step = {step: len(blobs) + k for k, step in enumerate(fitting)}
    blobs.extend(packed.numbers for packed in fitting.values())
    blobs.append(to_base64(json.dumps(tokenizer).encode()))
    tensors, _ = next(iter(fitting.values()))  # equal in all steps
    return {
        "tensors": tensors,
        "blobs": dict(sorted(blob_of_step.items())),
        "tokenizer": len(blobs) - 1,
    }


def _find_unsupported(model: EmbeddedModel) -> str | None:
    """Return the first thing about a model that the page cannot run; None if it can."""
    kind = model.tokenizer.get("kind")
    if kind not in TOKENIZERS:
        return f"a tokenizer of the kind {kind}"
    if unknown := find_unknown_setting(model.config, CAN_RUN):
        return unknown
    if model.config.ngrams > 1:
        return f"model.ngrams={model.config.ngrams}"
    return None
