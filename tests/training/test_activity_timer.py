"""The time of a training step, by a clock that the test sets."""

from training import activity_timer
from training.activity_timer import ActivityTimer


def test_the_time_of_a_step_is_that_of_training_since_the_last_reading(monkeypatch):
    clock = [100.0]  # seconds
    monkeypatch.setattr(activity_timer.time, "perf_counter", lambda: clock[0])
    timer = ActivityTimer("cpu", {"train": 1000.0}, step=500)
    timer.switch("train")
    clock[0] += 2
    assert timer.step_seconds(504) == 0.5
    timer.switch("evaluate")
    clock[0] += 50
    timer.switch("train")
    clock[0] += 1
    assert timer.step_seconds(508) == 0.25
