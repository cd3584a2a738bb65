import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from attention_maps.picture import draw, printable


def maps(L: int, H: int, T: int) -> np.ndarray:
    A = np.tril(np.random.default_rng(0).random((L, H, T, T)).astype(np.float32) ** 4 + 1e-6)
    return A / A.sum(axis=-1, keepdims=True)


def drawn(path, L: int, H: int, words: list[str], groups: int = 1, title: str = "a title"):
    """The picture, (…, …, 4), of maps of these words."""
    draw(maps(L, H, len(words)), words, path / "map.png", groups, title)
    assert [p.name for p in path.iterdir()] == ["map.png"]
    return imread(path / "map.png")


@pytest.mark.slow
@pytest.mark.parametrize(("L", "H", "groups"), [(1, 1, 1), (2, 2, 2), (2, 4, 2), (3, 6, 1)])
def test_a_picture_is_drawn_for_any_number_of_heads_and_groups(tmp_path, L, H, groups):
    image = drawn(tmp_path, L, H, [f"t{i}" for i in range(12)], groups)
    assert image.shape[0] > 200 and image.shape[1] > 200


def test_the_cells_of_the_picture_are_the_weights(tmp_path):
    image = drawn(tmp_path, 1, 1, ["t"] * 8)[:, :-150, :3]  # without the figures of the bar
    blank = np.abs(image - 0.96).max(-1) < 0.01  # the triangle of what may not be looked at
    top = np.flatnonzero(blank.sum(axis=1) > 100).min()
    columns = np.flatnonzero(blank[top + 2])  # its first row: all but the first cell
    right = columns.max()
    side = (right - columns.min()) / 7
    left = columns.min() - side
    for i in range(8):
        for j in range(i + 1):
            seen = image[int(top + (i + 0.5) * side), int(left + (j + 0.5) * side)]
            want = colormaps["magma_r"](np.sqrt(maps(1, 1, 8)[0, 0, i, j]))[:3]
            assert np.abs(seen - want).max() < 0.03


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_any_tokens_are_drawn_as_text_without_a_warning(tmp_path):
    words = ["</script>", "\0", "😀", "שלום", "\n\n    ", "$x^2", "a" * 5000, "\\frac", "\ufffd",
             "", " ", "\u202e", "\r\n", "\r", "a\r\n\r\n\r\n", "\t\x0b\x0c", "👩\u200d👧", "日本語",
             "\u2028", "e\u0301", *(chr(c) for c in [*range(32), *range(0x7F, 0xA0)])]
    for first in range(0, len(words), 12):  # few enough that their labels are drawn
        drawn(tmp_path, 1, 1, (words[first:] + words)[:12], title="$title_{")
    assert printable("\r\n") == "⇤⏎"
