"""Response times of the page that `python explore.py` serves, in Chromium on this machine.

    python -m benchmarks.exploring model=FILE.gguf [device=auto] [rounds=5]

A text is written into the page's field, and the clock runs until the frame after its attention maps
are drawn: texts of 32 and 256 tokens that share no beginning with the one before, and one token
more at their ends. Each is written half a second after the picture before it. Patching is timed
from the request to the last head of a text of 16 tokens, of which all but the first differ. It
needs playwright and Chromium.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, read_options, run_command
from common.errors import UserError

WORDS = ("the", "cat", "sat", "on", "mat", "and", "saw", "one", "red", "bird", "near", "an", "old")
LENGTHS = (32, 256)  # tokens
PATCHED_TOKENS = 16
PAUSE_MILLISECONDS = 500  # before a text is written
# Write a text, and return the milliseconds until the frame after it is shown.
TYPE_TEXT = """text => new Promise(resolve => {
  const field = document.getElementById("typed");
  const status = document.getElementById("own-text-status");
  const start = performance.now();
  const observer = new MutationObserver(() => {
    if (!status.textContent.endsWith(" ms")) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
  });
  observer.observe(status, { childList: true });
  field.value = text;
  field.dispatchEvent(new Event("input"));
})"""
# Patch every head and MLP, and return the milliseconds until the first and the last answer.
PATCH_HEADS = """async request => {
  const start = performance.now();
  const response = await fetch("ask", { method: "POST", body: JSON.stringify(request) });
  let first = null;
  const reader = response.body.getReader();
  let text = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    first ??= performance.now() - start;
    text = new TextDecoder().decode(read.value);
  }
  if (!text.includes('"answer"')) throw new Error(text);
  return [first, performance.now() - start];
}"""


@dataclass
class ExploringOptions:
    """Options of this benchmark."""

    model: str = ""
    device: str = "auto"
    rounds: int = 5


@contextmanager
def open_explorer(model: str, device: str = "auto") -> Iterator[str]:
    """Run explore.py, and yield the address of its page.

    Raises:
        UserError: If it ends at once; it has printed why.
    """
    command = [sys.executable, "explore.py", model, f"device={device}", "port=0", "browser=false"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise UserError(f"model={model} cannot be explored: see above")
        yield address
    finally:
        process.terminate()
        process.wait()


def measure_page(tab: Any, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each action on an open page."""
    times: dict[str, list[float]] = {}

    def ids_of(number: int, length: int) -> list[int]:
        """Return a text of some tokens that begins with the word of a number."""
        text = " ".join((WORDS[number:] + WORDS[:number]) * length)
        return tab.evaluate("text => glass.encode(text)", text)[:length]

    for length in LENGTHS:
        for number in range(rounds + 1):
            ids = ids_of(number + 1, length + 1)
            texts = [
                tab.evaluate("ids => glass.decode(ids)", ids[:n]) for n in (length, length + 1)
            ]
            for name, text in zip((f"{length} tokens", f"one token after {length}"), texts):
                tab.wait_for_timeout(PAUSE_MILLISECONDS)
                milliseconds = tab.evaluate(TYPE_TEXT, text)
                if number:  # the first one warms up
                    times.setdefault(name, []).append(milliseconds)

    clean, other = ids_of(1, PATCHED_TOKENS), ids_of(2, PATCHED_TOKENS)
    request = {
        "request": "patchCells",
        "kind": "component",
        "ids": clean,
        "corrupted": [clean[0], *other[1:]],
        "step": tab.evaluate("JSON.parse(document.getElementById('data').textContent).step"),
        "off": [],
        "hidden": [],
        "i": PATCHED_TOKENS - 1,
        "answer": clean[1],
        "wrong": other[1],
        "direction": "denoising",
        "patched": [],
    }
    for _ in range(rounds):
        first, last = tab.evaluate(PATCH_HEADS, request)
        times.setdefault("first patched head", []).append(first)
        times.setdefault("all patched heads", []).append(last)
    return {name: round(median(some), 1) for name, some in times.items()}


def main(argv: list[str]) -> dict[str, float]:
    """Measure a model's page, and print and return the median milliseconds of each action."""
    from playwright.sync_api import sync_playwright

    options = read_options(argv, ExploringOptions)
    if not options.model:
        raise UserError("model= is missing: name a model as for python explore.py")
    with open_explorer(options.model, options.device) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.goto(address)
        tab.locator("#own-text-status", has_text=" ms").wait_for()
        results = measure_page(tab, options.rounds)
        browser.close()
    for name, milliseconds in results.items():
        print(f"{name:<22} {milliseconds:>9,.1f} ms")
    return results


if __name__ == "__main__":
    run_command(main, __doc__)
