"""The seconds of each activity and the training speed, by a clock that the test sets."""

import pytest

from training import stopwatch
from training.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock whose only element is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def test_time_counts_for_the_current_activity_and_on_top_of_earlier_seconds(clock):
    watch = Stopwatch(lambda: None, {"train": 1000.0, "save": 5.0})
    for activity, seconds in (("train", 1), ("evaluate", 2), ("train", 4), (None, 8), ("save", 16)):
        watch.switch(activity)
        clock[0] += seconds
    watch.switch("train")
    assert watch.metrics() == {
        "train_seconds": 1005,
        "seconds/evaluate": 2,
        "seconds/attention": 0,
        "seconds/save": 21,
    }


def test_the_speed_is_that_of_the_training_since_the_last_reading(clock):
    watch = Stopwatch(lambda: None, {"train": 1000.0}, tokens=500)
    watch.switch("train")
    clock[0] += 2
    assert watch.speed(700) == 100
    watch.switch("evaluate")
    clock[0] += 50
    watch.switch("train")
    clock[0] += 1
    assert watch.speed(1000) == 300
