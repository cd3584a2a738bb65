"""Several processes under a real torchrun: restarts, signals, machines that are lost, ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Process, at_call
from ranks import free_port, train_in_fork, trained
from test_distributed import assert_same_steps, odd
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import training.device
from training.checkpoint import find_checkpoint

SCRIPT = f"""
import os, runpy, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
from processes import at_call, hasten
hasten()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FAULT
sys.argv[0] = {str(ROOT / 'train.py')!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Torchrun:
    """`torchrun … train.py ARGV` in a folder.

    `fault` is Python that each process runs first, which knows its `attempt`.
    """

    def __init__(self, folder: Path, processes: int, *argv: str, fault: str = "",
                 options: tuple = ("--standalone",), name: str = "torchrun",
                 env: dict | None = None):
        script, self.log = folder / f"{name}.py", folder / f"{name}.txt"
        script.write_text(SCRIPT.replace("FAULT", fault))
        with self.log.open("w") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}",
                 *options, str(script), *argv],
                cwd=folder, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})

    def wait(self, timeout: float = 150) -> int:
        try:
            return self.agent.wait(timeout)
        except subprocess.TimeoutExpired:
            self.agent.terminate()  # which it passes on, and kills those that do not end
            self.agent.wait(60)
            raise AssertionError(f"still running after {timeout} s: {self.said()}") from None

    def wait_for(self, words: str, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while words not in self.said():
            waiting = self.agent.poll() is None and time.monotonic() < end
            assert waiting, f"it does not say {words!r}: {self.said()}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """The process ids that it started."""
        return [int(pid) for task in Path(f"/proc/{self.agent.pid}/task").iterdir()
                for pid in (task / "children").read_text().split()]

    def kill(self) -> None:
        """As when its machine loses power."""
        for pid in (self.agent.pid, *self.workers()):
            os.kill(pid, signal.SIGKILL)
        self.agent.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def settings(text_file: Path, *more: str) -> list[str]:
    return odd(text_file, "tokenizer=char", *more)


@pytest.mark.slow
def test_after_a_process_is_killed_torchrun_goes_on_from_the_last_checkpoint(tmp_path, text_file):
    """By its agent, whose processes are forks of this one."""
    argv = odd(text_file, "optim.name=muon", "resume=auto")

    def work():
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            at_call(training.device, "seed_micro_step", 8,
                    lambda: os.kill(os.getpid(), signal.SIGKILL))()
        train_in_fork(argv)

    def launch():
        elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                                    max_restarts=1, start_method="fork"), work)()
        sys.exit()

    torchrun = Process(tmp_path, fault=launch)
    assert torchrun.wait() == 0, torchrun.said()
    assert torchrun.said().count("error: another process of the run has ended") == 1
    assert torchrun.said().count("resuming at step 5") == 1
    trained(tmp_path, 1, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


@pytest.mark.soak
def test_a_signal_to_torchrun_saves_and_the_run_goes_on(tmp_path, text_file):
    argv = settings(text_file, "max_steps=400", "optim.schedule=constant", "checkpoint.every=0",
                    "eval.every=0")
    torchrun = Torchrun(tmp_path, 2, *argv)
    torchrun.wait_for("step  20 ")
    torchrun.agent.terminate()
    torchrun.wait()
    assert torchrun.said().count("to go on: python train.py") == 1
    step = find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"]
    assert step >= 20
    trained(tmp_path, 1, *argv, "resume=true", f"max_steps={step + 5}", script=True)


@pytest.mark.soak
@pytest.mark.parametrize("processes", [2, 4])
def test_twelve_ends_of_sharded_processes_are_clean(tmp_path, text_file, processes):
    for n in range(12):
        torchrun = Torchrun(tmp_path, processes, *settings(
            text_file, "max_steps=1", f"run_dir=run{n}", "optim.warmup_steps=0", "shard=2"))
        assert torchrun.wait() == 0, torchrun.said()


@pytest.mark.soak
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_of_two_machines_one_is_killed(tmp_path, text_file, nodes):
    """Started again, or not: with --nnodes=1:2 the other one goes on by itself."""
    # Without it, torch 2.13 does not tell a machine that comes later where the first one is.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    port = free_port()
    options = (f"--nnodes={nodes}", "--max-restarts=3", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=glass",
               "--rdzv-conf=last_call_timeout=5")
    argv = settings(text_file, "optim=muon", "resume=auto")
    slow = """
import training.device
at_call(training.device, "seed_micro_step", 15, lambda: time.sleep(0 if attempt else 6))()
"""
    one = Torchrun(tmp_path, 2, *argv, options=options, env=env, name="one", fault=slow)
    end = time.monotonic() + 90
    while subprocess.run([sys.executable, "-c",
                          f"import socket; socket.create_connection(('127.0.0.1', {port}))"],
                         capture_output=True).returncode:
        assert time.monotonic() < end  # until the first machine is the one where they meet
    other = Torchrun(tmp_path, 2, *argv, options=options, env=env, name="other", fault=slow)
    one.wait_for("4 processes")
    while not (tmp_path / "run" / "checkpoints" / "step_00000010").exists():
        assert time.monotonic() < end, one.said() + other.said()
        time.sleep(0.05)
    other.kill()
    if nodes == "2":
        again = Torchrun(tmp_path, 2, *argv, options=options, env=env, name="again")
        assert again.wait() == 0, one.said() + again.said()
    assert one.wait() == 0, one.said()
    assert "resuming at step 10" in one.said() + (again.said() if nodes == "2" else "")
    trained(tmp_path, 1, *argv, "resume=false", "run_dir=whole", script=True)
    assert_same_steps(tmp_path / "whole", tmp_path / "run")
