"""Activation patching in the page, in Chromium; test_agreement.py checks the numbers."""

import re
import shutil

import pytest
import torch
from conftest import wait_until
from models import captured_with, lively
from pages import expect_text
from playwright.sync_api import expect
from run_folders import load_run
from safetensors.torch import save_file

from glass.heads.measure.snapshot_files import float16_weights
from glass.page import write as page
from run.run_dir import RunDir


def run(model, ids, source=None) -> torch.Tensor:
    """Return the last logits (V,), with the output of L0H0 from the pass over another text."""
    taps = {}
    if source is not None:

        def patch(heads):  # (B, T, H, d_v)
            heads = heads.clone()
            heads[:, :, 0] = captured_with(model, source).heads[0][:, :, 0]
            return heads

        taps = {("heads", 0): patch}
    x = model.run_blocks(ids[None], entry=(0, model.embed(ids[None])), taps=taps)
    return model.head(model.norm(x))[0, -1]


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
    tab = open_page(page.write_page(RunDir(folder)))
    texts = "the glass the glass", "the glass the token"
    clean, corrupted = (torch.tensor(tokenizer.encode(text)) for text in texts)

    def differences(answer, wrong, source=clean, base=corrupted):
        passes = [run(model, clean), run(model, corrupted), run(model, base, source)]
        return [(logits[answer] - logits[wrong]).item() for logits in passes]

    def figures():
        texts = tab.locator("#patching-figures b").all_inner_texts()
        return [number_in(text) for text in texts if text]  # one may be invisible

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

    # Texts beyond the context of 32 tokens are compared as they are, and then cut
    long = "the glass " * 4
    tab.fill("#typed", long)
    for changed, problem in (
        (long + "as", "42"),  # as long when it is cut
        (long, "same"),
        ("the grass " + long[10:], "not read"),
    ):
        tab.fill("#corrupted", changed)
        expect_text(tab, "#patching-problem", problem)
    tab.fill("#corrupted", long[:20] + "the grass " + long[30:])
    expect_complete(tab)
    expect_text(tab, "#patching-cut", "32 tokens, the last of 40")
    expect(tab.locator("#patching-tokens .differs")).to_have_count(1)

    tab.fill("#typed", texts[0])
    tab.fill("#corrupted", texts[1])
    expect_complete(tab)
    expect_text(tab, "#patching-cut", "")
    expect(tab.locator("#patching-tokens .differs")).to_have_count(5)

    with torch.no_grad():
        answer = run(model, clean).argmax().item()
        on_corrupted = run(model, corrupted)
        on_corrupted[answer] = -torch.inf
        wrong = on_corrupted.argmax().item()
        on_clean, on_corrupted, patched = differences(answer, wrong)
    names = tab.locator("#patching-contrast .token").all_inner_texts()
    assert names == [tokenizer.decode([id]).replace(" ", "·") for id in (answer, wrong)]
    assert figures()[:2] == pytest.approx([on_clean, on_corrupted], abs=0.006)

    # A cell, read and then kept with the keyboard.
    tab.focus("#patching-components canvas")
    tab.keyboard.press("ArrowUp")
    share = (patched - on_corrupted) / (on_clean - on_corrupted)
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
        expected = differences(answer, other, corrupted, clean)
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
    expect_text(tab, "#patching-interventions", heads.replace(",", ", "))
    expect(tab.locator("#patching-results")).to_be_hidden()
    tab.click("#patching > summary")
    wait_until(tab, "!location.hash.includes('corrupted')")
