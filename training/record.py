"""What a run writes: its folder and lock, metrics.jsonl, samples.jsonl, W&B, the terminal."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli import printer
from config import Config, UserError
from files import METRICS, SAMPLES, atomic_write, best_row, read_lines, with_best
from training.wandb_record import WandbRecord

# In the terminal: name → metric, format.
SHOWN = {"loss": ("train/loss", "{:.3f}"), "val": ("val/loss", "{:.3f}"),
         "bits/byte": ("val/bits_per_byte", "{:.3f}"),
         "tok/s": ("train/tokens_per_second", "{:,.0f}")}


class RunFolder:
    """A run's folder, locked by this process until it ends.

    Raises:
        UserError: it cannot be written, another process has it, or it is not empty though a new
            run is to start.
    """

    def __init__(self, path: Path, new: bool, made: bool = False):
        """`made`: the folder was made for this run, and is removed where nothing comes of it."""
        self.path, self._made = path, made or not os.path.exists(path)
        in_sweep = os.path.exists(path / "job.json")  # where run_dir= is not taken
        setting = "hydra.sweep.dir" if in_sweep else "run_dir"
        for name in (".lock", "checkpoints", "attention", "wandb"):  # what is in them is removed
            if os.path.islink(path / name):
                raise UserError(f"run_dir={path} has a link for its {name}: replace or remove it")
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):  # a lock that exists says nothing of new files
                pass
            ours = (".lock", ".config.yaml.part", "job.json")
            if new and any(p.name not in ours for p in path.iterdir()):
                raise UserError(f"run_dir={path} is not empty: choose another folder, "
                                "or continue the run in it with resume=true")
            self._lock = FileLock(path / ".lock")
            self._lock.acquire(timeout=0.2)  # who only looks whether it is held is soon gone
        except Timeout:
            raise UserError(f"run_dir={path} is in use by another process: "
                            "wait for it, or choose another folder") from None
        except OSError as e:
            raise UserError(f"run_dir={path} cannot be written ({e.strerror}): "
                            f"choose another folder with {setting}=PATH") from None

    def release(self) -> None:
        """Unlock the folder; where nothing came of the run, remove what it made."""
        self._lock.release()
        with suppress(OSError):  # an empty folder that stays harms nobody
            if [p.name for p in self.path.iterdir()] in ([], [".lock"]):
                (self.path / ".lock").unlink(missing_ok=True)
                if self._made:
                    self.path.rmdir()


def new_run_dir(experiment: str, setting: str = "run_dir") -> Path:
    """Make runs/<date>_<time>_<experiment>, with a number where a run of the same second has it.

    `setting` is what names another folder.
    """
    base = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{experiment}")
    for n in range(1, 1000):
        path = base if n == 1 else base.with_name(f"{base.name}_{n}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as e:
            raise UserError(f"{path} cannot be made ({e.strerror}): "
                            f"give a folder that can be written as {setting}=PATH") from None
    raise UserError(f"there are a thousand runs named {base}: give {setting}=PATH")


class MetricLogger:
    """Records what a run measures: in a line of metrics.jsonl for each step, W&B, the terminal."""

    def __init__(self, run_dir: Path, config: Config, experiment: str, console: Console,
                 step: int = 0, best: dict | None = None):
        """Continue the record after `step` steps; rows of later ones, and half a line, are dropped.

        `best` is the best row as the checkpoint has it, for a metrics.jsonl that has lost it.
        """
        self.console, self.config, self.say = console, config, printer(console)
        self.run_dir = run_dir
        self.damaged = False  # whether rows were lost
        rows, samples = (self._read(run_dir / name) if step else [] for name in (METRICS, SAMPLES))
        self.rows = with_best([row for row in rows if row["step"] <= step], best)
        last = self.rows[-1]["step"] if self.rows else -1
        samples = [row for row in samples if row["step"] <= last]
        self._written = {METRICS: self.rows, SAMPLES: samples}
        self._files = {name: open_rows(run_dir / name, rows)
                       for name, rows in self._written.items()}
        self._failed = False  # whether something could not be written
        self._wandb = WandbRecord(config, run_dir, experiment, self.say, self.rows)
        self._latest: dict[str, str] = {}
        self._figures, self._bar = "", None

    def __enter__(self):
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
                TextColumn("{task.fields[latest]}"), TimeRemainingColumn(compact=True),
                console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.config.max_steps, latest="")
        return self

    def __exit__(self, kind, *_):
        if self._bar:
            self._bar.stop()
        for name in (METRICS, SAMPLES):
            with self.tolerate_io_errors():
                if self._files[name] is None:  # perhaps there is room again
                    self._files[name] = open_rows(self.run_dir / name, self._written[name])
                self._files[name].close()
        self._wandb.finish(failed=kind is not None)

    def _read(self, path: Path) -> list[dict]:
        """The rows of a file; of one that has damaged lines, which are dropped, a copy is kept."""
        rows, bad = read_lines(path)
        if bad:
            self.damaged = True
            copies = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
            copy = next(copy for copy in copies if not os.path.lexists(copy))
            with atomic_write(copy) as part:
                shutil.copyfile(path, part)
            self.say(f"note: {path} has damaged lines ({bad}), which are left out; "
                     f"the file as it was is {copy}")
        return rows

    def has(self, step: int) -> bool:
        """Whether the last row is of this step."""
        return bool(self.rows) and self.rows[-1]["step"] == step

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self._bar:
            self._bar.update(self._task, completed=step, latest=self._figures)

    def doing(self, what: str) -> None:
        """Name in the progress bar, until it moves, what goes on between two steps."""
        if self._bar:
            self._bar.update(self._task, latest=f"{what} …")

    def write(self, row: dict, images: dict[str, Path | np.ndarray]) -> None:
        """Record a step: its row, with step, tokens and train_seconds; its images for W&B."""
        self._append(METRICS, row)
        self._wandb.log(row, images)

    def sample(self, step: int, text: str) -> None:
        """Record a text that the model wrote after `step` steps."""
        self._append(SAMPLES, {"step": step, "text": text})

    def _append(self, name: str, row: dict) -> None:
        """Add a line to a file. Where that fails, the next row writes the whole file again, so that
        no line is lost or cut."""
        rows, file, line = self._written[name], self._files[name], (json.dumps(row) + "\n").encode()
        rows.append(row)
        with self.tolerate_io_errors():
            self._files[name] = None
            if file is not None and file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir / name))
            self._files[name] = file or open_rows(self.run_dir / name, rows)

    @contextmanager
    def tolerate_io_errors(self):
        """Within this, a write that fails, as on a full disk, prints one note; training goes on."""
        try:
            yield
        except OSError as e:
            if not self._failed:
                self.say(f"{e.filename or self.run_dir} could not be written ({e.strerror or e}): "
                         "training goes on, its record may lack something")
            self._failed = True

    def page(self, path: Path, last: bool) -> None:
        """Give W&B the run's page; with the last one, what is only known at the end."""
        self._wandb.page(path, self.rows[-1], last)
        if last:
            self._wandb.conclude(self.rows[-1], (best_row(self.rows) or self.rows[-1])["step"])

    def show(self, row: dict) -> None:
        """Print what a row says of the losses and the speed."""
        shown = {name: form.format(row[key]) for name, (key, form) in SHOWN.items() if key in row}
        self._latest.update(shown)
        if self._bar:
            # Without bits per byte, to fit 80 columns.
            self._figures = " ".join(f"{name} {self._latest[name]}" for name in SHOWN
                                     if name in self._latest and name != "bits/byte")
            self.advance(row["step"])
        if shown and (not self._bar or "val" in shown):
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {row['step']:>{len(str(self.config.max_steps))}}  {values}")


def open_rows(path: Path, rows: list[dict]):
    """Write these rows as JSON lines, all else gone; return the file open to append, unbuffered."""
    with atomic_write(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.open("ab", buffering=0)


class Stopwatch:
    """Seconds by kind of work; `synchronize` waits until the device has done its part."""

    def __init__(self, synchronize: Callable[[], None], seconds: dict[str, float]):
        """Go on from the seconds that a resumed run had counted."""
        self.seconds = {"train": 0.0, "evaluate": 0.0, "attention": 0.0, "save": 0.0, **seconds}
        self._synchronize, self._kind, self._since = synchronize, None, 0.0

    def switch(self, kind: str | None) -> None:
        """Count what follows as this kind (None: not at all); the same kind needs no wait."""
        if kind != self._kind:
            self.read()
            self._kind = kind

    def metrics(self) -> dict[str, float]:
        """The seconds as a row of metrics has them."""
        return {"train_seconds" if kind == "train" else f"seconds/{kind}": seconds
                for kind, seconds in self.seconds.items()}

    def read(self) -> float:
        """Seconds of training so far, the device's work included."""
        self._synchronize()
        now = time.perf_counter()
        if self._kind is not None:
            self.seconds[self._kind] += now - self._since
        self._since = now
        return self.seconds["train"]
