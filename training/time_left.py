"""Estimate how long the rest of a run takes."""

from config import Config, ResolvedConfig
from training.evaluate import Windows
from training.flops import estimate_step_seconds, tokens_per_step
from training.stopwatch import Stopwatch

# Seconds that torch.compile takes before the first step, roughly.
COMPILE_SECONDS = 90


class TimeLeft:
    """Estimates the remaining seconds of a run from what its activities have taken so far.

    Until steps and evaluations have been timed, their operations give a first estimate.
    """

    def __init__(self, config: ResolvedConfig, clock: Stopwatch, validation: Windows) -> None:
        self._config = config
        self._clock = clock
        self._step_seconds = estimate_step_seconds(config, validation.world.size)
        # The forward pass takes a third of the operations of a step.
        self._evaluation_steps = validation.num_targets / (3 * tokens_per_step(config))
        # (step, seconds of training until then) of the first calls. Steps are timed from the last
        # of them on, which excludes what happens once, such as compiling.
        self._first_readings: list[tuple[int, float]] = []

    def estimate(self, step: int) -> float | None:
        """Return the estimated seconds from now on, or None if unknown.

        Call it before the first step, with -1 for a new run, and then at each step, after its
        evaluation and before its snapshot.
        """
        seconds, config = self._clock.peek(), self._config
        if len(self._first_readings) < 3:
            self._first_readings.append((step, seconds["train"]))
        timed_from, seconds_before = self._first_readings[-1]
        if step > timed_from:
            self._step_seconds = (seconds["train"] - seconds_before) / (step - timed_from)
        if self._step_seconds is None:
            return None

        evaluation = self._evaluation_steps * self._step_seconds
        if evaluations := _count_done(config.eval.every, step):
            evaluation = seconds["evaluate"] / evaluations
        snapshots = _count_done(config.attention.every, step - 1)
        snapshot = seconds["attention"] / snapshots if snapshots else 0.0
        will_compile = config.compile and len(self._first_readings) == 1
        return (
            (COMPILE_SECONDS if will_compile else 0)
            + (config.max_steps - max(0, step)) * self._step_seconds
            + count_evaluations(step, config) * evaluation
            + count_due(config.attention.every, step - 1, config) * snapshot
        )


def _count_done(every: int, step: int) -> int:
    """Return how often an activity was due until a step, except for the last one of the run."""
    return step // every + 1 if every else 0


def count_due(every: int, after: int, config: Config) -> int:
    """Return how often an activity is due after a step, -1 for all of the run; see `is_due`."""
    last = config.max_steps
    if after >= last:
        return 0
    return 1 + ((last - 1) // every - after // every if every else 0)


def count_evaluations(after: int, config: Config) -> int:
    """Return how many measurements of a loss follow a step; -1 for all of the run.

    At the last step two splits are measured: see `training.evaluate.evaluate`.
    """
    evaluations = count_due(config.eval.every, after, config)
    return evaluations + 1 if evaluations else 0
