"""train.py as a user runs it: commands, exit statuses, what is left on disk."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, soak
from omegaconf import OmegaConf
from processes import rows, tiny_arguments

from cli.config_file import read_config
from common.metrics import best_row, read_rows
from common.settings import iterate_settings
from training.record import describe_task

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
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_default", run.name)
    assert f"python sample.py run_dir=runs/{run.name}" in done.stdout
    assert "best validation loss" in done.stdout
    assert {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "report.html",
        "attention",
        "checkpoints",
    } <= {p.name for p in run.iterdir()}
    assert [sample["step"] for sample in read_rows(run / "samples.jsonl")] == [0, 5, 10]
    assert [row["step"] for row in rows(run)] == list(range(11))
    last = rows(run)[-1]
    assert last["tokens"] == 10 * 4 * 32
    # Seven scores and copying, at the end the importance, with errors; three without the first
    # token too.
    assert sum(key.startswith("heads/") for key in last) == (9 + 9 + 3) * 2 * 2
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
    again = command("train.py", "run_dir=run", "resume=true")
    assert again.returncode == 0 and "is finished" in again.stdout


def test_a_folder_that_is_not_empty_or_holds_no_run_is_refused(command, tmp_path, text_file):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for folder, resume, sentence in (
        ("full", "false", "run_dir=full"),
        ("full", "true", "run_dir=full"),
        ("none", "true", "run_dir=none"),
    ):
        done = command("train.py", *on(text_file), f"run_dir={folder}", f"resume={resume}")
        assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "none").exists()


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


def test_a_run_without_a_checkpoint_is_refused_with_resume_true(command, run):
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("")
    refused = command("train.py", "run_dir=run", "resume=true")
    assert refused.returncode == 1 and "resume=auto" in refused.stderr


def test_output_that_nobody_reads_on_is_no_error(tmp_path):
    done = subprocess.run(
        f"'{sys.executable}' '{ROOT}'/train.py --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_the_run_keeps_the_configuration_that_cfg_job_prints(command, text_file, finished_run):
    printed = OmegaConf.create(
        command(
            "train.py",
            *tiny_arguments(text_file),
            "checkpoint.every=1",
            "checkpoint.keep=99",
            "--cfg",
            "job",
        ).stdout
    )
    kept = {
        name: value
        for name, _, value in iterate_settings(read_config(finished_run / "config.yaml"))
    }
    differ = {name for name, value in kept.items() if value != OmegaConf.select(printed, name)}
    resolved = {"vocab_size", "vocab_multiple", "mlp_hidden"}
    assert differ <= {"device", "shard", *(f"model.{name}" for name in resolved)}


def test_tiny_contexts_and_vocabularies_train_and_sample(command, tmp_path):
    (tmp_path / "dna.txt").write_text("AC" * 40)
    shape = ["model.block_size=2", "model.n_head=1", "model.n_kv_head=1"]
    ngrams = ["model.n_layer=1", "model.ngrams=3", "model.ngram_count=2"]
    text = ["data=text", "data.path=dna.txt", "run_dir=run", "max_steps=2", "attention.every=1"]
    done = command("train.py", *TINY, *shape, *ngrams, *text)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    page = ["attention=page.html", "prompt=A", "max_new_tokens=9"]
    for request in (page, ["score=dna.txt"]):
        done = command("sample.py", "run_dir=run", *request)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("task", ["markov", soak("modular")])  # of any length, and a fixed one
def test_a_task_trains_resumes_and_samples(command, tmp_path, task):
    """All parts of a run work on generated sequences, and a resumed run has the same losses."""
    shape = [line for line in TINY if "tokenizer" not in line and "block_size" not in line]
    length = ["model.block_size=32"] if task in ("passages", "markov") else []
    data = ["data=synthetic", f"data.task={task}", "data.val_max_tokens=320", "data.begin=true"]
    settings = [*shape, *length, *data, "optim.schedule=constant", "attention.every=0"]
    for run, steps, more in (("run", 4, []), ("two", 2, []), ("two", 4, ["resume=true"])):
        done = command("train.py", *settings, f"run_dir={run}", f"max_steps={steps}", *more)
        assert done.returncode == 0, done.stderr
    losses = [
        {row["step"]: row["val/loss"] for row in rows(tmp_path / run) if "val/loss" in row}
        for run in ("run", "two")
    ]
    assert losses[0][4] == losses[1][4]
    assert not any("val/bits_per_byte" in row for row in rows(tmp_path / "run"))
    others = command("train.py", "run_dir=two", "resume=true", "data.symbols=9", "max_steps=5")
    assert others.returncode == 1 and "Traceback" not in others.stderr
    done = command("sample.py", "run_dir=run", "prompt=^0", "max_new_tokens=3")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 3
    done = command("sample.py", "run_dir=run")  # the rest of a held-out sequence
    assert len(done.stdout) == {"markov": 32, "modular": 1}[task] + 1, done.stderr
    done = command("train.py", "run_dir=run", "eval_only=true")
    best = best_row(rows(tmp_path / "run"))
    assert f"task     {describe_task(best)[0]}\n" in done.stdout, done.stderr
