import json
import shutil
from pathlib import Path

import pytest
import torch
from models import lively, small
from processes import pointer
from run_folders import load_run
from safetensors.torch import save_file

from common.checkpoints import (
    CHECKPOINT_FILES,
    MANIFEST_FILE,
    find_checkpoint,
    saved_steps,
)
from common.errors import UserError
from training.checkpoint import load_weights
from variants import build_model


@pytest.fixture
def run(tiny, train_in_process, shared) -> Path:
    """A finished run with checkpoints of steps 8 and 12."""
    trained = shared("trained", lambda folder: train_in_process(tiny, run_dir=str(folder / "run")))
    return Path(shutil.copytree(trained / "run", tiny.run_dir))


@pytest.mark.slow
def test_a_run_is_loaded_with_its_model_tokenizer_and_configuration(run, text_file):
    model, tokenizer, config = load_run(run)
    text = text_file.read_text(encoding="utf-8")[:100]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert config.model.vocab_size == tokenizer.vocab_size == model.config.vocab_size
    tokens = torch.tensor([tokenizer.encode(text)[:32]])
    assert not model.training and model.attention_maps(tokens).shape == (2, 1, 2, 32, 32)
    files = {path.name for path in run.glob("checkpoints/step_*/*")}
    assert files == {*CHECKPOINT_FILES, MANIFEST_FILE}


@pytest.mark.slow
def test_checkpoints_are_found_by_best_last_and_step(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row and row["step"]}
    assert pointer(run, "best") == min(losses, key=losses.get)
    assert find_checkpoint(run, "last")[1].step == 12
    assert find_checkpoint(run, "8")[1].step == find_checkpoint(run, 8)[1].step == 8
    with pytest.raises(UserError, match="8, 12"):
        load_run(run, 5)


@pytest.mark.slow
def test_the_newest_checkpoints_and_the_best_are_kept(tiny, train_in_process):
    tiny.checkpoint.every, tiny.checkpoint.keep, tiny.max_steps = 1, 2, 20
    train_in_process(tiny)
    run = Path(tiny.run_dir)
    assert set(saved_steps(run)) == {19, 20, pointer(run, "best")}
    assert not list((run / "checkpoints").glob(".*"))


def test_only_the_canonical_name_of_a_step_is_a_checkpoint(tmp_path):
    for name in ("step_00000004", "step_000000006", "step_٠٠٠٠٠٠٠٨", "step_7", "step_123456789"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert saved_steps(tmp_path) == [4, 123456789]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(run, tiny, train_in_process):
    for model in run.glob("checkpoints/*/model.safetensors"):
        model.write_bytes(b"nothing")
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError) as error:
        train_in_process(tiny, resume=True)
    assert str(run) in str(error.value)
    assert sorted(run.rglob("*")) == before


def test_loaded_weights_are_all_parameters_and_the_keys_of_the_ngrams(tmp_path):
    config = small(ngrams=3, ngram_rows=600)
    saved, loaded = lively(build_model(config)), build_model(config)
    save_file(saved.tensors(), tmp_path / "model.safetensors")
    load_weights(loaded, tmp_path / "model.safetensors")
    expected, actual = saved.state_dict(), loaded.state_dict()
    assert expected.keys() == actual.keys() and saved.ngrams.keys.any()
    assert all(torch.equal(expected[name], tensor) for name, tensor in actual.items())
