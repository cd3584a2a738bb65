"""Runs as processes of their own, to be killed, starved and asked things; and what they left,
compared."""

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
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

import hydra
import numpy as np
from conftest import ROOT, TINY
from hydra.core.global_hydra import GlobalHydra
from safetensors.numpy import load_file

CLOCKS = ("train_seconds", "train/tokens_per_second", "seconds/")
KILL = 9


@functools.cache
def ready() -> None:
    """Do what the processes would each spend seconds on: import, and read the presets."""
    for name in ("train", "training.wandb_record", "torch._dynamo"):  # which optimizers import
        importlib.import_module(name)
    if not GlobalHydra.instance().is_initialized():
        with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            hydra.compose("config", TINY)


def exec_script(
    script: str, argv: Sequence[str], fault: Callable[[], None] = lambda: None
) -> NoReturn:
    """Be `python SCRIPT ARGV` in this fork, or `python -m SCRIPT ARGV` where it names a module,
    with descriptors 0 to 2 as they are, and end."""
    status = 1
    gc.freeze()  # what this process was given is no garbage: looking at it would copy it
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        GlobalHydra.instance().clear()
        fault()
        encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
        coded = {"encoding": encoding or None, "errors": errors or None, "closefd": False}
        sys.stdin = os.fdopen(0, **coded)
        sys.stdout = os.fdopen(1, "w", **coded)
        sys.stderr = os.fdopen(2, "w", buffering=1, **coded | {"errors": "backslashreplace"})
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
    """`python SCRIPT ARGV` in a folder, as a fork of this process: it has all imported, and so
    starts at once.

    `fault` is called in it before the script begins: where the product is made to fail, it is
    patched there, from outside.
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
        ready()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(folder, script, argv, fault, stdout)
            finally:  # never back into pytest
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
        """Its exit status, or less than 0 where a signal ended it."""
        end = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {timeout} s: {self.output()}")
            time.sleep(0.005)
        return self.status

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait_for(self, path: Path, lines: int = 0, timeout: float = 600) -> None:
        """Wait until it has made a file of so many lines at least."""
        end = time.monotonic() + timeout
        while not path.exists() or (lines and path.read_bytes().count(b"\n") < lines):
            assert not self.ended(), self.output()
            assert time.monotonic() < end, f"{path} does not come: {self.output()}"
            time.sleep(0.002)

    def output(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in (self.out, self.err) if path.exists()
        )


def tiny_arguments(text_file: Path, *more: str) -> list[str]:
    """A run with dropout, of 12 steps, that evaluates and saves every 4 and captures every 6."""
    return [
        *TINY,
        "data=text",
        f"data.path={text_file}",
        "run_dir=run",
        "max_steps=12",
        "model.dropout=0.2",
        "eval.every=4",
        "attention.every=6",
        "attention.tokens=16",
        "checkpoint.every=4",
        *more,
    ]


def run_to_end(folder: Path, *argv: str, status: int = 0, **more) -> str:
    """Run it to its end, and give what it said."""
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
    """A `Process` to its end, in `folder` or `cwd`. It reads `input`, no more than a pipe holds,
    and has the variables of `env`: None takes one out. With text=False what it said is bytes."""

    def begin():
        os.chdir(cwd or folder)
        os.dup2(stdin, 0)
        for key, value in (env or {}).items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})

    stdin, given = os.pipe()
    os.write(given, input.encode() if isinstance(input, str) else input)
    os.close(given)
    with tempfile.TemporaryDirectory() as said:
        process = Process(Path(said), *argv, script=script, fault=begin)
        os.close(stdin)
        status = process.wait()
        out, err = (
            path.read_text("utf-8") if text else path.read_bytes()
            for path in (process.out, process.err)
        )
    return subprocess.CompletedProcess([script, *argv], status, out, err)


def fault_at_call(
    owner,
    name: str,
    call: int,
    do: Callable[[], None],
    when: Callable[..., bool] = lambda *args: True,
) -> Callable[[], None]:
    """A fault: at the n-th call of owner.name that `when` is for, `do` something first."""

    def fault():
        calls, original = iter(range(1, 10**9)), getattr(owner, name)

        def patched(*args, **more):
            if when(*args) and next(calls) == call:
                do()
            return original(*args, **more)

        setattr(owner, name, patched)

    return fault


def drop_privileges() -> None:
    """A fault: a process of root's is bound by the rights of files, as everyone else's is."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in range(64):
            libc.prctl(24, capability)  # PR_CAPBSET_DROP: nor does a program that it starts get it
        version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capset(version, none) == 0


def rows(run: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def rows_without_times(run) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows(run)]


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def assert_same_run(one: str | Path, other: str | Path, step: int = 12):
    """The logged numbers, the texts, the snapshots, the weights and the optimizers' state are the
    same, to the bit."""
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
        for key in a.files:  # what is left out of a row of losses is NaN
            assert np.array_equal(a[key], b[key], equal_nan=a[key].dtype.kind == "f"), key


def copy_after_8_steps(whole: Path, copy: Path) -> Path:
    """A copy of a run that has a checkpoint of each step, left with those of steps 4 and 8."""
    shutil.copytree(whole, copy)
    for folder in (copy / "checkpoints").glob("step_*"):
        if folder.name not in ("step_00000004", "step_00000008"):
            shutil.rmtree(folder)
    return copy
