"""Profile some training steps: a trace for a viewer, and a table of the expensive operations."""

import gzip
import os
import shutil
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from common.files import atomic_write, exists
from common.text import format_speed
from config import PROFILE_WARM_UP_STEPS, ResolvedConfig
from training.stopwatch import Stopwatch

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler prints nothing of its own

TRACE_FILE = "trace.json.gz"
TRACE_VIEWER = "https://ui.perfetto.dev"
TRAIN_STEP = "train_step"  # name of a training step in the trace
PYTHON = "(Python, and waiting)"  # name of the time in a step that no operation takes
IDLE = "(GPU idle)"
SHOWN_OPERATIONS = 10
NAME_WIDTH = 43  # characters of an operation's name, so that a line has at most 80


class Operation(NamedTuple):
    """An operation in all profiled steps."""

    name: str
    calls: int
    seconds: float  # of its kernels on a GPU; on a CPU without the operations that it calls


class StepProfile(NamedTuple):
    """The profile of some training steps.

    Attributes:
        first_step: The first profiled step, counted from 1.
        steps: Number of profiled steps.
        seconds: Their duration.
        operations: The operations in them, most expensive first.
    """

    first_step: int
    steps: int
    seconds: float
    operations: list[Operation]

    def table(self) -> list[str]:
        """Return the lines of a table of the most expensive operations."""
        last_step = self.first_step + self.steps - 1
        milliseconds = format_speed(1000 * self.seconds / self.steps)
        lines = [
            f"profile  steps {self.first_step} to {last_step}, {milliseconds} ms each",
            f"         {'operation':<{NAME_WIDTH}} calls/step  ms/step  share",
        ]
        for name, calls, seconds in self.operations[:SHOWN_OPERATIONS]:
            if len(name) > NAME_WIDTH:  # forward and backward operations differ at the end
                start = NAME_WIDTH // 2
                name = f"{name[:start]}…{name[start + 1 - NAME_WIDTH :]}"
            lines.append(
                f"         {name:<{NAME_WIDTH}} {format_speed(calls / self.steps):>10} "
                f"{1000 * seconds / self.steps:>8,.2f} {seconds / self.seconds:>6.1%}"
            )
        return lines


class StepProfiler:
    """Profiles `config.profile` training steps of rank 0, after the first steps of this process.

    A run whose folder has a trace is not profiled again. If a run stops before its profile is
    complete, the resumed run begins another one.
    """

    def __init__(self, config: ResolvedConfig, run_dir: Path, clock: Stopwatch, step: int) -> None:
        """Prepare to profile a run after `step` steps."""
        self.path = run_dir / TRACE_FILE
        self._clock = clock
        self._first_step = step + PROFILE_WARM_UP_STEPS + 1
        self._last_step = min(self._first_step + config.profile - 1, config.max_steps)
        self._is_due = self._first_step <= self._last_step and not exists(self.path)
        self._profile: profile | None = None
        self._start_seconds = 0.0

    def close(self) -> None:
        """End a profile that is not complete."""
        if self._profile is not None:
            self._profile.stop_trace()
            self._profile = None

    def advance(self, step: int) -> StepProfile | None:
        """Note that a step was taken; after the last profiled step, write the trace.

        Returns:
            The profile when it is complete, otherwise None.

        Raises:
            OSError: If the trace cannot be written.
        """
        if not self._is_due:
            return None
        if step == self._first_step - 1:
            self._clock.switch(None)
            self._profile = profile()
            self._profile.prepare_trace()
            self._start_seconds = self._clock.read_train_seconds()
            self._profile.start_trace()
        elif step == self._last_step and self._profile is not None:
            return self._finish(self._profile)
        return None

    def _finish(self, finished: profile) -> StepProfile:
        seconds = self._clock.read_train_seconds() - self._start_seconds
        self._clock.switch(None)
        self._profile, self._is_due = None, False
        finished.stop_trace()
        with TemporaryDirectory() as folder, atomic_write(self.path) as part:
            trace = Path(folder, "trace.json")
            finished.export_chrome_trace(str(trace))
            with trace.open("rb") as source, gzip.open(part, "wb") as target:
                shutil.copyfileobj(source, target)
        operations = summarize_events(finished.events(), seconds)
        steps = self._last_step - self._first_step + 1
        return StepProfile(self._first_step, steps, seconds, operations)


def summarize_events(events: Sequence[FunctionEvent], seconds: float) -> list[Operation]:
    """Return the operations in the training steps of a profile, most expensive first.

    If the steps ran on a GPU, an operation's time is that of its kernels, and `IDLE` is the time in
    which no kernel runs. Otherwise it is the operation's own time on the CPU, and `PYTHON` is the
    time that no operation takes.

    Args:
        events: All events of the profile, which can include what happened between the steps.
        seconds: Duration of the training steps.
    """
    events = [event for event in events if event.device_type == DeviceType.CPU]
    steps = [event.time_range for event in events if event.name == TRAIN_STEP]
    starts = [step.start for step in steps]

    def is_in_step(event: FunctionEvent) -> bool:
        k = bisect_right(starts, event.time_range.start) - 1
        return k >= 0 and event.time_range.start < steps[k].end

    events = [event for event in events if is_in_step(event)]
    on_gpu = any(event.kernels for event in events)
    threads = {event.thread for event in events if event.name == TRAIN_STEP}
    microseconds: dict[str, list[float]] = {}
    for event in events:
        name = PYTHON if event.name == TRAIN_STEP else event.name
        if not on_gpu and event.thread in threads:
            microseconds.setdefault(name, []).append(event.self_cpu_time_total)
        # The profiler counts a label's range on the GPU as a kernel with the label's name.
        kernels = [kernel.duration for kernel in event.kernels if kernel.name != event.name]
        if kernels:
            microseconds.setdefault(name, []).append(sum(kernels))

    operations = [Operation(name, len(us), sum(us) / 1e6) for name, us in microseconds.items()]
    if on_gpu:
        busy = sum(operation.seconds for operation in operations)
        operations.append(Operation(IDLE, len(steps), max(0.0, seconds - busy)))
    return sorted(operations, key=lambda operation: operation.seconds, reverse=True)
