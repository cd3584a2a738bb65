"""Sentences of measurements: what they say, and that nothing is said without its error."""

import math

import pytest

from files import as_known
from report.conclusion import conclude


def rows() -> list[dict]:
    def row(step: int, gain: float) -> dict:
        return {"step": step, "probe/repeat_gain": gain, "probe/repeat_gain_se": 0.05,
                "heads/induction/L3H2": gain / 5, "heads/induction_se/L3H2": 0.01}

    found = [row(0, 0.0), row(900, 0.4), row(1000, 1.9), row(1100, 2.5)]
    found[-1] |= {
        "heads/copying/L3H2": 0.9, "heads/copying_se/L3H2": 0.04, "births/induction/L3H2": 1000,
        "wiring/induction/L3H2/keys/L1H3": 0.94, "wiring/induction_se/L3H2/keys/L1H3": 0.02,
        "wiring/induction/L3H2/queries/L1H1": 0.3, "wiring/induction_se/L3H2/queries/L1H1": 0.02,
        "heads/pair_cost/L3H2": 1.77, "heads/pair_cost_se/L3H2": 0.05,
        "heads/new_cost/L3H2": 0.18, "heads/new_cost_se/L3H2": 0.02,
        "heads/importance/L3H2": 0.37, "heads/importance_se/L3H2": 0.04,
        "heads/importance/L0H0": 0.02, "heads/importance_se/L0H0": 0.04}
    return found


SAID = ["A token that comes again costs 2.50 ± 0.05 nats less than the first time; half of that "
        "was there by step 1,000.",
        "L3H2 copies what followed last time (0.50 ± 0.01, born between steps 900 and 1,000, fed "
        "by L1H3 through its keys, 94 ± 2%): without it a pair that repeats costs 1.77 ± 0.05 nats "
        "more, a token not seen before 0.18 ± 0.02.",
        "Without L3H2 the validation loss is 0.37 ± 0.04 nats higher, the most of any head."]


def test_what_a_run_found_out_is_said():
    assert conclude(rows()) == SAID
    assert conclude([]) == conclude([{"step": 3, "train/loss": 2.0}]) == []


@pytest.mark.parametrize(("lost", "sentence"), [
    ("probe/repeat_gain_se", 0), ("heads/induction_se/L3H2", 1), ("heads/importance_se/L3H2", 2)])
def test_nothing_is_said_without_its_error(lost, sentence):
    for error in (None, math.nan, 0.0, 9.0):
        changed = rows()
        if error is None:
            del changed[-1][lost]
        else:
            changed[-1][lost] = error
        if error == 9.0 and sentence == 1:  # a birth was told with its error: it stays
            continue
        assert conclude(changed) == [said for k, said in enumerate(SAID) if k != sentence]


def test_parts_of_a_sentence_that_are_not_known_are_left_out():
    changed = rows()
    for key in ("wiring/induction_se/L3H2/keys/L1H3", "heads/new_cost_se/L3H2",
                "heads/copying_se/L3H2"):
        del changed[-1][key]
    said = conclude(changed)[1]
    assert said == ("L3H2 looks at what followed last time (0.50 ± 0.01, born between steps 900 "
                    "and 1,000).")
    changed[-1] |= {"heads/copying/L3H2": -0.75, "heads/copying_se/L3H2": 0.06}
    assert "L3H2 pushes down what followed last time (copying -0.75 ± 0.06) (0.50" in conclude(
        changed)[1]


def test_a_value_has_the_digits_that_its_error_leaves():
    assert as_known(1.3949, 0.0612) == "1.39 ± 0.06" and as_known(-0.001, 0.2) == "0.0 ± 0.2"
