"""Which course of the losses counts as overfitting, and what a run says about it."""

import pytest

from run.loss_history import loss_warning, overfitting

# Validation losses every 10 steps, mean training losses before them → the rise that is reported.
FALLING = [3.0, 2.8, 2.6, 2.4, 2.2]
COURSES = [
    ([3.0, 2.8, 2.7, 2.6, 2.5], FALLING, 0),  # still improving
    ([3.0, 2.5, 2.55, 2.7, 2.9], FALLING, 0.4),
    ([3.0, 2.5, 2.6, 2.55, 2.8], FALLING, 0.3),  # although one evaluation was lower
    ([3.0, 2.8, 2.7, 2.5, 2.6], FALLING, 0.1),  # at the last evaluation alone
    ([3.0, 2.5, 2.56, 2.51, 2.58], FALLING, 0),  # rises and falls alike: noise
    ([3.0, 2.5, 2.505, 2.51, 2.52], FALLING, 0),  # less than a percent
    ([3.0, 2.5, 2.6, 2.8, 2.9], [3.0, 2.4, 2.5, 2.7, 2.9], 0),  # diverging
    ([3.0], [3.0], 0),
    ([], [], 0),
]


@pytest.mark.parametrize(("validation", "training", "rise"), COURSES)
def test_overfitting_is_a_rise_beyond_noise_while_the_training_loss_falls(
    validation, training, rise
):
    rows = [{"step": 0, "val/loss": 2.0}]  # before training, so it is never the best
    for number, (val_loss, train_loss) in enumerate(zip(validation, training)):
        step = 10 * number
        rows.append({"step": step + 5, "train/loss": train_loss + 0.5})
        rows.append({"step": step + 10, "train/loss": train_loss - 0.5, "val/loss": val_loss})
    assert overfitting(rows) == pytest.approx(rise)


def test_overfitting_is_noticed_if_the_best_step_came_before_any_training_loss():
    rows = [
        {"step": step, "val/loss": loss} for step, loss in ((4, 7.0), (8, 6.0), (16, 6.5), (32, 7))
    ]
    rows += [{"step": step, "train/loss": 5 - step / 20} for step in (20, 40, 60, 80)]
    rows += [{"step": 80, "val/loss": 8.0}]
    rows.sort(key=lambda row: row["step"])
    assert overfitting(rows) == 2.0


def test_training_that_did_not_lower_the_validation_loss_is_reported():
    rows = [{"step": 0, "val/loss": 2.5}, {"step": 10, "val/loss": 2.75, "train/loss": 3.0}]
    assert all(value in loss_warning(rows) for value in ("step 0", "2.5000", "2.7500"))
    assert not loss_warning([*rows, {"step": 20, "val/loss": 2.25}])
    assert not loss_warning(rows[1:]) and not loss_warning([])
