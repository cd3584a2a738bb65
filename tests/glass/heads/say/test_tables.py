"""W&B's tables hold every head and every composition share."""

import numpy as np

from glass.heads.say.tables import composition_table, head_table, highest_scores
from run.row import Row


def test_the_table_of_heads_has_their_scores_and_dates():
    scores = np.array([[0.25, np.nan, 0.5], [0.0, 0.1, 0.75]])
    row = Row({"emerged/induction/L1H2": 600, "lost/sink/L0H0": 300})
    row.put_heads("heads/induction", scores, scores / 10)
    columns, lines = head_table(row)
    heads = {line[0]: dict(zip(columns, line)) for line in lines}
    assert list(heads) == ["L0H0", "L0H2", "L1H0", "L1H1", "L1H2"]
    last = {"induction": 0.75, "induction_se": 0.075, "emerged/induction": 600, "lost/sink": None}
    assert heads["L1H2"].items() >= last.items() and heads["L0H0"]["lost/sink"] == 300
    assert head_table(Row())[1] == []


def test_the_table_of_composition_has_a_line_for_each_share():
    row = Row()
    row.put("composition/induction", (0.9, 0.02), "L1H2/keys/L0H0")
    row.put("composition/induction_direct", (0.4, 0.1), "L1H2/keys/L0H0")
    columns, lines = composition_table(row)
    assert lines == [["induction", "L1H2", "keys", "L0H0", 0.9, 0.02, 0.4, 0.1]]
    assert len(columns) == len(lines[0])
    assert composition_table(Row())[1] == []


def test_the_highest_value_of_a_score_is_charted_if_a_high_one_is_remarkable():
    row = Row()
    for name in ("induction", "copying", "entropy"):
        row.put_heads(f"heads/{name}", np.array([[0.25, np.nan, 0.5]]))
    assert highest_scores(row) == {"heads/induction/max": 0.5, "heads/copying/max": 0.5}
