"""Nothing is written through a link in the folder of a run or of a sweep."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import soak
from processes import assert_same_run, copy_after_8_steps, fault_at_call, run_to_end
from processes import tiny_arguments as typed

import training.device
from sweeps.jobs import open_sweep
from training.run_folder import run_folder

pytestmark = pytest.mark.slow

# Files that a resume to step 12 writes, and the temporary files of some of them.
WRITTEN = [
    "metrics.jsonl",
    ".metrics.jsonl.part",
    "metrics.jsonl.before",
    "samples.jsonl",
    "config.yaml",
    "report.html",
    ".report.html.part",
    "attention/step_00000012.npz",
    "attention/.step_00000012.npz.part",
    "attention/step_00000012.png",
    "checkpoints/last",
    "checkpoints/.last.part",
    "checkpoints/best",
]


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of the finished run with the checkpoints of steps 4 and 8."""
    return copy_after_8_steps(finished_run, tmp_path / "run")


def test_links_in_a_run_are_replaced_and_never_followed_for_writing(
    tmp_path, text_file, finished_run, run
):
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "kept").write_text("mine")
    for number, name in enumerate(WRITTEN):
        inside, target = run / name, outside / str(number)
        target.write_bytes(inside.read_bytes() if inside.exists() else b"mine")
        inside.unlink(missing_ok=True)
        inside.symlink_to(target)
    for name in ("step_00000012", ".step_00000012.part", "step_00000002"):
        (run / "checkpoints" / name).symlink_to(outside / "folder")
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}
    run_to_end(tmp_path, *typed(text_file, "resume=true"))
    assert_same_run(finished_run, run)
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


def link_out(run: Path, outside: Path, names: list[str], target: str) -> None:
    """Replace paths in a run by links to paths in another folder that exist or do not."""
    outside.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        path, elsewhere = run / name, outside / str(number)
        if target == "live" and path.is_dir():
            elsewhere.mkdir()
        elif target == "live":
            elsewhere.write_text("mine")
        if os.path.lexists(path):
            path.rename(outside.with_name(f"{number}_{path.name}"))
        path.symlink_to(elsewhere)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("target", [soak("live"), "dangling"])
def test_a_resume_writes_nothing_through_any_link(tmp_path, text_file, run, target):
    parts = ["attention/.step_00000012.png.part", "checkpoints/.step_00000012.part"]
    link_out(run, tmp_path / "outside", [*WRITTEN, *parts], target)
    before = contents(tmp_path / "outside")
    run_to_end(tmp_path, *typed(text_file, "resume=true"))
    assert contents(tmp_path / "outside") == before
    assert not [name for name in ("metrics.jsonl", "config.yaml") if (run / name).is_symlink()]


@pytest.mark.parametrize("name", [".lock", "checkpoints", "attention", "wandb"])
@pytest.mark.parametrize("target", ["live", "dangling"])
def test_a_run_whose_folders_are_links_is_refused(tiny, run, tmp_path, name, target):
    link_out(run, tmp_path / "outside", [name], target)
    before = contents(tmp_path / "outside")
    tiny.run_dir, tiny.resume = str(run), "auto"
    with pytest.raises(OSError) as error, run_folder(tiny, "test"):
        pass
    assert error.value.filename == str(run / name) and contents(tmp_path / "outside") == before


@pytest.mark.parametrize(
    "names, target, status",
    [
        soak(["metrics.jsonl", "samples.jsonl", "report.html", "attention"], "live", 0),
        (["metrics.jsonl", "samples.jsonl", "report.html", "attention"], "dangling", 0),
        soak(["checkpoints"], "live", 1),
        (["checkpoints"], "dangling", 1),
    ],
)
def test_a_run_writes_nothing_through_links_that_appear_meanwhile(
    tmp_path, text_file, names, target, status
):
    def make():
        link_out(tmp_path / "run", tmp_path / "outside", names, target)

    fault = fault_at_call(training.device, "seed_micro_step", 6, make)
    output = run_to_end(tmp_path, *typed(text_file), status=status, fault=fault)
    assert all(content in (b"", b"mine") for content in contents(tmp_path / "outside").values())
    assert len(contents(tmp_path / "outside")) == (len(names) if target == "live" else 0)
    assert "is a link" in output


# --- sweeps ---------------------------------------------------------------------------------------

SWEEP = ["-m", "seed=1,2", "hydra.sweep.dir=sweep", "max_steps=1", "attention.every=0"]


def sweep_arguments(text_file: Path) -> list[str]:
    return [a for a in typed(text_file) if not a.startswith("run_dir=")] + SWEEP


@pytest.fixture
def sweep(shared, text_file, tmp_path) -> Path:
    """A finished sweep of two jobs."""
    made = shared("linked_sweep", lambda folder: run_to_end(folder, *sweep_arguments(text_file)))
    return shutil.copytree(made / "sweep", tmp_path / "sweep")


@pytest.mark.parametrize("target", ["live", "dangling"])
@pytest.mark.parametrize("name", [".lock", "multirun.yaml", ".submitit", "sweep.csv", "seed=1"])
def test_a_sweep_whose_folder_contains_links_is_refused(sweep, tmp_path, name, target):
    link_out(sweep, tmp_path / "outside", [name], target)
    before = contents(tmp_path / "outside")
    with pytest.raises(OSError) as error:
        open_sweep(str(sweep), resume=True)
    assert error.value.filename == str(sweep / name) and contents(tmp_path / "outside") == before


@pytest.mark.parametrize("target", [soak("live"), "dangling"])
def test_a_job_writes_nothing_through_links(sweep, tmp_path, text_file, target):
    link_out(sweep, tmp_path / "outside", ["seed=1/log.txt", "seed=2/.job.lock"], target)
    before = contents(tmp_path / "outside")
    output = run_to_end(tmp_path, *sweep_arguments(text_file), "resume=auto", status=1)
    assert contents(tmp_path / "outside") == before
    assert output.count("failed") >= 2 and "link" in output
