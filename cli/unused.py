"""Refuse settings that were typed but have no effect beside the others."""

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.paths import expand_home
from common.settings import format_value
from common.text_files import is_jsonl
from config import DataConfig


class Above(NamedTuple):
    """All numbers above a limit."""

    limit: float

    def __contains__(self, value: Any) -> bool:
        """Return whether a number is above the limit."""
        return value > self.limit


UsedWith = tuple[tuple[str, str, tuple | Above], ...]

# Each row: a setting, another one, and the values of the other with which the first has an effect.
TRAIN_USED_WITH: UsedWith = (
    ("data.min_period", "data.task", ("passages",)),
    ("data.max_period", "data.task", ("passages",)),
    ("data.concentration", "data.task", ("markov",)),
    ("data.train_share", "data.task", ("modular",)),
    ("data.pairs", "data.task", ("recall",)),
    ("data.task", "data.source", ("synthetic",)),
    ("data.symbols", "data.source", ("synthetic",)),
    ("data.begin", "data.source", ("synthetic",)),
    ("data.min_period", "data.source", ("synthetic",)),
    ("data.max_period", "data.source", ("synthetic",)),
    ("data.concentration", "data.source", ("synthetic",)),
    ("data.train_share", "data.source", ("synthetic",)),
    ("data.pairs", "data.source", ("synthetic",)),
    ("data.lines", "data.source", ("stdlib", "shakespeare", "text", "hf")),
    ("data.path", "data.source", ("text", "shakespeare")),
    ("data.exclude", "data.source", ("text",)),
    ("data.field", "data.source", ("text", "hf")),
    ("data.name", "data.source", ("hf",)),
    ("data.subset", "data.source", ("hf",)),
    ("data.split", "data.source", ("hf",)),
    ("tokenizer.vocab_size", "tokenizer.name", ("bpe",)),
    ("tokenizer.pattern", "tokenizer.name", ("bpe",)),
    ("model.mlp_hidden", "model.mlp", ("gelu", "swiglu", "relu2")),
    ("model.rope_theta", "model.position", ("rope",)),
    ("model.rope_factor", "model.position", ("rope",)),
    ("model.rope_trained", "model.position", ("rope",)),
    ("model.rope_trained", "model.rope_factor", Above(1)),
    ("model.ngram_size", "model.ngrams", Above(1)),
    ("model.ngram_count", "model.ngrams", Above(1)),
    ("model.ngram_rows", "model.ngrams", Above(1)),
    ("optim.muon_lr", "optim.name", ("muon",)),
    ("optim.momentum", "optim.name", ("muon",)),
    ("optim.decay_share", "optim.schedule", ("wsd",)),
    ("optim.min_lr_ratio", "optim.schedule", ("cosine", "wsd")),
    ("attention.check_every", "attention.every", Above(0)),
    ("attention.picture_every", "attention.every", Above(0)),
    ("wandb.project", "wandb.mode", ("auto", "online", "offline")),
)
SAMPLE_USED_WITH: UsedWith = (
    *((name, "score", (None,)) for name in ("max_new_tokens", "stop", "temperature")),
    *((name, "score", (None,)) for name in ("top_k", "top_p", "min_p", "seed", "num_samples")),
    *((name, "interactive", (False,)) for name in ("prompt", "prompt_file", "score", "attention")),
    *((name, "temperature", Above(0)) for name in ("top_k", "top_p", "min_p", "seed")),
    ("precision", "attention", (None,)),  # a page shows the model with the weights that it has
)


def refuse_unused(
    typed: Mapping[str, Any], values: Mapping[str, Any], used_with: UsedWith = TRAIN_USED_WITH
) -> None:
    """Raise `UserError` if `explain_unused` finds a setting without effect."""
    if reason := explain_unused(typed, values, used_with):
        raise UserError(reason)


def refuse_unused_in_files(typed: Mapping[str, Any], data: DataConfig) -> None:
    """Raise `UserError` if a setting of data.… was typed that the files of data.path do not use."""
    if data.source != "text" or not data.path:
        return
    path = expand_home("data.path", data.path)
    if "data.exclude" in typed and data.exclude and path.is_file():
        raise UserError(
            f"data.exclude={data.exclude} has no effect with data.path={data.path}, which is one "
            "file: leave it out"
        )
    if "data.field" in typed:
        is_folder = path.is_dir()
        names = path.rglob("*") if is_folder else glob.iglob(str(path), recursive=True)
        files = [Path(name) for name in names]
        if files and not any(map(is_jsonl, files)):
            raise UserError(
                f"data.field={data.field} has no effect, because data.path={data.path} holds no "
                ".jsonl or .ndjson file: leave it out, or rename files with a JSON object on each "
                "line"
            )


def explain_unused(
    typed: Mapping[str, Any], values: Mapping[str, Any], used_with: UsedWith = TRAIN_USED_WITH
) -> str | None:
    """Return which typed setting has no effect beside known values of others, and what to do."""
    for name, other, allowed in used_with:
        if typed.get(name) is None or other not in values or values[other] in allowed:
            continue
        if isinstance(allowed, Above):
            fix = f"use {other} above {allowed.limit}"
        elif None in allowed:
            fix = f"leave out {other}"
        else:
            fix = f"use {' or '.join(_assignment(other, value) for value in allowed)}"
        return (
            f"{name}={format_value(typed[name])} has no effect with "
            f"{_assignment(other, values[other])}: leave it out, or {fix}"
        )
    return None


def _assignment(name: str, value: Any) -> str:
    """Format a setting as it is typed; a preset stands for the name of its section."""
    return f"{re.sub('[.](name|source)$', '', name)}={format_value(value)}"
