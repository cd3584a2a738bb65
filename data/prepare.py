"""Prepare text without training, with train.py's settings.

    python -m data.prepare data=text data.path=notes/ tokenizer=bpe
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1]))  # from wherever it is started

import cli
from config import UserError, is_hf
from data.hf_tokenizer import read_json, read_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokens import prepare


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(cfg) -> None:
    console = cli.Terminal()
    say = cli.printer(console)
    try:
        config, _ = cli.to_config(cfg, list(HydraConfig.get().overrides.task))
        tokenizer = tokenizer_of(Path(config.init_from)) if config.init_from else None
        with progress_bar(console) as progress:
            tokens = prepare(config.data, config.tokenizer, say, tokenizer, progress)
    except (UserError, OmegaConfBaseException) as e:
        cli.fail(cli.sentence(e))
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
def progress_bar(console) -> Iterator[Callable[[str, int, int], None] | None]:
    """What shows how far `prepare` is, in bytes with the time left; None without a terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {}

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield progress


if __name__ == "__main__":
    cli.start(main, cli.train_help, cli.check_arguments)
