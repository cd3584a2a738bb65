"""Arrange a row of metrics as the tables and charts of W&B."""

from glass.heads.measure.composition import MEASURED_SCORES
from glass.heads.measure.emergence import THRESHOLD_SHARES
from run.row import Row

# Scores that W&B charts. High values of the others, such as the distance, are not remarkable.
CHARTED_SCORES = (*THRESHOLD_SHARES, "copying")


def highest_scores(row: Row) -> dict[str, float]:
    """Return the highest score of any head in a row as `heads/<score>/max`, for W&B's charts."""
    scores = row.scores()
    charted = [score for score in CHARTED_SCORES if score in scores]
    return {f"heads/{score}/max": max(scores[score].values()) for score in charted}


def head_table(row: Row) -> tuple[list[str], list[list]]:
    """Return the names of columns and a row for each head: scores, errors, steps of emergence."""
    columns = row.columns("heads")
    for kind in ("emerged", "lost"):
        columns |= {f"{kind}/{score}": steps for score, steps in row.columns(kind).items()}
    heads = sorted({head for values in columns.values() for head in values})
    rows = [[str(head), *(values.get(head) for values in columns.values())] for head in heads]
    return ["head", *columns], rows


def composition_table(row: Row) -> tuple[list[str], list[list]]:
    """Return the names of columns and a row for each composition share that was measured."""
    columns = ["score", "head", "input", "upstream", "share", "share_se", "direct", "direct_se"]
    rows = []
    for score in MEASURED_SCORES:
        for place in row.places(f"composition/{score}"):
            share = row.estimate(f"composition/{score}", place)
            direct = row.estimate(f"composition/{score}_direct", place)
            rows.append([score, *place.split("/"), *share, *direct])
    return columns, rows
