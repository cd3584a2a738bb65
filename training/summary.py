"""What a run prints: before it what is going to be trained, at its end what came of it."""

import shlex
from collections.abc import Callable
from pathlib import Path

from config import Config
from data.tokens import Tokens
from files import METRICS, best_row
from model import GPT
from training.device import describe

MANY_EPOCHS = 20  # beyond these a run is out of proportion to its text


def print_run(log: Callable[[str], None], config: Config, model: GPT, tokens: Tokens,
              processes: int) -> None:
    """Print what is going to be trained, for how long, where."""
    parameters = model.num_parameters()
    step_tokens = config.batch_size * config.model.block_size
    epochs = config.max_steps * step_tokens / len(tokens.train)
    many = f"{processes} processes, each " if processes > 1 else ""
    how = "compiled, which takes a minute or two once" if config.compile else "eager"
    log(f"model    {parameters:,} parameters")
    log(f"run      {config.max_steps:,} steps of {step_tokens:,} tokens, {epochs:,.2f} epochs")
    if epochs > MANY_EPOCHS:
        log(f"note     each token is seen {epochs:,.0f} times, so the model will learn the text by "
            "heart: give more text or fewer max_steps")
    log(f"machine  {many}{describe(config.device)}, {config.precision}, {how}")


def print_summary(log: Callable[[str], None], run_dir: Path, rows: list[dict],
                  seconds: dict[str, float]) -> None:
    """Print where a run is, its best loss, its time, and what is next."""
    lines, best = [("run", run_dir)], best_row(rows)
    if best is not None:
        lines += [("best validation loss", f"{best['val/loss']:.4f} nats per token, "
                                           f"{best['val/bits_per_byte']:.4f} bits per byte"),
                  ("", f"after {best['step']:,} steps")]
    maps = sorted((run_dir / "attention").glob("*.png"))
    lines += [("attention", maps[-1])] if maps else []
    lines += [("numbers", run_dir / METRICS),
              ("page", run_dir / "report.html"),
              ("time", ", ".join(f"{kind} {s:.0f} s" for kind, s in seconds.items() if s)),
              ("sample from it", f"python sample.py run_dir={shlex.quote(str(run_dir))}")]
    for name, value in lines:
        log(f"{name:<21}{value}".rstrip())
