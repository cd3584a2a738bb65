"""The attention grid: its colors and its labels."""

import numpy as np
import pytest

from glass.heads.say import attention_grid
from glass.heads.say.attention_grid import (
    WEIGHT_COLORS,
    draw_attention_grid,
    has_glyph,
    make_labels,
)


def make_maps(L: int, H: int, T: int) -> np.ndarray:
    A = np.tril(np.random.default_rng(0).random((L, H, T, T)).astype(np.float32) ** 4 + 1e-6)
    return A / A.sum(axis=-1, keepdims=True)


def draw_image(L: int, H: int, tokens: list[str], groups: int = 1) -> np.ndarray:
    """Draw maps of these tokens and return the image (height, width, 3)."""
    return np.asarray(draw_attention_grid(make_maps(L, H, len(tokens)), tokens, groups, "a title"))


def test_the_colors_of_the_cells_are_those_of_the_weights():
    image = draw_image(1, 2, ["t"] * 8, groups=2)
    A, cell = make_maps(1, 2, 8), 10
    left = (
        (image[75] == WEIGHT_COLORS[-1]).all(-1).argmax()
    )  # the first cell of the first map has weight 1
    for head in range(2):
        for i in range(8):
            for j in range(i + 1):
                x = left + head * (8 * cell + 14) + j * cell + 5
                expected = WEIGHT_COLORS[int(np.rint(255 * np.sqrt(A[0, head, i, j])))]
                assert (image[74 + i * cell + 5, x] == expected).all()


def test_what_the_weights_of_a_query_leave_is_a_last_column():
    A = make_maps(1, 2, 8) * np.linspace(0, 1, 8, dtype=np.float32)[:, None]  # of the sum of a row
    image = np.asarray(draw_attention_grid(A, ["t"] * 8, 1, "a title"))
    sink = WEIGHT_COLORS[np.rint(255 * np.sqrt(1 - np.linspace(0, 1, 8))).astype(int)]
    assert (image[74] == WEIGHT_COLORS[0]).all(-1).any()  # the first query has no weight on tokens
    right = np.flatnonzero((image[79] == WEIGHT_COLORS[-1]).all(-1))  # but all on the sink
    assert len(right) == 2 * 10  # in both maps
    columns = image[79 : 79 + 80 : 10, right[[5, 15]]].astype(int)
    assert np.abs(columns - sink[:, None]).max() <= 2


@pytest.mark.filterwarnings("error")
def test_any_token_is_drawn_as_text_without_a_warning():
    odd = ["\0", "😀", "שלום", "", "\u202e", "a\r\n\r\n", "\t\x0b\x0c", "👩\u200d👧", "日本語"]
    draw_image(1, 1, ["$x^2", "a" * 5000, "\ufffd", *odd])
    labels = make_labels(("\r\n", "  ", "b" * 13), 10, print)
    assert [text for text, _ in labels] == ["\\r\\n", "··", "b" * 11 + "…"]


def test_what_no_font_has_is_a_code_point_and_noted_once(monkeypatch):
    monkeypatch.setattr(attention_grid, "find_font", lambda characters: "")
    notes = []
    tokens = ["a日", "本", "\0"]
    for title in ("after 1 step", "after 2 steps"):
        draw_attention_grid(make_maps(1, 1, 3), tokens, 1, title, notes.append)
    assert len(notes) == 1 and "2 characters" in notes[0]
    labels = make_labels(tuple(tokens), 10, print)
    assert [text for text, _ in labels] == ["aU+65E5", "U+672C", "U+0000"]


@pytest.mark.parametrize("text", ["Ελληνικά", "Привет", "Tiếng", "مرحبا", "aЖ…"])
def test_letters_are_drawn_in_a_font_that_has_them(text):
    if not has_glyph("DejaVuSans.ttf", "Ж"):
        pytest.skip("DejaVu Sans is not installed")
    notes = []
    [(label, font)] = make_labels((text,), 10, notes.append)
    assert label == text and notes == []
    boxes = [[*font.getmask(c)] for c in text]
    assert [*font.getmask("\uffff")] not in boxes
