"""The model in the page against the model in torch: what it reads, with heads off and tokens
hidden, what it needed, why a head looked where it looked; its tokenizers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import configs, lively, random_tokens

from attention_maps import ablation
from attention_maps.capture import capture
from attention_maps.logit_attribution import attribute_logits
from data.tokenizer import PATTERNS, CharTokenizer, load_tiktoken, train_bpe
from model import GPT, causal_mask
from report.bundle import bundle

# A reading that was something else before: what stands before a change is kept.
ASK = """async ([c, W, ids, off, hidden]) => {
  const { ANSWERS, models, read, readingOf, readings, session } = engine;
  for (const of of Object.values(W)) of.data = Float64Array.from(of.data);
  models.set(0, W);
  Object.assign(session, { config: c, tokenizer: { word: String } });
  readings.clear();
  const asked = { step: 0, ids, hidden: [], off: [] }, terms = [], needs = [];
  const reading = readingOf({ step: 0, off });
  reading.read(ids.slice(0, 4), [2]);
  reading.read([...ids.slice(0, 7), 1, 1], []);
  ANSWERS.look({ step: 0, ids: [...ids.slice(0, 9), 1], off, hidden: [2] });
  const changed = { step: 0, ids, off, hidden }, { losses, was } = ANSWERS.look(changed);
  for (let l = 0; l < c.n_layer; l++) for (const [h, i, j] of [[0, 5, 2], [3, 9, 9]]) {
    const found = ANSWERS.why({ ...asked, layer: l, head: h, i, j });
    terms.push([l, h, i, j, found.map(({ value }) => value)]);
  }
  await ANSWERS.token_effect(asked, part => needs.push(part), 1);
  return { terms, needs, losses, was, logits: [...ANSWERS.logits(changed)],
    maps: [...ANSWERS.maps(changed)], wrote: read(asked).parts().map(({ wrote }) => [...wrote]),
    card: ANSWERS.card({ ...asked, i: 8, of: [1, 2] }) };
}"""


@pytest.fixture(scope="module")
def tab(chromium):
    tab = chromium.new_page()
    tab.add_script_tag(content=bundle(Path(__file__).with_name("engine_in_page.js")))
    return tab


def changed(model, ids, off, hidden):
    """Logits (T, V) and maps (L, H, T, T) with heads off and tokens hidden from later ones."""
    T, mask, maps = len(ids), causal_mask(len(ids), len(ids)), []
    mask[:, hidden] &= torch.eye(T, dtype=torch.bool)[:, hidden]
    is_hidden = torch.isin(torch.arange(T), torch.tensor(hidden))
    x = model.embed(ids[None], hidden=is_hidden[None])

    def silent(layer, y):
        y = y.clone()
        y[:, :, [h for at, h in off if at == layer]] = 0
        return y

    x = model.run_blocks(
        ids[None],
        mask=mask,
        entry=(0, x),
        taps={"heads": silent, "weights": lambda layer, A: maps.append(A[0]) or A},
    )
    return model.head(model.norm(x))[0], torch.stack(maps)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    configs,
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=3),
    st.lists(st.integers(0, 10), max_size=3, unique=True),
)
def test_the_page_computes_what_the_model_computes(tab, config, off, hidden):
    model, ids = lively(GPT(config)).double(), random_tokens(12)
    W = {
        name: {"shape": list(t.shape), "data": t.flatten().tolist()}
        for name, t in model.tensors().items()
    }
    found = tab.evaluate(
        ASK, [vars(config), W, ids.tolist(), [f"L{layer}H{head}" for layer, head in off], hidden]
    )
    with torch.no_grad():
        logits, maps = changed(model, ids, off, hidden)
        whole = capture(model, ids.numpy()[None])
        attribution = attribute_logits(model, whole)
        token_effects = ablation.measure_token_effects(model, whole)
        loss = torch.nn.functional.cross_entropy(
            model(ids[None])[0][0, :-1], ids[1:], reduction="none"
        ).numpy()
    # The page has float32; where torch norms queries and keys and turns them, so has it.
    assert np.array(found["logits"]).reshape(12, -1) == pytest.approx(
        logits.numpy(), abs=5e-4, rel=2e-4
    )
    assert np.array(found["maps"]).reshape(maps.shape) == pytest.approx(maps.numpy(), abs=5e-5)
    follow = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").numpy()
    assert found["losses"][:-1] == pytest.approx(follow, abs=5e-4)
    if off or hidden:
        assert found["was"]["losses"][:-1] == pytest.approx(loss, abs=5e-4)
    hidden_state = whole.residuals[-1, 0].numpy()
    assert np.sum(found["wrote"], axis=0).reshape(12, -1) == pytest.approx(hidden_state, abs=2e-4)
    for part in found["needs"]:
        j = part["j"]
        for name, key in (("loss", "effects"), ("kl", "kl")):
            expected = getattr(token_effects, name)[j + 1 : 11, j]
            assert part[key][: len(expected)] == pytest.approx(expected, abs=1e-3)
    assert [part["j"] for part in found["needs"]] == list(range(10, -1, -1))
    assert found["card"]["lens"] == pytest.approx(attribution.logit_lens[:, 8], abs=1e-3)
    assert np.array(found["card"]["direct"]) == pytest.approx(
        attribution.logit_attribution[:, 8], abs=2e-3
    )
    for layer, head, i, j, terms in found["terms"]:
        row = attention_scores(model, whole, layer, head)[i, : i + 1]
        expected = (row[j] - row.mean()).item()
        assert sum(terms) == pytest.approx(expected, abs=1e-4 * (1 + np.abs(terms).sum()))


def attention_scores(model, whole, layer, head):
    """The scores (T, T) of a head before softmax, but for what is the same in a row."""
    return whole.weights[layer, 0, head].clamp(min=1e-30).log()


BPE = {
    name: train_bpe(["def f(x):\n    return 'é 漢字' * 12\n" * 9], 300, pattern)
    for name, pattern in PATTERNS.items()
}
texts = (
    st.text()
    | st.text("aé 漢\n\t'😀\x1c\x85\u2028\u3000don 12_")
    | st.builds(
        lambda a, n, b: a * n + b,
        st.sampled_from(["a", " ", "😀", "\x1c"]),
        st.integers(500, 1100),
        st.text(max_size=9),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char", *PATTERNS, "tiktoken"])
def test_the_page_has_the_tokens_that_python_has(tab, name, request):
    if name == "tiktoken":
        folder = request.getfixturevalue("test_data") / "tiktoken_cache"
        request.getfixturevalue("monkeypatch").setenv("TIKTOKEN_CACHE_DIR", str(folder))
    made = {"char": lambda: CharTokenizer("ab é漢😀\n"), "tiktoken": lambda: load_tiktoken("gpt2")}
    tokenizer = made.get(name, lambda: BPE[name])()
    tab.evaluate("saved => { window.tokenizer = engine.tokenizerOf(saved) }", tokenizer.to_json())
    known = st.text("ab é漢😀\n") if name == "char" else texts

    @settings(max_examples=100)
    @given(known)
    @example("")
    @example("a" if name == "char" else "a\r\n\r\n  b\ufeffc")
    def same(text):
        ids = tab.evaluate("text => tokenizer.encode(text)", text)
        assert ids == tokenizer.encode(text), json.dumps(text)
        assert tab.evaluate("ids => tokenizer.decode(ids)", ids) == tokenizer.decode(ids)

    same()
    if name != "char":
        assert tab.evaluate("tokenizer.encode('a\\ud83d')") == tokenizer.encode("a\ud83d")
