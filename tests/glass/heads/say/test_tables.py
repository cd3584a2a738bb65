"""W&B's table holds every head, and its charts those worth one."""

import numpy as np

from glass.heads.say.tables import charted_scores, head_table
from run.row import Row


def test_the_table_of_heads_has_their_scores_and_dates():
    scores = np.array([[0.25, np.nan, 0.5], [0.0, 0.1, 0.75]])
    row = Row({"emerged/induction/L1H2": 600, "lost/sink/L0H0": 300})
    row.put_heads("heads/induction", scores, scores / 10)
    columns, lines = head_table(700, row)
    heads = {line[1]: dict(zip(columns, line)) for line in lines}
    assert list(heads) == ["L0H0", "L0H2", "L1H0", "L1H1", "L1H2"]
    assert columns[:2] == ["step", "head"] and {line[0] for line in lines} == {700}
    last = {"induction": 0.75, "induction_se": 0.075, "emerged/induction": 600, "lost/sink": None}
    assert heads["L1H2"].items() >= last.items() and heads["L0H0"]["lost/sink"] == 300
    assert head_table(700, Row())[1] == []


def test_the_strongest_head_of_a_score_and_each_head_that_has_emerged_are_charted():
    row = Row({"emerged/sink/L0H0": 400, "lost/sink/L0H0": 500, "emerged/sink/L0H1": 100})
    for name in ("induction", "sink", "entropy"):
        row.put_heads(f"heads/{name}", np.array([[0.25, np.nan, 0.5]]))
    highest = {"heads/induction/max": 0.5, "heads/sink/max": 0.5}
    assert charted_scores(row) == highest | {"heads/sink/L0H0": 0.25}
