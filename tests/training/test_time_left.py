"""The estimated time left agrees with the rest of a run whose activities take known times."""

import pytest

from config import AttentionConfig, EvalConfig, GPTConfig, ResolvedConfig
from training import stopwatch
from training.schedule import is_due
from training.stopwatch import Stopwatch
from training.time_left import TimeLeft

SECONDS = {"compile": 100.0, "train": 2.0, "evaluate": 11.0, "attention": 5.0}


@pytest.mark.parametrize(("every", "compile"), [(0, False), (7, True), (20, True)])
def test_the_estimate_agrees_with_the_rest_of_a_run(monkeypatch, every, compile):
    config = ResolvedConfig(
        device="cpu",
        precision="fp32",
        compile=compile,
        max_steps=100,
        model=GPTConfig(65),
        eval=EvalConfig(every=10),
        attention=AttentionConfig(every=every, picture_every=0),
    )
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    clock = Stopwatch(lambda: None, {})
    time_left = TimeLeft(config, clock)

    def spend(activity: str, count: int = 1) -> None:
        clock.switch("train" if activity == "compile" else activity)
        now[0] += count * SECONDS[activity]

    estimates = {}  # by the time when they are made
    if compile:
        spend("compile")
    for step in range(101):
        if step:
            spend("train")
        if is_due(10, step, config):
            spend("evaluate", 2 if step == 100 else 1)
        estimates[now[0]] = time_left.estimate(step)
        if is_due(every, step, config):
            spend("attention")
    end = now[0]
    first, second, *errors = [
        abs(then + left - end) if left is not None else None for then, left in estimates.items()
    ]
    assert first is None and second is None  # steps 0 and 1, which are not typical
    assert max(errors) <= SECONDS["attention"]
