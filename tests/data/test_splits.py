"""The sample of the training text that a vocabulary is learned from."""

import math

from corpora import text_corpus

import data.corpus
from data import splits
from data.splits import sample_training_text


def test_a_vocabulary_is_learned_from_an_even_sample_of_a_long_training_text(tmp_path, monkeypatch):
    monkeypatch.setattr(data.corpus, "PIECE_CHARS", 100)
    monkeypatch.setattr(splits, "MAX_LEARNING_CHARS", 40_000)
    text = "".join(f"line {n:04}\n" for n in range(20_000))[:200_000]
    (tmp_path / "a.txt").write_text(text)
    corpus = text_corpus(tmp_path / "a.txt")
    pieces = list(sample_training_text(corpus, 180_000, 200_000))
    drawn, share = 1800, 40_000 / 180_000
    error = 100 * math.sqrt(drawn * share * (1 - share))
    assert abs(sum(map(len, pieces)) - 40_000) < 4 * error
    places = [text.index(piece) for piece in pieces]
    assert max(places) < 180_000 and abs(sum(places) / len(places) - 90_000) < 10_000
    assert pieces == list(sample_training_text(corpus, 180_000, 200_000))
    assert "".join(sample_training_text(corpus, 30_000, 30_000)) == text[:30_000]


def test_a_vocabulary_is_learned_from_little_text_without_white_space(tmp_path, monkeypatch):
    monkeypatch.setattr(data.corpus, "PIECE_CHARS", 100)
    monkeypatch.setattr(splits, "MAX_UNBROKEN_BYTES", 1000)
    prose, unbroken = "words and lines\n" * 100, "é" * 2000
    (tmp_path / "a.txt").write_text(prose + unbroken + prose)
    sample = "".join(sample_training_text(text_corpus(tmp_path / "a.txt"), 5200, 5200))
    assert sample.replace("é", "") == prose * 2
    assert 800 <= 2 * sample.count("é") <= 1000  # in whole pieces
