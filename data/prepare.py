"""Prepare text without training: `python -m data.prepare data=text data.path=notes/ tokenizer=bpe`, with train.py's settings."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf.errors import OmegaConfBaseException

sys.path.insert(0, str(Path(__file__).parents[1]))  # from wherever it is started

import cli
from config import UserError
from data.tokens import prepare


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(cfg) -> None:
    from rich.console import Console

    from training.record import printer

    console = Console()
    say = printer(console)
    try:
        config, _ = cli.to_config(cfg, list(HydraConfig.get().overrides.task))
        kept = None
        if config.init_from:
            from interop import starting_point

            kept, _ = starting_point(Path(config.init_from), say)
        with shown(console) as progress:
            tokens = prepare(config.data, config.tokenizer, say, kept, progress)
    except (UserError, OmegaConfBaseException) as e:
        cli.fail(cli.sentence(e))
    for line in tokens.summary():
        say(line)


@contextmanager
def shown(console) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar in a terminal, of bytes with the time left, as `prepare` takes it; None elsewhere."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks = {}

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield progress


if __name__ == "__main__":
    cli.start(main, cli.train_help, cli.check_arguments)
