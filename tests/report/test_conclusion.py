"""Sentences of measurements: what they say, and that nothing is said without its error."""

import math

import pytest

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


SAID = ["In random tokens that repeat, a token's loss is 2.50 ± 0.05 nats lower the second time.",
        "L3H2 copies what followed last time (score 0.50 ± 0.01, born between steps 900 and 1,000; "
        "94 ± 2% of the score is lost when L1H3 is cut from its keys). Without it the loss rises "
        "by 1.77 ± 0.05 nats at pairs that repeat, by 0.18 ± 0.02 at tokens not seen before.",
        "L3H2 matters most: without it the validation loss is 0.37 ± 0.04 nats higher."]


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
        expected = list(SAID)
        del expected[sentence]
        assert conclude(changed) == expected


def test_parts_of_a_sentence_that_are_not_known_are_left_out():
    changed = rows()
    for key in ("wiring/induction_se/L3H2/keys/L1H3", "heads/new_cost_se/L3H2",
                "heads/copying_se/L3H2"):
        del changed[-1][key]
    said = conclude(changed)[1]
    assert said == ("L3H2 looks at what followed last time (score 0.50 ± 0.01, born between steps "
                    "900 and 1,000).")
    changed[-1] |= {"heads/new_cost/L3H2": -0.05, "heads/new_cost_se/L3H2": 0.03}
    assert "at pairs that repeat, not clearly at tokens not seen before" in conclude(changed)[1]
    changed[-1] |= {"heads/copying/L3H2": -0.75, "heads/copying_se/L3H2": 0.06}
    assert ("L3H2 pushes down what followed last time (score 0.50 ± 0.01, copying -0.75 ± 0.06, "
            "born") in conclude(changed)[1]


def test_of_a_kind_the_two_strongest_are_told():
    changed = rows()
    for head in range(3):
        changed[-1] |= {f"births/previous_token/L0H{head}": 900,
                        f"heads/previous_token/L0H{head}": 0.5 + head / 10,
                        f"heads/previous_token_se/L0H{head}": 0.01}
    assert [sentence[:4] for sentence in conclude(changed)[1:-1]] == ["L0H2", "L0H1", "L3H2"]
