"""Findings hold at the latest snapshot and are statistically significant."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass.heads.measure.circuit import find_induction_circuit
from glass.heads.say.findings import Finding, announce_emergence, summarize
from run.row import Head, Row

INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD = Head(3, 2), Head(1, 3)


def make_rows() -> list[Row]:
    """Metrics of four snapshots of a run in which an induction head forms."""

    def row(step: int, gain: float) -> Row:
        row = Row(step=step)
        row.put("probe/copying_gain", (gain, 0.05))
        row.put("heads/induction", (gain / 4, 0.01), INDUCTION_HEAD)
        row.put_heads("heads/entropy", np.ones((4, 4)))
        return row

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
        "circuit/L1H3": 1,
        "circuit/L3H2": 1,
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


def find(rows: list[Row], title: str) -> Finding | None:
    """Return the first finding whose title begins like this."""
    return next((one for one in summarize(*rows) if one.title.startswith(title)), None)


def test_an_induction_head_is_reported_with_its_circuit():
    findings = summarize(*make_rows())
    assert [(finding.title, finding.heads) for finding in findings] == [
        ("Induction head", ["L3H2"]),
        ("Sufficient heads", ["L1H3", "L3H2"]),
        ("Most important head", ["L3H2"]),
        ("Previous-token head", ["L1H3"]),
        ("Attention sink", ["L2H0"]),
    ]
    circuit = find_induction_circuit(make_rows()[-1])
    assert circuit == [PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD]
    first, *others = findings
    for figure in ("L3H2", "L1H3", "layer 0", "at least 97%", "between steps 900 and 1,000"):
        assert figure in first.text
    details = "; ".join(first.details)
    for figure in ("2.50 ± 0.05", "0.62 ± 0.01", "0.90 ± 0.04", "94 ± 2%", "keys"):
        assert figure in details
    assert "93 ± 2%" in others[0].details[0] and "the other 14 heads" in others[0].details[0]
    assert "0.37 ± 0.04" in others[1].text and "0.90 ± 0.01" in others[-1].details[0]
    assert summarize(Row({"step": 3, "train/loss": 2.0})) == []


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        (["L3H2"], "This head alone suffices for copying: L3H2."),
        (["L1H3", "L3H2"], "These two heads alone suffice for copying: L1H3 and L3H2."),
        (
            [f"L0H{number}" for number in range(7)],
            "These 7 heads alone suffice for copying: L0H0, L0H1, L0H2, L0H3, L0H4, L0H5 and L0H6.",
        ),
    ],
)
def test_heads_that_suffice_are_counted_and_named(heads, text):
    rows = make_rows()
    rows[-1] = Row({key: rows[-1][key] for key in rows[-1] if not key.startswith("sufficient/")})
    rows[-1] |= {f"sufficient/{head}": 1 for head in heads}
    assert find(rows, "Sufficient head").text == text


def test_the_first_heads_of_a_kind_are_announced_when_their_emergence_is_known():
    rows = make_rows()
    announced = announce_emergence(*rows)
    assert [finding.heads for finding in announced] == [["L1H3"], ["L3H2"]]
    assert announced[1].text == "L3H2 became an induction head between steps 900 and 1,000"
    second = Row(rows[-1] | {"step": 1200, "emerged/induction/L3H1": 1100})
    for later in (rows[:-1], [*rows, second]):  # too early, and another head of the same kind
        assert announce_emergence(*later) == []
    rows[-1] |= {"emerged/induction/L3H0": 0, "emerged/previous_token/L1H0": 900}
    assert [len(finding.heads) for finding in announce_emergence(*rows)] == [2]


@pytest.mark.parametrize(
    ("error_key", "title", "text"),
    [
        ("probe/copying_gain_se", "Induction head", "copying gain"),
        ("heads/induction_se/L3H2", "Induction head", "L3H2"),
        ("heads/importance_se/L3H2", "Most important head", "L3H2"),
        ("faithfulness_se/circuit_and_layer_0", "Induction head", "layer 0"),
        ("composition/induction_se/L3H2/keys/L1H3", "Induction head", "reads from"),
        ("heads/sink_se/L2H0", "Attention sink", "L2H0"),
        ("faithfulness_se/sufficient", "Sufficient heads", "L3H2"),
    ],
)
def test_nothing_is_reported_without_a_small_standard_error(error_key, title, text):
    assert text in str(find(make_rows(), title))
    for error in (None, math.nan, 0.0, 9.0):
        rows = make_rows()
        rows[-1][error_key] = error
        if error is None:
            del rows[-1][error_key]
        assert text not in str(find(rows, title))


def score(kind: str, head: str, value: float, error: float = 0.01) -> dict[str, float]:
    """Metrics of a head's score."""
    return {f"heads/{kind}/{head}": value, f"heads/{kind}_se/{head}": error}


def kept(name: str, share: float, error: float) -> dict[str, float]:
    """Metrics of the share of the copying gain that a set of heads keeps."""
    return {f"faithfulness/{name}": share, f"faithfulness_se/{name}": error}


def composition(place: str, share: float, error: float = 0.01) -> dict[str, float]:
    """Metrics of a share of the induction head's score, such as at "keys/L2H0"."""
    prefix = "composition/induction"
    return {f"{prefix}/L3H2/{place}": share, f"{prefix}_se/L3H2/{place}": error}


LOST = {"lost/induction/L3H2": 1050, "probe/copying_gain": 0.02}
LOST_LATER = {"emerged/induction/L0H1": 100, "lost/induction/L0H1": 1050}
ALL_HEADS = {f"sufficient/{Head(*index)}": 1 for index in np.ndindex(4, 4)}
EQUAL = score("importance", "L2H0", 0.36) | score("importance", "L2H1", 0.36)
SECOND_HEAD = score("induction", "L3H3", 0.6) | {"emerged/induction/L3H3": 1000}
THIRD_HEAD = score("induction", "L3H1", 0.3) | {"emerged/induction/L3H1": 1000}
SINKS = {
    key: value
    for head, attention in enumerate((0.8, 0.7, 0.6, 0.3, 0.2))
    for key, value in (
        score("sink", f"L0H{head}", attention) | {f"emerged/sink/L0H{head}": 900}
    ).items()
}

# Changes of the metrics; the title of a finding; what it and its headline say; what they do not
# say. None: there is no such finding.
CASES = [
    (LOST, "Lost: induction head", ["L3H2", "from step 1,000 to step 1,050"], ["nan"]),
    (LOST, "Induction head", None, []),
    (LOST | LOST_LATER, "Lost", ["L0H1", "step 100 "], ["L3H2"]),  # it passed longest
    (composition("values/L1H3", 0.99), "Induction", ["in its keys", "from the previous"], []),
    (composition("queries/L1H3", 0.99), "Induction", ["in its queries"], ["in its keys"]),
    (composition("keys/L2H0", 0.99), "Induction", ["the previous-token head L1H3"], ["L2H0"]),
    (kept("circuit", 0.85, 0.01), "Induction", ["L1H3 and L3H2 keep 85 ± 1%"], ["layer 0"]),
    (
        kept("circuit", 0.75, 0.01),
        "Induction",
        ["L1H3, L3H2 and layer 0 keep at least 97%"],
        ["75", "105"],
    ),
    (kept("circuit", 0.97, 0.03), "Induction", ["97 ± 3%"], ["all"]),
    (kept("circuit", 1.08, 0.04), "Induction", ["all of"], ["108"]),
    (kept("circuit", 1.2, 0.3), "Induction", ["at least 60%"], ["120"]),
    (kept("circuit", 0.9, 0.21), "Induction", [], ["copying gain without"]),  # perhaps below half
    (kept("sufficient", 0.85, 0.03), "Sufficient heads", ["85 ± 3%"], []),
    (kept("sufficient", 0.83, 0.03), "Sufficient", None, []),  # significantly below 90%
    (composition("keys/L1H3", 1.03), "Induction", ["all of the score"], ["103"]),
    (score("importance", "L2H2", 0.3, 0.05), "Most important heads", ["L3H2", "L2H2"], []),
    (score("importance", "L2H2", 0.1), "Most important head", ["L3H2"], ["L2H2"]),
    (EQUAL | score("importance", "L2H2", 0.36), "Most important", None, []),  # too many
    (ALL_HEADS, "Sufficient", None, []),  # nothing is left out
    ({}, "Induction", ["head: L3H2, emerged between steps 900 and 1,000"], []),
    (SECOND_HEAD, "Induction heads", ["Emerged between steps 900 and 1,000"], ["L3H3 emerged"]),
    (score("induction", "L3H2", 0.51, 0.02), "Induction", ["in part"], []),
    (score("induction", "L3H2", 0.55, 0.02), "Induction", [], ["in part"]),
    (
        SECOND_HEAD | THIRD_HEAD | score("induction", "L3H2", 0.62, 0.07),
        "Induction heads",
        ["L3H3 attends", "L3H2, the strongest of 3 induction heads, does so in part"],
        [],
    ),
    (SECOND_HEAD | {"emerged/induction/L3H3": 0}, "Induction", ["emerged between"], ["Emerged"]),
    (
        SECOND_HEAD | {"emerged/induction/L3H3": 900},
        "Induction",
        ["Emerged between steps 0 and 1,000", "emerged between steps 0 and 900"],
        [],
    ),
    (
        {},
        "Previous-token",
        ["Emerged between steps 0 and 900"],
        [", emerged between steps 0 and 900]"],
    ),
    ({"emerged/induction/L3H2": 0}, "Induction head", [], ["merged"]),  # it was pretrained
    (
        SINKS,
        "Attention sink",
        ["sink: 6 heads", "6 of 6", "2 of them", "0.90 ± 0.01", "0.20 ± 0.01"],
        ["0.80 ±"],
    ),
]


@pytest.mark.parametrize(("changes", "title", "said", "unsaid"), CASES)
def test_what_is_said_follows_from_the_metrics(changes, title, said, unsaid):
    rows = make_rows()
    rows[-1] |= changes
    found = find(rows, title)
    assert (found is None) == (said is None)
    text = f"{found.headline}\n{found}" if found else ""
    assert all(one in text for one in said or [])
    assert not any(one in text for one in unsaid)


@given(st.floats(0.3, 2), st.floats(0.001, 0.3))
def test_a_stated_share_is_at_most_all_and_above_half_whatever_its_error(share, error):
    rows = make_rows()
    for name in ("circuit", "circuit_and_layer_0", "sufficient"):
        rows[-1] |= kept(name, share, error)
    rows[-1] |= composition("keys/L1H3", share, error) | {"sufficient/L2H0": 1}
    text = "; ".join(map(str, summarize(*rows)))
    stated = r"(?:all|at least (\d+)%|([\d.]+)(?: ± [\d.]+)?%) of the (score|in-context)"
    for least, estimate, whole in re.findall(stated, text):
        lowest = share - 2 * error
        assert float(estimate) <= 100 if estimate else float(least or 100) <= 100 * lowest
        assert lowest >= 0.5 or whole == "score"


def student_t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution from its density."""
    t = np.linspace(0, 50, 500_001)
    density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    mass = density.cumsum()  # of positive values, which have half of the probability
    return float(t[np.searchsorted(mass / mass[-1], 2 * probability - 1)])


@pytest.mark.parametrize("head_count", [1, 2, 3, 8, 51, 600])
@pytest.mark.parametrize("factor", [0.995, 1.005])
def test_a_share_is_compared_with_the_largest_by_chance_of_all_queries_and_keys(head_count, factor):
    rows = make_rows()
    for number in range(1, head_count):
        rows[-1] |= score("induction", f"L2H{number}", 0.0)
    comparisons = len(["queries", "keys"] * head_count)
    errors = student_t_quantile(1 - 0.05 / comparisons, freedom=15)  # of 16 readings
    rows[-1] |= composition("keys/L1H3", 0.94, 0.94 / errors * factor)
    reads_from = "reads from the previous-token head L1H3" in str(find(rows, "Induction head"))
    assert reads_from == (factor < 1)


@pytest.mark.parametrize("head_count", [1, 2, 3, 8, 51, 600])
@pytest.mark.parametrize("factor", [0.995, 1.005])
def test_importance_is_compared_with_the_largest_by_chance_of_all_heads(head_count, factor):
    row = Row(step=1)
    for number in range(head_count):
        row |= score("importance", f"L0H{number}", 0.0)
    errors = student_t_quantile(1 - 0.05 / head_count, freedom=15)
    row |= score("importance", "L0H0", 0.3, 0.3 / errors * factor)
    assert bool(summarize(row)) == (factor < 1)


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
def test_copying_is_learned_only_if_half_of_the_repeats_are_predicted(accuracy, error, is_learned):
    rows = make_rows()
    rows[-1] |= {"probe/repeated_loss": 6.76, "probe/repeated_loss_se": 0.05}
    rows[-1] |= {"probe/repeated_accuracy": accuracy, "probe/repeated_accuracy_se": error}
    del rows[-1]["emerged/induction/L3H2"]
    first = summarize(*rows)[0]
    assert first.title.startswith("Beginning") == (not is_learned)
    assert "6.76 ± 0.05" in str(first) and f"{100 * accuracy:.0f}" in str(first)
