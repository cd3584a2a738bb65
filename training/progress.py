"""Find the step at which a new, resumed or finished run starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.config_file import read_config
from common.checkpoints import find_checkpoint, saved_steps
from common.errors import UserError
from common.manifest import CONFIG_FILE, Manifest
from common.metrics import METRICS, read_rows
from common.text import pluralize
from config import Config
from training.run_folder import is_resuming
from training.schedule import lr_factor


@dataclass(frozen=True)
class Progress:
    """The checkpoint that a run resumes from.

    Attributes:
        manifest: Manifest of the checkpoint; None for a new run.
        first_step: The first step that this process records: that of the checkpoint if it is not
            recorded yet, otherwise the next one.
    """

    manifest: Manifest | None = None
    first_step: int = 0

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.manifest.step if self.manifest else 0

    @property
    def recorded_step(self) -> int:
        """The step up to which the run's record is kept; -1 for a new run."""
        return self.manifest.step if self.manifest else -1

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step that were saved with the checkpoint."""
        return dict(self.manifest.metrics) if self.manifest else {}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by activity."""
        return dict(self.manifest.seconds) if self.manifest else {}


def read_progress(config: Config, run_dir: Path, log: Callable[[str], None]) -> Progress:
    """Find the checkpoint that a run resumes from; none for a new run.

    Raises:
        UserError: If the run has no checkpoint that can be loaded. `resume=auto` starts over if the
            run was stopped before its first save, but never if a row was recorded after one.
        OSError: If the checkpoints cannot be listed.
    """
    if not is_resuming(config):
        return Progress()
    rows = read_rows(run_dir / METRICS)
    if not saved_steps(run_dir):
        if any(row.get("seconds/save") for row in rows):
            raise UserError(
                f"{run_dir / METRICS} records {pluralize(rows[-1]['step'], 'step')}, but "
                f"{run_dir / 'checkpoints'} holds no checkpoint: restore them, or, if none could "
                "be saved, start a new run in another folder."
            )
        if config.resume == "auto":
            return Progress()
        raise UserError(
            f"run_dir={run_dir} was stopped before its first checkpoint; "
            "start it again with resume=auto."
        )
    folder, manifest = find_checkpoint(run_dir, "last", log)
    if change := describe_rate_change(read_config(folder / CONFIG_FILE), config, manifest.step):
        log(f"note: {change}")
    is_recorded = any(row["step"] == manifest.step for row in rows)
    return Progress(manifest, manifest.step + 1 if is_recorded else manifest.step)


def describe_rate_change(before: Config, now: Config, step: int) -> str | None:
    """Return a sentence about the learning rate of a run whose length changes when it is resumed.

    Returns None if the length is the same, or if it does not change the next step's rate.
    """
    old, new = (lr_factor(step, config.optim, config.max_steps) for config in (before, now))
    old_lr, new_lr = before.optim.lr * old, now.optim.lr * new
    is_resized = now.max_steps != before.max_steps and step < now.max_steps
    if not is_resized or math.isclose(old_lr, new_lr):
        return None
    change = (
        f"with max_steps={now.max_steps} in place of {before.max_steps}, the schedule continues at "
        f"a learning rate of {new_lr:.3g} in place of {old_lr:.3g}"
    )
    if not old_lr:
        return change
    settings = f"optim.schedule=constant optim.warmup_steps=0 optim.lr={old_lr:.3g}"
    if now.optim.name == "muon":
        settings += f" optim.muon_lr={before.optim.muon_peak_lr * old:.3g}"
    return f"{change}; to stay at {old_lr:.3g}, add {settings}"
