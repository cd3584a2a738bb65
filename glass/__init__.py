"""Look inside a model: measure its attention heads, show them, and serve them live.

`heads/measure` measures the heads, `heads/say` states what was measured, `page` shows it in one
HTML file, and `live` serves the page of explore.py. Above them, `observer` looks at a run for
train.py, and `opened` answers questions from Python in `labeled` arrays.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from glass.opened import Opened
    from model import GPT


def open(model: "GPT", tokenizer: "Tokenizer") -> "Opened":
    """Return an object that answers questions about what the model does with a text."""
    from glass.opened import Opened  # imports torch

    return Opened(model, tokenizer)
