"""What train.py does instead of training: it prints true numbers and leaves a run as it was."""

import hashlib
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, read_only
from filelock import FileLock
from processes import rows, tiny_arguments

import sample
import train
from cli.sample_config import SampleConfig
from common.errors import UserError
from data.splits import VALIDATION_PERIOD
from interop import load
from train import train_from


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_eval_only_measures_the_recorded_loss_and_writes_nothing(
    finished_run, tmp_path, monkeypatch
):
    run = shutil.copytree(finished_run, tmp_path / "run")
    losses = [row["val/loss"] for row in rows(run) if "val/loss" in row]
    shutil.copytree(os.environ["GLASSGPT_CACHE"], tmp_path / "cache")
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = hashes(tmp_path)
    with FileLock(run / ".lock"), read_only(tmp_path):  # locked as by a process that trains it
        assert train_from(f"run_dir={run}", "eval_only=true") == min(losses)
        for name in ("last", "step_00000012"):
            last = train_from(f"run_dir={run}/checkpoints/{name}", "eval_only=true", "device=cpu")
            assert last == losses[-1]
    assert hashes(tmp_path) == before


def test_each_loss_of_text_is_printed_with_its_perplexity(finished_run, text_file, capsys):
    train_from(*tiny_arguments(text_file, "max_steps=4", "run_dir=null"))
    train_from(f"run_dir={finished_run}", "eval_only=true")
    sample.sample(SampleConfig(run_dir=str(finished_run), score=str(text_file)))
    loss, perplexity = r"(?:val (\d\S*)|(\d\S*) nats per token)", r"(?: \(perplexity (\S+)\))?"
    losses = re.findall(loss + perplexity, capsys.readouterr().out)
    assert len(losses) == 5  # of two evaluations, the end, eval_only and score
    for shown, precise, perplexity in losses:
        assert float(perplexity) == pytest.approx(math.exp(float(shown or precise)), rel=1e-3)


@pytest.mark.parametrize("typed", ["max_steps=3", "optim=muon"])
def test_a_setting_that_an_evaluation_does_not_read_is_refused(typed, finished_run):
    with pytest.raises(UserError, match=f"{typed} .*eval_only"):
        train_from(f"run_dir={finished_run}", "eval_only=true", typed)


def test_eval_only_of_another_model_takes_the_text_that_is_given(finished_run, tmp_path, text_file):
    text = text_file.read_text(encoding="utf-8")[:200]  # its validation split is below a context
    (tmp_path / "short.txt").write_text(text, encoding="utf-8")
    data = ["data=text", f"data.path={tmp_path / 'short.txt'}"]
    model, tokenizer = load(finished_run)
    validation = text[len(text) * (VALIDATION_PERIOD - 1) // VALIDATION_PERIOD :]
    ids = torch.tensor(np.array(tokenizer.encode(validation)))
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None, :-1])[0][0], ids[1:]).item()
    for source in (f"init_from={finished_run}", f"run_dir={finished_run}"):
        loss = train_from(source, "eval_only=true", "precision=fp32", *data)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_dry_run_takes_three_steps_of_the_run_and_leaves_its_folder_as_it_was(
    finished_run, tmp_path, text_file, monkeypatch, capsys
):
    run = shutil.copytree(finished_run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = hashes(tmp_path)
    steps = []
    monkeypatch.setattr(train, "train_step", lambda step, *_, **__: steps.append(step))
    resumed = ["resume=true", f"run_dir={run}"]
    for more, first, left in (["run_dir=new"], 0, 12), (resumed, 12, 0):
        train_from(*tiny_arguments(text_file, *more, "dry_run=true"))
        *_, cost = capsys.readouterr().out.splitlines()
        assert f" {left} steps" in cost and "ms/step" in cost and "GiB" in cost
        assert steps == [first, first + 1, first + 2]
        steps.clear()
    assert hashes(tmp_path) == before


def test_a_dry_run_of_a_sweep_measures_each_job_by_itself(command, tmp_path, text_file):
    settings = [*TINY, "data=text", f"data.path={text_file}", "max_steps=3", "dry_run=true"]
    done = command("train.py", "-m", *settings, "model.n_embd=1200,33,36")
    assert done.returncode == 1 and "model.n_embd=33" in done.stderr  # not divisible by n_head
    size, large, small = [line for line in done.stdout.splitlines() if re.match(r"sweep|\d", line)]
    assert "3 jobs" in size and "n_embd=1200" in large and "n_embd=36" in small
    memory = [float(re.findall(r"([\d.]+) GiB", line)[0]) for line in (small, large)]
    assert memory[0] < memory[1]
    assert not [*tmp_path.iterdir()]
