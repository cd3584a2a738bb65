"""Training that starts from a trained model, on new text."""

import json

import pytest
from conftest import TINY

from training.checkpoint import load_run

pytestmark = pytest.mark.slow
QUIET = ["attention.every=0", "log.every=1", "optim.warmup_steps=0", "batch_size=4",
         "compile=false", "precision=fp32"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "first.txt").write_text("the glass model attends to every token before it\n" * 200)
    (folder / "second.txt").write_text(
        "to every model the glass attends; before it every token\n".replace(";", "") * 150)
    return folder


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_fine_tuning_starts_from_the_best_model_with_its_tokenizer_and_resumes(
        command, texts, tmp_path):
    done = command("train.py", *TINY, "data=text", f"data.path={texts / 'first.txt'}",
                   "max_steps=60", "run_dir=base", "eval.every=30",
                   "attention.every=0")
    assert done.returncode == 0, done.stderr
    done = command("train.py", "init_from=base", "data=text", f"data.path={texts / 'second.txt'}",
                   "max_steps=6", "run_dir=tuned", "eval.every=2",
                   "checkpoint.every=2", *QUIET)
    assert done.returncode == 0, done.stderr
    tuned = rows(tmp_path / "tuned")
    # it knows the words already
    assert tuned[0]["val/loss"] < 0.9 * rows(tmp_path / "base")[0]["val/loss"]
    (model, tokenizer, config), (base, base_tokenizer,
                                 _) = load_run(tmp_path / "tuned"), load_run(tmp_path / "base")
    assert tokenizer.to_json() == base_tokenizer.to_json() and model.config == base.config
    assert config.init_from == str(tmp_path / "base")
    assert any((a != b).any() for a, b in zip(model.parameters(), base.parameters()))

    done = command("train.py", "run_dir=tuned", "resume=true", "max_steps=8")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "tuned")[-1]["step"] == 8

    for arguments, why in ((["init_from=base", "model.n_layer=3"],
                            "model.n_layer=3 does not go with init_from=base"),
                           (["init_from=nowhere"], "init_from=nowhere does not exist: give")):
        done = command("train.py", *arguments, "run_dir=new")
        assert done.returncode == 1 and why in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "new").exists()
