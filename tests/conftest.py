"""Fixtures: a small text and model, trained in this process or by a command; pages in Chromium."""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from config import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    TokenizerConfig,
    WandbConfig,
)
from glass.page.html import bundle

# Set before torch is imported, here and in the processes that tests start: models this small run
# faster on one thread.
os.environ["OMP_NUM_THREADS"] = "1"
# Random tests draw few examples per run, and many with --hypothesis-profile=soak. Drawing them may
# be slow on a busy machine; that is no failure.
for profile, examples in (("few", 25), ("soak", 300)):
    settings.register_profile(
        profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("few")

BROWSER_SECONDS = 60  # in which a page does what a test waits for, on a busy machine
ROOT = Path(__file__).parents[1]
TINY = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_kv_head=1",
    "model.n_embd=32",
    "model.block_size=32",
    "batch_size=4",
    "tokenizer=char",
    "log.every=1",
    "compile=false",
    "precision=fp32",
]


def soak(*values):
    """Return a case of a parametrized test that runs only with the soak tests."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark tests that soak, start a command or open a browser as slow, and run slow tests first.

    Soak tests are slow too because `-m "not slow"` replaces the default selection, which excludes
    them. Slow tests come first so that no worker is left alone with them at the end.
    """
    for item in items:
        if item.path.parent.name == "soak":
            item.add_marker("soak")
        starts = {"command", "new_command", "finished_run", "swept", "chromium"} & set(
            item.fixturenames
        )
        if starts or item.get_closest_marker("soak"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return shared(name, make): a folder that make(folder) fills once for all workers.

    Tests only read it; a test that changes something copies it first.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, marker = root / name, root / f"{name}.complete"
        with FileLock(root / f"{name}.lock"):
            if not marker.exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
                folder.mkdir()
                make(folder)
                marker.touch()
        return folder

    return once


@pytest.fixture(scope="session", autouse=True)
def _own_environment(shared):
    """Use a token cache of this session, and W&B only if a test enables it."""
    os.environ["GLASSGPT_CACHE"] = str(shared("cache", lambda folder: None))
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.pop("WANDB_API_KEY", None)
    # Workers of pytest-xdist ignore Ctrl-C, and so would the processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:  # it gets SIGINT if it takes seconds to end
        signal.signal(signal.SIGINT, signal.SIG_IGN)


WORDS = "the glass model attends to every token before it and writes what follows é—λ"


def write_text(folder: Path) -> None:
    rng = random.Random(0)
    words = WORDS.split()
    lines = [" ".join(rng.choices(words, k=rng.randrange(4, 12))) for _ in range(270)]
    (folder / "words.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def text_file(shared) -> Path:
    """A text of about 12,000 characters made of a few repeated words."""
    return shared("text", write_text) / "words.txt"


@pytest.fixture
def tiny(text_file, tmp_path) -> Config:
    """A run of one second: 2 layers, 2 heads that share 1 key/value head, 12 steps."""
    return Config(
        run_dir=str(tmp_path / "run"),
        device="cpu",
        precision="fp32",
        compile=False,
        max_steps=12,
        batch_size=4,
        model=ModelConfig(
            vocab_size=None, block_size=32, n_layer=2, n_head=2, n_kv_head=1, n_embd=32
        ),
        data=DataConfig(source="text", path=str(text_file)),
        tokenizer=TokenizerConfig(name="char"),
        log=LogConfig(every=1),
        eval=EvalConfig(every=4),
        checkpoint=CheckpointConfig(every=4),
        attention=AttentionConfig(every=6, tokens=16),
        wandb=WandbConfig(mode="disabled"),
    )


@pytest.fixture
def train_in_process():
    """Return train_in_process(config, resume=True, …), which returns the best validation loss."""
    import cli
    import train
    from interop import read_starting_model

    def run(config: Config, **changes) -> float:
        overrides = [f"{key}={value}" for key, value in changes.items()]
        job = cli.Job(replace(config, **changes), overrides)
        return train.run(cli.configure(job, read_starting_model))

    return run


@pytest.fixture
def run_hydra(monkeypatch):
    """Return run_hydra(*argv, task=…): the exit status of train.py in this process.

    Hydra calls the task instead of `train.main`.
    """
    import hydra

    import cli
    import train

    def run(*argv: str, task: Callable | None = None) -> int:
        main = hydra.main(version_base="1.3", config_path=str(cli.CONFIGS), config_name="config")
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["train.py", *argv])
            patch.setattr("signal.signal", lambda *_: None)  # pytest's own handlers stay
            for variable in ("HYDRA_FULL_ERROR", "PYTHONPATH", "WANDB_RUN_GROUP"):
                patch.setenv(variable, "")
            try:
                with cli.hydra_command():
                    main(task or train.main)()
            except SystemExit as e:
                return e.code or 0
        return 0

    return run


@pytest.fixture(scope="session")
def finished_run(text_file, shared) -> Path:
    """A finished run of `processes.tiny_arguments` with a checkpoint of each step.

    All tests share it; a test that changes something copies it first.
    """
    from processes import run_to_end, tiny_arguments

    argv = tiny_arguments(text_file, "checkpoint.every=1", "checkpoint.keep=99")
    return shared("finished_run", lambda folder: run_to_end(folder, *argv)) / "run"


@pytest.fixture
def command(tmp_path):
    """Return command("train.py", "max_steps=3", env=…): `processes.run` in a new folder."""
    from processes import run

    return functools.partial(run, tmp_path)


@pytest.fixture
def new_command(tmp_path):
    """Return `command` with a new interpreter, for tests of how a program starts."""

    def run(script: str, *args: str, env: dict | None = None, **more):
        environment = {**os.environ, **(env or {})}  # None removes a variable
        return subprocess.run(
            [sys.executable, str(ROOT / script), *args],
            cwd=tmp_path,
            capture_output=True,
            env={key: value for key, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            timeout=600,
            text=True,
            encoding="utf-8",
            **more,
        )

    return run


@contextmanager
def foreign_torch_settings() -> Iterator[None]:
    """Set what a notebook may have set, each of which would change or prevent a computation."""
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def offline_wandb(monkeypatch) -> Iterator[None]:
    """Set W&B's own mode to offline. W&B keeps its settings in a process until its teardown."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield
    wandb.teardown()


@contextmanager
def mounted(path: Path, *arguments: str | Path) -> Iterator[Path]:
    """Mount a device at a folder, with these arguments of `mount`."""
    path.mkdir(exist_ok=True)
    mount = ["mount", *arguments, path]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def small_disk(path: Path, size: str) -> AbstractContextManager[Path]:
    """Mount a disk of that size, in memory, as a folder."""
    return mounted(path, "-t", "tmpfs", "-o", f"size={size}", "none")


def read_only(path: Path) -> AbstractContextManager[Path]:
    """Let nobody write below a folder, not even root."""
    return mounted(path, "-o", "bind,ro", path)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A folder on a disk of 16 kB."""
    with small_disk(tmp_path / "disk", "16k") as path:
        yield path


@pytest.fixture
def test_data() -> Path:
    """The folder with real texts that GLASSGPT_TEST_DATA names."""
    if "GLASSGPT_TEST_DATA" not in os.environ:
        pytest.skip("GLASSGPT_TEST_DATA, the folder with real texts, is not set")
    return (ROOT / os.environ["GLASSGPT_TEST_DATA"]).resolve()


@pytest.fixture(scope="session")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not shutil.which("chromium"):
        pytest.skip("there is no chromium on this machine")
    api.expect.set_options(timeout=1000 * BROWSER_SECONDS)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine_tab(chromium):
    """Return a tab in which tests reach modules of the page's JavaScript as `engine`."""
    tab = chromium.new_page()
    tab.add_script_tag(content=bundle(ROOT / "tests" / "glass" / "page" / "engine_in_page.js"))
    return tab


def wait_until(tab, expression: str) -> None:
    """Wait until a JavaScript expression is true in a page, which each frame checks.

    Playwright's own wait_for_function is blocked by the page's content security policy.
    """
    tab.evaluate(
        f"""new Promise((resolve, reject) => {{
          setTimeout(reject, {1000 * BROWSER_SECONDS}, new Error("it did not come true"));
          const check = () => ({expression}) ? resolve() : requestAnimationFrame(check);
          check();
        }})"""
    )


def wait_for_frames(tab) -> None:
    """Wait until a page has drawn what it was about to draw."""
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def open_page(chromium):
    """Return open_page(path, width=…), which opens a page from its file, offline.

    An error or a warning in its console, or a request to the network, fails the test.
    """
    from playwright.sync_api import expect

    errors, contexts = [], []

    def note_message(message):
        if message.type in ("error", "warning"):
            errors.append(message.text)

    def note_request(request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            errors.append(request.url)

    def open_page(path: Path, width: int = 1280, **context):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **context))
        contexts[-1].set_offline(True)
        tab = contexts[-1].new_page()
        tab.on("console", note_message)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", note_request)
        tab.goto(path.as_uri())
        expect(tab.locator("#loading")).to_have_count(0)
        wait_for_frames(tab)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not errors
