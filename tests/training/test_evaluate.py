import lzma
import math

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from config import Config, DataConfig, GPTConfig, read_config
from data.tokenizer import CharTokenizer
from files import read_rows
from model import GPT
from training.distributed import World
from training.evaluate import Validation


def test_bits_per_byte_are_those_computed_by_hand_and_xz_reads_the_same_text():
    tokenizer = CharTokenizer("aé\n")
    text = "aéa\n" * 30 + "é"
    model = GPT(GPTConfig(vocab_size=3, block_size=7, n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        model.head.weight.zero_()  # every token is then equally likely
    validation = Validation(np.array(tokenizer.encode(text)), tokenizer, 7, "cpu", "fp32")
    loss, bits = validation.evaluate(model)
    predicted = text[1:].encode()
    assert loss == pytest.approx(math.log(3), abs=1e-6)
    assert bits == pytest.approx(len(text[1:]) * math.log2(3) / len(predicted), abs=1e-6)
    assert validation.xz() == 8 * len(lzma.compress(predicted, preset=9)) / len(predicted)
    assert validation.extent() == "all 121 validation tokens"


LETTERS = CharTokenizer("".join(map(chr, range(1000, 1300))))


def windows(length: int, block_size: int, **data) -> Validation:
    """Validation on `length` tokens, each with its own number where there are up to 300."""
    tokens, settings = np.arange(length) % 300, DataConfig(**data)
    return Validation(tokens, LETTERS, block_size, "cpu", "fp32", data=settings)


def test_windows_cover_the_first_the_middle_and_the_last_documents():
    seen = windows(300, 10, val_max_tokens=50)  # thirty documents of ten tokens
    predicted = seen.targets[seen.targets >= 0].numpy()
    documents = set(predicted // 10)
    assert {0, 29} <= documents and documents & {14, 15} and len(predicted) <= 50
    assert seen.extent() == f"{len(predicted)} of the 300 validation tokens"
    again = windows(300, 10, val_max_tokens=50)
    assert torch.equal(seen.inputs, again.inputs) and torch.equal(seen.targets, again.targets)
    kept = windows(300, 10, val_max_tokens=50, val_windows="first")  # as runs begun before have it
    assert kept.targets[kept.targets >= 0].tolist() == list(range(1, 50))


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 400))
def test_windows_are_different_whole_and_no_more_than_asked_for(length, block_size, most):
    seen = windows(length, block_size, val_max_tokens=most)
    predicted = seen.targets[seen.targets >= 0].tolist()
    assert 1 <= len(predicted) == len(set(predicted)) <= max(block_size, most + block_size - 1)
    assert len(predicted) == length - 1 or len(predicted) >= most - block_size
    for x, y in zip(seen.inputs, seen.targets):
        held = int((y >= 0).sum())
        assert torch.equal(x[:held] + 1, y[:held])
        assert held in (block_size, (length - 1) % block_size)


def test_the_windows_of_several_processes_are_those_of_one():
    model = GPT(GPTConfig(vocab_size=300, block_size=10, n_layer=1, n_head=1, n_embd=4))
    data = DataConfig(val_max_tokens=70)
    losses = []
    for size in (1, 3):
        for rank in range(size):
            mine = Validation(np.arange(300), LETTERS, 10, "cpu", "fp32", World(rank, size), data)
            losses.append(mine.local_loss(model, lambda: None))
    assert sum(count for _, count in losses[1:]) == losses[0][1] == 69
    assert sum(nats for nats, _ in losses[1:]) == pytest.approx(losses[0][0], rel=1e-6)


@pytest.mark.slow
def test_a_run_begun_before_keeps_its_windows_on_resume(command, tmp_path, text_file):
    argv = [*TINY, "data=text", f"data.path={text_file}", "data.val_max_tokens=200", "eval.every=2",
            "attention.every=0", "run_dir=run", "wandb.mode=disabled"]
    command("train.py", *argv, "max_steps=4", "data.val_windows=first")
    kept = tmp_path / "run" / "config.yaml"
    kept.write_text(kept.read_text().replace("  val_windows: first\n", ""))
    done = command("train.py", *argv, "max_steps=6", "resume=auto")
    assert done.returncode == 0 and "val/loss uses 199 of the 1,110" in done.stdout, done.stderr
    again = command("train.py", "run_dir=run", "eval_only=true", "data.val_windows=spread")
    loss = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["val/loss"]
    assert f"{loss:.4f}" in command("train.py", "run_dir=run", "eval_only=true").stdout
    assert again.returncode == 0 and f"{loss:.4f}" not in again.stdout


def test_the_excerpt_for_importance_is_spread_too():
    x, _, rows = windows(300, 10).excerpt(30)
    assert x[:, 0].tolist() == [0, 140, 290] and rows >= 1


def test_a_configuration_kept_before_there_was_a_choice_keeps_the_first_windows(tmp_path):
    assert Config().data.val_windows == "spread"
    for kept, expected in (({"data": {"val_max_tokens": 7}}, "first"), ({}, "first"),
                           ({"data": {"val_windows": "spread"}}, "spread")):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(kept))
        assert read_config(tmp_path / "config.yaml").data.val_windows == expected
