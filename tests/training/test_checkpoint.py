import json
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from training.checkpoint import (
    FILES,
    MANIFEST,
    find_checkpoint,
    load_run,
    read_pointer,
    saved_steps,
    verify,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tiny, train_in_process, shared) -> Path:
    """A finished run with checkpoints of steps 8 and 12."""
    trained = shared("trained", lambda folder: train_in_process(tiny, run_dir=str(folder / "run")))
    return Path(shutil.copytree(trained / "run", tiny.run_dir))


def test_a_run_is_loaded_with_its_model_tokenizer_and_configuration(run, text_file):
    model, tokenizer, config = load_run(run)
    text = text_file.read_text(encoding="utf-8")[:100]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert config.model.vocab_size == tokenizer.vocab_size == model.config.vocab_size
    tokens = torch.tensor([tokenizer.encode(text)[:32]])
    assert not model.training and model.attention_maps(tokens).shape == (2, 1, 2, 32, 32)
    assert {p.name for p in run.glob("checkpoints/step_*/*")} == {*FILES, MANIFEST}


def test_best_last_and_a_step_name_checkpoints(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row and row["step"]}
    assert read_pointer(run, "best") == min(losses, key=losses.get)
    assert find_checkpoint(run, "last")[1]["step"] == 12
    assert find_checkpoint(run, "8")[1]["step"] == find_checkpoint(run, 8)[1]["step"] == 8
    with pytest.raises(UserError, match="no checkpoint of step 5: there are 8, 12"):
        load_run(run, 5)


def test_the_newest_checkpoints_and_the_best_are_kept(tiny, train_in_process):
    tiny.checkpoint.every, tiny.checkpoint.keep, tiny.max_steps = 1, 2, 20
    train_in_process(tiny)
    run = Path(tiny.run_dir)
    assert set(saved_steps(run)) == {19, 20, read_pointer(run, "best")}
    assert not list((run / "checkpoints").glob(".*"))


def test_no_byte_of_a_manifest_changes_unnoticed(run):
    path = run / "checkpoints" / "step_00000012" / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"damaged|sha256|format|bytes where"):
            verify(path.parent)


def test_when_every_checkpoint_is_damaged_there_is_a_sentence_and_no_fresh_start(
    run, tiny, train_in_process
):
    for model in run.glob("checkpoints/*/model.safetensors"):
        model.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole"):
        train_in_process(tiny, resume=True)
