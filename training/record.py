"""The run's diary: its folder and lock, metrics.jsonl, samples.jsonl, the progress bar, the summary."""

import errno
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from math import isfinite
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from config import Config, UserError
from files import atomic_write, ordinary
from training.wandb_record import WandbRecord

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
CHANGES = "data/changes"  # in a row: how often the text had changed by then; absent: never
MANY_EPOCHS, MANY_PARAMETERS = 20, 10  # beyond these a run is out of proportion to its text
SHOWN = {"loss": ("train/loss", "{:.3f}"), "val": ("val/loss", "{:.3f}"), "bits/byte": ("val/bits_per_byte", "{:.3f}"),
         "tok/s": ("train/tokens_per_second", "{:,.0f}")}  # in the terminal: name → metric, format


class RunFolder:
    """A run's folder, claimed by this process until it ends.

    Raises:
        UserError: it cannot be written, another process has it, or it is not empty though a new run is to start.
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
            with tempfile.TemporaryFile(dir=path):  # a run that goes on finds its lock there, though nothing new can be made
                pass
            if new and any(p.name not in (".lock", ".config.yaml.part", "job.json") for p in path.iterdir()):
                raise UserError(f"run_dir={path} is not empty: choose another folder, or continue the run in it with resume=true")
            self._lock = FileLock(path / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"run_dir={path} is in use by another process: wait for it, or choose another folder") from None
        except OSError as e:
            raise UserError(f"run_dir={path} cannot be written ({e.strerror}): "
                            f"choose another folder with {setting}=PATH") from None

    def release(self) -> None:
        """Give the folder up; where nothing came of the run, leave nothing of ours."""
        self._lock.release()
        try:
            if [p.name for p in self.path.iterdir()] in ([], [".lock"]):
                (self.path / ".lock").unlink(missing_ok=True)
                if self._made:
                    self.path.rmdir()
        except OSError:
            return  # not ours to insist: a leftover empty folder harms nobody


def new_run_dir(experiment: str, setting: str = "run_dir") -> Path:
    """runs/<date>_<time>_<experiment>, with a number behind it where a run of the same second has that name."""
    base = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{experiment}")
    for n in range(1, 1000):
        path = base if n == 1 else base.with_name(f"{base.name}_{n}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as e:
            raise UserError(f"{path} cannot be made ({e.strerror}): give a folder that can be written as {setting}=PATH") from None
    raise UserError(f"there are a thousand runs named {base}: give {setting}=PATH")


class Terminal(Console):
    """A console that falls silent where what it writes to is gone: `python train.py | head` trains to its end."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def teller(console: Console) -> Callable[[str], None]:
    """What prints a line for the user as it is: nothing in it is markup, and nothing that is to be copied is broken."""
    def say(line: str) -> None:
        try:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError:  # the disk of the log is full, or the terminal is gone
            console.on_broken_pipe()

    return say


class Diary:
    """Takes what a run measures: a line of metrics.jsonl for each step that has something, W&B, the terminal."""

    def __init__(self, run_dir: Path, config: Config, experiment: str, console: Console, step: int = 0,
                 best: dict | None = None):
        """Continue the diary after `step` updates; rows of later steps, and half a line, are dropped.

        `best` is the best row as the checkpoint has it: it comes back where metrics.jsonl has lost it.
        """
        self.console, self.config, self.say = console, config, teller(console)
        self.run_dir = run_dir
        files = [run_dir / name for name in (METRICS, SAMPLES)]
        self.damaged = [path for path in files if step and self._set_aside(path)]
        rows = [row for row in read_rows(run_dir / METRICS) if row["step"] <= step]
        self.rows = with_best(rows, best) if step else []
        last = self.rows[-1]["step"] if self.rows else -1
        samples = [sample for sample in read_rows(run_dir / SAMPLES) if sample["step"] <= last]
        self._lost = False  # whether something could not be written
        self._files = {name: started(run_dir / name, rows) for name, rows in ((METRICS, self.rows), (SAMPLES, samples))}
        self._written = {METRICS: self.rows, SAMPLES: samples}
        self._wandb = WandbRecord(config, run_dir, experiment, self.say)
        self._latest: dict[str, str] = {}
        self._bar = None

    def __enter__(self):
        if self.console.is_terminal:
            self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[latest]}"),
                                 TimeRemainingColumn(compact=True), console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.config.max_steps, latest="")
        return self

    def __exit__(self, kind, *_):
        if self._bar:
            self._bar.stop()
        for name in (METRICS, SAMPLES):
            with self.spared():
                if self._files[name] is None:  # perhaps there is room again
                    self._files[name] = started(self.run_dir / name, self._written[name])
                self._files[name].close()
        self._wandb.finish(failed=kind is not None)

    def _set_aside(self, path: Path) -> bool:
        """Copy a file that has lines which cannot be read, since it goes on without them; whether it has."""
        bad = _read(path)[1]
        if bad:
            asides = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
            aside = next(aside for aside in asides if not os.path.lexists(aside))
            with atomic_write(aside) as part:
                shutil.copyfile(path, part)
            self.say(f"note: {path} has damaged lines ({bad}), which are left out; "
                     f"the file as it was is {aside}")
        return bad > 0

    def has(self, step: int) -> bool:
        return bool(self.rows) and self.rows[-1]["step"] == step

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def write(self, row: dict, images: dict[str, Path | np.ndarray]) -> None:
        """Record a step: `row` with step, tokens, train_seconds and metrics; images go to W&B under their keys."""
        self._put(METRICS, row)
        self._wandb.log(row, images)
        self._show(row)

    def sample(self, step: int, text: str) -> None:
        """Keep a text that the model wrote after `step` updates."""
        self._put(SAMPLES, {"step": step, "text": text})

    def _put(self, name: str, row: dict) -> None:
        """Add a line to a file; where that fails, the whole file is written again with the next line, so that none is lost or cut."""
        rows, file, line = self._written[name], self._files[name], (json.dumps(row) + "\n").encode()
        rows.append(row)
        with self.spared():
            self._files[name] = None
            if file is not None and file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir / name))
            self._files[name] = file or started(self.run_dir / name, rows)

    @contextmanager
    def spared(self):
        """What is written here may fail, as on a full disk, and training goes on; that is said once."""
        try:
            yield
        except OSError as e:
            if not self._lost:
                self.say(f"{e.filename or self.run_dir} could not be written ({e.strerror or e}): training goes on, its record may lack something")
            self._lost = True

    def page(self, path: Path, last: bool) -> None:
        """Give the run's page, and at the last of them what is only known at the end, to W&B."""
        self._wandb.page(path, self.rows[-1], last)
        if last:
            self._wandb.conclude(self.rows[-1], (best_row(self.rows) or self.rows[-1])["step"])

    def _show(self, row: dict) -> None:
        shown = {name: form.format(row[key]) for name, (key, form) in SHOWN.items() if key in row}
        self._latest.update(shown)
        if self._bar:
            # Bits per byte stay out of the bar, which has to fit 80 columns.
            latest = " ".join(f"{name} {self._latest[name]}" for name in SHOWN if name in self._latest and name != "bits/byte")
            self._bar.update(self._task, completed=row["step"], latest=latest)
        if shown and (not self._bar or "val" in shown):
            self.say(f"step {row['step']:>{len(str(self.config.max_steps))}}  " + "  ".join(f"{name} {value}" for name, value in shown.items()))

def started(path: Path, rows: list[dict]):
    """A file of JSON lines opened to go on after these rows, as bytes and unbuffered; half a line, or what is later, is gone."""
    with atomic_write(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.open("ab", buffering=0)


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics or samples file, in order; lines that are none are left out.

    Raises:
        UserError: it cannot be read, or is not an ordinary file.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict], int]:
    """The rows of a file, and how many lines are none, half a line at the end not counted."""
    try:
        lines = ordinary(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    rows = [row for line in lines if (row := _row(line)) is not None]
    return rows, len(lines) - len(rows)


def _row(line: bytes) -> dict | None:
    """The row in a line: an object with a step, whose values are numbers, or a text."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    numbers = [value for key, value in row.items() if key != "text" or not isinstance(value, str)]
    return row if {type(value) for value in numbers} <= {int, float} else None


def with_best(rows: list[dict], best: dict | None) -> list[dict]:
    """The rows, in their order, and the best one where it is not among them."""
    if not best or any(row["step"] == best["step"] for row in rows):
        return rows
    return sorted([*rows, best], key=lambda row: row["step"])


def best_row(rows: list[dict], changes: int | None = None) -> dict | None:
    """The row with the lowest validation loss of a trained model, the first of equals.

    Losses on different texts do not compare: only rows after so many `changes` of the text count,
    by default as many as the last row has.
    """
    if changes is None:
        changes = rows[-1].get(CHANGES, 0) if rows else 0
    measured = [row for row in rows if row["step"] and row.get(CHANGES, 0) == changes
                and {"val/loss", "val/bits_per_byte"} <= row.keys() and isfinite(row["val/loss"])]
    return min(measured, key=lambda row: row["val/loss"], default=None)


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def proportions(parameters: int, tokens: int, epochs: float) -> list[str]:
    """What is to be said of a run whose model, text and length do not fit each other."""
    said = []
    if epochs > MANY_EPOCHS:
        said.append(f"note     each token is seen {epochs:,.0f} times, so the model will learn the text by heart: give more text or fewer max_steps")
    if parameters > MANY_PARAMETERS * tokens:
        said.append(f"note     {parameters / tokens:,.0f} parameters for each token of text: a smaller model would be as good, and faster")
    return said


def print_summary(say: Callable[[str], None], run_dir: Path, rows: list[dict], seconds: dict[str, float], xz: float) -> None:
    """Where the run is, how good it became (beside the bits per byte of `xz -9`), what its heads do, where the time went, what to do next."""
    lines, best = [("", ""), ("run", run_dir)], best_row(rows)
    if best is not None:
        lines += [("best validation loss", f"{best['val/loss']:.4f} nats per token, {best['val/bits_per_byte']:.4f} bits per byte"),
                  ("", f"after {best['step']:,} steps; xz -9 needs {xz:.4f} bits per byte")]
    for score in ("previous_token", "duplicate_token", "induction", "sink"):
        heads = {key.rpartition("/")[2]: value for key, value in rows[-1].items() if key.startswith(f"heads/{score}/")}
        if heads:
            head = max(heads, key=heads.get)
            lines += [(f"most {score.replace('_', ' ')}", f"{heads[head]:.2f}, by head {head}")]
    born = sorted((step, key) for key, step in rows[-1].items() if key.startswith("births/"))
    lines += [("births" if n == 0 else "", f"{key.split('/')[2]} as {key.split('/')[1].replace('_', ' ')} head after {step:,} steps")
              for n, (step, key) in enumerate(born[:4])]
    maps = sorted((run_dir / "attention").glob("*.png"))
    lines += [("attention", maps[-1])] if maps else []
    lines += [("numbers", run_dir / "metrics.jsonl"),
              ("page", run_dir / "report.html"),
              ("time", ", ".join(f"{kind} {s:.0f} s" for kind, s in seconds.items() if s)),
              ("sample from it", f"python sample.py run_dir={quoted(run_dir)}")]
    for name, value in lines:
        say(f"{name:<21}{value}".rstrip())


class Stopwatch:
    """Seconds by kind of work; `synchronize` waits for the device where its work must be counted."""

    def __init__(self, synchronize: Callable[[], None], seconds: dict[str, float]):
        """Go on from the seconds that a resumed run had booked."""
        self.seconds = {"train": 0.0, "evaluate": 0.0, "attention": 0.0, "save": 0.0, **seconds}
        self._synchronize, self._kind, self._since = synchronize, None, 0.0

    def switch(self, kind: str | None) -> None:
        """Work of this kind begins (None: of no kind that counts); more of the same kind goes on without a wait."""
        if kind != self._kind:
            self.read()
            self._kind = kind

    def read(self) -> float:
        """Seconds of training so far, the device's work included."""
        self._synchronize()
        now = time.perf_counter()
        if self._kind is not None:
            self.seconds[self._kind] += now - self._since
        self._since = now
        return self.seconds["train"]
