"""Learning-rate schedules."""

from dataclasses import replace

import pytest

from config import Config, OptimConfig
from training.schedule import describe_rise, lr_factor


def factors(steps: int, **optim) -> list[float]:
    return [lr_factor(step, OptimConfig(**optim), steps) for step in range(steps + 9)]


def test_the_cosine_schedule_rises_linearly_and_ends_at_its_minimum():
    cosine = factors(2000, warmup_share=0.05, min_lr_ratio=0.1)
    assert cosine[:3] == pytest.approx([1 / 101, 2 / 101, 3 / 101])
    assert cosine[100] == 1.0
    assert cosine[1050] == pytest.approx(0.55)
    assert cosine[1999] == pytest.approx(0.1, abs=1e-4) and set(cosine[2000:]) == {0.1}


def test_the_wsd_schedule_is_flat_and_then_falls_linearly():
    wsd = factors(100, schedule="wsd", warmup_share=0.05, decay_share=0.4, min_lr_ratio=0.2)
    assert set(wsd[5:61]) == {1.0}
    assert wsd[80] == pytest.approx(0.6)
    assert wsd[99] == pytest.approx(0.22) and set(wsd[100:]) == {0.2}


def test_another_schedule_is_not_taken_for_one_of_them():
    with pytest.raises(KeyError, match="linear"):
        factors(50, schedule="linear")


@pytest.mark.parametrize(
    "schedule, step, max_steps, has_note",
    [
        ("cosine", 100, 200, True),  # extended after its end
        ("cosine", 60, 200, True),  # and before
        ("wsd", 100, 200, True),
        ("constant", 100, 200, False),
        ("cosine", 2, 200, False),  # in a warm-up that becomes longer
        ("cosine", 60, 80, False),
    ],
)
def test_a_rate_that_rises_again_in_a_longer_run_is_noted(schedule, step, max_steps, has_note):
    before = Config(max_steps=100, optim=OptimConfig(schedule=schedule, min_lr_ratio=0.1))
    note = describe_rise(step, before, replace(before, max_steps=max_steps))
    assert bool(note) == has_note
    assert step < 100 or not note or "from 1.0e-04 to" in note


def test_the_constant_schedule_stays_at_its_peak():
    assert set(factors(50, schedule="constant", warmup_share=0)) == {1.0}
