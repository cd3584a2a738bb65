"""Look inside a model: measure its attention heads, show them, and serve them live.

`heads/measure` measures the heads, `heads/say` states what was measured, `page` shows it in one
HTML file, and `live` serves the page of explore.py. Above them, `observer` looks at a run for
train.py, and `opened` answers questions from Python.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xarray import DataArray, Dataset

    from data.tokenizer import Tokenizer
    from glass.opened import Opened
    from model import GPT


def open(
    model: "GPT | str | os.PathLike",
    tokenizer: "Tokenizer | None" = None,
    checkpoint: str | int = "best",
) -> "Opened":
    """Return an object that answers questions about what a model does with a text.

    The model and its tokenizer, or the path or the name of a model: see `interop.load`, which says
    what `checkpoint` is.
    """
    from glass.opened import Opened  # imports torch
    from interop import find_model

    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        stored = find_model(model, checkpoint, key="model")
        return Opened(*stored.load(), stored.run_dir)
    return Opened(model, tokenizer)  # type: ignore[arg-type]  # it refuses other types


def series(
    path_or_name: str | os.PathLike, steps: "str | int | Sequence[int]" = "all"
) -> "Iterator[tuple[int, Opened]]":
    """Return an iterator over steps of a model, each with what `open` returns of it.

    `interop.find_series` says what the arguments are. Of several steps with equal weights, only the
    last one is returned, and a line names the others.
    """
    from glass.opened import Opened  # imports torch
    from interop import find_series

    found = find_series(path_or_name, steps)
    stored = ((step, found.open(step)) for step in found.group_equal())
    return ((step, Opened(*model.load(), model.run_dir)) for step, model in stored)


def mean_and_error(answers: "DataArray") -> "Dataset":
    """Return the mean over the first axis, of texts or pairs, and its standard error.

    Values that are nan are left out; the standard error of one value is nan.
    """
    import xarray

    from glass.heads.measure import scores  # imports torch

    axes = {"input_core_dims": [answers.dims[:1]], "output_core_dims": [[], []]}
    mean, error = xarray.apply_ufunc(scores.mean_and_error, answers, keep_attrs=True, **axes)
    return xarray.Dataset({"mean": mean, "standard_error": error})
