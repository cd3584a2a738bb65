"""What docs/ shows of real runs, made anew: tables, pages, pictures. 15 minutes on two cores.

    python -m benchmarks.docs [only=sweep,induction,notebook,studies] [sweeps=DIR]

The studies take an hour and a half more. sweeps= is a folder that has or gets theirs.

Needs playwright and Chromium. The sentences around them are not written anew: it prints what they
have to agree with.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import nbclient
import nbformat

from benchmarks import ROOT, chosen, options
from report import embedded_model, page

DOCS = ROOT / "docs"
EXAMPLE = 4_500_000  # bytes of weights in the example's page, which is kept with the code
STUDIES = {  # and the charts of each that are shown
    "depth": "copying_gain|tokens_at_emergence/induction|heads/previous",
    "kv": "(copying_gain|tokens_at_emergence/induction|heads/induction)-(0|1|cache)$",
    "ngrams": "copying_gain|heads/",
    "repeats": "(copying_gain|tokens_at_emergence/induction|heads/induction)",
    "optimizer": "(copying_gain|tokens_at_emergence/induction|heads/previous_token)",
}
TYPED = "class Reader:\n    def read_line(self):\n        return self.read_line"


def command(folder: Path, *argv: str) -> str:
    """Run a command of the repository in a folder; what it says."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    return done.stdout


def picture(
    path: Path, out: str, size: tuple[int, int], part: str = "", text: str = "", only: str = ""
) -> None:
    """A picture of a page, or of a part of it, in a window of that size, with a text typed; of a
    sweep's charts those `only` whose names match."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": size[0], "height": size[1]})
        tab.goto(path.as_uri())
        tab.wait_for_timeout(2000)
        if text:
            tab.fill("#typed", text)
            tab.wait_for_timeout(2000)
        if only:
            tab.evaluate(
                """only => document.querySelectorAll("#formed-charts > div").forEach(
                         chart => { chart.hidden ||= !new RegExp(only).test(chart.id); })""",
                only,
            )
        tab.add_style_tag(content="#steps, #legend { position: static }")  # nothing lies over it
        (tab.locator(part) if part else tab).screenshot(path=DOCS / out)
        browser.close()


def of_sweep(folder: Path) -> None:
    """The table of docs/sweeps.md, and the page of that sweep."""
    said = command(
        folder,
        str(ROOT / "train.py"),
        "-m",
        "sweep=kv_heads",
        "wandb.mode=disabled",
        "hydra.sweep.dir=kv_heads",
    )
    table = re.search(r"^n_kv_head .*\n─+\n(?:.+\n)+", said, re.MULTILINE)[0]
    text = (DOCS / "sweeps.md").read_text(encoding="utf-8")
    text = re.sub(r"(?<=```\n)n_kv_head .*\n─+\n(?:.+\n)+(?=```)", lambda _: table, text)
    (DOCS / "sweeps.md").write_text(text, encoding="utf-8")
    picture(folder / "kv_heads" / "sweep.html", "sweep.png", (1280, 1730))
    print(said)


def of_induction(folder: Path) -> None:
    """The pages of docs/example, and the pictures of README.md and docs/attention.md."""
    run = ROOT / "runs" / "induction"  # where the notebook looks for it; refused if it is there
    said = command(
        ROOT, "train.py", "experiment=induction", "run_dir=runs/induction", "wandb.mode=disabled"
    )
    embedded_model.MAX_WEIGHTS_BYTES = EXAMPLE
    shutil.copy(page.write_page(run), DOCS / "example" / "run.html")
    shutil.copy(max(run.glob("attention/*.png")), DOCS / "attention.png")
    command(
        ROOT,
        "sample.py",
        "run_dir=runs/induction",
        "max_new_tokens=60",
        "prompt=class BaseStream:\n    def read(self, size=-1):",
        f"attention={DOCS / 'example' / 'prompt.html'}",
    )
    picture(run / "report.html", "page.png", (1400, 1040), text=TYPED)
    picture(run / "report.html", "heads.png", (1316, 1062), "#heads")
    print(said)


def of_studies(folder: Path) -> None:
    """The tables and figures of docs/findings.md, each of a sweep's folder as it is there."""
    text = (DOCS / "findings.md").read_text(encoding="utf-8")
    for name, shown in STUDIES.items():
        sweep = folder / f"study_{name}"
        if not sweep.exists():
            command(
                folder,
                str(ROOT / "train.py"),
                "-m",
                f"sweep=study_{name}",
                "wandb.mode=disabled",
                f"hydra.sweep.dir={sweep}",
            )
        said = command(folder, str(ROOT / "sweeps.py"), str(sweep))
        table = re.search(r"^\S.*\n─+\n(?:.+\n)+", said, re.MULTILINE)[0]
        before, after = text.split(f"study_{name}`\n\n```\n")
        text = f"{before}study_{name}`\n\n```\n{table}{after[after.index('```') :]}"
        picture(
            sweep / "sweep.html", f"study_{name}.png", (1200, 1500), "#formed-charts", only=shown
        )
        print(said)
    (DOCS / "findings.md").write_text(text, encoding="utf-8")


def of_notebook(folder: Path) -> None:
    """docs/attention.ipynb, with that run."""
    notebook = nbformat.read(DOCS / "attention.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(DOCS)}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # the times of its run
    nbformat.write(notebook, DOCS / "attention.ipynb")


def main() -> None:
    parts = {
        "sweep": of_sweep,
        "induction": of_induction,
        "notebook": of_notebook,
        "studies": of_studies,
    }
    given = options(sys.argv[1:], __doc__, only="sweep,induction,notebook", sweeps="")
    with tempfile.TemporaryDirectory() as made:
        for make in chosen(given["only"], parts).values():
            make(Path(given["sweeps"] or made))
    print(f"made on {date.today():%d %B %Y}")


if __name__ == "__main__":
    main()
