import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import lively
from vocabularies import TEXT, TOKENIZERS

import data.corpus
from config import Config, DataConfig, GPTConfig, ModelConfig, TokenizerConfig
from data.corpus import open_corpus
from data.splits import split_corpus
from data.synthetic import Sequences
from data.tokenizer import CharTokenizer, encode_with_bytes
from data.tokens import prepare
from generation.scoring import score_tokens
from training.evaluate import NO_TARGET, Windows, evaluate, make_windows
from training.world import World
from variants import build_model


def config_of(block_size: int, **data) -> Config:
    return Config(
        device="cpu",
        precision="fp32",
        model=ModelConfig(None, block_size=block_size),
        data=DataConfig(**data),
    )


def test_loss_and_bits_per_byte_equal_those_computed_by_hand():
    tokenizer = CharTokenizer("aé\n")
    text = "aéa\n" * 30 + "é"
    model = build_model(GPTConfig(vocab_size=3, block_size=7, n_layer=1, n_head=1, n_embd=4))
    with torch.no_grad():
        model.head.weight.zero_()  # makes every token equally likely
    ids, sizes = encode_with_bytes(tokenizer, text)
    validation = Windows(ids, tokenizer, config_of(7), World(), token_bytes=sizes)
    bits = len(text[1:]) * math.log2(3) / len(text[1:].encode())
    assert evaluate(model, validation, training=validation) == {
        "val/loss": pytest.approx(math.log(3), abs=1e-6),
        "train/eval_loss": pytest.approx(math.log(3), abs=1e-6),
        "val/bits_per_byte": pytest.approx(bits, abs=1e-6),
    }


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bits_per_byte_are_those_of_the_documents_for_any_tokenizer(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data.corpus, "PIECE_CHARS", 10)  # the long documents have several pieces
    texts = ["ta" * (n % 40) + TEXT * (n % 3) + " " * (n % 2) for n in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts if text)
    (tmp_path / "texts.jsonl").write_text(lines)
    source = DataConfig(source="text", path=str(tmp_path / "texts.jsonl"))
    tokenizer = TOKENIZERS[name]
    tokens = prepare(source, TokenizerConfig(), lambda line: None, tokenizer)

    # Which of the tokens is a separator, by encoding each piece again
    pieces = [p for p in split_corpus(open_corpus(source), None) if not p.is_train]
    ends = (tokenizer.end_of_text, tokenizer.begin_of_text)
    separators = [id for id in ends if id is not None]
    ids, is_text = [], []
    for piece in pieces:
        before = separators if piece.begins_document and ids else []
        encoded = tokenizer.encode(piece.text)
        ids += before + encoded
        is_text += [False] * len(before) + [True] * len(encoded)
    assert tokens.val.tolist() == ids and len(pieces) > 20

    model = lively(build_model(GPTConfig(tokenizer.vocab_size, block_size=16, n_layer=1, n_embd=8)))
    model.begin_of_text = tokenizer.begin_of_text  # stands first in each window, as in sampling
    losses = score_tokens(model, ids)
    num_bytes = sum(len(piece.text.encode()) for piece in pieces) - int(tokens.val_bytes[0])
    bits = losses[is_text[1:]].sum() / math.log(2) / num_bytes
    validation, _ = make_windows(tokens, config_of(16), World())
    metrics = evaluate(model, validation)
    assert metrics["val/bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert metrics["val/loss"] == pytest.approx(losses.mean(), rel=1e-5)


LETTERS = CharTokenizer("".join(map(chr, range(1000, 1300))))


def windows_of(length: int, block_size: int, world: World | None = None, **data) -> Windows:
    """Windows of a text of `length` tokens, which are all different if there are at most 300."""
    config = config_of(block_size, **data)
    return Windows(np.arange(length) % 300, LETTERS, config, world or World())


def test_each_split_is_measured_on_its_own_tokens():
    model = build_model(GPTConfig(300, block_size=10, n_layer=1, n_head=1, n_embd=4))
    text = SimpleNamespace(
        train=np.arange(200),
        val=np.arange(250, 300),
        val_bytes=np.ones(50, dtype=np.int32),
        tokenizer=LETTERS,
        task=None,
    )
    validation, training = make_windows(text, config_of(10), World())
    assert validation.targets.unique().tolist() == [NO_TARGET, *range(251, 300)]
    assert training.inputs.shape == validation.inputs.shape  # as many windows
    assert training.inputs.max() < 200
    metrics = evaluate(model, validation, training=training)
    for name, tokens in (("val/loss", text.val), ("train/eval_loss", text.train)):
        windows = Windows(tokens, LETTERS, config_of(10), World(), max_windows=5)
        assert metrics[name] == windows.measure(model)["loss"]
    assert metrics["val/loss"] != metrics["train/eval_loss"]
    assert "train/eval_loss" not in evaluate(model, validation)
    sequences = Sequences(np.arange(22).reshape(2, 11), np.ones((2, 10), bool))
    of_task = Windows(sequences, LETTERS, config_of(10), World())
    assert evaluate(model, of_task).keys() == {"val/loss"}  # not bits per byte


def test_windows_cover_the_first_the_middle_and_the_last_document():
    windows = windows_of(300, 10, val_max_tokens=50)  # thirty documents of ten tokens
    predicted = windows.targets[windows.targets != NO_TARGET].numpy()
    documents = set(predicted // 10)
    assert {0, 29} <= documents and documents & {14, 15} and len(predicted) <= 50


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 400))
@example(300, 7, 8)  # one window has 7 targets and their inputs
@example(300, 7, 9)
def test_windows_are_disjoint_consecutive_and_limited_in_number(length, block_size, max_tokens):
    windows = windows_of(length, block_size, val_max_tokens=max_tokens)
    predicted = windows.targets[windows.targets != NO_TARGET].tolist()
    assert len(set(predicted)) == len(predicted) == windows.num_targets
    fewest = 1  # windows that hold all tokens, or as many as are measured
    while fewest * block_size + 1 < min(length, max_tokens):
        fewest += 1
    assert len(windows.inputs) == fewest
    for x, y in zip(windows.inputs, windows.targets):
        num_targets = int((y != NO_TARGET).sum())
        assert torch.equal(x[:num_targets] + 1, y[:num_targets])
        assert num_targets in (block_size, (length - 1) % block_size)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_all_windows_and_run_equally_many(size):
    model = build_model(GPTConfig(300, block_size=40, n_layer=1, n_head=1, n_embd=4))
    sums, passes = [], []
    for rank in range(size):
        world = World()
        world.rank, world.size = rank, size
        windows = windows_of(5 * 40 + 1, 40, world)
        windows.batch_size = 1
        passes.append(0)
        with model.register_forward_hook(lambda *_: passes.append(passes.pop() + 1)):
            sums.append(windows.local_loss(model))
    assert passes == [-(-5 // size)] * size
    alone = windows_of(5 * 40 + 1, 40).local_loss(model)
    assert np.sum(sums, axis=0) == pytest.approx(alone, rel=1e-5)


def test_the_in_context_score_is_the_early_minus_the_late_loss_of_each_window():
    torch.manual_seed(0)
    model = build_model(replace(config_of(40).model, vocab_size=300, n_layer=1, n_head=2, n_embd=8))
    windows = windows_of(9 * 40 + 1, 40)  # the last token is the last target
    with torch.no_grad():
        p = model(windows.inputs)[0].double().softmax(-1).numpy()
    scores = []
    for probabilities, targets in zip(p, windows.targets.tolist()):
        nats = [-math.log(row[target]) for row, target in zip(probabilities, targets)]
        scores.append((nats[2] + nats[3] - nats[38] - nats[39]) / 2)  # of 40 tokens, 2 are 1/16
    metrics = evaluate(model, windows)
    assert metrics["val/in_context_score"] == pytest.approx(np.mean(scores), abs=1e-6)
    error = np.std(scores, ddof=1) / 3
    assert metrics["val/in_context_score_se"] == pytest.approx(error, rel=1e-4)
    is_given = ["in_context_score" in windows_of(n * 40 + 1, 40).measure(model) for n in (7, 8)]
    assert is_given == [False, True]  # with at least 8 windows
