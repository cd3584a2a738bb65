"""Profile some training steps: a trace for a viewer, and torch's table of the operations."""

import os
from pathlib import Path

from torch.profiler import profile

from config import ResolvedConfig
from training.activity_timer import ActivityTimer

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler prints nothing of its own

TRAIN_STEP = "train_step"  # name of a training step in the trace
WARM_UP_STEPS = 3  # before the first profiled one: code is compiled and memory allocated
SHOWN_OPERATIONS = 10
NAME_WIDTH = 30  # characters of an operation's name


class StepProfiler:
    """Profiles `config.profile` training steps of rank 0, after the first steps of this process.

    The trace is written to `path`.
    """

    def __init__(self, config: ResolvedConfig, path: Path, timer: ActivityTimer, step: int) -> None:
        self.path = path
        self._timer = timer
        self._start = step + WARM_UP_STEPS
        self._end = min(self._start + config.profile, config.max_steps)
        self._sort_by = f"self_{'cpu' if config.device == 'cpu' else 'device'}_time_total"
        self._profile: profile | None = None

    def advance(self, step: int) -> str | None:
        """Count a step; after the last profiled one, write the trace and return the table."""
        if step == self._start < self._end:
            self._timer.switch(None)
            self._profile = profile()
            self._profile.start()
        elif step == self._end and self._profile is not None:
            finished = self._profile
            self.close()
            finished.export_chrome_trace(str(self.path))
            return finished.key_averages().table(
                self._sort_by, row_limit=SHOWN_OPERATIONS, max_name_column_width=NAME_WIDTH
            )
        return None

    def close(self) -> None:
        """End a profile, also one that is not complete."""
        if self._profile is not None:
            self._timer.switch(None)
            self._profile.stop()
            self._profile = None
