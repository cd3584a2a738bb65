"""Run commands as processes that tests can kill, starve or make fail, and compare their results.

A process is a fork of the test process, which has imported everything, so it starts at once. It
runs the script as shipped; only a `fault` patches anything, to make it fail from outside.
"""

import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from conftest import ROOT, TINY
from hydra.core.global_hydra import GlobalHydra
from safetensors.numpy import load_file

import cli
from run.row import Row
from run.run_dir import parse_step

# Prefixes of the metrics that depend on time and on the rest of the process.
CLOCKS = (
    "train_seconds",
    "train/tokens_per_second",
    "train/ms_per_step",
    "memory/",
    "seconds/",
)
KILL = 9
RUN_STEPS = 12  # of the run of `tiny_arguments`


@functools.cache
def import_everything() -> None:
    """Import modules and read presets once, on which every process would spend seconds."""
    optional = ("glass.observer", "interop", "callback", "sweeps.sweep", "studies.study")
    for name in ("train", *optional, "torch._dynamo"):  # optimizers import the last
        importlib.import_module(name)
    cli.compose_job(TINY)


def exec_script(
    script: str, argv: Sequence[str], fault: Callable[[], None] = lambda: None
) -> NoReturn:
    """Run `python SCRIPT ARGV`, or `python -m SCRIPT ARGV` for a module, in this fork and exit.

    Standard input, output and error are file descriptors 0 to 2 as they are.
    """
    status = 1
    gc.freeze()  # a garbage collection would copy the memory shared with the parent
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        GlobalHydra.instance().clear()
        fault()
        encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
        options = {"encoding": encoding or None, "errors": errors or None, "closefd": False}
        sys.stdin = os.fdopen(0, **options)
        sys.stdout = os.fdopen(1, "w", **options)
        sys.stderr = os.fdopen(2, "w", buffering=1, **options | {"errors": "backslashreplace"})
        sys.argv = [str(ROOT / script), *argv]
        if script.endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.modules.pop(script, None)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


class Process:
    """A fork of this process that runs `python SCRIPT ARGV` in a folder.

    The folder gets its output as out.txt and err.txt. `fault` is called in the fork before the
    script starts, to make the product fail. `stdout` is a file descriptor instead of out.txt.
    """

    def __init__(
        self,
        folder: Path,
        *argv: str,
        script: str = "train.py",
        fault: Callable[[], None] = lambda: None,
        stdout: int | None = None,
    ):
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        self.status = None
        import_everything()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(folder, script, argv, fault, stdout)
            finally:  # never return into pytest
                os._exit(70)

    def _run(self, folder, script, argv, fault, stdout):
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(self.out, flags) if stdout is None else stdout, 1)
        os.dup2(os.open(self.err, flags), 2)
        exec_script(script, argv, fault)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 600) -> int:
        """Wait for its end and return the exit status, or minus the signal that killed it."""
        if not self.ended():
            end_of_process = os.pidfd_open(self.pid)
            has_ended = select.select([end_of_process], [], [], timeout)[0]
            os.close(end_of_process)
            if not has_ended:
                self.signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {timeout} s: {self.output()}")
            self.ended()
        return self.status

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait_for(self, path: Path, lines: int = 0, timeout: float = 600) -> None:
        """Wait until it has written a file, of at least `lines` lines."""
        end = time.monotonic() + timeout
        while not path.exists() or (lines and path.read_bytes().count(b"\n") < lines):
            assert not self.ended(), self.output()
            assert time.monotonic() < end, f"{path} is still missing: {self.output()}"
            time.sleep(0.002)

    def output(self) -> str:
        """Return its stdout, then its stderr."""
        return "".join(
            path.read_text(errors="replace") for path in (self.out, self.err) if path.exists()
        )


def tiny_arguments(text_file: Path, *more: str) -> list[str]:
    """Return the arguments of a tiny run with dropout.

    It has 12 steps, evaluates and saves every 4, and takes a snapshot every 6.
    """
    return [
        *TINY,
        "data=text",
        f"data.path={text_file}",
        "run_dir=run",
        f"max_steps={RUN_STEPS}",
        "model.dropout=0.2",
        "eval.every=4",
        "attention.every=6",
        "attention.tokens=16",
        "checkpoint.every=4",
        *more,
    ]


def run_to_end(folder: Path, *argv: str, status: int = 0, **more) -> str:
    """Run a script to its end, check its exit status, and return its output."""
    process = Process(folder, *argv, **more)
    assert process.wait() == status, process.output()
    assert "Traceback" not in process.output()
    return process.output()


def run(
    folder: Path,
    script: str,
    *argv: str,
    env: dict[str, str | None] | None = None,
    input: str | bytes = "",
    cwd: Path | None = None,
    text: bool = True,
) -> subprocess.CompletedProcess:
    """Run a script to its end, like `subprocess.run`.

    `input` is its standard input, at most what a pipe holds; variables of `env` that are None are
    removed.
    """

    def set_up():
        os.chdir(cwd or folder)
        os.dup2(read_end, 0)
        for name, value in (env or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    read_end, write_end = os.pipe()
    os.write(write_end, input.encode() if isinstance(input, str) else input)
    os.close(write_end)
    with tempfile.TemporaryDirectory() as logs:
        process = Process(Path(logs), *argv, script=script, fault=set_up)
        os.close(read_end)
        status = process.wait()
        out, err = process.out.read_bytes(), process.err.read_bytes()
    if text:
        out, err = out.decode("utf-8"), err.decode("utf-8")
    return subprocess.CompletedProcess([script, *argv], status, out, err)


def fault_at_call(
    owner,
    name: str,
    call: int,
    do: Callable[[], None],
    when: Callable[..., bool] = lambda *args: True,
) -> Callable[[], None]:
    """Return a fault that calls `do` just before the n-th call of owner.name.

    Only calls for whose arguments `when` is true are counted.
    """

    def fault():
        calls, original = itertools.count(1), getattr(owner, name)

        def patched(*args, **more):
            if when(*args) and next(calls) == call:
                do()
            return original(*args, **more)

        setattr(owner, name, patched)

    return fault


def drop_privileges() -> None:
    """Fault: make file permissions apply to this process even if it is root's."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in range(64):
            libc.prctl(24, capability)  # PR_CAPBSET_DROP: programs that it starts lose it too
        version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capset(version, none) == 0


def pointer(run: Path, name: str) -> int:
    """Return the step that the file checkpoints/`name` of a run names."""
    return parse_step((run / "checkpoints" / name).read_text().strip())


def rows(run: str | Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [Row(json.loads(line)) for line in lines]


def rows_without_times(run: str | Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl without what a clock measured."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows(run)]


def same_tensors(one: Path, other: Path) -> bool:
    """Compare two safetensors files bit by bit."""
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def assert_same_run(one: str | Path, other: str | Path, step: int = RUN_STEPS) -> None:
    """Check that metrics, samples, snapshots, weights and optimizer state are the same."""
    assert rows_without_times(one) == rows_without_times(other)
    assert Path(one, "samples.jsonl").read_text() == Path(other, "samples.jsonl").read_text()
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(
            *(Path(run, "checkpoints", f"step_{step:08d}", name) for run in (one, other))
        )
    snapshots = sorted(p.name for p in Path(one, "attention").glob("*.npz"))
    assert snapshots == sorted(p.name for p in Path(other, "attention").glob("*.npz"))
    for name in snapshots:
        a, b = (np.load(Path(run, "attention", name)) for run in (one, other))
        for key in a.files:  # masked losses are NaN
            assert np.array_equal(a[key], b[key], equal_nan=a[key].dtype.kind == "f"), key


def copy_after_8_steps(finished_run: Path, copy: Path) -> Path:
    """Copy a run with a checkpoint of each step, keeping only those of steps 4 and 8."""
    shutil.copytree(finished_run, copy)
    for folder in (copy / "checkpoints").glob("step_*"):
        if folder.name not in ("step_00000004", "step_00000008"):
            shutil.rmtree(folder)
    return copy
