"""Text prepared without training, with a progress bar.

    python -m data.prepare data=text data.path=notes/     train.py with prepare_only=true
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))  # from wherever it is started
    sys.argv.append("prepare_only=true")
    runpy.run_path(str(root / "train.py"), run_name="__main__")

from config import Config, UserError, is_hf
from data.hf_tokenizer import read_json, read_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokens import prepare
from hub import folder_of


def prepare_text(config: Config, console: Console, say: Callable[[str], None]) -> None:
    """Prepare the text of a configuration, and print what it became; raises as `prepare`."""
    kept = tokenizer_of(folder_of(config.init_from)) if config.init_from else None
    with progress_bar(console) as progress:
        tokens = prepare(config.data, config.tokenizer, say, kept, progress)
    for line in tokens.summary():
        say(line)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face's format, or of a run, whose checkpoints have one.

    Raises:
        UserError: there is none.
    """
    if is_hf(folder):
        return read_tokenizer(folder, read_json(folder / "config.json"))
    found = sorted(folder.glob("checkpoints/step_*/tokenizer.json"))
    if not found:
        raise UserError(f"init_from={folder} has no checkpoint, and so no tokenizer")
    try:
        return load_tokenizer(found[-1])
    except ValueError as e:
        raise UserError(str(e)) from None


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """What `prepare` reports its bytes to, shown as a bar in a terminal; None elsewhere."""
    if not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(),
                  TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks = {}

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield progress
