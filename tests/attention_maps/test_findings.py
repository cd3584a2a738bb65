"""What is said of measurements: that it holds now and beyond its error, and nothing else."""

import math

import numpy as np
import pytest

from attention_maps.findings import beyond, summarize_run, told_heads


def rows() -> list[dict]:
    def row(step: int, gain: float) -> dict:
        return {
            "step": step,
            "probe/copying_gain": gain,
            "probe/copying_gain_se": 0.05,
            "heads/induction/L3H2": gain / 4,
            "heads/induction_se/L3H2": 0.01,
        }

    found = [row(0, 0.0), row(900, 0.4), row(1000, 1.9), row(1100, 2.5)]
    found[-1] |= {
        "heads/copying/L3H2": 0.9,
        "heads/copying_se/L3H2": 0.04,
        "emerged/induction/L3H2": 1000,
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
        "emerged/sink/L2H0": 900,
        "heads/sink/L2H0": 0.9,
        "heads/sink_se/L2H0": 0.01,
    }
    return found


def test_what_a_run_found_out_is_said():
    first, *rest = summarize_run(rows())
    assert first.text == (
        "By step 1,000 this model learned to repeat what it has seen: L3H2 copies what followed "
        "last time, fed by L1H3; together with layer 0 they make all of the gain."
    )
    for figure in (
        "2.50 ± 0.05",
        "0.62 ± 0.01",
        "between steps 900 and 1,000",
        "94 ± 2%",
        "105 ± 4%",
    ):
        assert figure in first.figures
    assert [finding.text for finding in rest] == [
        "L3H2 matters most to the validation loss.",
        "L2H0 rests on the first token.",
    ]
    assert "0.37 ± 0.04" in rest[0].figures and "0.90 ± 0.01" in rest[1].figures
    assert told_heads(rows()[-1]) == [(1, 3), (3, 2)]
    assert summarize_run([]) == summarize_run([{"step": 3, "train/loss": 2.0}]) == []


@pytest.mark.parametrize(
    ("lost", "word"),
    [
        ("probe/copying_gain_se", "learned"),
        ("heads/induction_se/L3H2", "copies"),
        ("heads/importance_se/L3H2", "matters"),
        ("faithfulness_se/circuit_and_layer_0", "layer 0"),
        ("composition/induction_se/L3H2/keys/L1H3", "fed by"),
        ("heads/sink_se/L2H0", "rests"),
        ("heads/copying_se/L3H2", "copies"),
    ],
)
def test_nothing_is_said_without_its_error(lost, word):
    assert any(word in finding.text for finding in summarize_run(rows()))
    for error in (None, math.nan, 0.0, 9.0):
        changed = rows()
        changed[-1][lost] = error
        if error is None:
            del changed[-1][lost]
        assert not any(word in finding.text for finding in summarize_run(changed))


def test_a_head_that_was_born_and_does_it_no_more_is_told_in_the_past():
    changed = rows()
    changed[-1] |= {
        "lost/induction/L3H2": 1050,
        "probe/copying_gain": 0.02,
        "heads/induction/L3H2": 0.001,
    }
    told = [finding.text for finding in summarize_run(changed)]
    assert any(
        text.startswith("L3H2 looked at what followed last time from step 1,000 to 1,050")
        for text in told
    )
    assert not any("looks" in text or "copies" in text or "learned" in text for text in told)
    assert told_heads(changed[-1]) == []


def test_a_gain_that_was_there_and_went_is_told_from_when_it_stayed():
    changed = rows()
    changed[1]["probe/copying_gain"], changed[2]["probe/copying_gain"] = 2.0, 0.1
    assert "By step 1,100" in summarize_run(changed)[0].text
    for row in changed:
        row["probe/copying_gain"] = 2.5
    assert summarize_run(changed)[0].text.startswith("This model repeats what it has seen:")


def test_heads_of_which_none_stands_out_are_not_told_to_matter_most():
    changed = rows()
    for head in range(3):
        changed[-1] |= {f"heads/importance/L2H{head}": 0.36, f"heads/importance_se/L2H{head}": 0.04}
    assert not any("matter" in finding.text for finding in summarize_run(changed))
    del changed[-1]["heads/importance/L2H0"], changed[-1]["heads/importance/L2H1"]
    assert any(text.startswith("L3H2 and L2H2 matter most") for text, _ in summarize_run(changed))


def test_of_many_heads_without_effect_none_matters_most():
    """Noise of 16 windows, 144 heads: a tenth of an error of 0.05 told at most in 5% of draws."""
    rng, said = np.random.default_rng(0), 0
    for _ in range(400):
        values = rng.normal(0, 1, (144, 16))
        mean, error = values.mean(axis=1), values.std(axis=1, ddof=1) / 4
        row = {
            "step": 1,
            **{f"heads/importance/L0H{h}": m for h, m in enumerate(mean)},
            **{f"heads/importance_se/L0H{h}": e for h, e in enumerate(error)},
        }
        said += bool(summarize_run([row]))
    assert said <= 30
    # Student's t with 15 degrees of freedom: 1.753 at 5%, 4.073 at 0.05%.
    assert beyond(1) == pytest.approx(1.753, abs=0.005)
    assert beyond(100) == pytest.approx(4.073, abs=0.02)


def test_a_head_that_does_it_less_than_half_of_the_time_does_it_partly():
    changed = rows()
    for head, score in enumerate((0.4, 0.7)):
        changed[-1] |= {
            f"emerged/previous_token/L0H{head}": 900,
            f"heads/previous_token/L0H{head}": score,
            f"heads/previous_token_se/L0H{head}": 0.01,
        }
    assert "L0H1 (and L0H0 partly) looks at the token just before." in [
        finding.text for finding in summarize_run(changed)
    ]
