"""Questions in Python, against passes of the model that are written out."""

import statistics
import sys
from collections import UserDict
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray
from conftest import foreign_torch_settings
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB_SIZE, configs, few, lively, small

import glass
from common.errors import UserError
from data.tokenizer import CharTokenizer
from glass.heads.measure.analysis import analyze
from glass.heads.measure.capture import capture
from glass.heads.measure.interventions import Interventions, chain_taps
from glass.heads.say.attention_grid import WEIGHT_COLORS
from run.row import Head
from variants import build_model

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstu v")
TEXT, CORRUPTED = "hold that thought", "hold this thought"  # of 17 tokens, the last 16 are read
T = 16


def ids_of(text):
    return TOKENIZER.encode(text)[-T:]


@torch.no_grad()
def ablating_taps(model, off, ablation="zero", reference=TEXT):
    """Taps, written out, that set the outputs of heads, MLPs and layers to zero or to a mean."""
    _, values = model.run_with_cache(torch.tensor([ids_of(reference)]))
    replaced = {}  # heads, or everything, by key

    def replace(key, value):
        mean = values[key].mean(dim=(0, 1)) if ablation == "mean" else 0 * values[key][0, 0]
        value[:, :, replaced[key]] = mean[replaced[key]]

    for name in off:
        layer, rest = int(name[1]), name[2:]
        if rest.startswith("H"):
            replaced.setdefault(("heads", layer), []).append(int(rest[1:]))
        if not rest:
            replaced["attention", layer] = slice(None)
        if rest in ("", "MLP") and model.config.mlp != "none":
            replaced["mlp", layer] = slice(None)
    return {key: partial(replace, key) for key in replaced}


def pass_of(model, text, off=(), hidden=(), ablation="zero", reference=None):
    """A whole pass over a text."""
    taps = ablating_taps(model, off, ablation, reference or text)
    return capture(model, np.array([ids_of(text)]), Interventions(hidden=tuple(hidden)), taps)


def logits_of(model, text, **changes):
    """Logits (T, V) of a whole pass."""
    return model.head(model.norm(pass_of(model, text, **changes).residuals[-1, 0])).detach()


def test_answers_do_not_depend_on_settings_of_torch():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    names = ("loss", "logits", "patterns", "head_effects", "token_effects")
    expected = [getattr(opened, name)(TEXT).values for name in names]
    with foreign_torch_settings():
        for name, values in zip(names, expected):
            assert np.array_equal(getattr(opened, name)(TEXT).values, values), name
        opened.measure_heads(TEXT)
        opened.patch(TEXT, CORRUPTED)


def losses_of(model, text, **changes):
    logits = logits_of(model, text, **changes)
    return F.cross_entropy(logits[:-1], torch.tensor(ids_of(text)[1:]), reduction="none").numpy()


@few
@given(
    configs,
    st.lists(st.sampled_from(["L0H1", "L1H3", "L0MLP", "L1MLP", "L0", "L1"]), max_size=2),
    st.lists(st.integers(0, T - 1), max_size=2),
    st.sampled_from([{}, {"ablation": "mean"}, {"ablation": "mean", "reference": "a ball"}]),
)
def test_answers_are_those_of_whole_passes(config, off, hidden, ablation):
    model = lively(build_model(config))
    off = [name for name in off if config.mlp != "none" or not name.endswith("MLP")]
    opened, changes = glass.open(model, TOKENIZER), {"off": off, "hidden": hidden, **ablation}
    weights = pass_of(model, TEXT, **changes).weights[:, 0].numpy()
    assert opened.patterns(TEXT, **changes).values == pytest.approx(weights, abs=1e-4)
    losses = losses_of(model, TEXT, **changes)
    assert opened.loss(TEXT, **changes).values == pytest.approx(losses, abs=1e-4)
    logits = logits_of(model, TEXT, **changes).numpy()
    assert opened.logits(TEXT, **changes).values == pytest.approx(logits, abs=1e-4)

    effects = opened.head_effects(TEXT, 5, **changes)
    for head in (Head(0, 2), Head(1, 0)):
        without = losses_of(model, TEXT, **changes | {"off": [*off, str(head)]})
        assert effects[head].item() == pytest.approx(without[4] - losses[4], abs=1e-4)
    last = opened.head_effects(TEXT, **changes)
    assert last.values == pytest.approx(opened.head_effects(TEXT, T - 1, **changes).values)

    effects = opened.token_effects(TEXT, **changes)
    assert effects.values.shape == (T - 1, T - 1)
    for j in {2, 9} - {*hidden}:
        without = losses_of(model, TEXT, **changes | {"hidden": [*hidden, j]})
        assert effects.values[:, j] == pytest.approx(without - losses, abs=1e-4)


CHANGES = [{}, {"off": "L0", "hidden": 3}, {"off": ["L1MLP", "L1H2"], "ablation": "mean"}]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_logit_lens_and_the_contributions_are_those_of_what_was_written(bias, changes):
    model = lively(build_model(small(bias=bias, parallel_mlp=bias))).double()
    opened = glass.open(model, TOKENIZER)
    off = changes.get("off", [])
    written_out = changes | {"hidden": [3] if "hidden" in changes else []}
    written_out["off"] = [off] if isinstance(off, str) else off
    forward = pass_of(model, TEXT, **written_out)
    residuals = forward.residuals[:, 0]
    logits = model.head(model.norm(residuals)).detach()  # after the embedding, and each layer
    lens = opened.logit_lens(TEXT, **changes)
    targets = torch.tensor(ids_of(TEXT))[1:]
    for name, of_layer in zip(("embedding", "L0", "L1"), logits, strict=True):
        losses = F.cross_entropy(of_layer[:-1], targets, reduction="none")
        assert lens.sel(after=name).values == pytest.approx(losses.numpy(), abs=1e-5)

    # With the scale of the final norm fixed, a component's contribution is its part of the logits
    scale = residuals[-1, 4].var(correction=0).add(1e-5).sqrt()
    W_O = model.blocks[1].attention.W_O.weight.unflatten(1, (4, -1))  # (C, H, d_v)
    layer_0 = residuals[1, 4] - residuals[0, 4]
    writes = {"embedding": residuals[0, 4], "L1H3": W_O[:, 3] @ forward.heads[1, 0, 4, 3]}
    id = ids_of(TEXT)[5]
    of_number = opened.logit_attribution(TEXT, 5, **changes)
    text = TEXT[1:6]  # the last 16 tokens are read
    assert of_number.token_text == TEXT[6]
    for name, written in writes.items():
        through = (written - written.mean()) / scale * model.norm.weight @ model.head.weight.T
        expected = (through[id] - through.mean()).item()
        assert of_number.sel(component=name).item() == pytest.approx(expected, abs=1e-5)
    expected = (logits[-1, 4, id] - logits[-1, 4].mean()).item()
    assert of_number.sum().item() == pytest.approx(expected, abs=1e-5)
    if changes.get("off") == "L0":
        assert not layer_0.any()
        of_layer = of_number.sel(
            component=[name for name in of_number.component.values if "L0" in name]
        )
        assert of_layer.size == 5 and not of_layer.any()
    if "ablation" not in changes:  # its means are those of another text
        of_text = opened.logit_attribution(text, TEXT[6], **changes)
        assert of_text.values == pytest.approx(of_number.values, abs=1e-5)
        assert (of_text.token, of_text.token_text) == (5, TEXT[6])


@pytest.mark.parametrize("mlp", ["gelu", "none"])
def test_components_have_the_names_by_which_they_are_ablated(mlp):
    model = lively(build_model(small(mlp=mlp)))
    opened = glass.open(model, TOKENIZER)
    names = opened.logit_attribution(TEXT).component.values.tolist()
    assert [names[0], names[-1]] == ["embedding", "biases"]
    assert len(names) == 2 + 2 * (4 + (mlp != "none"))
    for name in names[1:-1]:
        assert opened.logit_attribution(TEXT, off=name).sel(component=name) == pytest.approx(
            0, abs=1e-6
        )


@pytest.mark.parametrize("changes", CHANGES)
def test_a_continuation_is_drawn_from_the_changed_predictions(changes):
    model = lively(build_model(small()))
    opened, state = glass.open(model, TOKENIZER), torch.get_rng_state()
    text = "a ball"
    continued = opened.generate(text, 8, temperature=0, **changes | {"ablation": "zero"})
    assert len(continued) == 8
    for k in range(8):
        logits = opened.logits(text + continued[:k], **changes | {"ablation": "zero"})
        assert continued[k] == TOKENIZER.decode([int(logits.values[-1].argmax())])
    if not changes:
        expected = model.generate(torch.tensor([TOKENIZER.encode(text)]), 40, 0.8, seed=3)
        assert opened.generate(text, 40, seed=3) == TOKENIZER.decode(expected[0, 6:].tolist())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ablation", [{}, {"ablation": "mean"}])
@pytest.mark.parametrize("off", ["L0H1", "L0MLP", "L0"])
def test_patches_are_copied_between_runs_with_the_same_ablation(off, ablation):
    model = lively(build_model(small()))
    ids = answers_of(model, TEXT, CORRUPTED)
    shares = glass.open(model, TOKENIZER).patch(TEXT, CORRUPTED, *ids, off=off, **ablation)
    clean = pass_of(model, TEXT, [off], **ablation)

    def difference(text, taps=None):
        taps = chain_taps(taps or {}, ablating_taps(model, [off], **ablation, reference=text))
        logits = model.run_with_taps(torch.tensor([ids_of(text)]), taps)[0, -1]
        return (logits[ids[0]] - logits[ids[1]]).item()

    def patch(heads):
        heads[:, :, 2] = clean.heads[1, :, :, 2]

    highest, lowest = difference(TEXT), difference(CORRUPTED)
    share = (difference(CORRUPTED, {("heads", 1): patch}) - lowest) / (highest - lowest)
    expected = [highest, lowest, share if highest > max(lowest, 0) else np.nan]
    answer = [shares.clean_difference, shares.corrupted_difference, shares[1, 2]]
    assert answer == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_patterns_are_the_attention_maps_of_the_model():
    model = lively(build_model(small()))
    patterns = glass.open(model, TOKENIZER).patterns(TEXT)
    expected = model.attention_maps(torch.tensor([ids_of(TEXT)]))[:, 0].numpy()
    assert patterns.values == pytest.approx(expected, abs=1e-6)
    assert patterns.dims == ("layer", "head", "query", "key")
    assert np.array_equal(patterns.sel(layer=1, head=2), expected[1, 2])
    assert patterns.key_text.values.tolist() == patterns.query_text.values.tolist()


def test_a_plot_of_patterns_has_the_queries_downwards_and_the_colors_of_the_page():
    plt = pytest.importorskip("matplotlib.pyplot")
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    patterns = opened.patterns(TEXT)
    mean = xarray.concat([patterns, opened.patterns(CORRUPTED)], "text").mean("text")

    def plot(array, **options):
        """Return the image's values as they are drawn from the top, and their colors."""
        plt.close("all")
        mesh = array.plot(**options)
        rows = slice(None, None, 1 if plt.gcf().axes[0].yaxis_inverted() else -1)
        plt.gcf().canvas.draw()
        return mesh.get_array()[rows], mesh.get_facecolors().reshape(*array.shape, 4)[rows]

    counts = (patterns > 0.1).sum(["layer", "head"])
    for pattern in (patterns[1, 2], patterns.sel(layer=0, head=3)[:9], mean[0, 1], counts):
        values, colors = plot(pattern)
        assert np.array_equal(values, pattern)
        shares = np.sqrt(pattern.values / max(1, pattern.values.max()))
        expected = WEIGHT_COLORS[np.rint(255 * shares).astype(int)]
        assert 255 * colors[..., :3] == pytest.approx(expected, abs=13)  # of the next color
    change = patterns[1, 2] - patterns[1, 1]
    values, colors = plot(change)
    assert np.array_equal(values, change) and (colors[values > 0.1][:, 0] > 0.5).all()
    plot(patterns[1, 2], vmax=0.1, cmap="viridis", col=None)
    patterns[1].plot(col="head")
    patterns[1, 2, 3].plot()  # a line
    patterns.plot()  # a histogram


@pytest.mark.parametrize("mlp", ["gelu", "none"])
@pytest.mark.parametrize("kind", ["component", "residual"])
def test_patches_restore_a_share_of_a_logit_difference(mlp, kind):
    model = lively(build_model(small(mlp=mlp)))
    answer, wrong = answers_of(model, TEXT, CORRUPTED)
    shares = glass.open(model, TOKENIZER).patch(TEXT, CORRUPTED, answer, wrong, kind)
    clean, corrupted = (torch.tensor([ids_of(text)]) for text in (TEXT, CORRUPTED))
    _, cache = model.run_with_cache(clean)

    def difference(tokens, taps):
        logits = model.run_with_taps(tokens, taps)[0, -1]
        return (logits[answer] - logits[wrong]).item()

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
        assert shares[cell].item() == pytest.approx(share, abs=1e-4) != 0
    assert shares.values.shape == (2, T if kind == "residual" else 4 + (mlp != "none"))
    if kind == "component" and mlp != "none":
        assert shares.sel(component="MLP")[0] == shares[0, 4]
    assert shares.clean_difference == pytest.approx(highest, abs=1e-4)
    assert shares.corrupted_difference == pytest.approx(lowest, abs=1e-4)


def test_answers_are_the_likeliest_tokens_unless_they_are_named():
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    answer = int(logits_of(model, TEXT)[-1].argmax())
    wrong = next(k for k in logits_of(model, CORRUPTED)[-1].argsort(descending=True) if k != answer)
    named = opened.patch(TEXT, CORRUPTED, answer, int(wrong))
    assert np.array_equal(opened.patch(TEXT, CORRUPTED), named)


def test_coordinates_are_the_numbers_and_texts_of_tokens():
    opened = glass.open(lively(build_model(small(vocab_size=VOCAB_SIZE + 1))), TOKENIZER)
    tokens = opened.tokens("a b")
    assert tokens.values.tolist() == ["a", "·", "b"] and tokens.token.values.tolist() == [0, 1, 2]
    assert tokens.id.values.tolist() == TOKENIZER.encode("a b")
    answers = {
        "token": [opened.loss("a b"), opened.logits("a b"), opened.token_effects("a b")],
        "hidden": [opened.token_effects("a b")],
        "query": [opened.patterns("a b")],
        "key": [opened.patterns("a b")],
    }
    answers["token"].append(opened.patch("a b", "abb", kind="residual"))
    for axis, asked in answers.items():
        for answer in asked:
            texts = answer[f"{axis}_text"].values.tolist()
            expected = ["a", "b", "b"] if answer.name == "share" else tokens.values
            assert texts == [expected[number] for number in answer[axis].values], answer.name
    effects = opened.head_effects("a b")
    assert effects.token == 2 and effects.token_text == "b"
    next_tokens = opened.logits("a b").next_token_text.values
    assert next_tokens[1:3].tolist() == ["a", "b"] and next_tokens[-1] == f"<{VOCAB_SIZE}>"


def test_a_begin_of_text_token_is_read_first():
    tokenizer = CharTokenizer(TOKENIZER.alphabet)
    tokenizer.begin_of_text = 2
    opened = glass.open(lively(build_model(small())), tokenizer)
    for text in ("ab", TEXT):
        ids = [2, *TOKENIZER.encode(text)[1 - T :]]
        assert np.array_equal(opened.loss(text), opened.loss(ids))


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


def test_the_answers_about_several_texts_are_those_about_each():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    rows = [opened.measure_heads(text, log=lambda line: None) for text in TEXTS]
    scores = opened.measure_heads(TEXTS, log=lambda line: None)
    answers = {
        "loss": (opened.loss(TEXTS), [opened.loss(text).values.mean() for text in TEXTS]),
        "effects": (opened.head_effects(TEXTS), [opened.head_effects(text) for text in TEXTS]),
        "sink": (
            scores.sel(score="sink"),
            [
                [[row.score("sink", Head(layer, k)).value for k in range(4)] for layer in range(2)]
                for row in rows
            ],
        ),
    }
    for name, (answer, singles) in answers.items():
        singles = np.asarray(singles, dtype=float)
        assert answer.dims[0] == "text" and answer.text.values.tolist() == TEXTS, name
        assert answer.values == pytest.approx(singles), name
        summary = glass.mean_and_error(answer)
        assert summary["mean"].values == pytest.approx(np.mean(singles, axis=0)), name
        assert summary.standard_error.values == pytest.approx(standard_errors(singles)), name
    assert set(scores.score.values) == {*rows[0].scores()}


def test_differences_are_taken_text_by_text():
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    effects, without = opened.head_effects(TEXTS), opened.head_effects(TEXTS[1:], off="L0H1")
    difference = without - effects
    assert difference.text.values.tolist() == TEXTS[1:]
    assert np.array_equal(difference, without.values - effects.values[1:])
    assert without.token.values.tolist() == [len(ids_of(text)) - 1 for text in TEXTS[1:]]


def test_a_mean_leaves_out_nan_and_one_value_has_no_standard_error():
    nan = np.nan
    answers = xarray.DataArray([[1.0, 2, nan], [3, nan, nan]], dims=["pair", "layer"], name="share")
    summary = glass.mean_and_error(answers)
    assert summary["mean"].values == pytest.approx([2, 2, nan], nan_ok=True)
    assert summary.standard_error.values == pytest.approx([1, nan, nan], nan_ok=True)


def test_without_xarray_an_answer_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    monkeypatch.delitem(sys.modules, "glass.opened", raising=False)
    with pytest.raises(UserError, match=r"^xarray[^\n]*$"):
        glass.open(lively(build_model(small())), TOKENIZER)


def answers_of(model, clean, corrupted):
    """Ids of the likeliest token after a text, and of one that gains most on it in another."""
    clean, corrupted = (logits_of(model, text)[-1] for text in (clean, corrupted))
    answer, gains = int(clean.argmax()), corrupted - clean
    gains[answer] = -torch.inf
    return answer, int(gains.argmax())


@pytest.mark.parametrize("kind", ["component", "residual"])
def test_shares_of_several_pairs_are_those_of_each(kind):
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    pairs = [(TEXT, CORRUPTED), ("that hold", "this hold"), ("abab", "acab")]
    cases = [(*pair, *answers_of(model, *pair)) for pair in pairs]
    singles = [opened.patch(*case, kind).values for case in cases]
    answer = opened.patch(*zip(*cases), kind)
    assert answer.dims[0] == "pair" and answer.pair[1] == " → ".join(pairs[1])
    for shares, single in zip(answer.values, singles):
        length = single.shape[1]  # shorter texts have nan after their last token
        assert np.array_equal(shares[:, :length], single) and np.isnan(shares[:, length:]).all()
    same_clean = opened.patch(TEXT, [CORRUPTED] * 2, *cases[0][2:], kind)
    assert np.array_equal(same_clean[1], singles[0])


def test_shares_are_nan_unless_the_clean_text_prefers_the_answer_and_more_so():
    model = lively(build_model(small()))
    opened = glass.open(model, TOKENIZER)
    best, good = answers_of(model, TEXT, CORRUPTED)
    clean, corrupted = (logits_of(model, text)[-1] for text in (TEXT, CORRUPTED))
    worst = int(clean.argmin())
    by_fall = (clean - corrupted).argsort().tolist()
    rising = next(  # preferred after the clean text, but more after the other
        (a, w) for a, w in product(by_fall, by_fall[::-1]) if clean[a] > clean[w]
    )
    cases = [(best, good), (worst, best), rising, (best, best)]
    asked = [opened.patch(TEXT, CORRUPTED, *case) for case in cases]
    assert [shares.isnull().all().item() for shares in asked] == [False, True, True, True]
    pairs = opened.patch([TEXT] * 4, CORRUPTED, *zip(*cases))
    assert pairs.equals(xarray.concat(asked, pairs.pair, coords="different", compat="equals"))
    assert pairs.answer[0] == asked[0].answer == opened.tokens([best])[0]
    assert np.array_equal(pairs.mean("pair"), asked[0])


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
    assert np.array_equal(opened.loss(texts), opened.loss(TEXTS))


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
        ({"off": "L0"}, {"off": [f"L0H{number}" for number in range(4)] + ["L0MLP"]}),
        (
            {"off": "L0", "ablation": "mean", "reference": iter(TOKENIZER.encode("a ball"))},
            {"off": "L0", "ablation": "mean", "reference": "a ball"},
        ),
        ({"hidden": 3}, {"hidden": [3]}),
        ({"hidden": range(3, 5)}, {"hidden": [3, 4]}),
        ({"hidden": torch.tensor([[3, 4]])}, {"hidden": [3, 4]}),
    ],
)
def test_heads_and_tokens_are_read_in_whatever_type_they_are_given(changes, same):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    texts = [TEXT, CORRUPTED]
    assert np.array_equal(opened.loss(texts, **changes), opened.loss(texts, **same))


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
    + [{"off": off} for off in ("L2", "L2MLP", "MLP", "L0H01", "L0H4", ("mlp", 0))]
    + [{"ablation": "resample"}]
    + [{"hidden": hidden} for hidden in (None, "3", [1.0], torch.ones(2, 1), np.ones(T, bool))],
)
def test_what_is_no_head_or_token_is_refused_in_one_sentence(changes):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    (name,) = changes
    for text in (TEXT, TEXTS):
        with pytest.raises(UserError, match=f"^{name}=[^\n]*$"):
            opened.loss(text, **changes)


QUESTIONS = ("loss", "logits", "patterns", "head_effects", "token_effects", "logit_lens")
QUESTIONS = (*QUESTIONS, "logit_attribution", "generate")
ARGUMENTS = {
    "text": (*QUESTIONS, "measure_heads", "show"),
    "off": QUESTIONS,
    "hidden": QUESTIONS,
    "token": ("head_effects", "logit_attribution", "show"),
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
        (lambda opened: opened.loss(TEXT, off="L0", reference=TEXT), "reference"),
        (lambda opened: opened.loss(TEXT, ablation="mean", reference=TEXTS), "reference"),
        (lambda opened: opened.loss(TEXT, off=["head 2"]), "head 2"),
        (lambda opened: opened.patterns(TEXT, hidden=[T]), str(T)),
        (lambda opened: opened.logits(TEXT, hidden=[-1]), "-1"),
        (lambda opened: opened.loss(""), "''"),
        (lambda opened: opened.loss("xyz"), "x"),
        (lambda opened: opened.head_effects(TEXT, token=0), "0"),
        (lambda opened: opened.head_effects("a"), "-1"),
        (lambda opened: opened.logit_attribution(TEXT, 16), "16"),
        (lambda opened: opened.logit_attribution(TEXT, "ef"), "'ef'"),
        (lambda opened: opened.generate(TEXT, temperature=-1), "-1"),
        (lambda opened: opened.show(TEXT, head="L2H0"), "L2H0"),
        (lambda opened: opened.show(TEXT, token=T), str(T)),
        (lambda opened: opened.show(), "give a text"),
        (lambda opened: opened.patch("a c", "ab"), "3 and 2 tokens, a|·|c and a|b:"),
        (lambda opened: opened.patch("abc", "abd", answer="ef"), "'ef'"),
        (lambda opened: opened.patch("abc", "abd", kind="head"), "head"),
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
    ],
)
def test_an_impossible_question_gets_one_sentence_with_its_value(ask, value):
    opened = glass.open(lively(build_model(small())), TOKENIZER)
    with pytest.raises(UserError) as error:
        ask(opened)
    assert value in str(error.value) and "\n" not in str(error.value)
