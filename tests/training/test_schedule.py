"""Learning-rate schedules."""

import pytest

from config import AttentionConfig, Config, OptimConfig
from training.intervals import is_attention_due, is_due, is_grid_due
from training.schedule import lr_factor


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


def test_the_constant_schedule_stays_at_its_peak():
    assert set(factors(50, schedule="constant", warmup_share=0)) == {1.0}


@pytest.mark.parametrize(
    ("every", "first", "check_every", "due", "attention_due"),
    [
        (4, 0, 0, {0, 4, 8, 10}, {0, 4, 8, 10}),
        (4, 0, 3, {0, 4, 8, 10}, {0, 3, 4, 6, 8, 9, 10}),
        (0, 0, 3, {10}, {10}),
        (9, 2, 0, {0, 2, 4, 8, 9, 10}, {0, 2, 4, 8, 9, 10}),
        (4, 3, 0, {0, 3, 4, 8, 10}, {0, 3, 4, 8, 10}),
        (99, 1, 0, {0, 1, 2, 4, 8, 10}, {0, 1, 2, 4, 8, 10}),
        (0, 2, 0, {10}, {10}),
    ],
)
def test_activities_are_due_at_multiples_at_early_steps_and_at_the_last_step(
    every, first, check_every, due, attention_due
):
    attention = AttentionConfig(every=every, first=first, check_every=check_every)
    config = Config(max_steps=10, attention=attention)
    assert {step for step in range(11) if is_due(every, step, config, first)} == due
    assert {step for step in range(11) if is_attention_due(step, config)} == attention_due


@pytest.mark.parametrize(
    ("picture_every", "expected"), [(0, [0, 2, 4, 8, 12]), (4, [0, 4, 8, 12]), (10, [0, 10, 12])]
)
def test_grids_are_due_at_both_ends_and_regularly_or_at_each_doubling(picture_every, expected):
    config = Config(max_steps=12, attention=AttentionConfig(every=2, picture_every=picture_every))
    assert [step for step in range(13) if is_grid_due(step, config)] == expected
