"""The commands of the README (and, with the soak tests, of docs/) run, with small sizes."""

import gzip
import json
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from explore_process import exploring
from processes import run, run_to_end

import train
from config import AttentionConfig, CheckpointConfig, EvalConfig, TokenizerConfig
from interop import save_hf

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Commands of other programs, and commands with tests of their own.
SKIPPED_PREFIXES = (
    "pip ",
    "torchrun ",
    "srun ",
    "export ",
    "head=",
    "#",
    "hf ",
    "wandb ",
    "vllm ",
    "transformers ",
    "ollama ",
    "python -m pytest",
    "python -m benchmarks.",
    "lm_eval ",
    "llama-",
)
FROM_THE_HUB = ("data=tinystories", "data=hf", "init_from=Qwen/", "init_from=gpt2")
# Files of another index, and plugins of packages that are not required.
MISSING = ("init_from=models/", "hydra/launcher=", "hydra/sweeper=")
OFFLINE_ERRORS = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")  # of huggingface_hub
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
CHOOSES_TOKENS = ("tokenizer", "tokenizer.vocab_size", "init_from", "experiment", "sweep")
VOCABULARY = ["tokenizer.vocab_size=300"]  # of bytes: any prompt can be encoded


def commands() -> dict[str, int]:
    """Return the commands of the shell blocks, each with the index of the first page that has it.

    Lines that a backslash continues are joined. Index 0 is the README.
    """
    pages = {}
    for place, page in enumerate(PAGES):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not command.startswith(SKIPPED_PREFIXES):
                    pages.setdefault(command, place)
    return pages


@pytest.fixture(scope="module")
def place(shared, text_file) -> Path:
    """A folder with all files and runs that the commands name."""
    return shared("place", lambda folder: make_files(folder, text_file))


def make_files(folder: Path, text_file: Path) -> None:
    text = text_file.read_text(encoding="utf-8")
    for name in ("notes", "poems"):
        (folder / name).mkdir()
        (folder / name / "a.md").write_text(text, encoding="utf-8")
    for name in ("poem.txt", "notes.txt"):
        (folder / name).write_text(text[:4000], encoding="utf-8")
    with gzip.open(folder / "posts.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": line}) + "\n" for line in text.splitlines())
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "big.yaml").write_text(
        "# @package _global_\nmodel:\n  n_layer: 1\n"
    )
    notes = ["data=text", "data.path=notes"]
    run_to_end(folder, *small(["run_dir=runs/mine", *notes]))
    run_to_end(folder, *small(["run_dir=runs/llama", "model=llama_small", *notes]))
    run_to_end(folder, "run_dir=runs/llama", "to=FOLDER", script="interop/__main__.py")
    shutil.copytree(folder / "FOLDER", folder / "exported")
    run_to_end(folder, *small(["-m", "seed=1,2", "hydra.sweep.dir=runs/rates", *notes]))


def small(argv: list[str]) -> list[str]:
    """Return the arguments of a training run with small sizes and a small text."""
    typed = {argument.partition("=")[0] for argument in argv}
    if {"resume=true", "eval_only=true"} & {*argv}:
        return argv
    sizes = {size.partition("=")[0]: size for size in SMALL}
    if {"init_from", "sweep"} & typed:  # these say what the model is
        sizes = {
            key: size for key, size in sizes.items() if not key.startswith("model.") or key in typed
        }
    swept = {key for key in typed if any("," in a for a in argv if a.startswith(f"{key}="))}
    kept = [a for a in argv if a.partition("=")[0] not in sizes or a.partition("=")[0] in swept]
    text = [] if {"data", "init_from"} & typed else ["data=text", "data.path=notes"]
    names = [] if {*typed} & {*CHOOSES_TOKENS} else VOCABULARY
    if "data=synthetic" in argv:  # a task chooses both
        names = []
        sizes.pop("model.block_size", None)
    return [*kept, *(size for key, size in sizes.items() if key not in swept), *text, *names]


def names_any(line: str, starts: Sequence[str]) -> bool:
    """Return whether an argument of a command begins with one of these."""
    return any(f" {start}" in line for start in starts)


def lines(from_the_hub: bool) -> list:
    """Return the commands that need the hub, or all others, as cases of a parametrized test."""
    return [
        pytest.param(line, marks=[pytest.mark.soak] * (page > 0 or "train.py -m" in line))
        for line, page in commands().items()
        if names_any(line, FROM_THE_HUB) == from_the_hub
    ]


@pytest.mark.parametrize("line", lines(from_the_hub=True))
def test_a_documented_command_gets_as_far_as_the_download(line, new_command, tmp_path):
    _, script, *argv = shlex.split(line)
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = new_command(script, *argv, env=env)
    assert done.returncode == 1, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and any(name in error for name in OFFLINE_ERRORS), error


@pytest.mark.parametrize("line", lines(from_the_hub=False))
def test_a_documented_command_succeeds(line, place, tmp_path, test_data):
    command, *_ = line.partition(" > ")
    program, first, *argv = shlex.split(command)
    assert program in ("python", "ls"), f"{line}: unknown program"
    if names_any(line, MISSING):
        pytest.skip("needs files or packages that are not required")
    folder = tmp_path / "place"
    shutil.copytree(place, folder)
    shutil.copytree(place / "runs" / "mine", tmp_path / "other" / "runs" / "big")
    if first == "-m":
        module, *argv = argv
        path = module.replace(".", "/")
        script = f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__main__.py"
    else:
        script = first
    if script == "train.py" and not {"--help", "--cfg"} & {*argv}:
        argv = small(argv)
    argv = [argument.replace("=RUN", "=runs/llama") for argument in argv]
    if "data=shakespeare" in argv:
        argv.append(f"data.path={test_data / 'data' / 'tinyshakespeare.txt'}")
    if not {"resume=true", "resume=auto"} & {*argv}:  # remove the folders that it creates
        for key, _, path in (argument.partition("=") for argument in argv):
            if key in ("hydra.sweep.dir", "to") or (key == "run_dir" and "max_steps=2" in argv):
                shutil.rmtree(folder / path, ignore_errors=True)
    if "data.path=." in argv:
        folder = folder / "notes"
    if script == "explore.py":
        (logs := tmp_path / "logs").mkdir()
        with exploring(logs, *argv, fault=partial(os.chdir, folder)) as explorer:
            assert explorer.data()["kind"] == "explore"
        return
    done = run(folder, script, *argv, env={"TIKTOKEN_CACHE_DIR": str(test_data / "tiktoken_cache")})
    assert done.returncode == 0, done.stderr


def test_the_documented_python_code_trains(place, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copy(place / "notes" / "a.md", tmp_path / "notes.txt")
    monkeypatch.chdir(tmp_path)
    train_from = train.train_from
    monkeypatch.setattr(train, "train_from", lambda *argv: train_from(*small([*argv])))
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    names = runpy.run_path(str(script))
    assert names["loss"] > 0 and names["model"].config.n_layer == 1


@pytest.fixture
def patching(tiny, train_in_process, tmp_path, monkeypatch) -> SimpleNamespace:
    """The names of the Python code of docs/attention.md, which ran on a run of 60 steps."""
    config = replace(
        tiny,
        run_dir=str(tmp_path / "runs" / "mine"),
        model=replace(tiny.model, norm="rmsnorm", position="rope", mlp="swiglu"),
        tokenizer=TokenizerConfig(name="bpe", vocab_size=300),
        attention=AttentionConfig(every=60, tokens=16),
        max_steps=60,
    )
    train_in_process(config, eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=0))
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(block for block in blocks if "transformer_lens" not in block)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(**runpy.run_path(str(script)))


def test_documented_patches_give_the_logits_of_hooks_in_transformers(patching, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, clean, corrupted, at = (
        getattr(patching, name) for name in ("model", "clean", "corrupted", "changed")
    )
    save_hf(model, tmp_path / "exported")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    layers = peer.model.layers

    def run_with_hook(tokens, module, hook):
        handle = module.register_forward_pre_hook(hook)
        logits = peer(tokens).logits
        handle.remove()
        return logits

    d_v = model.config.value_dim
    for taps, module, part in (
        (patching.patch_head(1, 1), layers[1].self_attn.o_proj, (..., slice(d_v, 2 * d_v))),
        (patching.patch_residual(0, at), layers[1], (slice(None), at)),
        (patching.patch_residual(0, -1), layers[1], (slice(None), -1)),
    ):
        inputs = []

        def read(module, args, inputs=inputs):
            inputs.append(args[0])

        def patch(module, args, inputs=inputs, part=part):
            patched = args[0].clone()
            patched[part] = inputs[0][part]
            return (patched, *args[1:])

        with torch.no_grad():
            run_with_hook(clean, module, read)
            expected = run_with_hook(corrupted, module, patch)
            patched = model.run_with_taps(corrupted, taps)
            unpatched = model.run_with_taps(corrupted, {})
        assert (patched - expected).abs().max() < 1e-5 < 1e-3 < (patched - unpatched).abs().max()


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_that_exist():
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not path.startswith("http"):
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
