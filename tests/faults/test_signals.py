"""A stop signal saves and exits within seconds; a second Ctrl-C exits at once."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from conftest import ROOT
from processes import Process, assert_same_run, fault_at_call, run_to_end, tiny_arguments

import training.device
import training.evaluate
import training.wandb_record
from common.signals import STOP_SIGNALS
from run.run_dir import RunDir
from training.world import World

pytestmark = pytest.mark.slow
SOON = 300  # seconds, of a whole run on a busy machine


def send_signals(*numbers: int, hangs: bool = False):
    """Return a function that sends this process signals, and then hangs unless they end it."""

    def do():
        for number in numbers:
            os.kill(os.getpid(), number)
        if hangs:
            signal.pause()

    return do


def terminate_in_evaluation(call: int):
    """Return a fault: SIGTERM in the n-th evaluation, whose next window then hangs."""

    def fault():
        calls, measure = iter(range(1, 100)), training.evaluate.Windows.measure

        def patched(self, model):
            if next(calls) == call:
                self.batch_size = 1
                fault_at_call(training.evaluate, "autocast", 3, send_signals(signal.SIGTERM))()
                fault_at_call(training.evaluate, "autocast", 4, signal.pause)()
            return measure(self, model)

        training.evaluate.Windows.measure = patched

    return fault


def test_sigterm_in_an_evaluation_saves_soon_and_the_run_resumes_exactly(
    tmp_path, text_file, finished_run
):
    process = Process(tmp_path, *tiny_arguments(text_file), fault=terminate_in_evaluation(2))
    assert process.wait(SOON) == 143, process.output()
    assert "resume=true" in process.output() and "Traceback" not in process.output()
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step == 4
    run_to_end(tmp_path, *tiny_arguments(text_file, "resume=true"))
    assert_same_run(finished_run, tmp_path / "run")


def test_sigterm_while_the_record_is_opened_saves_and_says_how_to_resume(tmp_path, text_file):
    fault = fault_at_call(training.wandb_record, "start", 1, send_signals(signal.SIGTERM))
    process = Process(tmp_path, *tiny_arguments(text_file), fault=fault)
    assert process.wait(SOON) == 143, process.output()
    assert "resume=true" in process.output()
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step == 0


def replace_compiler(compiled):
    """Return a fault: torch.compile takes no time, and `compiled(model)` is what it returns."""

    def fault():
        torch.compile = lambda model, **_: compiled(model)

    return fault


def test_sigterm_while_the_model_is_compiled_ends_the_run_soon_and_it_resumes_exactly(
    tmp_path, text_file, finished_run
):
    arguments = ["compile=true" if a == "compile=false" else a for a in tiny_arguments(text_file)]

    def compile_for_long(model):
        return lambda *batch: send_signals(signal.SIGTERM, hangs=True)()

    process = Process(tmp_path, *arguments, fault=replace_compiler(compile_for_long))
    assert process.wait(SOON) == 143, process.output()
    assert RunDir(tmp_path / "run").checkpoint("last", pytest.fail).step == 0
    compile_at_once = replace_compiler(lambda model: model)
    run_to_end(tmp_path, *arguments, "resume=true", fault=compile_at_once)
    assert_same_run(finished_run, tmp_path / "run")


@pytest.mark.parametrize(
    "numbers, saved",
    [((signal.SIGINT,), 6), ((signal.SIGUSR1, signal.SIGTERM), 6), ((signal.SIGINT,) * 2, 4)],
    ids=str,
)
def test_a_stop_signal_saves_and_a_second_ctrl_c_exits_at_once(tmp_path, text_file, numbers, saved):
    hangs = numbers == (signal.SIGINT,) * 2
    process = Process(
        tmp_path,
        *tiny_arguments(text_file, "attention.every=0"),
        fault=fault_at_call(
            training.device, "seed_micro_step", 6, send_signals(*numbers, hangs=hangs)
        ),
    )
    assert process.wait(SOON) == 128 + numbers[-1]
    assert RunDir(tmp_path / "run").checkpoint("last").step == saved
    assert "Traceback" not in process.output()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_an_ignored_signal_stays_ignored(number):
    handler = signal.signal(number, signal.SIG_IGN)
    try:
        with World():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, handler)


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_saving(tmp_path, text_file):
    terminal, output = os.openpty()

    def hang_up():
        os.close(terminal)  # from now on writing to it fails
        send_signals(signal.SIGHUP)()

    fault = fault_at_call(training.device, "seed_micro_step", 6, hang_up)
    process = Process(tmp_path, *tiny_arguments(text_file), fault=fault, stdout=output)
    os.close(terminal)
    os.close(output)
    assert process.wait() == 128 + signal.SIGHUP, process.output()
    assert RunDir(tmp_path / "run").checkpoint("last").step == 6


def test_how_to_resume_a_stopped_run_is_on_a_line_of_its_own_in_a_terminal(tmp_path, text_file):
    terminal, output = os.openpty()
    fault = fault_at_call(training.device, "seed_micro_step", 6, send_signals(signal.SIGINT))
    process = Process(tmp_path, *tiny_arguments(text_file), fault=fault, stdout=output)
    os.close(output)
    shown = b""
    with suppress(OSError):  # the process has ended
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert process.wait() == 128 + signal.SIGINT
    (line,) = [line for line in shown.splitlines() if b"stopped after" in line]
    after_the_erased_bar = line.rpartition(b"\x1b[2K")[2]
    assert after_the_erased_bar.startswith(b"stopped after")


def test_ctrl_c_while_torch_is_being_imported_exits_at_once(tmp_path, text_file):
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *tiny_arguments(text_file)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline()  # printed before torch is imported
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), process.stderr.read()) == (130, "")
    assert not (tmp_path / "run").exists()
