"""SIGTERM and Ctrl-C save and leave within seconds, whatever is going on; twice Ctrl-C leaves at
once; SIGUSR1 saves and goes on."""

import os
import signal
import time

import pytest
from processes import Process, assert_same_run, at_call, finished, same_tensors, tiny

import attention_maps.capture
import attention_maps.picture
import data.tokens
import decoding
import training.checkpoint
import training.evaluate
import training.optim
from training.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow


def signals(*numbers: int, then: float = 0.0):
    """What sends this process signals, and then hangs for some seconds."""
    def do():
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(then)

    return do


def slow_from(owner, name: str, call: int, number: int, seconds: float = 2.0):
    """A fault: from its n-th call on, before which a signal comes, a function takes seconds."""
    def fault():
        calls, original = iter(range(1, 10 ** 9)), getattr(owner, name)

        def patched(*args, **more):
            now = next(calls)
            if now == call:
                os.kill(os.getpid(), number)
            if now >= call:
                time.sleep(seconds)
            return original(*args, **more)

        setattr(owner, name, patched)

    return fault


def in_evaluation(call: int):
    """A fault: SIGTERM in the n-th evaluation, of which each window then takes seconds."""
    def fault():
        calls, original = iter(range(1, 100)), training.evaluate.Validation.evaluate

        def patched(self, *args):
            if next(calls) == call:
                self.rows = 1
                slow_from(training.evaluate, "autocast", 3, signal.SIGTERM)()
            return original(self, *args)

        training.evaluate.Validation.evaluate = patched

    return fault


def in_capture():
    """A fault: a signal while maps are captured, of which the drawing would take long."""
    at_call(attention_maps.capture, "maps", 4, signals(signal.SIGTERM))()
    at_call(attention_maps.picture, "draw", 2, signals(then=40))()


# Where SIGTERM comes, and the step that is saved.
MOMENTS = {
    "in a step": (at_call(training.optim, "seed_micro_step", 6, signals(signal.SIGTERM)), 6),
    "in an evaluation": (in_evaluation(2), 4),
    "in a capture": (in_capture, 6),
    "in a drawing": (slow_from(attention_maps.picture, "printable", 20, signal.SIGTERM, 0.1), 6),
    "in a sample": (slow_from(decoding.Text, "add", 10, signal.SIGTERM), 6),
    "in a saving": (at_call(training.checkpoint, "save_tokenizer", 1, signals(signal.SIGTERM)), 4),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment_saves_soon_and_the_run_goes_on_exactly(
        tmp_path, text_file, whole, moment):
    fault, step = MOMENTS[moment]
    process = Process(tmp_path, *tiny(text_file), fault=fault)
    began = time.monotonic()
    assert process.wait() == 143, process.said()
    assert time.monotonic() - began < 35
    assert "resume=true" in process.said() and "Traceback" not in process.said()
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == step
    finished(tmp_path, *tiny(text_file, "resume=true"))
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("argv", [(), ("checkpoint.every=0",)],
                         ids=["with a checkpoint", "without"])
def test_sigterm_in_the_last_evaluation_leaves_what_is_missing_to_the_resumed_run(
        tmp_path, text_file, whole, argv):
    process = Process(tmp_path, *tiny(text_file, *argv), fault=in_evaluation(4))
    assert process.wait() == 143, process.said()
    finished(tmp_path, *tiny(text_file, *argv, "resume=true"))
    assert_same_run(whole, tmp_path / "run")


def test_ctrl_c_once_saves_and_twice_leaves_at_once(tmp_path, text_file):
    once = Process(tmp_path, *tiny(text_file, "run_dir=once"),
                   fault=at_call(training.optim, "seed_micro_step", 6, signals(signal.SIGINT)))
    assert once.wait() == 130
    assert find_checkpoint(tmp_path / "once", "last")[1]["step"] == 6
    began = time.monotonic()
    twice = Process(tmp_path, *tiny(text_file, "run_dir=twice"),
                    fault=at_call(training.optim, "seed_micro_step", 6,
                                  signals(signal.SIGINT, signal.SIGINT, then=40)))
    assert twice.wait() == 130 and time.monotonic() - began < 35
    assert find_checkpoint(tmp_path / "twice", "last")[1]["step"] == 4
    assert "Traceback" not in twice.said() + once.said()


def test_ctrl_c_while_the_text_is_prepared_leaves_without_a_traceback(tmp_path, text_file):
    process = Process(tmp_path, *tiny(text_file),
                      fault=at_call(data.tokens, "corpus_fingerprint", 1, signals(signal.SIGINT)))
    assert process.wait() == 130 and "Traceback" not in process.said()
    assert not (tmp_path / "run").exists()


WARNED = {
    "in a step": (training.optim, "seed_micro_step", 6, 6),
    "in an evaluation": (training.evaluate, "autocast", 2, 4),
    "in a saving": (training.checkpoint, "save_tokenizer", 1, 4),
}


@pytest.mark.parametrize("moment", [
    moment if moment == "in a step" else pytest.param(moment, marks=pytest.mark.soak)
    for moment in WARNED])
def test_sigusr1_saves_and_the_run_goes_on(tmp_path, text_file, whole, moment):
    owner, name, call, step = WARNED[moment]
    fault = at_call(owner, name, call, signals(signal.SIGUSR1))
    process = Process(tmp_path, *tiny(text_file, "checkpoint.keep=99"), fault=fault)
    assert process.wait() == 0, process.said()
    assert f"saved after {step} steps" in process.said()
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(*(run / "checkpoints" / f"step_{step:08d}" / file
                              for run in (whole, tmp_path / "run")))
    assert_same_run(whole, tmp_path / "run")
