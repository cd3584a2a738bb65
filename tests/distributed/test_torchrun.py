"""Several processes under a real torchrun, and on several machines: restarts, and clean ends.

A machine is a group of processes with a working directory and a cache of their own.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, soak
from filelock import FileLock
from processes import Process, assert_same_run, fault_at_call
from ranks import Ranks, free_port, odd, train_in_fork, trained
from test_distributed import assert_same_steps
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import training.device
import training.run_folder


def elastic(machines: int, processes: int, port: int = 0, is_host: bool = True) -> LaunchConfig:
    """Return what torchrun makes of the options in docs/distributed.md; workers are forks."""
    return LaunchConfig(
        machines,
        machines,
        processes,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"is_host": is_host, "keep_alive_interval": 1},
        max_restarts=3,
        start_method="fork",
    )


@pytest.mark.soak
def test_after_a_process_is_killed_torchrun_goes_on_from_the_last_checkpoint(tmp_path, text_file):
    """By its agent, whose processes are forks of this one."""
    argv = odd(text_file, "optim.name=muon", "resume=auto")

    def work():
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fault_at_call(
                training.device, "seed_micro_step", 8, lambda: os.kill(os.getpid(), signal.SIGKILL)
            )()
        train_in_fork(argv)

    def launch():
        elastic_launch(elastic(1, 2), work)()
        sys.exit()

    torchrun = Process(tmp_path, fault=launch)
    assert torchrun.wait() == 0, torchrun.output()
    assert torchrun.output().count("error: another process of the run has ended") == 1
    assert torchrun.output().count("resuming at step 5") == 1
    trained(tmp_path, 1, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")


def machine(
    folder: Path,
    name: str,
    port: int,
    argv: list[str],
    is_host: bool = False,
    fault: Callable[[], None] = lambda: None,
) -> Process:
    """Start torchrun's agent with one process of a run on two machines, in a process group."""

    def work():
        fault()
        train_in_fork(argv)

    def launch():
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        elastic_launch(elastic(2, 1, port, is_host), work)()
        sys.exit()

    (folder / name).mkdir()
    return Process(folder / name, fault=launch)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, soak(signal.SIGTERM)])
def test_a_machine_that_is_lost_can_join_again(tmp_path, text_file, number):
    argv = odd(text_file, "model.dropout=0.3", "resume=auto")
    port = free_port()
    first = machine(tmp_path, "first", port, argv, is_host=True)
    end_machine = fault_at_call(
        training.device, "seed_micro_step", 8, lambda: os.killpg(os.getpgrp(), number)
    )
    machine(tmp_path, "lost", port, argv, fault=end_machine).wait()

    replacement = machine(tmp_path, "replacement", port, argv)
    assert [first.wait(60), replacement.wait(60)] == [0, 0], first.output() + replacement.output()
    assert first.output().count("2 processes on 2 machines") == 2
    assert first.output().count("resuming at step") == 1
    trained(tmp_path, 2, *argv, "run_dir=undisturbed")
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run", 20)


def documented_command(port: int) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the options of torchrun that docs/distributed.md gives machines.

    The number of processes and the meeting point are those of this test.
    """
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = page.partition("## Two machines")[2]
    script = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1].replace("\\\n", " ")
    variables = dict(re.findall(r"^export (\w+)=(\S+)", script, re.MULTILINE))
    command = re.search("^torchrun (.*) train.py .*", script, re.MULTILINE)[1]
    replaced = {"--nproc-per-node": "1", "--rdzv-endpoint": f"localhost:{port}"}
    options = [option.partition("=") for option in shlex.split(command)]
    return variables, [f"{name}={replaced.get(name, value)}" for name, _, value in options]


@pytest.mark.soak
def test_the_documented_command_of_two_machines_survives_the_loss_of_one(
    request, tmp_path, text_file
):
    changed = ("run_dir=", "data.", "tokenizer.", "max_steps=", "eval.every=", "checkpoint.every=")
    settings = [setting for setting in odd(text_file) if not setting.startswith(changed)]
    argv = [*settings, "data=text", f"data.path={text_file}", "tokenizer=char"]
    argv += ["max_steps=400", "eval.every=50", "checkpoint.every=50"]
    variables, options = documented_command(free_port())

    def start(is_host: bool) -> subprocess.Popen:
        """Both agents are on this machine, so that host names do not tell which one hosts."""
        host = [f"{option},is_host={is_host}" for option in options if "--rdzv-conf" in option]
        training_command = [str(ROOT / "train.py"), *argv, "run_dir=run", "resume=auto"]
        agent = subprocess.Popen(
            ["torchrun", *options, *host, *training_command],
            cwd=tmp_path,
            env=os.environ | variables,
        )
        request.addfinalizer(agent.terminate)
        return agent

    first, lost = start(is_host=True), start(is_host=False)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 100:
        assert first.poll() is None and lost.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{lost.pid}/task/{lost.pid}/children").read_text().split()
    for pid in [lost.pid, *map(int, workers)]:
        os.kill(pid, signal.SIGKILL)

    replacement = start(is_host=False)
    assert [first.wait(300), replacement.wait(300)] == [0, 0]
    trained(tmp_path, 2, *argv, "run_dir=undisturbed", script=True)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run", 400)


def other_machine(folder: Path, text: str | None):
    """Return a fault that moves rank 1 to a folder and a cache that hold only this text."""
    folder.mkdir()
    if text is not None:
        (folder / "text.txt").write_text(text)

    def fault(rank: int) -> None:
        if rank == 1:
            os.chdir(folder)
            os.environ["GLASSGPT_CACHE"] = str(folder / "cache")

    return fault


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_machines_with_caches_of_their_own_train_on_the_same_text(tmp_path, text_file):
    text = text_file.read_text()
    (tmp_path / "text.txt").write_text(text)
    argv = odd(Path("text.txt"), "max_steps=2")
    trained(tmp_path, 2, *argv, fault=other_machine(tmp_path / "machine", text))
    assert len(list((tmp_path / "machine" / "cache").glob("*/train.bin"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda text: None, lambda text: text.replace("e", "a")])
def test_another_machine_without_the_same_text_is_named(tmp_path, text_file, change):
    text = text_file.read_text()
    (tmp_path / "text.txt").write_text(text)
    fault = other_machine(tmp_path / "machine", change(text))
    ranks = Ranks(tmp_path, 2, *odd(Path("text.txt")), fault=fault)
    assert ranks.wait() == [1, 1], ranks.output()
    (error,) = re.findall("^error: .*", ranks.output(), re.MULTILINE)
    assert error in ranks.processes[0].output()
    assert "process 1" in error and "text.txt" in error


@pytest.mark.slow
def test_an_error_of_one_process_is_printed_by_it(tmp_path, text_file):
    def fault(rank):
        if rank == 1:
            fault_at_call(training.device, "seed_micro_step", 3, run_out_of_memory)()

    ranks = Ranks(tmp_path, 2, *odd(text_file), fault=fault)
    assert ranks.wait() == [1, 1], ranks.output()
    said = ranks.processes[1].output()
    assert said.count("error: ") == 1
    assert "process 1" in said and "CUDA out of memory" in said


def hold_lock(path: Path) -> int:
    """Lock a run's folder in another process, and return its id."""
    path.mkdir()
    pid = os.fork()
    if pid == 0:
        lock = FileLock(path / ".lock")
        lock.acquire()
        (path.parent / "locked").touch()
        signal.pause()
        os._exit(1)
    while not (path.parent / "locked").exists():
        time.sleep(0.01)
    return pid


@pytest.mark.slow
def test_a_restarted_run_waits_until_the_lock_of_a_lost_machine_is_free(tmp_path, text_file):
    class NotedLock(FileLock):
        def acquire(self, *args, **options):
            (tmp_path / "waits").touch()
            return super().acquire(*args, **options)

    def note_waiting(rank):
        training.run_folder.FileLock = NotedLock

    holder = hold_lock(tmp_path / "run")
    ranks = Ranks(tmp_path, 2, *odd(text_file, "max_steps=2"), fault=note_waiting)
    while not (tmp_path / "waits").exists() and not any(p.ended() for p in ranks.processes):
        time.sleep(0.01)
    time.sleep(1)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert ranks.wait() == [0, 0], ranks.output()
