"""What a run prints: before it what is going to be trained, at its end what came of it."""

import shlex
from collections.abc import Callable
from pathlib import Path

from config import Config
from data.tokens import Tokens
from files import as_known, best_row
from training.evaluate import Validation
from training.runtime import describe

MANY_EPOCHS, MANY_PARAMETERS = 20, 10  # beyond these a run is out of proportion to its text


def print_run(say: Callable[[str], None], config: Config, parameters: int, tokens: Tokens,
              validation: Validation, processes: int, why: str) -> None:
    """Print what is going to be trained, for how long, where; `why` it is compiled or not."""
    step_tokens = config.batch_size * config.model.block_size
    epochs = config.max_steps * step_tokens / len(tokens.train)
    many = f"{processes} processes, each " if processes > 1 else ""
    how = "compiled" if config.compile else "eager"
    say(f"model    {parameters:,} parameters")
    say(f"run      {config.max_steps:,} steps of {step_tokens:,} tokens, {epochs:,.2f} epochs")
    say(f"val/loss uses {validation.extent()}")
    for line in proportions(parameters, len(tokens.train), epochs):
        say(line)
    say(f"machine  {many}{describe(config.device)}, {config.precision}, {how}{why}")


def proportions(parameters: int, tokens: int, epochs: float) -> list[str]:
    """Notes on a run whose model, text and length do not fit each other."""
    notes = []
    if epochs > MANY_EPOCHS:
        notes.append(f"note     each token is seen {epochs:,.0f} times, so the model will learn "
                     "the text by heart: give more text or fewer max_steps")
    if parameters > MANY_PARAMETERS * tokens:
        notes.append(f"note     {parameters / tokens:,.0f} parameters for each token of text: "
                     "a smaller model would be as good, and faster")
    return notes


def print_summary(say: Callable[[str], None], run_dir: Path, rows: list[dict],
                  thresholds: dict[str, float], seconds: dict[str, float],
                  validation: Validation) -> None:
    """Print where a run is, its best loss, its strongest heads, its time, and what is next.
    thresholds: from what score on, less its error, a head counts as one of its kind."""
    lines, best = [("run", run_dir)], best_row(rows)
    if best is not None:
        lines += [("best validation loss", f"{best['val/loss']:.4f} nats per token, "
                                           f"{best['val/bits_per_byte']:.4f} bits per byte"),
                  ("", f"after {best['step']:,} steps"),
                  ("", f"for comparison, xz -9: {validation.xz():.4f} bits per byte")]
    lines += strongest_heads(rows[-1], thresholds)
    maps = sorted((run_dir / "attention").glob("*.png"))
    lines += [("attention", maps[-1])] if maps else []
    lines += [("numbers", run_dir / "metrics.jsonl"),
              ("page", run_dir / "report.html"),
              ("time", ", ".join(f"{kind} {s:.0f} s" for kind, s in seconds.items() if s)),
              ("sample from it", f"python sample.py run_dir={shlex.quote(str(run_dir))}")]
    for name, value in lines:
        say(f"{name:<21}{value}".rstrip())


def strongest_heads(row: dict, thresholds: dict[str, float]) -> list[tuple[str, str]]:
    """The strongest head of each kind, and where it is not strong enough to be one."""
    lines = []
    for kind, least in thresholds.items():
        prefix = f"heads/{kind}/"
        heads = {key.removeprefix(prefix): value for key, value in row.items()
                 if key.startswith(prefix)}
        if heads:
            head = max(heads, key=heads.get)
            error = row.get(f"heads/{kind}_se/{head}")
            none = f": none yet (counts from {least:.2g})"
            lines.append((kind.replace("_", " "), f"strongest {head}, "
                          f"{as_known(heads[head], error)}"
                          f"{none if heads[head] - (error or 0) < least else ''}"))
    return lines
