"""Measurements survive their way through metrics.jsonl."""

import json

import numpy as np

from glass.heads.measure.results import (
    CompositionShare,
    Emergence,
    Estimate,
    Estimates,
    Faithfulness,
    Head,
    Measurements,
)
from glass.heads.say.metrics import (
    composition_table,
    flatten,
    head_table,
    highest_scores,
    read_emergence,
    read_gain_history,
    read_head_values,
    read_latest,
    read_measurements,
)


def make_measurements() -> Measurements:
    table = np.array([[0.25, np.nan, 0.5], [0.0, 0.1, 0.75]])
    error = np.array([[0.01, np.nan, 0.02], [0.01, 0.02, 0.03]])
    share = CompositionShare(
        "induction", Head(1, 2), "keys", "L0H0", Estimate(0.9, 0.02), Estimate(0.4, 0.1)
    )
    return Measurements(
        step=700,
        scores={
            "induction": Estimates(table, error),
            "sink_without_first": Estimates(table, np.full((2, 3), np.nan)),
        },
        emergence=Emergence(
            {"induction": {Head(1, 2): 600}, "sink": {Head(0, 0): 100}},
            {"sink": {Head(0, 0): 300}},
        ),
        copying_gain=Estimate(2.5, 0.25),
        repeated_loss=Estimate(3.5, 0.5),
        repeated_accuracy=Estimate(0.25, 0.0),
        composition=(share,),
        faithfulness=Faithfulness(
            (Head(0, 0), Head(1, 2)),
            (Head(0, 1),),
            Estimate(0.0, 0.01),
            Estimate(0.5, 0.1),
            Estimate(1.06, 0.04),
            Estimate(0.94, 0.02),
        ),
    )


def test_reading_inverts_flattening():
    measurements = make_measurements()
    row = json.loads(json.dumps({"step": 700, **flatten(measurements)}))
    again = read_measurements(row)
    for name, estimates in measurements.scores.items():
        for before, after in zip(estimates, again.scores[name]):
            assert np.array_equal(before, after, equal_nan=True)
    random = ("copying_gain", "repeated_loss", "repeated_accuracy")
    for attribute in ("step", "emergence", *random, "composition", "faithfulness"):
        assert getattr(again, attribute) == getattr(measurements, attribute)


def test_keys_are_those_of_the_interface():
    row = flatten(make_measurements())
    assert row["heads/induction/L1H2"] == 0.75 and row["heads/induction_se/L1H2"] == 0.03
    assert row["emerged/induction/L1H2"] == 600 and row["lost/sink/L0H0"] == 300
    assert row["probe/copying_gain"] == 2.5 and row["probe/copying_gain_se"] == 0.25
    assert row["composition/induction/L1H2/keys/L0H0"] == 0.9
    assert row["composition/induction_direct_se/L1H2/keys/L0H0"] == 0.1
    assert row["faithfulness/circuit_and_layer_0"] == 1.06 and row["circuit/L1H2"] == 1
    assert row["faithfulness_se/sufficient"] == 0.02 and row["sufficient/L0H1"] == 1
    assert "heads/induction/L0H1" not in row  # unknown
    assert "heads/sink_without_first_se/L0H0" not in row


def test_the_history_has_the_snapshots_of_a_run():
    scored = {"heads/sink/L0H0": 0.5, "probe/copying_gain": 1.5}
    rows = [
        {"step": 0, "heads/sink/L0H0": 0.1},
        {"step": 5, "val/loss": 2.0},
        {"step": 9, **scored},
    ]
    history = read_gain_history(rows)
    assert list(history) == [0, 9] and history[9].value == 1.5 and not history[0].is_known
    assert read_latest(rows).step == 9 and read_latest(rows[1:2]) is None


def test_values_of_heads_are_read_without_errors_and_companions():
    row = {"step": 700, **flatten(make_measurements())}
    assert read_head_values(row, "heads") == {
        "induction": {
            Head(0, 0): 0.25,
            Head(0, 2): 0.5,
            Head(1, 0): 0.0,
            Head(1, 1): 0.1,
            Head(1, 2): 0.75,
        }
    }
    assert read_emergence(row)["induction"] == {Head(1, 2): 600}


def test_the_tables_hold_every_head_and_composition_share():
    columns, rows = head_table(flatten(make_measurements()))
    heads = {line[0]: dict(zip(columns, line)) for line in rows}
    assert list(heads) == ["L0H0", "L0H2", "L1H0", "L1H1", "L1H2"]
    last = {"induction": 0.75, "induction_se": 0.03, "emerged/induction": 600, "lost/sink": None}
    assert heads["L1H2"].items() >= last.items() and heads["L0H0"]["lost/sink"] == 300
    columns, rows = composition_table(make_measurements())
    assert rows == [["induction", "L1H2", "keys", "L0H0", 0.9, 0.02, 0.4, 0.1]]
    assert len(columns) == len(rows[0])
    assert head_table({})[1] == composition_table(Measurements(step=0))[1] == []


def test_the_highest_value_of_a_score_is_charted_if_a_high_one_is_remarkable():
    table = np.array([[0.25, np.nan, 0.5]])
    scores = {name: Estimates(table, table) for name in ("induction", "copying", "entropy")}
    row = flatten(Measurements(step=0, scores=scores))
    assert highest_scores(row) == {"heads/induction/max": 0.5, "heads/copying/max": 0.5}
