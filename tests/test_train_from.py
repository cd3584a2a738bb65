"""Training from Python, as in a notebook: with replaced streams, and in any thread."""

import io
import sys
import threading

import pytest
from conftest import TINY

import train
from common.errors import UserError


class Notebook(io.TextIOBase):
    """A stream without a file, as Jupyter's and IDLE's."""

    encoding = "UTF-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


@pytest.mark.slow
def test_a_notebook_trains_in_any_thread(tmp_path, text_file, monkeypatch):
    settings = [*TINY, "data=text", f"data.path={text_file}", "max_steps=1", "attention.tokens=8"]
    losses = [train.train_from(*settings, f"run_dir={tmp_path / 'main'}")]

    def train_again():
        losses.append(train.train_from(*settings, f"run_dir={tmp_path / 'thread'}"))

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Notebook())
    monkeypatch.setattr(sys, "stdin", None)
    thread = threading.Thread(target=train_again)
    thread.start()
    thread.join()
    assert losses[0] == losses[1] and "report.html" in sys.stdout.text


@pytest.mark.parametrize("argument", ["-m", "--cfg=job", "max_step=3", "max_steps=0", "--help"])
def test_what_is_not_one_run_is_refused(argument):
    with pytest.raises(UserError, match=argument.partition("=")[0]):
        train.train_from("seed=1", argument)
