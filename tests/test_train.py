"""train.py as a user runs it: commands, exit statuses, what is left on disk."""

import shutil
from pathlib import Path

import pytest
from conftest import TINY, soak
from processes import rows

from run.config_file import read_config
from run.loss_history import best_row
from run.run_dir import RunDir
from training.task_metrics import describe_task

pytestmark = pytest.mark.slow


def on(text_file) -> list[str]:
    return [
        *TINY,
        "data=text",
        f"data.path={text_file}",
        "eval.every=5",
        "attention.every=5",
        "attention.tokens=16",
    ]


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A finished run of 12 steps, to be changed."""
    return shutil.copytree(finished_run, tmp_path / "run")


def test_a_run_leaves_what_it_promises_and_says_what_to_do_next(command, tmp_path, text_file):
    done = command("train.py", *on(text_file), "max_steps=10")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    _, end = done.stdout.split("\n\n")  # the page first, then what it says, then what to do next
    assert end.splitlines()[0].endswith((run / "report.html").as_uri())
    for command_line in ("python explore.py", "python sample.py"):
        assert f"{command_line} run_dir=runs/{run.name}\n" in end
    names = {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "checkpoints"}
    assert names <= {p.name for p in run.iterdir()}
    assert [sample["step"] for sample in RunDir(run).samples()] == [0, 5, 10]
    assert [row["step"] for row in rows(run)] == list(range(11))
    last = rows(run)[-1]
    assert last["tokens"] == 10 * 4 * 32
    assert {"seconds/evaluate", "seconds/attention", "seconds/save"} <= last.keys()
    assert sorted(p.name for p in (run / "attention").iterdir()) == sorted(
        f"step_{step:08d}.{kind}" for step in (0, 5, 10) for kind in ("npz", "png", "safetensors")
    )
    config = read_config(run / "config.yaml")
    assert "auto" not in (config.device, config.precision, config.compile, config.shard)
    assert not (tmp_path / "outputs").exists()
    said = command("sample.py", "max_new_tokens=20")  # from the newest run
    assert said.returncode == 0 and run.name in said.stderr


def test_resuming_a_finished_run_says_so(command, run):
    again = command("train.py", "run_dir=run", "resume=true", "eval.every=3")
    assert again.returncode == 0 and "is finished" in again.stdout
    assert "eval.every" not in again.stdout  # which changes nothing


def test_a_resumed_run_takes_the_same_settings_again_and_others_that_change_no_step(
    command, tmp_path, text_file, run
):
    moved = shutil.copy(text_file, tmp_path / "moved.txt")
    same = ["model.n_layer=2", "tokenizer=char", "accumulate=4", "max_steps=14"]
    data = ["data=text", f"data.path={moved}"]
    done = command("train.py", "run_dir=run", "resume=true", *same, *data)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == list(range(15))
    assert read_config(run / "config.yaml").model.n_embd == 32
    done = command("train.py", "run_dir=run", "resume=true", "data.val_max_tokens=100")
    assert done.returncode == 1 and "data.val_max_tokens" in done.stderr


@pytest.mark.parametrize("task", ["markov", soak("modular")])  # of any length, and a fixed one
def test_a_task_trains_resumes_and_samples(command, tmp_path, task):
    """All parts of a run work on generated sequences."""
    shape = [line for line in TINY if "tokenizer" not in line and "block_size" not in line]
    length = ["model.block_size=32"] if task in ("passages", "markov") else []
    data = ["data=synthetic", f"data.task={task}", "data.val_max_tokens=320", "data.begin=true"]
    settings = [*shape, *length, *data, "optim.schedule=constant", "attention.every=0"]
    for more in (["max_steps=2"], ["max_steps=4", "resume=true"]):
        done = command("train.py", *settings, "run_dir=run", *more)
        assert done.returncode == 0, done.stderr
    assert not any("val/bits_per_byte" in row for row in rows(tmp_path / "run"))
    done = command("sample.py", "run_dir=run/checkpoints/last")  # the rest of a held-out sequence
    assert len(done.stdout) == {"markov": 32, "modular": 1}[task] + 1, done.stderr
    done = command("train.py", "run_dir=run", "eval_only=true")
    best = best_row(rows(tmp_path / "run"))
    assert f"{describe_task(best)[0]}\n" in done.stdout, done.stderr
