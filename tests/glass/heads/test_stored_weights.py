"""Which snapshots' weights a run's folder keeps, and which of them its page shows."""

from itertools import pairwise

import pytest

from glass.heads import stored_weights
from glass.heads.metrics import read_emergence
from glass.heads.results import Head
from glass.heads.stored_weights import (
    list_stored_weights,
    order_by_importance,
    prune_stored_weights,
)


@pytest.mark.parametrize(
    ("emerged", "expected"),
    [
        ({}, [0, 400, 800, 1200, 1600, 2000]),
        ({"induction/L2H3": 800, "sink/L0H0": 200}, [0, 500, 600, 700, 800, 900, 1000, 2000]),
        (
            {"induction/L2H3": 1800, "induction/L2H0": 500, "sink/L0H0": 1200},
            [0, *range(200, 800, 100), 1100, 1200, 2000],
        ),
        ({"previous_token/L1H3": 2000}, [0, 1700, 1800, 1900, 2000]),
    ],
)
def test_the_emergence_of_the_first_induction_head_is_followed_step_by_step(emerged, expected):
    steps = [*range(0, 2001, 100)]
    row = {f"emerged/{head}": step for head, step in emerged.items()}
    ordered = order_by_importance(steps, read_emergence(row))
    assert sorted(ordered[: len(expected)]) == expected


@pytest.mark.parametrize("emergence", [None, 4, 50, 98])
def test_a_folder_keeps_as_many_weights_as_allowed_and_those_around_emergence(
    tmp_path, monkeypatch, emergence
):
    monkeypatch.setattr(stored_weights, "MAX_STORED_BYTES", 2000)
    emerged = {}
    for step in range(100):
        (tmp_path / f"step_{step:08d}.safetensors").write_bytes(bytes(100))
        (tmp_path / f"step_{step:08d}.npz").touch()
        if emergence is not None and step > emergence:  # it is known at the next snapshot
            emerged = {"induction": {Head(1, 0): emergence}}
        prune_stored_weights(tmp_path, emerged)
        kept = [*list_stored_weights(tmp_path)]
        assert len(kept) == min(step + 1, 20)
        assert kept[0] == 0 and kept[-4:] == [*range(max(0, step - 3), step + 1)]
    if emergence is not None:
        assert {*range(emergence - 2, min(99, emergence + 2) + 1)} <= {*kept}
    assert max(after - before for before, after in pairwise(kept)) <= 25
    assert len([*tmp_path.glob("*.npz")]) == 100
