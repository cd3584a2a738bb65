"""Training needs no file of glass/, which looks at attention heads and draws pages."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from processes import rows


@pytest.fixture
def train_script(tmp_path) -> Path:
    """train.py in a copy of the repository without glass/."""
    copy = tmp_path / "repository"
    left_out = shutil.ignore_patterns(
        "glass", "tests", "docs", "runs", "cache", ".*", "__pycache__"
    )
    shutil.copytree(ROOT, copy, ignore=left_out)
    # git leaves this when it removes a folder
    (copy / "glass" / "__pycache__").mkdir(parents=True)
    return copy / "train.py"


def test_a_run_without_glass_trains_resumes_and_says_that_heads_are_not_measured(
    new_command, train_script, text_file, tmp_path
):
    def train(*settings: str):
        arguments = [*TINY, f"data.path={text_file}", "eval.every=2", "wandb.mode=offline"]
        environment = {"WANDB_MODE": "offline"}
        return new_command(train_script, *arguments, "run_dir=run", *settings, env=environment)

    for arguments in (["attention.every=2"], ["attention.every=2", "dry_run=true"]):
        refused = train(*arguments, "max_steps=2")
        assert refused.returncode == 1 and "attention.every=2" in refused.stderr
    run = tmp_path / "run"
    assert not run.exists()

    for number, length in enumerate((2, 4), 1):
        done = train("attention.every=0", f"max_steps={length}", "resume=auto")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("heads are not measured") == 1
        assert [row["step"] for row in rows(run)] == list(range(length + 1))
        assert "val/loss" in rows(run)[-1]
        assert len([*(run / "wandb").glob("offline-run-*")]) == number
    assert (run / "samples.jsonl").exists() and not (run / "report.html").exists()
