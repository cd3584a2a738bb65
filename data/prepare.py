"""Text prepared, with a progress bar on a terminal."""

from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from config import Config
from data.tokenizer import Tokenizer
from data.tokens import Tokens, prepare


def prepare_text(config: Config, console: Console, log: Callable[[str], None],
                 tokenizer: Tokenizer | None = None, whole: bool = False) -> Tokens:
    """The tokens of a configuration's text, as `prepare` makes them."""
    columns = (TextColumn("{task.description:<12}"), TimeElapsedColumn(), BarColumn(),
               TextColumn("{task.fields[size]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True,
                  disable=not console.is_terminal) as bar:
        return prepare(config.data, config.tokenizer, log, tokenizer, partial(show, bar), whole)


def show(bar: Progress, stage: str, done: int, total: int | None) -> None:
    """Show how many bytes of a stage are done, in a line of its own."""
    task = next((task.id for task in bar.tasks if task.description == stage), None)
    if task is None:
        task = bar.add_task(stage, size="")
    size = f"{decimal(done)} of {decimal(total)}" if total else decimal(done) if done else ""
    bar.update(task, completed=done, total=total, size=size)
