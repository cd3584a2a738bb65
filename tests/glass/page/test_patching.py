"""Activation patching in the page: the worker against the model in torch, and the view in
Chromium."""

import re
import shutil
from functools import partial

import pytest
import torch
from conftest import wait_until
from hypothesis import given
from models import in_browser, lively, page_weights, patched_models, random_tokens
from pages import expect_text
from playwright.sync_api import expect
from run_folders import load_run
from safetensors.torch import save_file

from glass.heads.capture import float16_weights
from glass.heads.interventions import Interventions, chain_taps
from glass.heads.results import parse_head
from glass.page import write as page
from model import GPT, Taps
from model import tap as apply_tap
from variants import build_model

MEASURE = """async ([config, weights, parameters]) => {
  const { models, PATCH_HANDLERS, passes, session } = engine;
  for (const weight of Object.values(weights)) weight.data = Float64Array.from(weight.data);
  models.set(0, weights);
  Object.assign(session, { config, tokenizer: { tokenText: String } });
  passes.clear();
  const other = { ...parameters, ids: [...parameters.ids].reverse(), patched: ["L0H1"] };
  PATCH_HANDLERS.contrast(other); // so that cached tokens are reused
  const contrast = PATCH_HANDLERS.contrast(parameters);
  const measured = { contrast };
  for (const kind of ["residual", "component"]) {
    measured[kind] = [];
    await PATCH_HANDLERS.patchCells({ ...parameters, kind }, ({ cells, values }) => {
      cells.forEach(([row, column], k) => measured[kind].push([row, column, values[k]]));
    }, 1);
  }
  return measured;
}"""


def run(model: GPT, ids, interventions: Interventions, taps: Taps):
    """Return the last logits (V,) of a run with interventions and then other taps."""
    device = ids.device
    x = model.embed(ids[None], hidden=interventions.is_hidden(len(ids), device))
    x = apply_tap(taps, "embedding", 0, x)
    taps = chain_taps(interventions.taps(), taps)
    mask = interventions.mask(len(ids), device)
    x = model.run_blocks(ids[None], mask=mask, entry=(0, x), taps=taps)
    return model.head(model.norm(x))[0, -1]


def record(model: GPT, ids, interventions: Interventions) -> tuple[dict, torch.Tensor]:
    """Return the activations of a run by the name and layer of their tap, and its last logits."""
    values = {}
    keys = [("embedding", 0)]
    keys += [(name, layer) for name in ("heads", "mlp", "residual") for layer in range(2)]
    taps = {key: partial(values.__setitem__, key) for key in keys}
    return values, run(model, ids, interventions, taps)


def patch(source: dict, name: str) -> Taps:
    """Return the tap that copies the activation of a name, such as L1T3, L0H2 or L1MLP."""
    layer, kind, number = re.fullmatch(r"L(\d)(T|H|MLP)(\d*)", name).groups()
    if kind == "MLP":
        key, place = ("mlp", int(layer)), ...
    elif kind == "H":
        key, place = ("heads", int(layer)), (slice(None), slice(None), int(number))
    else:
        key = ("residual", int(layer) - 1) if int(layer) else ("embedding", 0)
        place = (slice(None), int(number))

    def copy(value):
        value = value.clone()
        value[place] = source[key][place]
        return value

    return {key: copy}


@pytest.mark.slow
@in_browser
@given(patched_models())
def test_the_page_patches_as_taps_of_the_model_do(engine_tab, drawn):
    config, changes = drawn
    off, hidden, kept = (changes[key] for key in ("off", "hidden", "patched"))
    model = lively(build_model(config)).double()
    ids = random_tokens(12)
    corrupted = ids.clone()
    corrupted[[3, 6]] = (ids[[3, 6]] + 1) % config.vocab_size
    i, answer, wrong = 8, 5, 11
    parameters = {
        **changes,
        "step": 0,
        "ids": ids.tolist(),
        "corrupted": corrupted.tolist(),
        "i": i,
        "answer": answer,
        "wrong": wrong,
    }
    measured = engine_tab.evaluate(MEASURE, [vars(config), page_weights(model), parameters])

    interventions = Interventions(tuple(map(parse_head, off)), tuple(j for j in hidden if j < i))
    texts = [ids[: i + 1], corrupted[: i + 1]]
    source_text, base_text = texts if changes["direction"] == "denoising" else texts[::-1]

    def difference(patches: list[str]) -> float:
        taps = chain_taps(*(patch(source, name) for name in patches))
        logits = run(model, base_text, interventions, taps)
        return (logits[answer] - logits[wrong]).item()

    with torch.no_grad():
        source, _ = record(model, source_text, interventions)
        contrast = measured["contrast"]
        for name, text in zip(("clean", "corrupted"), texts, strict=True):
            logits = run(model, text, interventions, {})
            assert contrast[name] == pytest.approx(logits[answer] - logits[wrong], abs=2e-5)
        assert contrast["patched"] == pytest.approx(difference(kept), abs=2e-5)
        taps = chain_taps(*(patch(source, name) for name in kept))
        chances = run(model, base_text, interventions, taps).softmax(dim=-1)
        for token in contrast["next"]:
            assert token["chance"] == pytest.approx(chances[token["id"]].item(), abs=1e-5)
        top = chances.topk(5).values.tolist()
        assert [token["chance"] for token in contrast["next"]] == pytest.approx(top, abs=1e-5)

        assert [cell[:2] for cell in measured["residual"]] == [
            [k, t] for k in (0, 1) for t in range(9)
        ]
        for layer, t, value in measured["residual"]:
            assert value == pytest.approx(difference([*kept, f"L{layer}T{t}"]), abs=2e-5)
        columns = range(4 if config.mlp == "none" else 5)
        assert [cell[:2] for cell in measured["component"]] == [
            [k, c] for k in (0, 1) for c in columns
        ]
        for layer, column, value in measured["component"]:
            name = f"L{layer}H{column}" if column < 4 else f"L{layer}MLP"
            assert value == pytest.approx(difference([*kept, name]), abs=2e-5)


def number_in(text: str) -> float:
    """Return the first number in a text of the page, which writes a long minus sign."""
    return float(re.search(r"[+−-]?\d+\.?\d*", text)[0].replace("−", "-"))


def expect_complete(tab, **state) -> None:
    """Wait until all cells were measured with these patches, wrong answer and direction."""
    wanted = "".join(f'[data-{name}="{value}"]' for name, value in state.items())
    tab.wait_for_selector(f"#patching-results[data-complete=true]{wanted}:not([hidden])")


@pytest.mark.slow
def test_a_reader_patches_activations_of_one_text_into_another(finished_run, tmp_path, open_page):
    folder = shutil.copytree(finished_run, tmp_path / "run")
    model, tokenizer, _ = load_run(folder)
    lively(model)
    save_file(float16_weights(model), folder / "attention" / "step_00000012.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    tab = open_page(page.write_page(folder))
    texts = "the glass the glass", "the glass the token"
    clean, corrupted = (torch.tensor(tokenizer.encode(text)) for text in texts)

    def differences(patches, source_text, base_text, answer, wrong):
        source, _ = record(model, source_text, Interventions())
        taps = chain_taps(*(patch(source, name) for name in patches))
        logits = [
            run(model, text, Interventions(), on)
            for text, on in ((clean, {}), (corrupted, {}), (base_text, taps))
        ]
        return [(row[answer] - row[wrong]).item() for row in logits]

    def figures():
        return [number_in(text) for text in tab.locator("#patching-figures b").all_inner_texts()]

    tab.fill("#typed", texts[0])
    # All views are drawn between the click and the event that follows it.
    tab.evaluate("""() => {
      document.querySelector("#patching > summary").click();
      document.getElementById("theme").click();
    }""")
    tab.fill("#corrupted", "the grass")
    expect_text(tab, "#patching-problem", str(len(clean)))
    expect_text(tab, "#patching-problem", str(len("the grass")))
    expect(tab.locator("#patching-results")).to_be_hidden()
    tab.fill("#corrupted", texts[1])
    expect_complete(tab)
    expect(tab.locator("#patching-tokens .differs")).to_have_count(5)

    with torch.no_grad():
        answer = run(model, clean, Interventions(), {}).argmax().item()
        on_corrupted = run(model, corrupted, Interventions(), {})
        on_corrupted[answer] = -torch.inf
        wrong = on_corrupted.argmax().item()
        clean_difference, corrupted_difference, _ = differences([], clean, corrupted, answer, wrong)
    names = tab.locator("#patching-contrast .token").all_inner_texts()
    assert names == [tokenizer.decode([id]).replace(" ", "·") for id in (answer, wrong)]
    shown = [number_in(text) for text in tab.locator("#patching-figures b").all_inner_texts()[:2]]
    assert shown == pytest.approx([clean_difference, corrupted_difference], abs=0.006)

    # A cell, read and then kept with the keyboard.
    tab.focus("#patching-components canvas")
    tab.keyboard.press("ArrowUp")
    with torch.no_grad():
        patched = differences(["L0H0"], clean, corrupted, answer, wrong)[2]
    share = (patched - corrupted_difference) / (clean_difference - corrupted_difference)
    assert number_in(tab.inner_text("#tip .value")) == pytest.approx(share, abs=0.006)
    tab.keyboard.press("Enter")
    expect_complete(tab, patched="L0H0")
    assert figures()[2] == pytest.approx(patched, abs=0.006)
    expect(tab.locator("#patching-next .chip")).to_have_count(5)

    # Another wrong answer, and the other direction.
    tab.check("#slot-wrong")
    tab.fill("#typed-token", "ab")
    tab.press("#typed-token", "Enter")
    expect_text(tab, "#typed-token-problem", "2 tokens")
    other = next(id for id in range(3, 20) if id not in (answer, wrong))
    tab.fill("#typed-token", tokenizer.decode([other]))
    tab.press("#typed-token", "Enter")
    tab.check("#noising")
    expect_complete(tab, patched="L0H0", wrong=other, direction="noising")
    with torch.no_grad():
        expected = differences(["L0H0"], corrupted, clean, answer, other)
    assert figures() == pytest.approx(expected, abs=0.006)

    wait_until(tab, "location.hash.includes('direction=noising')")
    again = open_page(folder / "report.html")
    again.goto(tab.url)
    again.reload()
    expect_complete(again, patched="L0H0", wrong=other, direction="noising")
    assert again.inner_text("#patching-figures") == tab.inner_text("#patching-figures")
    assert again.input_value("#corrupted") == texts[1]
    again.click("#patching-chips [aria-label='remove L0H0']")
    expect(again.locator("#patching-kept")).to_be_hidden()

    # Without heads, a token changes nothing at later ones.
    heads = "L0H0,L0H1,L1H0,L1H1"
    tab.goto(tab.url.replace("text=", f"off={heads}&text=").replace("token=18", "token=17"))
    tab.fill("#corrupted", "the grass the glass")
    expect_text(tab, "#patching-problem", "do not differ")
    expect(tab.locator("#patching-results")).to_be_hidden()
    tab.click("#patching > summary")
    wait_until(tab, "!location.hash.includes('corrupted')")
