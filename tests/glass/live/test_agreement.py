"""Both transports of the page agree: the worker with the weights, and the model in Python."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from asking import ask
from hypothesis import given
from models import in_browser, lively, page_weights, patched_models, random_tokens, small

from data.tokenizer import CharTokenizer
from glass.live.session import Session
from model import GPT
from variants import build_model


def assert_agree(found, expected, place: str) -> None:
    """Compare two answers, except for the texts of tokens, which depend on the tokenizer."""
    if isinstance(expected, dict):
        for key in expected.keys() - {"words", "text"}:
            assert_agree(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list) and not all(isinstance(value, float) for value in expected):
        assert len(found) == len(expected), place
        for k, pair in enumerate(zip(found, expected)):
            assert_agree(*pair, f"{place}[{k}]")
    elif isinstance(expected, (np.ndarray, list)):
        np.testing.assert_allclose(
            np.array(found, dtype=float), np.array(expected, dtype=float), atol=1e-3, err_msg=place
        )
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-3), place
    else:
        assert found == expected, place


def by_key(name: str, parts: list) -> dict:
    """What the parts of a request say, however they are divided."""
    if name == "patterns" or name == "headEffects":
        field = "maps" if name == "patterns" else "nats"
        flat = [np.reshape(part[field], (len(part["heads"]), -1)) for part in parts]
        heads = [head for part in parts for head in part["heads"]]
        return dict(zip(heads, np.concatenate(flat)))
    if name == "patchCells":
        cells = [tuple(cell) for part in parts for cell in part["cells"]]
        return dict(zip(cells, [np.array([v]) for part in parts for v in part["values"]]))
    return {part["j"]: np.array([part["effects"], part["kl"]], float) for part in parts}


def make_session(model: GPT) -> Session:
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvw")
    return Session(model, tokenizer, "model")


@pytest.mark.slow
@in_browser
@given(patched_models())
def test_the_worker_and_the_model_in_python_agree(engine_tab, drawn):
    config, changes = drawn
    model = lively(build_model(config))
    ids, corrupted = random_tokens(10).tolist(), random_tokens(10).tolist()
    corrupted[3] = (corrupted[3] + 1) % 23
    text = {"step": 0, "ids": ids, "off": changes["off"], "hidden": changes["hidden"]}
    contrast = {**text, **changes, "corrupted": corrupted, "i": 8, "answer": 2, "wrong": 7}
    own_score = {"layer": 1, "head": 2, "i": 9, "j": 9}
    other_score = {"layer": 0, "head": 0, "i": 5, "j": 2}
    requests = [
        # The passes read other texts before, so that cached tokens are reused.
        ("logits", {**text, "ids": ids[:4], "hidden": [2]}),
        ("read", {**text, "ids": [*ids[:7], 1], "hidden": []}),
        ("logits", text),
        ("maps", text),
        ("read", text),
        ("patterns", {**text, "heads": [5, 0, 1, 2, 3, 4, 7, 6]}),
        ("breakDown", {**text, "i": 8, "of": [1, 2], "answer": 2}),
        ("headEffects", {**text, "i": 8}),
        ("tokenEffects", text),
        ("explainScore", {**text, **own_score}),
        ("explainScore", {**text, **other_score}),
        ("contrast", contrast),
        ("patchCells", {**contrast, "kind": "residual"}),
        ("patchCells", {**contrast, "kind": "component"}),
    ]
    questions = [{"request": name, **parameters} for name, parameters in requests]
    in_page = engine_tab.evaluate("engine.ask", [asdict(config), page_weights(model), questions])
    session = make_session(model)
    for (name, parameters), answer in zip(requests, in_page):
        expected_parts, expected = ask(session, name, **parameters)
        if expected_parts:
            found, expected_values = by_key(name, answer), by_key(name, expected_parts)
            assert found.keys() == expected_values.keys(), name
            for key, value in expected_values.items():
                np.testing.assert_allclose(found[key], value, atol=1e-3, err_msg=f"{name} {key}")
            continue
        if isinstance(expected, np.ndarray):
            expected = expected.ravel()
        elif name == "read":
            expected["norms"] = expected["norms"].ravel()
        assert_agree(answer, expected, name)


def test_both_continue_a_text_with_its_interventions_beyond_the_context(engine_tab):
    model = lively(build_model(small()))
    text = {"step": 0, "ids": random_tokens(12).tolist(), "off": ["L1H3"], "hidden": [2, 9]}
    text |= {"temperature": 0, "maxTokens": 14}
    question = [asdict(model.config), page_weights(model), [{"request": "continue", **text}]]
    (in_page,) = engine_tab.evaluate("engine.ask", question)
    expected, _ = ask(make_session(model), "continue", **text)
    assert [part["ids"] for part in in_page] == [part["ids"] for part in expected]
