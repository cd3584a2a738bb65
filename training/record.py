"""Record what a run measures: metrics.jsonl, samples.jsonl, W&B and the terminal."""

import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from rich.text import Text

from common.files import atomic_write
from common.terminal import Terminal, printer, tolerate_errors
from common.text import format_loss, format_minutes
from config import ResolvedConfig
from data.tokenizer import encode_prompt, save_tokenizer
from data.tokens import Tokens
from generation.decoder import Decoder
from generation.sampling import Sampling, draw_batch, stream_text
from model import GPT
from run.checkpoints import Start
from run.config_file import config_yaml
from run.loss_history import best_row, loss_warning
from run.row import Row
from run.run_dir import RunDir, read_rows
from training.activity_timer import ActivityTimer
from training.device import exact_float32
from training.display import Display
from training.flops import memory_metrics, tokens_per_step
from training.intervals import is_grid_due
from training.profiling import StepProfiler
from training.task_metrics import describe_task
from training.wandb_record import WandbRecord

SAMPLE_TOKENS = 100  # length of each sample text
SAMPLE_TEMPERATURE = 0.8
# Metrics that W&B does not get: of each head, standard errors, and what the page explains better.
UNCHARTED = re.compile(r".*/L\d+H\d+(/.*)?|.*_se|(faithfulness|probe/repeated_).*")


class Record:
    """The record of a run on rank 0: its rows, samples, W&B run and terminal; a context manager.

    Rows and snapshots of earlier training are kept as far as `start` says.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        run_dir: RunDir,
        text: Tokens,
        start: Start,
        timer: ActivityTimer,
        console: Terminal,
    ) -> None:
        self.log = printer(console)
        self.note = cache(self.log)  # prints a note that recurs, as on a full disk, only once
        self.config = config
        self.run_dir = run_dir
        self.text = text
        self.timer = timer
        with atomic_write(run_dir.config_file) as part:  # from now on the folder is a run's
            part.write_text(config_yaml(config), encoding="utf-8")
        path = run_dir.tokenizer_file
        with self.tolerate_errors(f"writing {path}"), atomic_write(path) as part:
            save_tokenizer(text.tokenizer, part)

        self.rows = truncate_rows(run_dir.metrics_file, start.recorded, self.log)
        samples = truncate_rows(run_dir.samples_file, start.recorded, self.log)
        run_dir.remove_snapshots_after(start.recorded)
        self._sample: str | None = None  # generated after the step whose row is not written yet
        self._samples = [[row["step"], row.get("text")] for row in samples]

        self.display = Display(console, config, start.step)
        self.wandb = WandbRecord(config, run_dir, self.note)
        self.profiler = StepProfiler(config, run_dir.trace_file, timer, start.step)

    def __enter__(self) -> "Record":
        self.display.show_activity("compiling" if self.config.compile else "starting")
        self.display.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.profiler.close()
        self.display.stop()
        if error_type is None and self.config.wandb.log_model:
            self.wandb.log_best_checkpoint(self.run_dir)
        self.wandb.finish(failed=error_type is not None)

    def show(self, step: int, row: dict[str, float]) -> None:
        """Show the step, and its metrics or the profile if there are any, in the terminal."""
        with self.tolerate_errors("profiling"):
            if table := self.profiler.advance(step):
                self.log(Text(table))
                self.log(f"trace    {self.profiler.path}, for https://ui.perfetto.dev")
        memory = memory_metrics(self.config.device) if row else {}
        self.display.show(step, row | memory)

    def sample(self, model: GPT, step: int) -> None:
        """Generate a sample text if one is due, for `write`; a second call replaces it."""
        if is_grid_due(step, self.config):
            with self.tolerate_errors("generating a sample text"):
                self._sample = sample_text(model, self.text, self.config.seed)

    def write(self, step: int, row: dict[str, float]) -> None:
        """Record the metrics of a step, if there are any, and the sample text after it.

        They are appended to metrics.jsonl, and those that are charted are sent to W&B with what
        else was logged there. Values that are not finite are left out, because JSON has none.
        """
        if not row:
            return
        self.timer.switch(None)
        values = {"step": step, "tokens": step * tokens_per_step(self.config)} | row
        values |= self.timer.metrics() | memory_metrics(self.config.device)
        recorded = Row({key: value for key, value in values.items() if math.isfinite(value)})
        self._write_sample(step)
        self.rows.append(recorded)
        self._append(self.run_dir.metrics_file, recorded)
        charted = [key for key in recorded if key in row and not UNCHARTED.fullmatch(key)]
        self.wandb.log({key: recorded[key] for key in charted})
        self.wandb.commit(step)

    def _write_sample(self, step: int) -> None:
        text, self._sample = self._sample, None
        if text is not None:
            self._append(self.run_dir.samples_file, {"step": step, "text": text})
            self._samples.append([step, text])
            self.wandb.log_table("samples", ["step", "text"], self._samples)

    def _append(self, path: Path, row: dict) -> None:
        """Append a complete line to a file, or nothing."""
        line = (json.dumps(row) + "\n").encode()
        with self.tolerate_errors(f"writing {path}"), path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def tolerate_errors(self, activity: str) -> AbstractContextManager:
        """Continue without a part of the record that cannot be made or written, with one note."""
        return tolerate_errors(activity, self.note)

    def print_summary(self, findings: list[str] | None) -> None:
        """Print the run's page, losses, strongest finding, time and memory, and what to do next.

        `findings` about heads, the strongest first, are None if none were measured.
        """
        self.timer.switch(None)
        page = self.run_dir.page
        location = f"run      {self.run_dir.path}"
        if page.exists():
            location = f"page     {page.absolute().as_uri()}"
        self.log(f"\n{location}")
        for line in summarize_losses(self.rows):
            self.log(line)
        if findings is not None:
            finding = findings[0] if findings else "no attention head stands out yet"
            self.log(f"finding  {finding}")
        if findings and len(findings) > 1:
            self.log(f"         {len(findings) - 1} more, and all measurements, on the page")
        seconds = self.timer.seconds
        cost = [f"{name} {format_minutes(spent)}" for name, spent in seconds.items() if spent >= 1]
        if cost:
            self.log(f"time     {', '.join(cost)}")
        if "memory/peak_gib" in self.rows[-1]:
            self.log(f"memory   {self.rows[-1]['memory/peak_gib']:.1f} GiB at its peak")
        folder = shlex.quote(str(self.run_dir.path))
        self.log(f"next     python explore.py run_dir={folder}")
        self.log(f"         python sample.py run_dir={folder}")


def sample_text(model: GPT, text: Tokens, seed: int) -> str:
    """Generate a text, or one sequence of a task; equal weights and seed give equal texts."""
    tokenizer, task = text.tokenizer, text.task
    prompt: list[int] = task.prompt if task else []
    start = prompt or encode_prompt(tokenizer, "")
    count = task.block_size + 1 - len(prompt) if task else SAMPLE_TOKENS
    sampling = Sampling(temperature=SAMPLE_TEMPERATURE, vocab_size=tokenizer.vocab_size)
    with exact_float32():
        decoder = Decoder(model, 1, len(start) + count)
        (ids,) = draw_batch(decoder, start, count, sampling, [seed])
        pieces = stream_text(tokenizer, ids, has_prompt=bool(prompt))
        return tokenizer.decode(prompt) + "".join(pieces)


def truncate_rows(path: Path, step: int, log: Callable[[str], None]) -> list[Row]:
    """Keep and return the rows of a file up to `step`; `<name>.before` is the file as it was."""
    if not path.exists():
        return []
    rows = [row for row in read_rows(path, log) if row["step"] <= step]
    with atomic_write(path.with_name(f"{path.name}.before")) as part:
        shutil.copyfile(path, part)
    with atomic_write(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def summarize_losses(rows: Sequence[Row]) -> list[str]:
    """Return lines with the best validation loss, a warning, and the last metrics of a task."""
    best = best_row(rows)
    if best is None:
        return []
    loss = format_loss(best["val/loss"], best.get("val/bits_per_byte"))
    lines = [f"loss     {loss} in validation (best, step {best['step']:,})"]
    if warning := loss_warning(rows):
        lines.append(f"note     {warning}")
    return lines + describe_task(rows[-1])
