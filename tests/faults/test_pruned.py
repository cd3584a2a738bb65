"""A run's checkpoint opens while the run goes on and removes the checkpoints it does not keep."""

import signal

import pytest
from processes import Process, tiny_arguments
from run_folders import load_run

from cli.config_file import read_run_config
from common.checkpoints import find_newest_run, saved_steps
from glass.page.embedded_model import find_model
from interop import load, open_starting_weights, read_starting_model

SAVING = ["checkpoint.every=1", "checkpoint.keep=1", "eval.every=3", "attention.every=0"]
OPENED = 6  # times in each way


@pytest.fixture
def saving_run(tmp_path, text_file):
    """A run that saves every few milliseconds."""
    argv = tiny_arguments(text_file, *SAVING, "max_steps=1000000")
    process = Process(tmp_path, *argv)
    run = tmp_path / "run"
    process.wait_for(run / "checkpoints" / "last")
    yield run
    assert not process.ended(), process.output()
    process.signal(signal.SIGKILL)
    process.wait()


@pytest.mark.soak
def test_a_run_opens_while_it_removes_its_checkpoints(saving_run):
    readers = {
        "last": lambda: load_run(saving_run, "last", pytest.fail),
        "best": lambda: load_run(saving_run, "best", pytest.fail),
        "load": lambda: load(saving_run),
        "init_from": lambda: open_starting_weights(
            read_starting_model(str(saving_run)).init_from, pytest.fail
        ),
        "settings": lambda: read_run_config(saving_run),
        "page": lambda: find_model(saving_run, {}).tokenizer,
        "newest": lambda: find_newest_run(saving_run.parent),
    }
    before = saved_steps(saving_run)[-1]
    for _ in range(OPENED):
        for read in readers.values():
            read()
    assert saved_steps(saving_run)[-1] > before + OPENED
