"""Text prepared without training, with a progress bar.

    python -m data.prepare data=text data.path=notes/     train.py with prepare_only=true
"""

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))  # from wherever it is started
    sys.argv.append("prepare_only=true")
    runpy.run_path(str(root / "train.py"), run_name="__main__")

from config import Config
from data.tokenizer import Tokenizer
from data.tokens import prepare


def prepare_text(config: Config, console: Console, say: Callable[[str], None],
                 tokenizer: Tokenizer | None = None) -> None:
    """Prepare the text of a configuration, and print what it became; raises as `prepare`."""
    bar = Progress(TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(),
                   TimeRemainingColumn(), console=console, transient=True)
    with bar if console.is_terminal else nullcontext():
        tokens = prepare(config.data, config.tokenizer, say, tokenizer, partial(show, bar))
    for line in tokens.summary():
        say(line)


def show(bar: Progress, stage: str, done: int, total: int | None) -> None:
    """Show how many bytes of a stage are done, in a line of its own."""
    task = next((task.id for task in bar.tasks if task.description == stage), None)
    if task is None:
        task = bar.add_task(stage, total=total)
    bar.update(task, completed=done)
