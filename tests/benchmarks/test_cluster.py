"""The simulation of a cluster: published speeds, and the tables of docs/scaling.md."""

import pytest
from conftest import ROOT

from benchmarks import cluster
from benchmarks.cluster import check_predictions, predict_published


@pytest.mark.soak
def test_published_speeds_are_predicted_within_15_percent_and_the_tables_are_current():
    predictions = predict_published()
    check_predictions(predictions)
    assert len({p.row[:2] for p in predictions}) == sum(p.is_fitted for p in predictions) == 5
    assert all(abs(p.error) < 1e-4 for p in predictions if p.is_fitted)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for part in cluster.PARTS:
        table = cluster.make_table(part, cluster.ClusterOptions())
        assert f"<!-- {part} -->\n{table}\n<!-- end -->" in page, (
            "run python -m benchmarks.docs only=scaling"
        )
