"""Commands run where a notebook or an editor has replaced the standard streams, and in threads."""

import io
import os
import shutil
import signal
import sys
import threading
from functools import partial

import pytest
from conftest import TINY

import cli
import interop.__main__
import sample
import train
from common.errors import UserError
from common.signals import STOP_SIGNALS, set_handlers
from common.terminal import exit_on_error, run_main
from sweeps import jobs
from sweeps.__main__ import main as summarize_or_compare
from sweeps.note import JobNote, write_job


class Notebook(io.TextIOBase):
    """A stream without a file, as Jupyter's and IDLE's."""

    encoding = "UTF-8"

    def __init__(self):
        self.texts = []

    def write(self, text):
        self.texts.append(text)

    def getvalue(self):
        return "".join(self.texts)


class Latin1(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="latin-1", write_through=True)

    def getvalue(self):
        return self.buffer.getvalue().decode("latin-1")


def closed():
    """Return what Python makes of a standard stream that is closed: None."""


STREAMS = [Notebook, Latin1, closed]


def run_command(argv: list[str]) -> int:
    """Run `python ARGV` in this process and thread; return its exit status."""
    name, *sys.argv[1:] = argv
    try:
        if name == "train.py":
            exit_on_error(partial(train.main, cli.read_request(train.read_starting_model)))
        elif name == "sample.py":
            run_main(sample.main, cli.sample_help)
        elif name == "sweeps":
            run_main(summarize_or_compare, str)
        else:
            run_main(interop.__main__.main, interop.__main__.export_help)
    except SystemExit as e:
        return e.code or 0
    return 0


def in_thread(function, *args):
    """Call a function in a new thread, and return its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


QUICK = [*TINY, "data=text", "max_steps=1", "attention.tokens=8"]


@pytest.fixture(scope="module")
def trained(text_file, shared):
    """A folder with a run and a sweep of one step."""

    def make(folder):
        settings = [*QUICK, f"data.path={text_file}"]
        train.train_from(*settings, f"run_dir={folder / 'run'}")
        job = folder / "sweep" / "seed=1"
        shutil.copytree(folder / "run", job)
        write_job(job, JobNote({"seed": "1"}, ["seed"]))

    return shared("streams", make)


@pytest.fixture
def try_command(tmp_path, monkeypatch):
    """Return try_command(argv, make, thread), which checks a command with streams of `make`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script"])
    for name in ("HYDRA_FULL_ERROR", "PYTHONPATH", "WANDB_RUN_GROUP"):
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(argv, make, text, thread=False, status=0):
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        out, err = make(), make()
        with monkeypatch.context() as replaced:
            for name, stream in (("stdout", out), ("stderr", err), ("stdin", None)):
                replaced.setattr(sys, name, stream)
            returned = in_thread(run_command, argv) if thread else run_command(argv)
        set_handlers(handlers)
        printed = text if make is closed else out.getvalue() + err.getvalue()
        assert returned == status and text in printed, printed

    return run


@pytest.mark.parametrize("make", STREAMS)
@pytest.mark.slow
def test_commands_run_with_replaced_streams(make, try_command, trained):
    run = f"run_dir={trained / 'run'}"
    try_command(["train.py", "--help"], make, "max_steps=")
    try_command(["train.py", "max_steps=0"], make, "max_steps=0", thread=True, status=1)
    try_command(["sample.py", run, "prompt=the", "max_new_tokens=2"], make, "2 tokens")
    try_command(["interop", run, "to=exported"], make, "exported", thread=True)
    try_command(["sweeps", str(trained / "sweep")], make, "sweep.csv")


@pytest.mark.slow
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("make", [Notebook, pytest.param(closed, marks=pytest.mark.soak)])
def test_training_runs_with_replaced_streams(make, thread, try_command, text_file):
    settings = [*QUICK, f"data.path={text_file}"]
    try_command(["train.py", *settings, "run_dir=run"], make, "report.html", thread)
    try_command(
        ["train.py", "-m", *settings, "seed=1", "hydra.sweep.dir=s"], make, "s/sweep", thread
    )


@pytest.mark.parametrize("named", [None, "", "mine"])
def test_a_sweep_leaves_no_group_in_the_environment(named, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    if named is not None:
        monkeypatch.setenv("WANDB_RUN_GROUP", named)
    with jobs.wandb_group("sweep"):
        assert os.environ["WANDB_RUN_GROUP"] == (named or "sweep")
    assert os.environ.get("WANDB_RUN_GROUP") == named


@pytest.mark.slow
def test_train_from_works_in_any_thread(tmp_path, text_file):
    settings = [*QUICK, f"data.path={text_file}"]
    first = train.train_from(*settings, f"run_dir={tmp_path / 'main'}")
    assert in_thread(train.train_from, *settings, f"run_dir={tmp_path / 'thread'}") == first


@pytest.mark.parametrize("argument", ["-m", "--cfg=job", "max_step=3", "max_steps=0", "--help"])
def test_train_from_refuses_what_is_not_one_run(argument):
    with pytest.raises(UserError, match=argument.partition("=")[0]):
        train.train_from("seed=1", argument)
