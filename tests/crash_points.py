"""Interrupt a job at a file operation: kill it, let the operation fail, or cut the power.

What is on the disk then resumes to the files of an undisturbed job, or the job printed which write
failed. strace injects the faults from outside.

Each job is traced once, to count its operations, and each operation makes two cases: a kill before
it, and its failure. Of consecutive writes to one file only the first and the last are interrupted,
because nothing but the length of that file changes between them. Operations of a sweep on snapshots
and checkpoints are not interrupted, because a single run has the same ones.
"""

import errno
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import KILL, Process, pointer, rows, rows_without_times, same_tensors, tiny_arguments

from run.run_dir import RunDir

needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
CALLS = [
    "open",
    "openat",
    "creat",
    "write",
    "writev",
    "pwrite64",
    "sendfile",
    "copy_file_range",
    "truncate",
    "ftruncate",
    "fsync",
    "rename",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
]
WRITES = re.compile(r"O_(WRONLY|RDWR|CREAT)")
IN_SNAPSHOTS_OR_CHECKPOINTS = re.compile("/(attention|checkpoints)/")
JOBS = {
    "run": ["checkpoint.keep=1", "run_dir=place/run", "optim=muon", "accumulate=2"],
    "prepare": ["prepare_only=true"],
    "sweep": [
        "-m",
        "seed=1,2",
        "hydra.sweep.dir=place/sweep",
        "max_steps=2",
        "eval.every=1",
        "checkpoint.every=1",
        "attention.every=0",
    ],
}
INJECTED_ERRORS = (errno.ENOSPC, errno.EIO)


class Case(NamedTuple):
    """A fault that strace injects into the n-th call of a name."""

    call: str
    number: int
    fault: str


def argv_of(job: str, text_file: Path) -> list[str]:
    arguments = tiny_arguments(text_file)
    if job == "prepare":
        arguments = ["data=text", f"data.path={text_file}", "tokenizer=char"]
    elif job == "sweep":
        arguments.remove("run_dir=run")
    return [*arguments, *JOBS[job]]


def traced(folder: Path, job: str, text_file: Path, *options: str) -> Process:
    """Start the job in a folder, its main thread under strace from its first line on."""
    reading, writing = os.pipe()
    os.environ["GLASSGPT_CACHE"] = str(folder / "place" / "cache")
    process = Process(folder, *argv_of(job, text_file), fault=lambda: os.read(reading, 1))
    strace = subprocess.Popen(
        ["strace", "-y", "-s", "300", "-o", folder / "trace", *options, "-p", str(process.pid)],
        stderr=subprocess.PIPE,
        text=True,
    )
    attached = strace.stderr.readline()
    if not attached.endswith("attached\n"):
        process.signal(KILL)
        process.wait()
        pytest.skip(f"strace cannot attach here: {attached.strip()}")
    os.write(writing, b"\n")  # now the job begins
    process.wait()
    strace.communicate()  # it ends with the process
    os.close(reading)
    os.close(writing)
    return process


def resume(folder: Path, job: str, text_file: Path) -> str:
    """Run the job's command again, a run or sweep with resume=auto, and return its output."""
    os.environ["GLASSGPT_CACHE"] = str(folder / "place" / "cache")
    more = [] if job == "prepare" else ["resume=auto"]
    process = Process(folder, *argv_of(job, text_file), *more)
    assert process.wait() == 0 and "Traceback" not in process.output(), process.output()
    return process.output()


def assert_same(job: str, whole: Path, other: Path, output: str) -> None:
    """Check that the other folder holds what the undisturbed one does.

    Snapshots, rows and checkpoints may be missing only if the output reports the injected error.
    """
    logs = [path.read_text(encoding="utf-8") for path in other.glob("place/sweep/*/log.txt")]
    reports = "".join([output, *logs])  # a job of a sweep reports into its log
    error_reported = any(os.strerror(code) in reports for code in INJECTED_ERRORS)
    runs = sorted(path.parent.relative_to(whole) for path in whole.glob("place/**/metrics.jsonl"))
    for one, run in ((whole / name, other / name) for name in runs):
        *_, step = steps = RunDir(one).steps()
        for name in ("best", "last"):
            assert pointer(run, name) == pointer(one, name)
        assert RunDir(run).steps() == steps or (error_reported and RunDir(run).steps()[-1] == step)
        for name in ("model", "optimizer"):
            assert same_tensors(
                *(
                    path / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors"
                    for path in (one, run)
                )
            )
        remaining = rows_without_times(run)
        assert remaining == [row for row in rows_without_times(one) if row in remaining]
        names = [{p.name for p in path.glob("attention/*.npz")} for path in (one, run)]
        assert names[1] <= names[0]
        if not error_reported:
            assert len(remaining) == len(rows(one)) and names[0] == names[1]
            assert (run / "report.html").stat().st_size > 100_000
    caches = [
        {p.name: p.read_bytes() for p in path.glob("place/cache/*/*.bin")}
        for path in (whole, other)
    ]
    assert caches[0] == caches[1] and {"train.bin", "val.bin"} <= caches[0].keys()
    assert not [p for p in other.glob("place/**/.*.part") if ".report.html." not in p.name]
    if job == "sweep":
        assert (other / "place" / "sweep" / "sweep.csv").read_text().count("finished") == 2


def run_undisturbed(folder: Path, job: str, text_file: Path) -> None:
    """Run a job in a folder, which keeps the trace of its calls."""
    calls = ",".join(f"?{call}" for call in CALLS)
    process = traced(folder, job, text_file, "-e", f"trace={calls}")
    assert process.wait() == 0, process.output()


def find_cases(folder: Path, job: str) -> list[Case]:
    """Return the cases of a job from the trace of its undisturbed run in a folder.

    Paths are relative to the folder, or absolute in what strace adds to file descriptors.
    """
    in_place = re.compile(rf'[<"]{re.escape(str(folder))}/place\b|"place\b')
    operations, counts = [], Counter()
    for line in (folder / "trace").read_text(errors="replace").splitlines():
        call, _, arguments = line.partition("(")
        counts[call] += 1
        opens = call in ("open", "openat")
        if ") = -1 " in line or not in_place.search(line) or (opens and not WRITES.search(line)):
            continue  # it changes nothing
        if job == "sweep" and IN_SNAPSHOTS_OR_CHECKPOINTS.search(line):
            continue
        written = arguments.partition(",")[0] if call == "write" else len(operations)
        operations.append((call, counts[call], written))
    cases = []
    for _, group in groupby(operations, key=lambda operation: operation[2]):
        consecutive = list(group)
        for call, number, _ in {consecutive[0]: None, consecutive[-1]: None}:
            error = ("error=ENOSPC", "error=EIO")[number % 2]
            cases += [Case(call, number, "signal=KILL"), Case(call, number, error)]
    return cases


def check_interruptions(
    whole: Path, job: str, text_file: Path, cases: Sequence[Case], root: Path
) -> None:
    """Interrupt a job in each case, and check that it resumes to what is in the folder `whole`."""
    failures = []
    for case in cases:
        folder = root / f"{case.call} {case.number} {case.fault}"
        folder.mkdir()
        fault = f"inject={case.call}:{case.fault}:when={case.number}"
        process = traced(folder, job, text_file, "-e", f"trace={case.call}", "-e", fault)
        try:
            assert process.wait() in ((-KILL,) if "KILL" in case.fault else (0, 1))
            output = process.output()
            assert "Traceback" not in output, output
            assert_same(job, whole, folder, output + resume(folder, job, text_file))
        except AssertionError as e:
            failures.append(f"{folder.name}: {process.status} {process.output()[-600:]} {e}")
        shutil.rmtree(folder)
    assert not failures, "\n\n".join(failures)


class Disk:
    """Model of a disk whose power is lost.

    Files keep what was synced. Folders keep the entries that were synced (`strictly`), or all
    entries, as on a disk that only delays data.
    """

    def __init__(self, place: Path, out: Path):
        self.place, self.out, self.files, self.folders = place, out, {}, {}
        self.open_files, self.states, self.fsync = {}, [], os.fsync

    def hold(self, path: str) -> int:
        """Return the inode of a file, and keep it open so that no other file gets this number."""
        number = os.lstat(path).st_ino
        if number not in self.open_files:
            self.open_files[number] = os.open(path, os.O_RDONLY)
        return number

    def sync(self, fd: int) -> None:
        """Replace os.fsync: record what is on the disk now, and write it out if it is new."""
        self.fsync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(str(self.place)):
            return
        if os.path.isdir(path):
            entries = {e.name: (self.hold(e.path), e.is_dir()) for e in os.scandir(path)}
            self.folders[self.hold(path)] = entries
        else:
            self.files[self.hold(path)] = Path(path).read_bytes()
        for strictly in (True, False):
            state = self.state(str(self.place), strictly)
            if state not in self.states:
                self.states.append(state)
                self.keep(self.out / f"{len(self.states)}" / self.place.name, state)

    def state(self, path: str, strictly: bool, number: int | None = None) -> dict:
        number = self.hold(path) if number is None else number
        entries = (
            self.folders.get(number, {})
            if strictly
            else {e.name: (self.hold(e.path), e.is_dir()) for e in os.scandir(path)}
        )
        return {
            name: self.state(f"{path}/{name}", strictly, child)
            if is_folder
            else self.files.get(child, b"")
            for name, (child, is_folder) in entries.items()
        }

    def keep(self, folder: Path, state: dict) -> None:
        folder.mkdir(parents=True)
        for name, value in state.items():
            if isinstance(value, dict):
                self.keep(folder / name, value)
            else:
                (folder / name).write_bytes(value)


def run_on_failing_disk(folder: Path, text_file: Path) -> None:
    """Run a job in a folder, and keep what the disk holds after each sync in `lost`."""
    (folder / "place").mkdir()
    os.environ["GLASSGPT_CACHE"] = str(folder / "place" / "cache")

    def fault():
        os.fsync = Disk(folder / "place", folder / "lost").sync

    process = Process(folder, *argv_of("run", text_file), fault=fault)
    assert process.wait() == 0, process.output()


def states_of_disk(folder: Path) -> list[Path]:
    """Return what `run_on_failing_disk` kept, in the order of time."""
    return sorted((folder / "lost").iterdir(), key=lambda path: int(path.name))


def check_power_losses(whole: Path, text_file: Path, states: Sequence[Path], root: Path) -> None:
    """Check that a run resumes from each state of the disk to what is in the folder `whole`."""
    for state in states:
        folder = shutil.copytree(state, root / state.name)
        assert_same("run", whole, folder, resume(folder, "run", text_file))
        shutil.rmtree(folder)
