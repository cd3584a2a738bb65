"""The estimated time left agrees with the rest of a run whose activities take known times."""

from types import SimpleNamespace

import pytest

from config import AttentionConfig, EvalConfig, GPTConfig, ResolvedConfig
from training import stopwatch
from training.flops import estimate_step_seconds
from training.schedule import is_due
from training.stopwatch import Stopwatch
from training.time_left import TimeLeft
from training.world import World

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
    planned = estimate_step_seconds(config, 1)  # measures the processor, by the real clock
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    clock = Stopwatch(lambda: None, {})
    validation = SimpleNamespace(num_targets=1000, world=World())
    time_left = TimeLeft(config, clock, validation)

    def spend(activity: str, count: int = 1) -> None:
        clock.switch("train" if activity == "compile" else activity)
        now[0] += count * SECONDS[activity]

    estimates = {}  # by the time when they are made
    assert time_left.estimate(-1) > 100 * planned + (60 if compile else 0)
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
    errors = [abs(then + left - end) for then, left in estimates.items()]
    assert max(errors[3:]) <= SECONDS["attention"]


def test_nothing_is_estimated_for_an_unknown_device():
    config = ResolvedConfig(device="mps", model=GPTConfig(65))
    validation = SimpleNamespace(num_targets=1000, world=World())
    assert TimeLeft(config, Stopwatch(lambda: None, {}), validation).estimate(-1) is None
