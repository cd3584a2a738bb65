"""Estimate how long the rest of a run takes."""

from config import Config
from training.stopwatch import Stopwatch


class TimeLeft:
    """Estimates the remaining seconds of a run from its steps, evaluations and snapshots so far."""

    def __init__(self, config: Config, clock: Stopwatch) -> None:
        self._config = config
        self._clock = clock
        self._first_step: int | None = None
        self._first_seconds = 0.0  # of training until then, such as compiling

    def estimate(self, step: int) -> float | None:
        """Return the estimated seconds left, None before the first timed step.

        Call it at each step, after its evaluation and before its snapshot.
        """
        config, seconds = self._config, self._clock.peek()
        if self._first_step is None and step > 0:  # step 1 also allocates memory
            self._first_step, self._first_seconds = step, seconds["train"]
        if self._first_step is None or step == self._first_step:
            return None
        step_seconds = (seconds["train"] - self._first_seconds) / (step - self._first_step)
        evaluation = seconds["evaluate"] / max(1, count_done(config.eval.every, step))
        snapshot = seconds["attention"] / max(1, count_done(config.attention.every, step - 1))
        return (
            (config.max_steps - step) * step_seconds
            + count_evaluations(step, config) * evaluation
            + count_due(config.attention.every, step - 1, config) * snapshot
        )


def count_done(every: int, step: int) -> int:
    """Return how often an activity was due until a step, except for the last one of the run."""
    return step // every + 1 if every else 0


def count_due(every: int, after: int, config: Config) -> int:
    """Return how often an activity is due after a step, -1 for all of the run; see `is_due`."""
    last = config.max_steps
    if after >= last:
        return 0
    return 1 + ((last - 1) // every - after // every if every else 0)


def count_evaluations(after: int, config: Config) -> int:
    """Return how many measurements of a loss follow a step, -1 for all; two at the last step."""
    evaluations = count_due(config.eval.every, after, config)
    return evaluations + 1 if evaluations else 0
