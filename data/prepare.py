"""Text prepared, with a progress bar; by itself, without training:

    python -m data.prepare data=text data.path=notes/     train.py with prepare_only=true
"""

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))  # from wherever it is started
    sys.argv.append("prepare_only=true")
    runpy.run_path(str(root / "train.py"), run_name="__main__")

from config import Config
from data.tokenizer import Tokenizer
from data.tokens import Tokens, prepare


def prepare_text(config: Config, console: Console, say: Callable[[str], None],
                 tokenizer: Tokenizer | None = None, whole: bool = False) -> Tokens:
    """The tokens of a configuration's text; takes and raises what `prepare` does."""
    bar = stages(console)
    with bar if console.is_terminal else nullcontext():
        return prepare(config.data, config.tokenizer, say, tokenizer, partial(show, bar), whole)


def stages(console: Console) -> Progress:
    """The bar that `show` fills."""
    return Progress(TextColumn("{task.description:<12}"), TimeElapsedColumn(), BarColumn(),
                    TextColumn("{task.fields[size]}"), TimeRemainingColumn(), console=console,
                    transient=True)


def show(bar: Progress, stage: str, done: int, total: int | None) -> None:
    """Show how many bytes of a stage are done, in a line of its own."""
    task = next((task.id for task in bar.tasks if task.description == stage), None)
    if task is None:
        task = bar.add_task(stage, total=total, size="")
    size = f"{decimal(done)} of {decimal(total)}" if total else decimal(done) if done else ""
    bar.update(task, completed=done, total=total, size=size)
