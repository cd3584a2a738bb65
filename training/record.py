"""What a run writes: its folder and lock, metrics.jsonl, samples.jsonl, W&B, the terminal."""

import errno
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli import Terminal, printer
from cli.config_file import config_yaml
from common.errors import UserError
from common.files import atomic_write
from common.metrics import METRICS, SAMPLES, best_row, read_rows
from config import Config

# In the terminal: name → metric, format.
SHOWN = {
    "loss": ("train/loss", "{:.3f}"),
    "val": ("val/loss", "{:.3f}"),
    "bits/byte": ("val/bits_per_byte", "{:.3f}"),
    "tok/s": ("train/tokens_per_second", "{:,.0f}"),
}
# What a run's folder may hold before the run begins.
OURS = {".lock", ".config.yaml.part", "job.json", "log.txt"}


def goes_on(config: Config) -> bool:
    """Whether a run continues the one in its folder."""
    return bool(config.run_dir and config.resume) and Path(config.run_dir, "config.yaml").exists()


@contextmanager
def run_folder(config: Config, experiment: str) -> Iterator[Path]:
    """A run's folder, locked by this process; one of which nothing came is removed at the end."""
    path = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
    made = not config.run_dir or not path.exists()
    for name in (".lock", "checkpoints", "attention", "wandb"):  # what is in them is removed
        if os.path.islink(path / name):
            raise UserError(f"run_dir={path} has a link for its {name}: replace or remove it")
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not goes_on(config) and {p.name for p in path.iterdir()} - OURS:
            raise UserError(
                f"run_dir={path} is not empty: choose another folder, "
                "or continue the run in it with resume=true"
            )
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"run_dir={path} is in use by another process: wait for it, or choose another folder"
        ) from None
    try:
        yield path
    finally:
        lock.release()
        with suppress(OSError):  # an empty folder that stays harms nobody
            if {p.name for p in path.iterdir()} <= {".lock"}:
                (path / ".lock").unlink(missing_ok=True)
                if made:
                    path.rmdir()


def new_run_dir(experiment: str) -> Path:
    """Make runs/<date>_<time>_<experiment>, with a number where a run of the same second has it."""
    base = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{experiment}")
    for n in count(1):
        path = base if n == 1 else base.with_name(f"{base.name}_{n}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


class Record:
    """Records what a run measures: in a line of metrics.jsonl for each step, W&B, the terminal."""

    def __init__(self, config: Config, run_dir: Path, step: int = 0):
        """Continue the record after `step` steps."""
        self.console = Terminal()
        self.config, self.run_dir, self.log = config, run_dir, printer(self.console)
        with atomic_write(run_dir / "config.yaml") as part:  # what has one can be resumed
            part.write_text(config_yaml(config), encoding="utf-8")
        self.rows = begin_rows(run_dir / METRICS, step, self.log)
        begin_rows(run_dir / SAMPLES, self.rows[-1]["step"] if self.rows else -1, self.log)
        discard_snapshots(run_dir / "attention", step)
        self._failed = False  # whether something could not be written
        from training.wandb_record import WandbRecord  # W&B takes a third of a second

        self.wandb = WandbRecord(config, run_dir, self.log)
        self._latest: dict[str, str] = {}
        self._figures, self._bar = "", None

    def __enter__(self):
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[latest]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.config.max_steps, latest="")
        return self

    def __exit__(self, kind, *_):
        if self._bar:
            self._bar.stop()
        self.wandb.finish(failed=kind is not None)

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self._bar:
            self._bar.update(self._task, completed=step, latest=self._figures)

    def doing(self, what: str) -> None:
        """Name in the progress bar, until it moves, what goes on between two steps."""
        if self._bar:
            self._bar.update(self._task, latest=f"{what} …")

    def write(self, row: dict) -> None:
        """Record a step: its row, with step, tokens and train_seconds; its picture for W&B."""
        self.rows.append(row)
        self._append(METRICS, row)
        picture = self.run_dir / "attention" / f"step_{row['step']:08d}.png"
        self.wandb.log(row, picture if picture.exists() else None)

    def sample(self, step: int, text: str) -> None:
        """Record a text that the model wrote after `step` steps."""
        self._append(SAMPLES, {"step": step, "text": text})
        self.wandb.sample(step, text)

    def _append(self, name: str, row: dict) -> None:
        """Add a line to a file, whole or not at all."""
        line = (json.dumps(row) + "\n").encode()
        with self.tolerate_io_errors(), (self.run_dir / name).open("ab", buffering=0) as file:
            before = file.tell()
            if file.write(line) < len(line):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)

    @contextmanager
    def tolerate_io_errors(self):
        """Within this, a write that fails, as on a full disk, prints one note; training goes on."""
        try:
            yield
        except OSError as e:
            if not self._failed:
                self.log(
                    f"{e.filename or self.run_dir} could not be written ({e.strerror or e}): "
                    "training goes on, its record may lack something"
                )
            self._failed = True

    def show(self, row: dict) -> None:
        """Print what a row says of the losses and the speed."""
        shown = {name: form.format(row[key]) for name, (key, form) in SHOWN.items() if key in row}
        self._latest.update(shown)
        if self._bar:
            # Without bits per byte, to fit 80 columns.
            self._figures = " ".join(
                f"{name} {self._latest[name]}"
                for name in SHOWN
                if name in self._latest and name != "bits/byte"
            )
            self.advance(row["step"])
        if shown and (not self._bar or "val" in shown):
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.log(f"step {row['step']:>{len(str(self.config.max_steps))}}  {values}")


def begin_rows(path: Path, step: int, log: Callable[[str], None]) -> list[dict]:
    """The rows up to `step`, of a file that from now on holds these alone, and is only appended to;
    what was there is kept beside it."""
    if not path.exists():
        return []
    rows = [row for row in read_rows(path, log) if row["step"] <= step]
    with atomic_write(path.with_name(f"{path.name}.before")) as part:
        shutil.copyfile(path, part)
    with atomic_write(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def discard_snapshots(folder: Path, step: int) -> None:
    """Remove what was captured after `step`: the run may go another way from there."""
    for path in folder.glob("step_*.*"):
        number = path.name.removesuffix(path.suffix).removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            path.unlink()


class Stopwatch:
    """Seconds by kind of work; `synchronize` waits until the device has done its part."""

    def __init__(self, synchronize: Callable[[], None], seconds: dict[str, float], tokens: int = 0):
        """Go on from the seconds that a resumed run had counted, after so many tokens."""
        self.seconds = {"train": 0.0, "evaluate": 0.0, "attention": 0.0, "save": 0.0, **seconds}
        self._synchronize, self._kind, self._since = synchronize, None, 0.0
        self._measured = tokens, self.seconds["train"]

    def switch(self, kind: str | None) -> None:
        """Count what follows as this kind (None: not at all); the same kind needs no wait."""
        if kind != self._kind:
            self.read()
            self._kind = kind

    def metrics(self) -> dict[str, float]:
        """The seconds as a row of metrics has them."""
        return {
            "train_seconds" if kind == "train" else f"seconds/{kind}": seconds
            for kind, seconds in self.seconds.items()
        }

    def read(self) -> float:
        """Seconds of training so far, the device's work included."""
        self._synchronize()
        now = time.perf_counter()
        if self._kind is not None:
            self.seconds[self._kind] += now - self._since
        self._since = now
        return self.seconds["train"]

    def speed(self, tokens: int) -> float:
        """Tokens per second of training since this was last asked, `tokens` being those so far."""
        before, began = self._measured
        self._measured = tokens, self.read()
        return (tokens - before) / (self._measured[1] - began)


def print_losses(log: Callable[[str], None], rows: list[dict]) -> None:
    """Print the best validation loss of a run, and the last beside the training split's."""
    best, last = best_row(rows), rows[-1]
    if best is None:
        return
    log(
        f"best validation loss {best['val/loss']:.4f} nats per token, "
        f"{best['val/bits_per_byte']:.4f} bits per byte,"
    )
    log(f"                     after {best['step']:,} steps")
    if "train/eval_loss" in last:
        log(
            f"at the end           {last['val/loss']:.4f} in validation, "
            f"{last['train/eval_loss']:.4f} in training"
        )


def print_summary(log: Callable[[str], None], run_dir: Path, seconds: dict[str, float]) -> None:
    """Print where a run is, its time, and what is next."""
    maps = sorted((run_dir / "attention").glob("*.png"))
    lines = [
        ("run", run_dir),
        *([("attention", maps[-1])] if maps else []),
        ("numbers", run_dir / METRICS),
        ("page", run_dir / "report.html"),
        ("time", ", ".join(f"{kind} {s:.0f} s" for kind, s in seconds.items() if s)),
        ("sample from it", f"python sample.py run_dir={shlex.quote(str(run_dir))}"),
    ]
    for name, value in lines:
        log(f"{name:<21}{value}".rstrip())
