import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config import UserError
from training.checkpoint import find_checkpoint, load_run, pointed, saved_steps


@pytest.fixture
def run(tiny, train_here) -> Path:
    """A finished run with checkpoints of steps 8 and 12."""
    train_here(tiny)
    return Path(tiny.run_dir)


def test_a_run_is_loaded_with_its_model_tokenizer_and_configuration(run, text_file):
    model, tokenizer, config = load_run(run)
    text = text_file.read_text(encoding="utf-8")[:100]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert config.model.vocab_size == tokenizer.vocab_size == model.config.vocab_size
    assert not model.training
    assert model.attention_maps(torch.tensor([tokenizer.encode(text)[:32]])).shape == (2, 1, 2, 32, 32)


def test_best_last_and_a_step_name_checkpoints(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row and row["step"]}
    assert pointed(run, "best") == min(losses, key=losses.get)
    assert find_checkpoint(run, "last")[1]["step"] == 12
    assert find_checkpoint(run, 8)[1]["step"] == 8
    assert find_checkpoint(run, "8")[1]["step"] == 8


def test_the_newest_checkpoints_and_the_best_are_kept(tiny, train_here):
    tiny.checkpoint.every, tiny.checkpoint.keep, tiny.max_steps = 1, 2, 20
    train_here(tiny)
    run = Path(tiny.run_dir)
    assert set(saved_steps(run)) == {19, 20, pointed(run, "best")}
    assert not list((run / "checkpoints").glob(".*"))


def test_checkpoints_that_only_an_improvement_caused_are_pruned_too(tiny, train_here, monkeypatch):
    from training import checkpoint

    most, prune = [], checkpoint.prune
    monkeypatch.setattr(checkpoint, "prune", lambda run, keep: (prune(run, keep), most.append(len(saved_steps(run)))))
    tiny.checkpoint.every, tiny.checkpoint.keep, tiny.eval.every = 0, 1, 1
    train_here(tiny)
    assert len(most) > 3 and max(most) <= 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.yaml", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_found_said_and_the_one_before_it_taken(run, name, damage):
    path = run / "checkpoints" / "step_00000012" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1] if name != "manifest.json" else data[:40])
    else:
        path.unlink()
    said = []
    if damage == "flip" and name == "manifest.json":  # a flipped bit of JSON is a damaged file or a hash that does not fit
        assert find_checkpoint(run, "last", said.append)[1]["step"] in (8, 12)
        return
    assert find_checkpoint(run, "last", said.append)[1]["step"] == 8
    assert len(said) == 1 and "step_00000012" in said[0]


def test_when_every_checkpoint_is_damaged_there_is_a_sentence_and_no_fresh_start(run, tiny, train_here):
    for model in run.glob("checkpoints/*/model.safetensors"):
        model.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole"):
        train_here(tiny, resume=True)


def test_a_checkpoint_is_made_of_safetensors_and_text_alone(run):
    names = {p.name for p in run.glob("checkpoints/step_*/*")}
    assert names == {"model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.yaml", "manifest.json"}


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run):
    with pytest.raises(UserError, match="no checkpoint of step 5: there are 8, 12"):
        load_run(run, 5)


KILLED_SAVE = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from pathlib import Path
from config import GPTConfig
from data.tokenizer import CharTokenizer
from model import GPT
from training import checkpoint

def save(step):
    torch.manual_seed(step)
    checkpoint.save_checkpoint(Path({run!r}), step, GPT(GPTConfig(vocab_size=3, n_layer=1, n_head=1, n_embd=4, block_size=4)), {{}},
                               CharTokenizer("abc"), "seed: 1", {{"metrics": {{}}}})

save(1)
calls = 0
def dying(do):
    def call(*args, **more):
        global calls
        calls += 1
        if calls == {fatal}:
            os.kill(os.getpid(), 9)
        return do(*args, **more)
    return call
for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "write_text"),
                    (checkpoint, "save_file"), (checkpoint, "save_tokenizer")):
    setattr(owner, name, dying(getattr(owner, name)))
save(2)
print("saved")
"""


@pytest.mark.slow
def test_killed_anywhere_in_a_save_the_newest_whole_checkpoint_loads(tmp_path):
    root = str(Path(__file__).parents[2])
    for fatal in range(1, 60):
        run = tmp_path / str(fatal)
        (run / "checkpoints").mkdir(parents=True)
        done = subprocess.run([sys.executable, "-c", KILLED_SAVE.format(root=root, run=str(run), fatal=fatal)], capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        step = find_checkpoint(run, "last")[1]["step"]
        assert step in (1, 2)
        if done.returncode == 0:
            assert step == 2 and fatal > 10, "every write, sync and rename was tried"
            return
        assert done.returncode == -9
    raise AssertionError("the save never came to its end")
