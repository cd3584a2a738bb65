"""Findings hold at the latest snapshot and are statistically significant."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass.heads.circuit import (
    UpstreamHead,
    find_induction_circuit,
    find_upstream_head,
    max_errors_by_chance,
)
from glass.heads.findings import Finding, summarize_run
from glass.heads.metrics import read_latest, read_measurements
from glass.heads.results import Head

INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD = Head(3, 2), Head(1, 3)


def make_rows() -> list[dict]:
    """Metrics of four snapshots of a run in which an induction head forms."""

    def row(step: int, gain: float) -> dict:
        return {
            "step": step,
            "probe/copying_gain": gain,
            "probe/copying_gain_se": 0.05,
            "heads/induction/L3H2": gain / 4,
            "heads/induction_se/L3H2": 0.01,
        }

    rows = [row(0, 0.0), row(900, 0.4), row(1000, 1.9), row(1100, 2.5)]
    rows[-1] |= {
        "heads/copying/L3H2": 0.9,
        "heads/copying_se/L3H2": 0.04,
        "emerged/induction/L3H2": 1000,
        "heads/previous_token/L1H3": 0.7,
        "heads/previous_token_se/L1H3": 0.01,
        "emerged/previous_token/L1H3": 900,
        "composition/induction/L3H2/keys/L1H3": 0.94,
        "composition/induction_se/L3H2/keys/L1H3": 0.02,
        "composition/induction/L3H2/keys/embedding": 0.99,
        "composition/induction_se/L3H2/keys/embedding": 0.01,
        "heads/importance/L3H2": 0.37,
        "heads/importance_se/L3H2": 0.04,
        "heads/importance/L0H0": 0.02,
        "heads/importance_se/L0H0": 0.04,
        "faithfulness/circuit_and_layer_0": 1.05,
        "faithfulness_se/circuit_and_layer_0": 0.04,
        "faithfulness/sufficient": 0.93,
        "faithfulness_se/sufficient": 0.02,
        "sufficient/L1H3": 1,
        "sufficient/L3H2": 1,
        "emerged/sink/L2H0": 900,
        "heads/sink/L2H0": 0.9,
        "heads/sink_se/L2H0": 0.01,
    }
    return rows


def find(rows: list[dict], title: str) -> Finding | None:
    """Return the first finding whose title begins like this."""
    return next((one for one in summarize_run(rows) if one.title.startswith(title)), None)


def find_text(rows: list[dict], title: str) -> str:
    """Return the finding whose title begins like this in one line, "" without one."""
    return str(find(rows, title) or "")


def test_an_induction_head_is_reported_with_its_circuit():
    findings = summarize_run(make_rows())
    assert [(finding.title, finding.heads) for finding in findings] == [
        ("Induction head", ["L3H2"]),
        ("Sufficient heads", ["L1H3", "L3H2"]),
        ("Most important head", ["L3H2"]),
        ("Previous-token head", ["L1H3"]),
        ("Attention sink", ["L2H0"]),
    ]
    circuit = find_induction_circuit(read_measurements(make_rows()[-1]))
    assert circuit == [PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD]


def test_there_are_no_findings_without_a_snapshot():
    assert summarize_run([]) == summarize_run([{"step": 3, "train/loss": 2.0}]) == []


def test_the_headline_names_the_phenomenon_the_upstream_head_and_the_emergence_interval():
    first, *others = summarize_run(make_rows())
    for figure in ("L3H2", "L1H3", "94%", "105 ± 4%", "between steps 900 and 1,000"):
        assert figure in first.text
    details = "; ".join(first.details)
    for figure in (
        "2.50 ± 0.05",
        "0.62 ± 0.01",
        "0.90 ± 0.04",
        "94 ± 2%",
        "keys",
        "between steps 900 and 1,000",
    ):
        assert figure in details
    assert "L1H3 and L3H2" in others[0].text and "93 ± 2%" in others[0].text
    assert "0.37 ± 0.04" in others[1].text and "0.90 ± 0.01" in others[-1].details[0]
    assert str(first).startswith("Induction head: L3H2")


@pytest.mark.parametrize(
    ("error_key", "title", "text"),
    [
        ("probe/copying_gain_se", "Induction head", "copying gain"),
        ("heads/induction_se/L3H2", "Induction head", "L3H2"),
        ("heads/importance_se/L3H2", "Most important head", "L3H2"),
        ("faithfulness_se/circuit_and_layer_0", "Induction head", "with layer 0"),
        ("composition/induction_se/L3H2/keys/L1H3", "Induction head", "L1H3"),
        ("heads/sink_se/L2H0", "Attention sink", "L2H0"),
        ("faithfulness_se/sufficient", "Sufficient heads", "L3H2"),
    ],
)
def test_nothing_is_reported_without_a_small_standard_error(error_key, title, text):
    assert text in find_text(make_rows(), title)
    for error in (None, math.nan, 0.0, 9.0):
        rows = make_rows()
        rows[-1][error_key] = error
        if error is None:
            del rows[-1][error_key]
        assert text not in find_text(rows, title)


def test_a_head_that_no_longer_passes_is_reported_as_lost():
    rows = make_rows()
    rows[-1] |= {
        "lost/induction/L3H2": 1050,
        "probe/copying_gain": 0.02,
        "heads/induction/L3H2": 0.001,
    }
    lost = find(rows, "Lost: induction head")
    assert lost.heads == ["L3H2"] and "from step 1,000 to step 1,050" in lost.text
    assert find(rows, "Induction head") is None
    assert find_induction_circuit(read_measurements(rows[-1])) == []


def test_of_two_lost_heads_the_one_that_passed_longest_is_reported():
    rows = make_rows()
    rows[-1] |= {"lost/induction/L3H2": 1050, "probe/copying_gain": 0.02}
    rows[-1] |= {"emerged/induction/L0H1": 100, "lost/induction/L0H1": 1050}
    assert find(rows, "Lost").heads == ["L0H1"]


def test_at_most_six_findings_are_reported():
    rows = make_rows()
    for score in ("duplicate_token", "current_token"):
        rows[-1] |= {f"heads/{score}/L0H0": 0.9, f"heads/{score}_se/L0H0": 0.01}
        rows[-1] |= {f"emerged/{score}/L0H0": 900}
    assert [finding.title for finding in summarize_run(rows)] == [
        "Induction head",
        "Sufficient heads",
        "Most important head",
        "Previous-token head",
        "Duplicate-token head",
        "Current-token head",
    ]


def find_upstream(**shares: tuple[float, float]) -> UpstreamHead | None:
    """Return the induction head's upstream head with more shares, such as keys_L2H0=(0.5, 0.1)."""
    rows = make_rows()
    for name, (share, error) in shares.items():
        place = f"L3H2/{name.replace('_', '/')}"
        rows[-1] |= {f"composition/induction/{place}": share}
        rows[-1] |= {f"composition/induction_se/{place}": error}
    return find_upstream_head(read_latest(rows), "induction", INDUCTION_HEAD)


def test_the_upstream_head_is_a_previous_token_head_read_through_keys_or_queries():
    assert find_upstream(values_L1H3=(0.99, 0.01)).input == "keys"
    assert find_upstream(queries_L1H3=(0.99, 0.01)).input == "queries"
    assert find_upstream(keys_L2H0=(0.99, 0.01)).head == PREVIOUS_TOKEN_HEAD
    assert find_upstream(keys_L1H3=(0.1, 0.01), keys_L2H0=(0.5, 0.01)).head == Head(2, 0)


def test_a_share_is_compared_with_the_largest_by_chance_among_all_heads():
    rows = make_rows()
    rows[-1]["composition/induction_se/L3H2/keys/L1H3"] = 0.94 / 3
    assert "reads from the previous-token head L1H3" in find_text(rows, "Induction head")
    for head in range(50):
        rows[-1] |= {f"heads/induction/L2H{head}": 0.0, f"heads/induction_se/L2H{head}": 0.01}
    assert "L1H3" not in find_text(rows, "Induction head")


@pytest.mark.parametrize("alone", [0.85, 0.75])
def test_layer_0_is_added_to_a_circuit_that_keeps_too_little_alone(alone):
    rows = make_rows()
    rows[-1] |= {"faithfulness/circuit": alone, "faithfulness_se/circuit": 0.01}
    text = find(rows, "Induction head").text
    assert ("with layer 0" in text) == (alone < 0.8)
    assert ("85 ± 1%" if alone > 0.8 else "105 ± 4%") in text


def test_two_heads_whose_difference_is_within_its_error_are_both_most_important():
    rows = make_rows()
    rows[-1] |= {"heads/importance_se/L3H2": 0.01}
    rows[-1] |= {"heads/importance/L2H2": 0.3, "heads/importance_se/L2H2": 0.05}
    assert find(rows, "Most important head").heads == ["L3H2", "L2H2"]
    rows[-1] |= {"heads/importance_se/L2H2": 0.02}
    assert find(rows, "Most important head").heads == ["L3H2"]


def test_sufficient_heads_are_reported_unless_all_heads_of_the_model_are_needed():
    rows = make_rows()
    assert "the other 14 heads" in find(rows, "Sufficient heads").text
    rows[-1] |= {f"sufficient/{Head(*index)}": 1 for index in np.ndindex(4, 4)}
    assert find(rows, "Sufficient") is None


def rows_of_gains(gains: list[float], error: float = 0.05) -> list[dict]:
    """Metrics of snapshots every 100 steps of a run without an induction head."""
    return [
        {
            "step": 100 * number,
            "heads/induction/L0H0": 0.0,
            "heads/induction_se/L0H0": 0.01,
            "probe/copying_gain": gain,
            "probe/copying_gain_se": error,
        }
        for number, gain in enumerate(gains)
    ]


def date_of_gain(rows: list[dict]) -> str:
    """Return when the copying gain was first reported, as its finding states it."""
    return find_text(rows, "In-context copying").partition("The gain passed")[2]


@given(st.lists(st.floats(-1, 9), min_size=2, max_size=30))
def test_the_date_of_a_copying_gain_never_moves(gains):
    """Whatever follows: the gain may grow, as it does for hundreds of steps, or shrink."""
    rows = rows_of_gains(gains)
    dates = {date_of_gain(rows[:count]) for count in range(1, 1 + len(rows))}
    assert len(dates - {""}) <= 1


def test_a_copying_gain_is_dated_from_the_first_of_two_snapshots_that_report_it():
    gains = [0.0, 0.3, 0.0, 0.3, 0.9, 1.8, 2.7, 3.1]  # significant alone at step 100
    assert "steps 200 and 300" in date_of_gain(rows_of_gains(gains))
    assert find(rows_of_gains(gains[:2]), "In-context copying").heads == []
    assert date_of_gain(rows_of_gains(gains[:2])) == ""
    assert "steps 300 and 400" in date_of_gain(rows_of_gains(gains, error=0.2))
    assert "at step 0" in date_of_gain(rows_of_gains([2.5, 2.5]))


@pytest.mark.parametrize(
    ("accuracy", "error", "is_learned"),
    [
        (0.011, 0.004, False),  # repeated tokens cost 6.8 nats, 1.9 less than others
        (0.55, 0.04, False),
        (0.55, 0.02, True),
        (1.0, 0.0, True),
        (0.0, 0.0, False),
        (0.9, math.nan, False),
    ],
)
@pytest.mark.parametrize("has_head", [True, False])
def test_copying_is_learned_only_if_half_of_the_repeats_are_predicted(
    accuracy, error, is_learned, has_head
):
    rows = make_rows()
    rows[-1] |= {"probe/repeated_loss": 6.76, "probe/repeated_loss_se": 0.05}
    rows[-1] |= {"probe/repeated_accuracy": accuracy, "probe/repeated_accuracy_se": error}
    if not has_head:
        del rows[-1]["emerged/induction/L3H2"]
    first = summarize_run(rows)[0]
    beginning = "So far" in first.text if has_head else first.title.startswith("Beginning")
    assert beginning == (not is_learned)
    assert "6.76 ± 0.05" in str(first) and f"{100 * accuracy:.0f}" in str(first)


@pytest.mark.parametrize(
    ("share", "error", "all_of_it", "more"),
    [
        (0.56, 0.23, False, False),  # within two errors of 100%, but this says little
        (0.96, 0.07, False, False),
        (0.96, 0.03, True, False),
        (1.03, 0.03, True, False),
        (1.08, 0.03, False, True),  # the other heads lower it
        (0.93, 0.02, False, False),
        (1.2, 0.3, False, False),
    ],
)
def test_a_share_is_all_only_if_a_narrow_interval_includes_it(share, error, all_of_it, more):
    rows = make_rows()
    for name in ("circuit", "circuit_and_layer_0"):
        rows[-1] |= {f"faithfulness/{name}": share, f"faithfulness_se/{name}": error}
    text = find_text(rows, "Induction head")
    assert ("for all of" in text, "lower it" in text) == (all_of_it, more)
    assert f"{100 * share:.0f} ± {100 * error:.0f}%" in text


def test_a_head_that_was_lost_and_nearly_came_back_is_reported_with_its_present_score():
    rows = make_rows()
    rows[-1] |= {"lost/induction/L3H2": 1050, "heads/induction/L3H2": 0.197}
    assert "now it is 0.20 ± 0.01" in find_text(rows, "Lost")
    del rows[-1]["heads/induction/L3H2"], rows[-1]["heads/induction_se/L3H2"]
    assert "now" not in find_text(rows, "Lost") and "nan" not in find_text(rows, "Lost")


@pytest.mark.parametrize(
    ("scores", "in_part"),
    [([0.33], 1), ([0.9], 0), ([0.9, 0.33], 1), ([0.9, 0.4, 0.33], 1), ([0.4, 0.4, 0.33], 1)],
)
def test_an_attention_sink_below_one_half_is_one_in_part(scores, in_part):
    rows = make_rows()
    del rows[-1]["emerged/sink/L2H0"]
    for head, score in enumerate(scores):
        rows[-1] |= {f"emerged/sink/L0H{head}": 900, f"heads/sink/L0H{head}": score}
        rows[-1] |= {f"heads/sink_se/L0H{head}": 0.01}
    found = find(rows, "Attention sink")
    assert found.heads == [f"L0H{head}" for head in range(len(scores))]
    assert found.text.count("in part") == in_part
    assert f"{scores[-1]:.2f} ± 0.01" in found.details[-1]


def test_no_head_is_most_important_if_too_many_are_equally_important():
    rows = make_rows()
    for head in range(3):
        rows[-1] |= {f"heads/importance/L2H{head}": 0.36, f"heads/importance_se/L2H{head}": 0.04}
    assert find(rows, "Most important head") is None
    del rows[-1]["heads/importance/L2H0"], rows[-1]["heads/importance/L2H1"]
    assert find(rows, "Most important head").heads == ["L3H2", "L2H2"]


def test_among_many_heads_without_effect_rarely_one_is_most_important():
    """Importance without any effect: 16 windows, 144 heads; at most 5% of draws are reported."""
    rng, reported = np.random.default_rng(0), 0
    for _ in range(400):
        values = rng.normal(0, 1, (144, 16))
        means, errors = values.mean(axis=1), values.std(axis=1, ddof=1) / 4
        row = {
            "step": 1,
            **{f"heads/importance/L0H{h}": mean for h, mean in enumerate(means)},
            **{f"heads/importance_se/L0H{h}": error for h, error in enumerate(errors)},
        }
        reported += bool(summarize_run([row]))
    assert reported <= 30


def test_the_bound_is_students_t_with_15_degrees_of_freedom():
    assert max_errors_by_chance(1) == pytest.approx(1.753, abs=0.005)  # at 5%
    assert max_errors_by_chance(100) == pytest.approx(4.073, abs=0.02)  # at 0.05%


def test_a_head_with_a_score_below_one_half_attends_in_part():
    rows = make_rows()
    for head, score in enumerate((0.4, 0.8)):
        rows[-1] |= {
            f"emerged/previous_token/L0H{head}": 900,
            f"heads/previous_token/L0H{head}": score,
            f"heads/previous_token_se/L0H{head}": 0.01,
        }
    del rows[-1]["emerged/previous_token/L1H3"]
    found = find(rows, "Previous-token heads")
    assert found.heads == ["L0H1", "L0H0"]
    text = found.text
    assert text.index("L0H1") < text.index("L0H0") < text.index("in part")
