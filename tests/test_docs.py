"""The commands of README.md and the tutorial, and the Python code of docs/, with small sizes."""

import os
import re
import runpy
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from explore_process import exploring
from processes import run, run_to_end

import train
from interop import load, save_hf

pytestmark = pytest.mark.slow

# Models and data that are not on this machine.
MISSING = ("data=tinystories", "init_from=gpt2", "init_from=models/", "EleutherAI/")
SMALL = [
    "max_steps=2",
    "batch_size=4",
    "model.n_layer=1",
    "model.n_head=4",
    "model.n_kv_head=1",
    "model.n_embd=32",
    "model.block_size=32",
    "compile=false",
    "precision=fp32",
    "eval.every=0",
    "attention.every=0",
    "log.every=1",
]


def commands() -> list:
    """Return the commands of the shell blocks as cases of a parametrized test."""
    pages = (ROOT / "README.md", ROOT / "docs" / "tutorial.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    return [
        pytest.param(line.split(" #")[0], marks=[pytest.mark.soak] * (" -m " in line))
        for line in lines
        if line.startswith("python ") and not any(f" {start}" in line for start in MISSING)
    ]


def small(argv: list[str]) -> list[str]:
    """Return the arguments of a training run with small sizes and a small text."""
    if {"resume=true", "eval_only=true"} & {*argv}:
        return argv
    sizes = {size.partition("=")[0]: size for size in SMALL}
    kept = [a for a in argv if a.partition("=")[0] not in sizes or "," in a]
    typed = {argument.partition("=")[0] for argument in kept}
    is_sweep = "sweep" in typed  # which says what the models are
    names_text = {"data", "data.path", "notes/", "poem.txt"} & typed
    text = [] if names_text else ["data=text", "data.path=notes"]
    # A small vocabulary of bytes: any prompt can be encoded.
    tokens = [] if {"tokenizer", "sweep"} & typed else ["tokenizer.vocab_size=300"]
    return [
        *kept,
        *(
            size
            for name, size in sizes.items()
            if name not in typed and not (is_sweep and name.startswith("model."))
        ),
        *text,
        *tokens,
    ]


@pytest.fixture(scope="module")
def place(shared, text_file) -> Path:
    """A folder with the files and the run that the commands name."""

    def make(folder: Path) -> None:
        (folder / "notes").mkdir()
        shutil.copy(text_file, folder / "notes" / "a.md")
        text = text_file.read_text(encoding="utf-8")
        for name in ("poem.txt", "notes.txt"):
            (folder / name).write_text(text[:4000], encoding="utf-8")
        run_to_end(folder, *small(["run_dir=runs/mine", "checkpoint.every=1", "checkpoint.keep=2"]))
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / "first")
        for step in (1, 2):
            model, tokenizer = load(folder / "runs" / "mine", step)
            save_hf(model, folder / "output_dir" / f"checkpoint-{step}", tokenizer)

    return shared("place", make)


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_or_the_tutorial_succeeds(line, place, tmp_path):
    _, script, *argv = shlex.split(line)
    folder = shutil.copytree(place, tmp_path / "place")
    if script == "train.py":
        argv = small(argv)
        if "max_steps=2" in argv:  # a new run
            shutil.rmtree(folder / "runs")
    if script == "explore.py":
        (logs := tmp_path / "logs").mkdir()
        with exploring(logs, *argv, fault=partial(os.chdir, folder)) as explorer:
            assert explorer.data()["kind"] == "explore"
        return
    done = run(folder, script, *argv)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page, name, start",
    [
        ("settings.md", "loss", ""),
        ("attention.md", "corrupted", ""),
        ("attention.md", "corrupted", "init_from=base"),  # a model with begin-of-text
    ],
)
def test_the_python_code_of_a_page_runs(page, name, start, place, tmp_path, monkeypatch):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "\n".join(blocks)
    words = (('f" {x}" for', "4 for"), ('f" {y}" for', "5 for"), ('" line")', "-1)"))
    for word, token in words:
        code = code.replace(word, token)  # a small vocabulary lacks these words
    monkeypatch.chdir(shutil.copytree(place, tmp_path / "place"))
    train_from = train.train_from
    monkeypatch.setattr(train, "train_from", lambda *argv: train_from(*small([*argv])))
    if page == "attention.md":  # which reads maps and induction heads of a run of two layers
        shutil.rmtree("runs")
        changed = ("model.n_layer", "attention.every")
        argv = [a for a in small(["run_dir=runs/mine"]) if not a.startswith(changed)]
        argv += ["model.n_layer=2", "attention.every=2", "attention.tokens=16"]
        if start:
            monkeypatch.syspath_prepend(ROOT / "tests" / "interop")
            from hf_models import write_model_and_tokenizer

            write_model_and_tokenizer("llama", Path("base"))
            argv = [a for a in argv if not a.startswith(("model.n_", "tokenizer"))] + [start]
        train_from(*argv)
    script = Path("example.py")
    script.write_text(code, encoding="utf-8")
    variables = runpy.run_path(str(script))
    assert name in variables
    if start:
        assert (variables["clean"][0, 0], variables["tokens"][0, 0]) == (1, 1)


def test_reliability_names_files_of_tests_that_exist():
    table = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:\.\./[\w/]*)?test_\w+\.py)`", table)
    assert len(names) > 10
    for name in names:
        assert (ROOT / "tests" / "faults" / name).exists(), name


@pytest.mark.soak
def test_every_cell_of_the_notebook_runs():
    """It asserts that formulas and code agree."""
    path = ROOT / "docs" / "attention.ipynb"
    notebook = pytest.importorskip("nbformat").read(path, as_version=4)
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
