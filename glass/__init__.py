"""Look inside a model: measure its attention heads, show them, and serve them live.

`heads/measure` measures the heads, `heads/say` states what was measured, `page` shows it in one
HTML file, and `live` serves the page of explore.py. Above them, `observer` looks at a run for
train.py, and `opened` answers questions from Python in `labeled` arrays.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    from interop import load

    if tokenizer is None and isinstance(model, (str, os.PathLike)):
        return Opened(*load(model, checkpoint))
    return Opened(model, tokenizer)  # type: ignore[arg-type]  # it refuses other types


def series(
    path_or_name: str | os.PathLike, steps: "str | int | Sequence[int]" = "all"
) -> "Iterator[tuple[int, Opened]]":
    """Return an iterator over steps of a model, each with what `open` returns of it.

    `interop.find_series` says what the arguments are. Of several steps with equal weights, the last
    one is returned, and a line names the others.
    """
    from common.terminal import print_stderr
    from glass.opened import Opened  # imports torch
    from interop.series import find_series, name_repeats

    found = find_series(path_or_name, steps)
    groups = found.group_equal()
    for line in name_repeats(groups):
        print_stderr(line)
    return ((step, Opened(*found.open(step).load())) for step in groups)
