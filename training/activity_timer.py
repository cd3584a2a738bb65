"""Measure how long a run spends on each activity."""

import time

from training.device import synchronize


class ActivityTimer:
    """Measures the seconds per activity; a resumed run goes on from its `seconds` and `step`.

    It waits until the device has finished its work.
    """

    def __init__(self, device: str, seconds: dict[str, float], step: int = 0) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "attention": 0.0, "save": 0.0, **seconds}
        self._device = device
        self._activity: str | None = None
        self._started = 0.0
        self._last_step = step
        self._last_train_seconds = self.seconds["train"]

    def switch(self, activity: str | None) -> None:
        """Attribute the time from now on to an activity, or to none."""
        if activity != self._activity:
            self._read_train_seconds()
            self._activity = activity

    def metrics(self) -> dict[str, float]:
        """Return the seconds by their names in metrics.jsonl."""
        return {
            "train_seconds" if activity == "train" else f"seconds/{activity}": seconds
            for activity, seconds in self.seconds.items()
        }

    def _read_train_seconds(self) -> float:
        synchronize(self._device)
        now = time.perf_counter()
        if self._activity is not None:
            self.seconds[self._activity] += now - self._started
        self._started = now
        return self.seconds["train"]

    def step_seconds(self, step: int) -> float:
        """Return the mean training time of the steps since the last call, up to `step`."""
        train_seconds = self._read_train_seconds()
        mean = (train_seconds - self._last_train_seconds) / (step - self._last_step)
        self._last_step = step
        self._last_train_seconds = train_seconds
        return mean
