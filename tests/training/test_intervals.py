"""The steps at which something is due."""

import pytest

from config import AttentionConfig, Config
from training.intervals import is_attention_due, is_due, is_grid_due


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
