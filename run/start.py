"""Find the start of a run: step 0, or its newest checkpoint."""

from dataclasses import dataclass

from run.checkpoints import Checkpoint, Manifest
from run.run_dir import Log, RunDir

# What a new run begins with, on any text.
NEW = Manifest(step=0, seconds={}, metrics={}, fingerprint="", losses=(0.0, 0))


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or by default step 0 of a new run."""

    checkpoint: Checkpoint | None = None  # has the weights; None: the run makes its own
    recorded: int = -1  # the last step whose row of metrics.jsonl is kept

    @property
    def manifest(self) -> Manifest:
        """The facts of the start besides its tensors and settings."""
        return self.checkpoint.manifest if self.checkpoint else NEW

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.manifest.step


def find_start(run_dir: RunDir, log: Log) -> Start:
    """Return the newest intact checkpoint of a run as its start; a new start if it has none."""
    if not run_dir.steps():
        return Start()
    checkpoint = run_dir.checkpoint("last", log)
    rows = run_dir.rows(lambda note: None)  # the record prints it
    is_recorded = any(row["step"] == checkpoint.step for row in rows)
    return Start(checkpoint, checkpoint.step if is_recorded else checkpoint.step - 1)
