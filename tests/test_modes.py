"""What train.py does instead of training: it prints true numbers and leaves a run as it was."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from processes import rows

from data.splits import VALIDATION_PERIOD
from interop import load
from train import train_from


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_eval_only_measures_the_recorded_loss_and_leaves_the_run_as_it_was(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    losses = [row["val/loss"] for row in rows(run) if "val/loss" in row]
    before = hashes(tmp_path)
    with FileLock(run / ".lock"):  # as of a process that trains it
        assert train_from(f"run_dir={run}", "eval_only=true") == min(losses)
        last = train_from(f"run_dir={run}/checkpoints/last", "eval_only=true", "batch_size=2")
    assert last == losses[-1]
    assert hashes(tmp_path) == before


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
