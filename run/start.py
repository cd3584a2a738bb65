"""Find the start of a run: step 0, or its newest checkpoint."""

from dataclasses import dataclass, field

from run.checkpoints import Checkpoint
from run.run_dir import Log, RunDir


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or by default step 0 of a new run."""

    step: int = 0  # optimizer steps taken
    recorded: int = -1  # the last step whose row of metrics.jsonl is kept
    seconds: dict[str, float] = field(default_factory=dict)  # spent so far, by activity
    metrics: dict[str, float] = field(default_factory=dict)  # of the step
    losses: tuple[float, int] = (0.0, 0)  # sum and number of those that no row contains yet
    loss_scale: tuple[float, int] | None = None  # in fp16: the factor, and the steps since a change
    fingerprint: str | None = None  # hash of the text; None: of any text
    checkpoint: Checkpoint | None = None  # has the weights; None: the run makes its own


def find_start(run: RunDir, log: Log) -> Start:
    """Return the newest intact checkpoint of a run as its start; a new start if it has none."""
    if not run.steps():
        return Start()
    checkpoint = run.checkpoint("last", log)
    manifest = checkpoint.manifest
    is_recorded = any(row["step"] == manifest.step for row in run.rows())
    return Start(
        step=manifest.step,
        recorded=manifest.step if is_recorded else manifest.step - 1,
        seconds=manifest.seconds,
        metrics=manifest.metrics,
        losses=manifest.losses,
        loss_scale=manifest.loss_scale,
        fingerprint=manifest.fingerprint,
        checkpoint=checkpoint,
    )
