"""A row keeps what was measured, under the keys of metrics.jsonl."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from run.row import Estimate, Head, Row, last_scored_row, parse_head, scored_rows

NAMES = st.sampled_from(["probe/copying_gain", "heads/sink", "composition/induction", "a"])
PLACES = st.sampled_from(["", Head(0, 1), "L1H2/keys/L0H0"])


def read_again(row: Row) -> Row:
    return Row(json.loads(json.dumps(row, allow_nan=False)))


def make_row() -> Row:
    table = np.array([[0.25, np.nan, 0.5], [0.0, 0.1, 0.75]])
    row = Row(step=700)
    row.put_heads("heads/induction", table, table / 10)
    row.put_heads("heads/sink_without_first", table)
    row |= {"emerged/induction/L1H2": 600, "emerged/sink/L0H0": 100, "lost/sink/L0H0": 300}
    row |= {"circuit/L0H0": 1, "circuit/L1H2": 1}
    row.put("probe/copying_gain", (2.5, 0.25))
    row.put("composition/induction", (0.9, 0.02), "L1H2/keys/L0H0")
    return row


@given(NAMES, PLACES, st.floats(), st.floats())
def test_what_is_put_is_read_again_if_it_is_finite(name, place, value, error):
    row = Row(step=1)
    row.put(name, (value, error), place)
    for put, read in zip((value, error), read_again(row).estimate(name, place)):
        assert read == put if math.isfinite(put) else math.isnan(read)


def test_keys_are_those_of_the_interface():
    row = read_again(make_row())
    assert row["heads/induction/L1H2"] == 0.75 and row["heads/induction_se/L1H2"] == 0.075
    assert row["probe/copying_gain"] == 2.5 and row["probe/copying_gain_se"] == 0.25
    assert row["composition/induction/L1H2/keys/L0H0"] == 0.9
    assert row["composition/induction_se/L1H2/keys/L0H0"] == 0.02
    assert "heads/induction/L0H1" not in row  # unknown
    assert "heads/sink_without_first_se/L0H0" not in row
    assert row.score("induction", Head(1, 2)) == (0.75, 0.075)
    assert not row.score("induction", Head(0, 1)).is_measured


def test_heads_are_found_by_the_name_that_their_keys_begin_with():
    row = make_row()
    values = {Head(0, 0): 0.25, Head(0, 2): 0.5, Head(1, 0): 0.0, Head(1, 1): 0.1, Head(1, 2): 0.75}
    assert row.heads("heads/induction") == values
    assert row.heads("emerged/induction") == {Head(1, 2): 600}
    assert row.heads("circuit").keys() == {Head(0, 0), Head(1, 2)}
    assert row.heads("composition/induction") == row.heads("heads/ind") == {}
    assert row.places("composition/induction") == ["L1H2/keys/L0H0"]


def test_scores_are_columns_without_errors_and_companions():
    row = make_row()
    assert [*row.columns("heads")] == ["induction", "induction_se", "sink_without_first"]
    assert row.scores() == {"induction": row.heads("heads/induction")}
    assert row.scores("emerged") == {"induction": {Head(1, 2): 600}, "sink": {Head(0, 0): 100}}


def test_snapshots_are_the_rows_with_scores():
    rows = [Row(step=0), Row(make_row(), step=5), Row({"step": 9, "heads/sink/L0H0": 0.5})]
    assert [row["step"] for row in scored_rows(rows)] == [5, 9]
    assert last_scored_row(rows)["step"] == 9
    assert last_scored_row(rows[:1]) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_estimate_is_known_with_its_error(value):
    assert Estimate(1.0, 0.1).is_known and Estimate(1.0).is_measured
    assert not Estimate(1.0, value).is_known and not Estimate(1.0, 0.0).is_known
    assert not Estimate(value, 0.1).is_known and not Estimate(value, 0.1).is_measured


@given(st.integers(0, 999), st.integers(0, 999))
def test_a_head_is_parsed_from_its_name(layer, number):
    assert parse_head(str(Head(layer, number))) == (layer, number)
    assert parse_head(f"{Head(layer, number)} ") is None
