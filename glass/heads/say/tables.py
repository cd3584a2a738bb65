"""Arrange a row of metrics as the table and the charts of W&B."""

from glass.heads.measure.emergence import THRESHOLD_SHARES
from run.row import Row


def charted_scores(row: Row) -> dict[str, float]:
    """Return the scores in a row that W&B charts.

    They are `heads/<score>/max`, the highest of any head, of each score by which heads emerge, and
    the scores of the heads that have emerged.
    """
    scores = {score: row.heads(f"heads/{score}").values() for score in THRESHOLD_SHARES}
    charted = {f"heads/{score}/max": max(values) for score, values in scores.items() if values}
    emerged = (f"heads/{place}" for place in row.places("emerged"))
    return charted | {key: row[key] for key in emerged if key in row}


def head_table(step: int, row: Row) -> tuple[list[str], list[list]]:
    """Return the names of columns and a row for each head: scores, errors, steps of emergence."""
    columns = row.columns("heads")
    for kind in ("emerged", "lost"):
        columns |= {f"{kind}/{score}": steps for score, steps in row.columns(kind).items()}
    heads = sorted({head for values in columns.values() for head in values})
    rows = [[step, str(head), *(values.get(head) for values in columns.values())] for head in heads]
    return ["step", "head", *columns], rows
