"""Checkpoints: a damaged one is found by its hash, said, and passed over; never a silent fresh
start; older formats load."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Process, after_8_steps, assert_same_run, at_call, finished, tiny

import attention_maps.capture
import attention_maps.snapshot
import training.evaluate
from training.checkpoint import find_checkpoint, load_run, read_pointer, saved_steps

FORMAT_1 = Path(__file__).parent / "format_1"
FILES = ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.yaml",
         "manifest.json"]


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of the whole run, as it was after 8 steps, with the checkpoints of steps 4 and 8."""
    return after_8_steps(whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name, damage", [(name, "flip") for name in FILES] + [(
    "model.safetensors", "truncate"), ("manifest.json", "truncate")])
def test_a_damaged_checkpoint_is_said_in_a_line_and_the_run_goes_on_from_the_one_before(
        tmp_path, text_file, whole, run, name, damage):
    path = run / "checkpoints" / "step_00000008" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-7])
    said = finished(tmp_path, *tiny(text_file, "resume=true")).splitlines()
    assert sum("is damaged" in line and "step_00000008" in line for line in said) == 1
    assert "resuming at step 4" in said
    assert_same_run(whole, run)


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_the_run_ends_with_a_sentence_and_does_not_begin_anew(
        tmp_path, text_file, run):
    for path in run.glob("checkpoints/step_*/optimizer.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = (run / "metrics.jsonl").read_bytes()
    for resume in ("true", "auto"):
        said = finished(tmp_path, *tiny(text_file, f"resume={resume}"), status=1)
        assert "is whole: it cannot be loaded" in said
        assert len((tmp_path / "err.txt").read_text().splitlines()) == 1
    assert "is whole" in finished(tmp_path, "run_dir=run", script="sample.py", status=1)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_the_newest_and_the_best_are_kept_wherever_the_best_is(tmp_path, text_file):
    def best_after_5():
        steps = iter(range(99))
        training.evaluate.Validation.evaluate = (
            lambda self, model, *_: (1.0 + abs(next(steps) - 5), 1.0))

    finished(tmp_path, *tiny(text_file, "max_steps=20", "checkpoint.every=1", "checkpoint.keep=2",
                             "eval.every=1", "attention.every=0"),
             fault=best_after_5)
    assert read_pointer(tmp_path / "run", "best") == 5
    assert saved_steps(tmp_path / "run") == [5, 19, 20]
    assert find_checkpoint(tmp_path / "run", "best", pytest.fail)[1]["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, call, step", [(training.evaluate.Validation, "evaluate", 3,
                                                      8), (attention_maps.capture, "capture", 2, 8),
                                                     (attention_maps.snapshot, "sample_text", 2, 8),
                                                     (attention_maps.capture.Snapshot, "save", 2,
                                                      8)])
def test_what_fails_while_it_looks_at_the_run_finds_the_steps_checkpoint_on_disk(
        tmp_path, text_file, owner, name, call, step):
    def fail():
        raise RuntimeError("on purpose")

    process = Process(tmp_path, *tiny(text_file, "attention.every=8"),
                      fault=at_call(owner, name, call, fail))
    assert process.wait() == 1 and "on purpose" in process.said()
    assert find_checkpoint(tmp_path / "run", "last", pytest.fail)[1]["step"] == step


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_with_both_settings(tmp_path, text_file, run):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("n_layer: 2",
                                             "n_layer: 3").replace("n_embd: 32", "n_embd: 64"))
    finished(tmp_path, "run_dir=run", "resume=true", status=1)
    sentence, = (tmp_path / "err.txt").read_text().splitlines()
    assert ("model.n_layer: 2 in the checkpoint, 3 in the run; "
            "model.n_embd: 32 in the checkpoint, 64 in the run") in sentence


def test_a_checkpoint_of_the_first_format_gives_the_logits_that_it_gave(tmp_path):
    """The files in format_1 were written by the version that wrote that format."""
    model, tokenizer, config = load_run(FORMAT_1, say=pytest.fail)
    tokens = torch.tensor([tokenizer.encode("the glass attend")])
    with torch.no_grad():
        logits = model(tokens)[0].numpy()
    assert np.allclose(logits, np.load(FORMAT_1 / "logits.npy"), rtol=1e-6, atol=1e-6)
    assert (config.optim.name, config.max_steps, config.model.norm) == ("muon", 6, "rmsnorm")


@pytest.mark.slow
def test_a_run_of_the_first_format_goes_on(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "run")
    (tmp_path / "t.txt").write_text("the glass attends to what came before it\n" * 40)
    # texts were told apart otherwise then
    finished(tmp_path, "run_dir=run", "resume=true", "max_steps=8", status=1)
    assert "the text, or how it is prepared, has changed" in (tmp_path / "err.txt").read_text()
    said = finished(tmp_path, "run_dir=run", "resume=true", "max_steps=8",
                    "accept_changed_data=true")
    assert "resuming at step 6" in said and saved_steps(tmp_path / "run") == [6, 8]


def test_a_checkpoint_of_a_later_format_is_said_to_be_that(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step_00000006" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    said = []
    with pytest.raises(Exception, match="is whole"):
        find_checkpoint(tmp_path / "run", "last", said.append)
    assert "its format is 9, and this version of GlassGPT reads 1 to 2" in said[0]
