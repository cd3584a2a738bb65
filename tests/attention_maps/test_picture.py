import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from attention_maps.capture import Snapshot
from attention_maps.picture import draw, printable


def snapshot(L: int, H: int, T: int, words=None) -> Snapshot:
    A = np.tril(np.random.default_rng(0).random((L, H, T, T)).astype(np.float32) ** 4 + 1e-6)
    A /= A.sum(axis=-1, keepdims=True)
    return Snapshot(5, A, words or [f"t{i}" for i in range(T)], A, A, np.array([2]))


@pytest.mark.parametrize(("L", "H", "groups"), [(1, 1, 1), (2, 2, 2), (2, 4, 2), (3, 6, 1)])
def test_a_picture_is_drawn_for_any_number_of_heads_and_groups(tmp_path, L, H, groups):
    draw(snapshot(L, H, 12), tmp_path / "map.png", groups, "a title")
    image = imread(tmp_path / "map.png")
    assert image.shape[0] > 200 and image.shape[1] > 200
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]


def test_the_cells_of_the_picture_are_the_weights(tmp_path):
    snap = snapshot(1, 1, 8)
    draw(snap, tmp_path / "map.png", 1, "")
    image = imread(tmp_path / "map.png")[..., :3]
    blank = np.abs(image - 0.96).max(-1) < 0.01  # the triangle of what may not be looked at
    top = np.flatnonzero(blank.sum(axis=1) > 100).min()
    columns = np.flatnonzero(blank[top + 2])  # its first row: all but the first cell
    right = columns.max()
    side = (right - columns.min()) / 7
    left = columns.min() - side
    for i in range(8):
        for j in range(i + 1):
            seen = image[int(top + (i + 0.5) * side), int(left + (j + 0.5) * side)]
            want = colormaps["magma_r"](np.sqrt(snap.text[0, 0, i, j]))[:3]
            assert np.abs(seen - want).max() < 0.03


def test_hostile_tokens_are_drawn_as_text(tmp_path, recwarn):
    words = ["</script>", "\0", "😀", "שלום", "\n\n    ", "$x^2", "a" * 5000, "\\frac", "\ufffd", "", " ", "\u202e"]
    draw(snapshot(1, 2, 12, words), tmp_path / "map.png", 2, "$title_{")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_labels_show_white_space_and_stay_short():
    assert printable("\n        ") == "⏎·×8"
    assert printable(" word") == "·word"
    assert len(printable("x" * 100)) <= 12
