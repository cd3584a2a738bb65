"""Too little memory is a sentence that names what to lower, and costs no checkpoint."""

import resource
import shutil
from pathlib import Path

import pytest
import torch
from processes import after_8_steps, at_call, finished, tiny

import training.evaluate
import training.optim
from training.checkpoint import find_checkpoint, saved_steps

pytestmark = pytest.mark.slow


def limit(more: int) -> None:
    """Let this process take so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)


def sentence(tmp_path) -> str:
    (line,) = (tmp_path / "err.txt").read_text().splitlines()
    assert (
        line.startswith("error: there is too little memory on cpu (")
        and "raise accumulate=1" in line
    )
    assert "lower model.n_layer=" in line
    return line


@pytest.mark.parametrize(
    "size",
    [
        ["model.n_embd=1000000"],
        ["model.n_embd=100000000", "model.n_head=1"],
        ["model.n_layer=10000", "model.n_embd=4096"],
    ],
    ids=["large", "enormous", "deep"],
)
def test_a_model_larger_than_the_memory_is_refused_and_leaves_nothing(tmp_path, text_file, size):
    finished(tmp_path, *tiny(text_file, *size), status=1)
    assert sentence(tmp_path) and not (tmp_path / "run").exists()


def test_memory_that_ends_in_a_step_costs_no_checkpoint(tmp_path, text_file):
    def ask_for_too_much():  # what the steps before have freed may be enough for the tiny model
        limit(1_000_000)
        torch.empty(1 << 28)

    fault = at_call(training.optim, "seed_micro_step", 6, ask_for_too_much)
    large = ["batch_size=512", "log.every=0", "eval.every=0", "attention.every=0"]
    finished(tmp_path, *tiny(text_file, *large), status=1, fault=fault)
    assert "batch_size=512" in sentence(tmp_path)
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == 4


def test_memory_that_python_lacks_is_the_same_sentence(tmp_path, text_file, whole):
    run = after_8_steps(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_00000004")

    def fill():
        limit(10_000_000)
        bytearray(1 << 30)

    finished(
        tmp_path,
        *tiny(text_file, "resume=true"),
        status=1,
        fault=at_call(training.optim, "seed_micro_step", 2, fill),
    )
    assert "MemoryError" in sentence(tmp_path) and saved_steps(run) == [8]
