"""The model in the page against the model in torch: logits, maps, interventions, the prediction
breakdown and score attribution; the tokenizers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import in_browser, lively, page_configs, page_weights, random_tokens, small

from data.tokenizer import PATTERNS, CharTokenizer, load_tiktoken, train_bpe
from generation.decoder import window_start
from glass.heads import ablation, scores
from glass.heads.capture import capture, residual_writes, value_norms
from glass.heads.logit_attribution import attribute_logits, scale_like_norm
from glass.heads.scores import without_first_token
from glass.page.pack import pack_float16
from model import causal_mask
from variants import build_model

# The passes have read other texts before, so that cached tokens are reused.
ASK = """async ([config, weights, ids, off, hidden]) => {
  const { HANDLERS, cachedPass, models, passes, runModel, session } = engine;
  for (const weight of Object.values(weights)) weight.data = Float64Array.from(weight.data);
  models.set(0, weights);
  const tokenizer = { tokenText: String, decode: String };
  Object.assign(session, { config, tokenizer });
  passes.clear();
  const pass = cachedPass({ step: 0, off });
  pass.read(ids.slice(0, 4), [2]);
  pass.read([...ids.slice(0, 7), 1, 1], []);
  HANDLERS.read({ step: 0, ids: [...ids.slice(0, 9), 1], off, hidden: [2] });

  const changed = { step: 0, ids, off, hidden };
  const { losses, next, chances, was } = HANDLERS.read(changed);
  const heads = Array.from({ length: config.n_layer * config.n_head }, (_, k) => k).reverse();
  const patterns = [];
  const keepPatterns = part => patterns.push({ heads: part.heads, maps: [...part.maps] });
  await HANDLERS.patterns({ ...changed, heads }, keepPatterns, 1);
  const plain = { step: 0, ids, hidden: [], off: [] };
  const scores = [];
  for (let layer = 0; layer < config.n_layer; layer++) {
    for (const [head, i, j] of [[0, 5, 2], [3, 9, 9]]) {
      const terms = HANDLERS.explainScore({ ...changed, layer, head, i, j });
      scores.push({ layer, head, i, j, terms: terms.map(({ value }) => value) });
    }
  }
  const tokenEffects = [];
  await HANDLERS.tokenEffects(plain, part => tokenEffects.push(part), 1);
  const headEffects = [];
  await HANDLERS.headEffects({ ...plain, i: 8 }, part => headEffects.push(part), 1);
  const { norms, largest } = HANDLERS.read(plain);
  let continued = [];
  const keepIds = part => { continued = part.ids; };
  await HANDLERS.continue({ ...changed, temperature: 0, maxTokens: 14 }, keepIds, 1);
  return {
    continued,
    headEffects,
    largest,
    next,
    chances,
    norms: [...norms],
    patterns,
    losses,
    was,
    scores,
    tokenEffects,
    logits: [...HANDLERS.logits(changed)],
    maps: [...HANDLERS.maps(changed)],
    components: runModel(plain).components().map(({ wrote }) => [...wrote]),
    breakdown: HANDLERS.breakDown({ ...plain, i: 8, of: [1, 2] }),
  };
}"""


def run_with_interventions(model, ids, off, hidden):
    """Return logits (T, V) and maps (L, H, T, T) with heads ablated and tokens hidden."""
    T, maps = len(ids), []
    mask = causal_mask(T, T)
    mask[:, hidden] &= torch.eye(T, dtype=torch.bool)[:, hidden]
    is_hidden = torch.isin(torch.arange(T), torch.tensor(hidden))
    x = model.embed(ids[None], hidden=is_hidden[None])

    def ablate(layer, y):
        y = y.clone()
        y[:, :, [head for at, head in off if at == layer]] = 0
        return y

    layers = range(model.config.n_layer)
    taps = {("heads", layer): partial(ablate, layer) for layer in layers}
    taps |= {("weights", layer): maps.append for layer in layers}
    x = model.run_blocks(ids[None], mask=mask, entry=(0, x), taps=taps)
    return model.head(model.norm(x))[0], torch.cat(maps)


def next_token_losses(logits, ids) -> np.ndarray:
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").numpy()


@pytest.mark.slow
@in_browser
@given(
    page_configs,
    st.sampled_from([13, 16]),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=3),
    st.lists(st.integers(0, 10), max_size=3, unique=True),
)
def test_the_page_computes_what_the_model_computes(engine_tab, config, block_size, off, hidden):
    config.block_size = block_size
    model, ids = lively(build_model(config)).double(), random_tokens(12)
    weights = page_weights(model)
    names = [f"L{layer}H{head}" for layer, head in off]
    computed = engine_tab.evaluate(ASK, [vars(config), weights, ids.tolist(), names, hidden])
    with torch.no_grad():
        logits, maps = run_with_interventions(model, ids, off, hidden)
        captured = capture(model, ids.numpy()[None])
        breakdown = attribute_logits(model, captured)
        effects = ablation.measure_token_effects(model, captured)
        head_effects = ablation.measure_head_effects(model, captured)
        norms = value_norms(model, captured.v)[:, 0]
        plain_logits = model(ids[None])[0][0]
    plain_losses = next_token_losses(plain_logits, ids)

    # The page computes in float32, as torch does in QK-norm and in rotations.
    page_logits = np.array(computed["logits"]).reshape(12, -1)
    assert page_logits == pytest.approx(logits.numpy(), abs=5e-4, rel=2e-4)
    assert np.array(computed["maps"]).reshape(maps.shape) == pytest.approx(maps.numpy(), abs=5e-5)
    rows, columns = np.tril_indices(12)
    for part in computed["patterns"]:
        triangles = np.array(part["maps"]).reshape(len(part["heads"]), -1)
        expected = maps.numpy().reshape(-1, 12, 12)[part["heads"]][:, rows, columns]
        assert triangles == pytest.approx(expected, abs=5e-5)
    listed = [head for part in computed["patterns"] for head in part["heads"]]
    assert listed == list(reversed(range(maps.shape[0] * maps.shape[1])))
    assert computed["losses"][:-1] == pytest.approx(next_token_losses(logits, ids), abs=5e-4)
    probabilities = logits.softmax(dim=-1)
    next_ids, chances = torch.tensor(computed["next"]), torch.tensor(computed["chances"])
    assert chances.numpy() == pytest.approx(probabilities.topk(5).values.numpy(), abs=1e-4)
    assert chances.numpy() == pytest.approx(probabilities.gather(1, next_ids).numpy(), abs=1e-4)
    if off or hidden:
        before = plain_logits.softmax(dim=-1).gather(1, next_ids).numpy()
        assert np.array(computed["was"]["chances"]) == pytest.approx(before, abs=1e-4)
        assert computed["was"]["losses"][:-1] == pytest.approx(plain_losses, abs=5e-4)
    residual = np.sum(computed["components"], axis=0).reshape(12, -1)
    assert residual == pytest.approx(captured.residuals[-1, 0].numpy(), abs=2e-4)
    for part in computed["tokenEffects"]:
        j = part["j"]
        for name, key in (("loss", "effects"), ("kl", "kl")):
            expected = getattr(effects, name)[j + 1 : 11, j]
            assert part[key][: len(expected)] == pytest.approx(expected, abs=1e-3)
    assert [part["j"] for part in computed["tokenEffects"]] == list(range(10, -1, -1))
    shown_effects = dict(
        pair for part in computed["headEffects"] for pair in zip(part["heads"], part["nats"])
    )
    expected = dict(enumerate(head_effects[..., 8].ravel()))
    assert shown_effects == pytest.approx(expected, abs=1e-3)
    assert computed["norms"] == pytest.approx(norms.ravel(), rel=1e-3, abs=1e-4)
    products = captured.weights[:, 0] * norms[:, :, None]
    assert computed["largest"] == pytest.approx(products.max().item(), rel=1e-3)
    page_breakdown = computed["breakdown"]
    written = residual_writes(model.blocks[1].attention, captured.heads[1, 0, 8])[2]
    with torch.no_grad():
        pushed = model.head.weight @ scale_like_norm(
            model.norm, written, captured.residuals[-1, 0, 8]
        )
    for shown, is_promoted in (
        (page_breakdown["writes"][:3], True),
        (page_breakdown["writes"][3:], False),
    ):
        expected = pushed.topk(3, largest=is_promoted).values
        assert pushed[shown].numpy() == pytest.approx(expected.numpy(), abs=1e-3)
    assert page_breakdown["lens"] == pytest.approx(breakdown.logit_lens[:, 8], abs=1e-3)
    expected = breakdown.logit_attribution[:, 8]
    assert np.array(page_breakdown["direct"]) == pytest.approx(expected, abs=2e-3)
    for score in computed["scores"]:
        i, j = score["i"], score["j"]
        visible = [t for t in range(i + 1) if t == i or t not in hidden]
        if j not in visible:
            continue
        row = maps[score["layer"], score["head"], i].clamp(min=1e-30).log()
        expected = (row[j] - row[visible].mean()).item()
        tolerance = 1e-4 * (1 + np.abs(score["terms"]).sum())
        assert sum(score["terms"]) == pytest.approx(expected, abs=tolerance)

    continued = torch.tensor(computed["continued"])
    assert len(continued) == 12 + 14
    assert continued[:12].tolist() == ids.tolist()
    for length in range(12, len(continued)):
        start = window_start(length, block_size)
        hidden_here = [j - start for j in hidden if j >= start]
        with torch.no_grad():
            logits, _ = run_with_interventions(model, continued[start:length], off, hidden_here)
        assert logits[-1, continued[length]] == pytest.approx(logits[-1].max(), abs=1e-3)


# The random numbers are evenly spaced, so that each id is drawn as often as its probability says.
DRAW = """async ([config, weights, ids, temperature]) => {
  const { HANDLERS, models, passes, session } = engine;
  for (const weight of Object.values(weights)) weight.data = Float64Array.from(weight.data);
  models.set(0, weights);
  Object.assign(session, { config, tokenizer: { decode: String, size: 23 } });
  passes.clear();
  const random = Math.random;
  const drawn = [];
  for (let k = 0; k < 200; k++) {
    Math.random = () => (k + 0.5) / 200;
    const input = { step: 0, ids, off: [], hidden: [], temperature, maxTokens: 1 };
    await HANDLERS.continue(input, part => drawn.push(part.ids.at(-1)), 1);
  }
  Math.random = random;
  return drawn;
}"""


@pytest.mark.slow
def test_the_page_draws_tokens_as_often_as_their_probability_at_a_temperature(engine_tab):
    model, ids = (
        lively(build_model(small(vocab_size=40))),
        random_tokens(12),
    )  # 17 ids are no tokens
    drawn = engine_tab.evaluate(DRAW, [vars(model.config), page_weights(model), ids.tolist(), 0.7])
    with torch.no_grad():
        probabilities = (model(ids[None])[0][0, -1, :23] / 0.7).softmax(dim=-1).numpy()
    assert np.bincount(drawn, minlength=23) == pytest.approx(200 * probabilities, abs=1.1)


def test_the_page_reads_float16_numbers(engine_tab):
    numbers = np.arange(0, 1 << 16, 13, dtype=np.uint16).view(np.float16)  # of each exponent
    read = """bytes => {
      const length = bytes.length / 2;
      const number = engine.floatReader(bytes)(length);
      return Array.from({ length }, (_, k) => number(k));
    }"""
    found = engine_tab.evaluate(read, list(pack_float16(numbers)))
    assert np.array_equal(np.array(found, float), numbers.astype(float), equal_nan=True)


def test_rows_without_the_first_token_sum_to_1(engine_tab):
    A = np.tril(np.random.default_rng(0).random((5, 5)))
    A /= A.sum(axis=-1, keepdims=True) / 0.8  # a sink logit has the rest
    read = """A => {
      const shape = { L: 1, H: 1, T: 5 };
      const view = engine.withoutFirstToken({
        ...shape, at: (l, h, i, j) => A[i][j], bound: () => 0.001
      });
      return A.map((row, i) => row.map((_, j) => (j <= i ? view.at(0, 0, i, j) : 0)));
    }"""
    found = np.array(engine_tab.evaluate(read, A.tolist()))
    assert found[1:, 1:] == pytest.approx(without_first_token(A))
    assert not found[0].any() and not found[:, 0].any()


def test_the_framed_cells_are_those_that_the_scores_read(engine_tab):
    diagonals = engine_tab.evaluate("engine.scoredDiagonals(8)")
    assert {diagonal["score"] for diagonal in diagonals} == {"duplicate token", "induction"}
    queries = np.arange(8, 16)
    for diagonal in diagonals:
        A = np.zeros((1, 1, 16, 16))  # (P, H, T, T)
        A[..., queries, queries - diagonal["distance"]] = 1
        compute_score = getattr(scores, diagonal["score"].replace(" ", "_"))
        assert compute_score(A, np.zeros_like(A), np.array([8])).item() == 1


BPE = {
    name: train_bpe(["def f(x):\n    return 'é 漢字' * 12\n" * 9], 300, pattern)
    for name, pattern in PATTERNS.items()
}
CHARACTERS = "ab é漢😀\n"
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


@pytest.fixture(params=["char", *PATTERNS, "tiktoken"])
def tokenizer(request):
    if request.param == "char":
        return CharTokenizer(CHARACTERS)
    if request.param == "tiktoken":
        folder = request.getfixturevalue("test_data") / "tiktoken_cache"
        request.getfixturevalue("monkeypatch").setenv("TIKTOKEN_CACHE_DIR", str(folder))
        return load_tiktoken("gpt2")
    return BPE[request.param]


@pytest.mark.slow
def test_the_page_encodes_and_decodes_as_python_does(engine_tab, tokenizer):
    is_char = isinstance(tokenizer, CharTokenizer)
    create = "saved => { window.tokenizer = engine.createTokenizer(saved) }"
    engine_tab.evaluate(create, tokenizer.to_json())

    @settings(max_examples=100)
    @given(st.text(CHARACTERS) if is_char else texts)
    @example("")
    @example("a" if is_char else "a\r\n\r\n  b\ufeffc")
    def check(text):
        ids = engine_tab.evaluate("text => tokenizer.encode(text)", text)
        assert ids == tokenizer.encode(text), json.dumps(text)
        assert engine_tab.evaluate("ids => tokenizer.decode(ids)", ids) == tokenizer.decode(ids)

    check()
    if not is_char:
        assert engine_tab.evaluate("tokenizer.encode('a\\ud83d')") == tokenizer.encode("a\ud83d")
