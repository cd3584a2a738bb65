"""Questions in Python, against passes of the model that are written out."""

import re
import statistics
import sys
from collections import UserDict
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import foreign_torch_settings
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB_SIZE, captured_with, configs, few, lively, small

import glass
from common.errors import UserError
from data.tokenizer import CharTokenizer
from glass.heads.measure.analysis import analyze
from glass.heads.measure.interventions import Interventions
from glass.labeled import Labeled, average
from glass.opened import PatchedPair
from run.row import Head, parse_head
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstu v")
TEXT, CORRUPTED = "hold that thought", "hold this thought"  # of 17 tokens, the last 16 are read
T = 16


def ids_of(text):
    return TOKENIZER.encode(text)[-T:]


def logits_of(model, text, off=(), hidden=()):
    """Logits (T, V) of a whole pass."""
    changed = Interventions(tuple(parse_head(name) for name in off), tuple(hidden))
    x = captured_with(model, ids_of(text), changed).residuals[-1, 0]
    return model.head(model.norm(x)).detach()


def test_answers_do_not_depend_on_settings_of_torch():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    names = ("loss", "logits", "patterns", "head_effects", "token_effects")
    expected = [getattr(opened, name)(TEXT).values for name in names]
    with foreign_torch_settings():
        for name, values in zip(names, expected):
            assert np.array_equal(getattr(opened, name)(TEXT).values, values), name
        opened.measure_heads(TEXT)
        opened.patch(TEXT, CORRUPTED)


def losses_of(model, text, off=(), hidden=()):
    logits = logits_of(model, text, off, hidden)
    return F.cross_entropy(logits[:-1], torch.tensor(ids_of(text)[1:]), reduction="none").numpy()


ALL_HEADS = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]


@few
@given(
    configs,
    st.lists(st.sampled_from(["L0H1", "L1H3"]), max_size=2),
    st.lists(st.integers(0, T - 1), max_size=2),
)
def test_answers_are_those_of_whole_passes(config, off, hidden):
    model = lively(build_model(config))
    opened, changes = glass.open(model, TOKENIZER), {"off": off, "hidden": hidden}
    losses = losses_of(model, TEXT, **changes)
    assert opened.loss(TEXT, **changes).values == pytest.approx(losses, abs=1e-4)
    logits = logits_of(model, TEXT, **changes).numpy()
    assert opened.logits(TEXT, **changes).values == pytest.approx(logits, abs=1e-4)

    effects = opened.head_effects(TEXT, 5, **changes)
    for name in ("L0H2", "L1H0"):
        without = losses_of(model, TEXT, [*off, name], hidden)
        assert effects[name] == pytest.approx(without[4] - losses[4], abs=1e-4)
    last = opened.head_effects(TEXT, **changes)
    assert last.values == pytest.approx(opened.head_effects(TEXT, T - 1, **changes).values)

    effects = opened.token_effects(TEXT, **changes)
    assert effects.values.shape == (T - 1, T - 1)
    for j in {2, 9} - {*hidden}:
        without = losses_of(model, TEXT, off, [*hidden, j])
        assert effects.values[:, j] == pytest.approx(without - losses, abs=1e-4)


def test_patterns_are_the_attention_maps_of_the_model():
    model = lively(build_model(small()))
    patterns = glass.open(model, TOKENIZER).patterns(TEXT)
    expected = model.attention_maps(torch.tensor([ids_of(TEXT)]))[:, 0].numpy()
    assert np.asarray(patterns) == pytest.approx(expected, abs=1e-6)
    assert np.array_equal(patterns["L1H2"], patterns.values[1, 2])
    assert patterns.axes["layer"] == ["L0", "L1"] and patterns.axes["head"][3] == "H3"
    assert patterns.axes["query"] == patterns.axes["key"]


@pytest.mark.parametrize("mlp", ["gelu", "none"])
@pytest.mark.parametrize("kind", ["component", "residual"])
def test_patches_restore_a_share_of_a_logit_difference(mlp, kind):
    model = lively(build_model(small(mlp=mlp)))
    shares = glass.open(model, TOKENIZER).patch(TEXT, CORRUPTED, "a", "i", kind)
    clean, corrupted = (torch.tensor([ids_of(text)]) for text in (TEXT, CORRUPTED))
    _, cache = model.run_with_cache(clean)

    def difference(tokens, taps):
        logits = model.run_with_taps(tokens, taps)[0, -1]
        return (logits[TOKENIZER.encode("a")] - logits[TOKENIZER.encode("i")]).item()

    highest, lowest = difference(clean, {}), difference(corrupted, {})
    patches = {(1, 2): (("heads", 1), (slice(None), slice(None), 2))}
    if kind == "residual":
        patches = {(1, 8): (("residual", 0), (slice(None), 8))}
    elif mlp != "none":
        patches[0, 4] = ("mlp", 0), (slice(None),)
    for cell, (key, at) in patches.items():

        def replace(value, key=key, at=at):
            value[at] = cache[key][at]

        with torch.no_grad():
            share = (difference(corrupted, {key: replace}) - lowest) / (highest - lowest)
        assert shares[cell] == pytest.approx(share, abs=1e-4) != 0
    assert shares.values.shape == (2, T if kind == "residual" else 4 + (mlp != "none"))
    if kind == "component" and mlp != "none":
        assert shares["L0MLP"] == shares[0, 4]


def test_answers_are_the_likeliest_tokens_unless_they_are_named():
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    answer = int(logits_of(model, TEXT)[-1].argmax())
    wrong = next(k for k in logits_of(model, CORRUPTED)[-1].argsort(descending=True) if k != answer)
    named = opened.patch(TEXT, CORRUPTED, answer, int(wrong))
    assert np.array_equal(opened.patch(TEXT, CORRUPTED), named)


def test_labels_name_tokens_and_heads():
    opened = glass.open(lively(build_model(small(vocab_size=VOCAB_SIZE + 1))), TOKENIZER)
    loss = opened.loss("a b")
    assert loss.axes == {"token": ["T1 ·", "T2 b"]}
    next_tokens = opened.logits("a b").axes["next token"]
    assert next_tokens[1:3] == ["a", "b"] and next_tokens[-1] == f"<{VOCAB_SIZE}>"
    for label, value in zip(loss.axes["token"], loss.values, strict=True):
        assert f"{label} {value:6.2f}".split() in [line.split() for line in repr(loss).splitlines()]


def test_a_begin_of_text_token_is_read_first():
    tokenizer = CharTokenizer(TOKENIZER.alphabet)
    tokenizer.begin_of_text = 2
    opened = glass.open(lively(build_model(small())), tokenizer)
    for text in ("ab", TEXT):
        ids = [2, *TOKENIZER.encode(text)[1 - T :]]
        assert np.array_equal(opened.loss(text), opened.loss(ids))


def test_a_result_of_any_shape_selects_and_prints_a_short_table():
    values = np.arange(100.0 * 200).reshape(100, 200)
    axes = {"layer": [f"L{k}" for k in range(100)], "head": [f"H{k}" for k in range(200)]}
    result = Labeled("number", values, axes)
    lines = repr(result).splitlines()
    assert len(lines) < 50 and max(map(len, lines)) <= 120
    assert "40 of 100 rows" in lines[0] and "12 of 200 columns" in lines[0]
    assert lines[2].split()[:3] == ["L0", "0.00", "1.00"]
    assert result[-1].axes == {"head": axes["head"]}
    assert result[3, 5] == result["L3H5"] == result["H5"]["L3"] == values[3, 5]
    assert not (result - result).values.any()
    each = Labeled("number", values[None], {"text": ["a\n" * 99], **axes})
    hint = re.findall(r'\["(.+?)"\]', repr(each))[0]
    assert each[hint].axes.keys() == {"text", "head"}
    assert len(repr(each[hint]).splitlines()) == 3 and each["a\n" * 99][3, 5] == values[3, 5]
    empty = Labeled("number", np.zeros((0, 0)), {"token": [], "hidden": []})  # of one token
    assert "token" in repr(empty)


def test_the_largest_numbers_are_named_by_head_and_token():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    effects = opened.head_effects(TEXT)
    strongest = effects.top(2)
    best = np.unravel_index(effects.values.argmax(), effects.values.shape)
    assert strongest.axes["layer head"][0] == "L{}H{}".format(*best)
    assert strongest[0] == effects.values.max() and len(strongest.values) == 2
    place = opened.patterns("ab").top(1).axes["layer head query key"][0]
    assert place.split(" ", 1)[0] in ALL_HEADS
    assert "L" not in opened.loss(TEXT).top(1).axes["token"][0]
    with pytest.raises(TypeError):
        strongest[:1]
    with pytest.raises(UserError, match="L0"):
        opened.loss(TEXT)["L0H0"]


def test_the_model_is_read_as_it_is_and_left_as_it_was():
    model = lively(build_model(small(dropout=0.5))).train()
    opened, state = glass.open(model, TOKENIZER), torch.get_rng_state()
    before = opened.loss(TEXT).values
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        model.blocks[0].attention.W_O.weight.mul_(2)
    model.eval()
    after = opened.loss(TEXT).values
    assert after == pytest.approx(losses_of(model, TEXT), abs=1e-4)
    assert not np.allclose(after, before)


def test_heads_are_measured_on_a_text():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    assert len(opened.measure_heads(TEXT, log=lambda line: None).heads("heads/sink")) == 8


TEXTS = ["hold that", TEXT, "abc", "that hold that"]


def standard_errors(singles):
    """Standard errors of the mean over the first axis, number by number."""
    singles = np.asarray(singles, dtype=float)
    columns = singles.reshape(len(singles), -1).T.tolist()
    errors = [statistics.stdev(column) / len(column) ** 0.5 for column in columns]
    return np.reshape(errors, singles.shape[1:])


def test_the_answer_about_several_texts_is_their_mean_with_its_standard_error():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    rows = [opened.measure_heads(text, log=lambda line: None) for text in TEXTS]
    answers = {
        "loss": (opened.loss(TEXTS), [opened.loss(text).values.mean() for text in TEXTS]),
        "effects": (opened.head_effects(TEXTS), [opened.head_effects(text) for text in TEXTS]),
        "scores": (
            opened.measure_heads(TEXTS, log=lambda line: None),
            [
                [
                    [row.score(name, parse_head(head)).value for name in rows[0].scores()]
                    for head in ALL_HEADS
                ]
                for row in rows
            ],
        ),
    }
    for name, (answer, singles) in answers.items():
        assert answer.values == pytest.approx(np.mean(singles, axis=0), nan_ok=True), name
        assert answer.errors == pytest.approx(standard_errors(singles), nan_ok=True), name
        assert np.asarray(answer.each) == pytest.approx(np.asarray(singles), nan_ok=True), name
    scores = answers["scores"][0]
    assert scores["L1H2"]["sink"].values == np.mean(
        [row.score("sink", Head(1, 2)).value for row in rows]
    )


def test_a_difference_and_a_part_of_means_have_the_errors_of_their_own_texts():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    with_head, without = opened.head_effects(TEXTS), opened.head_effects(TEXTS, off="L0H1")
    singles = without.each.values - with_head.each.values
    difference = without - with_head
    assert difference.errors == pytest.approx(standard_errors(singles))
    head = difference["L1H2"]
    assert float(head) == pytest.approx(singles[:, 1, 2].mean())
    assert head.errors == difference[1, 2].errors == pytest.approx(difference.errors[1, 2])
    largest = difference.top(1)
    assert largest.errors[0] == difference[largest.axes["layer head"][0]].errors
    with pytest.raises(UserError, match="same texts"):
        difference - with_head[0]
    with pytest.raises(UserError, match="same texts"):
        opened.loss(TEXTS) - opened.loss(TEXTS[:3])
    with pytest.raises(UserError, match="same texts"):
        opened.loss("ababa") - opened.loss(TEXTS)


def test_means_print_their_standard_errors_which_one_text_does_not_have():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    loss = opened.loss(TEXTS)
    assert f"{loss.values:.2f} ± {loss.errors:.2f}" in repr(loss)
    effects = opened.head_effects(TEXTS)
    row = f"{effects.values[0, 0]:.2f} ± {effects.errors[0, 0]:.2f}"
    assert repr(effects).splitlines()[2].startswith(f"L0 {row}")
    assert all(f"'{text}'" in repr(loss.each) for text in TEXTS)
    one = opened.loss([TEXT])
    assert np.isnan(one.errors) and float(one) == pytest.approx(opened.loss(TEXT).values.mean())


def test_a_result_becomes_a_table_of_pandas():
    pytest.importorskip("pandas")
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    effects = opened.head_effects(TEXTS)
    table = effects.frame()
    assert table["mean"].tolist() == effects.values.ravel().tolist()
    errors = effects.each.frame().groupby(["layer", "head"])["value"].sem()
    assert errors.tolist() == pytest.approx(effects.errors.ravel().tolist())
    assert table["standard_error"].tolist() == pytest.approx(errors.tolist())
    loss = opened.loss(TEXTS)
    assert loss.frame()["mean"].tolist() == [float(loss)]
    assert loss.each.frame()["text"].tolist() == TEXTS
    assert opened.loss(TEXT).frame()["token"].tolist() == opened.loss(TEXT).axes["token"]


def test_without_pandas_a_table_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"^pandas[^\n]*$"):
        glass.open(lively(build_model(small())), TOKENIZER).loss(TEXT).frame()


def answers_of(model, clean, corrupted):
    """Ids of the likeliest token after a text, and of one that gains most on it in another."""
    clean, corrupted = (logits_of(model, text)[-1] for text in (clean, corrupted))
    answer, gains = int(clean.argmax()), corrupted - clean
    gains[answer] = -torch.inf
    return answer, int(gains.argmax())


@pytest.mark.parametrize("kind", ["component", "residual"])
def test_shares_of_several_pairs_are_averaged(kind):
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    pairs = [(TEXT, CORRUPTED), ("that hold", "this hold"), ("abab", "acab")]
    if kind == "residual":  # one share for each token
        pairs[1:] = [("hold chat thought", "hold chit thought")]
    cases = [(*pair, *answers_of(model, *pair)) for pair in pairs]
    singles = [opened.patch(*case, kind).values for case in cases]
    answer = opened.patch(*zip(*cases), kind)
    assert answer.values == pytest.approx(np.mean(singles, axis=0))
    assert answer.errors == pytest.approx(standard_errors(singles))
    same_clean = opened.patch(TEXT, [CORRUPTED] * 2, *cases[0][2:], kind)
    assert np.array_equal(same_clean.each[1], singles[0])
    if kind == "residual":
        assert answer.axes["token"][0] == "T0 o" and answer.axes["token"][4] == "T4"
        assert f"T{T - 1} t" in repr(answer).splitlines()[1]  # the last token, of more than fit
    else:
        pair = " → ".join(pairs[1])
        assert np.array_equal(answer.each[pair], singles[1])


def test_shares_say_that_they_mean_nothing_unless_the_clean_text_prefers_the_answer():
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    best, good = answers_of(model, TEXT, CORRUPTED)
    clean, corrupted = (logits_of(model, text)[-1] for text in (TEXT, CORRUPTED))
    worst = int(clean.argmin())
    by_fall = (clean - corrupted).argsort().tolist()
    rising = next(  # preferred after the clean text, but more after the other
        (a, w) for a, w in product(by_fall, by_fall[::-1]) if clean[a] > clean[w]
    )
    assert "nothing" not in opened.patch(TEXT, CORRUPTED, best, good).name
    assert "nothing" in opened.patch(TEXT, CORRUPTED, worst, best).name
    assert "nothing" in opened.patch(TEXT, CORRUPTED, *rising).name
    pairs = opened.patch([TEXT] * 3, CORRUPTED, [best, worst, best], [good, best, good])
    assert "without 1 pair (1)" in pairs.name and np.isnan(pairs.each[1]).all()
    assert pairs.name.startswith(opened.patch(TEXT, CORRUPTED, best, good).name)
    assert "of 2 pairs" in repr(pairs).splitlines()[0]
    assert pairs.values == pytest.approx(opened.patch(TEXT, CORRUPTED, best, good).values)
    assert np.isnan(opened.patch([TEXT], CORRUPTED, worst, best)).all()


@pytest.mark.parametrize("lowest", [-2.0, 0.0, 1.0])
@pytest.mark.parametrize("highest", [-1.0, 0.0, 1.0, 3.0])
def test_a_pair_means_something_if_its_clean_run_prefers_the_answer_and_more_so(lowest, highest):
    expected = highest > 0 and highest > lowest
    assert PatchedPair(Labeled("share", np.zeros(1), {}), lowest, highest).is_meaningful == expected


def test_a_printed_mean_is_of_the_texts_with_a_value():
    nan = np.nan
    values = {"a": [1, 2], "b": [1, nan], "c": [nan, nan], "d": [nan, 4]}
    for count, noun in ((4, "3 texts"), (3, "2 texts"), (1, "1 text")):
        texts = list(values)[:count]
        answers = [Labeled("x", np.array(values[text]), {"y": ["u", "v"]}) for text in texts]
        title = repr(average("x", answers, "text", texts)).splitlines()[0]
        assert re.search(r"\d+ texts?\b", title)[0] == noun


def test_an_opened_model_says_what_it_is():
    model = lively(build_model(small()))
    name = repr(glass.open(model, TOKENIZER))
    assert "2 layers × 4 heads" in name and f"{model.num_parameters():,} parameters" in name


IDS = TOKENIZER.encode(TEXT)[-T:]


@pytest.mark.parametrize(
    "texts",
    [
        tuple(TEXTS),
        np.array(TEXTS),
        iter(TEXTS),
        [TOKENIZER.encode(text) for text in TEXTS],
        [torch.tensor(TOKENIZER.encode(text)) for text in TEXTS],
        [{"input_ids": TOKENIZER.encode(text)} for text in TEXTS],
        {"input_ids": [TOKENIZER.encode(text) for text in TEXTS]},
    ],
)
def test_texts_are_read_in_whatever_type_they_are_given(texts):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    assert np.array_equal(opened.loss(texts).each, opened.loss(TEXTS).each)


@pytest.mark.parametrize(
    "text",
    [
        tuple(IDS),
        np.array(IDS, np.int32),
        torch.tensor([IDS]),
        list(torch.tensor(IDS)),
        {"input_ids": IDS, "attention_mask": [1] * T},
        UserDict(input_ids=torch.tensor([IDS]), attention_mask=torch.ones(1, T)),
    ],
)
def test_a_text_is_read_in_whatever_type_it_is_given(text):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    assert np.array_equal(opened.loss(text), opened.loss(TEXT))


@pytest.mark.parametrize(
    "changes, same",
    [
        ({"off": "L0H1"}, {"off": ["L0H1"]}),
        ({"off": Head(0, 1)}, {"off": ["L0H1"]}),
        ({"off": (Head(0, 1), Head(1, 2))}, {"off": ["L0H1", "L1H2"]}),
        ({"off": iter(["L0H1"])}, {"off": ["L0H1"]}),
        ({"hidden": 3}, {"hidden": [3]}),
        ({"hidden": range(3, 5)}, {"hidden": [3, 4]}),
        ({"hidden": torch.tensor([[3, 4]])}, {"hidden": [3, 4]}),
    ],
)
def test_heads_and_tokens_are_read_in_whatever_type_they_are_given(changes, same):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    texts = [TEXT, CORRUPTED]
    assert np.array_equal(opened.loss(texts, **changes).each, opened.loss(texts, **same).each)


@pytest.mark.parametrize(
    "text",
    [
        b"hold",
        [1.0, 2.0],
        torch.ones(4, dtype=torch.bool),
        [1, -1],
        [VOCAB_SIZE, *IDS],  # cut off, but no token of the vocabulary
        None,
    ],
)
def test_what_is_no_text_is_refused_in_one_sentence(text):
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    for ask in (opened.loss, opened.measure_heads, partial(analyze, model, TOKENIZER)):
        with pytest.raises(UserError, match=r"^text[^\n]*\b0 to 22\b"):
            ask(text)


@pytest.mark.parametrize(
    "changes",
    [{"off": off} for off in (None, (0, 1), "l0h1", Head(2, 0), np.ones((2, 4), bool))]
    + [{"hidden": hidden} for hidden in (None, "3", [1.0], torch.ones(2, 1), np.ones(T, bool))],
)
def test_what_is_no_head_or_token_is_refused_in_one_sentence(changes):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    (name,) = changes
    for text in (TEXT, TEXTS):
        with pytest.raises(UserError, match=f"^{name}=[^\n]*$"):
            opened.loss(text, **changes)


ARGUMENTS = {
    "text": ("loss", "logits", "patterns", "head_effects", "token_effects", "measure_heads"),
    "off": ("loss", "logits", "patterns", "head_effects", "token_effects"),
    "hidden": ("loss", "logits", "patterns", "head_effects", "token_effects"),
    "token": ("head_effects",),
}
ARGUMENTS |= dict.fromkeys(("clean", "corrupted", "answer", "wrong"), ("patch",))


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_what_has_keys_columns_or_no_order_is_refused_by_its_type(argument):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    table = pytest.importorskip("pandas").DataFrame({TEXT: [1], CORRUPTED: [2]})
    keys = dict.fromkeys(["L0H1", 3])
    for method in ARGUMENTS[argument]:
        texts = [TEXT, CORRUPTED] if method == "patch" else [TEXT]
        names = ["clean", "corrupted"] if method == "patch" else ["text"]
        for value in (keys, UserDict(keys), set(keys), frozenset(keys), keys.keys(), table):
            arguments = dict(zip(names, texts)) | {argument: value}
            with pytest.raises(UserError, match=rf"\b{type(value).__name__}\b"):
                getattr(opened, method)(**arguments)


def test_padding_is_not_measured():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    with pytest.raises(UserError, match="attention_mask"):
        opened.loss({"input_ids": [IDS, IDS], "attention_mask": [[1] * T, [0] + [1] * (T - 1)]})


def test_models_and_tokenizers_of_other_libraries_are_refused_by_their_type():
    model = lively(build_model(small()))
    for pair in ((torch.nn.Linear(2, 2), TOKENIZER), (model, None), (model, "gpt2")):
        with pytest.raises(UserError, match=r"interop\.load"):
            glass.open(*pair)


@pytest.mark.parametrize(
    "ask, value",
    [
        (lambda opened: opened.loss(TEXT, off=["L0H4"]), "L0H4"),
        (lambda opened: opened.loss(TEXT, off=["head 2"]), "head 2"),
        (lambda opened: opened.patterns(TEXT, hidden=[T]), str(T)),
        (lambda opened: opened.logits(TEXT, hidden=[-1]), "-1"),
        (lambda opened: opened.loss(""), "''"),
        (lambda opened: opened.loss("xyz"), "x"),
        (lambda opened: opened.head_effects(TEXT, token=0), "0"),
        (lambda opened: opened.head_effects("a"), "-1"),
        (lambda opened: opened.patch("abc", "ab"), "3 and 2"),
        (lambda opened: opened.patch("abc", "abd", answer="ef"), "'ef'"),
        (lambda opened: opened.patch("abc", "abd", kind="head"), "head"),
        (lambda opened: opened.patch("abc", "abc"), "the same logit difference"),
        (lambda opened: opened.patch(b"abc", "abd"), "clean"),
        (lambda opened: opened.patch("abc", "abd", answer=True), "answer"),
        (lambda opened: opened.loss(["abc", "xyz"]), "text 1"),
        (lambda opened: opened.loss(["abc", "a"]), "text 1"),
        (lambda opened: opened.loss(["abc", b"abc"]), "text 1"),
        (lambda opened: opened.loss([]), "[]"),
        (lambda opened: opened.head_effects(["abcd", "abc"], token=3), "text 1"),
        (lambda opened: opened.patch(["abc", "ab"], ["abd", "a"]), "pair 1"),
        (lambda opened: opened.patch(["abc", "ab"], ["abd", "ad", "d"]), "clean has 2"),
        (lambda opened: opened.patch(["abc", "abc"], "abd", answer=[1, 2, 3]), "clean has 2"),
        (lambda opened: opened.patch(["abc", "ab"], ["abd", "ad"], kind="residual"), "2 and 3"),
    ],
)
def test_an_impossible_question_gets_one_sentence_with_its_value(ask, value):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    with pytest.raises(UserError) as error:
        ask(opened)
    assert value in str(error.value) and "\n" not in str(error.value)
