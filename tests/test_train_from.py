"""Training from Python, as in a notebook: with replaced streams, and in any thread."""

import io
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
import wandb
from conftest import TINY, foreign_torch_settings
from processes import rows

import train
from common.errors import UserError
from common.signals import STOP_SIGNALS


class Notebook(io.TextIOBase):
    """A stream without a file, as Jupyter's and IDLE's."""

    encoding = "UTF-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


@pytest.mark.slow
def test_a_notebook_trains_in_any_thread_and_with_any_settings_of_torch(
    tmp_path, text_file, monkeypatch
):
    settings = [*TINY, "data=text", f"data.path={text_file}", "max_steps=2", "attention.tokens=8"]
    settings.append("precision=bf16")
    losses = []

    def train_in_thread():
        losses.append(train.train_from(*settings, f"run_dir={tmp_path / 'thread'}"))

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Notebook())
    monkeypatch.setattr(sys, "stdin", None)
    thread = threading.Thread(target=train_in_thread)
    thread.start()
    thread.join()
    with foreign_torch_settings():
        losses.append(train.train_from(*settings, f"run_dir={tmp_path / 'foreign'}"))
    assert losses[0] == losses[1] and "report.html" in sys.stdout.text
    assert rows(tmp_path / "foreign")[0]["val/loss"] > losses[0]  # of the weights before training


def process_state() -> dict:
    """Return what a run could change for the program around it."""
    return {
        "random": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "modes": (
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
        "hooks": (sys.exit, sys.excepthook, sys.stdout, sys.stderr),
        "wandb": wandb.run,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "warnings": list(warnings.filters),
        "logging": list(logging.root.handlers),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "is_agents"), [(False, True), (True, False)])
def test_the_program_around_a_run_stays_as_it_was(
    tmp_path, text_file, monkeypatch, fails, is_agents
):
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setenv("WANDB_MODE", "offline")
    if is_agents:
        monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    if fails:
        monkeypatch.setattr(train, "train_step", fail)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    precision = torch.get_float32_matmul_precision()
    wandb.teardown()
    with wandb.init(dir=tmp_path) as own:
        torch.set_float32_matmul_precision("medium")
        before = process_state()
        settings = [
            "data=text",
            f"data.path={text_file}",
            "attention.every=0",
            "threads=2",
            "wandb.mode=offline",
        ]
        with pytest.raises(RuntimeError) if fails else nullcontext():
            train.train_from(*TINY, *settings, "max_steps=1", f"run_dir={tmp_path / 'run'}")
        after = process_state()
        own.log({"still": "open"})
        assert ("val/loss" in dict(own.summary)) == is_agents
    torch.set_float32_matmul_precision(precision)
    wandb.teardown()
    assert after == before


@pytest.mark.parametrize("argument", ["-m", "--cfg=job", "max_step=3", "--help"])
def test_what_is_not_one_run_is_refused(argument):
    with pytest.raises(UserError, match=argument.partition("=")[0]):
        train.train_from("seed=1", argument)
