import numpy as np
import pytest
from PIL import Image

from attention_maps.attention_grid import COLOURS, draw, printable


def maps(L: int, H: int, T: int) -> np.ndarray:
    A = np.tril(np.random.default_rng(0).random((L, H, T, T)).astype(np.float32) ** 4 + 1e-6)
    return A / A.sum(axis=-1, keepdims=True)


def drawn(path, L: int, H: int, words: list[str], groups: int = 1) -> np.ndarray:
    """The picture, (…, …, 3), of maps of these words."""
    draw(maps(L, H, len(words)), words, path / "map.png", groups, "a title")
    assert [p.name for p in path.iterdir()] == ["map.png"]
    return np.asarray(Image.open(path / "map.png"))


@pytest.mark.parametrize(
    ("L", "H", "groups", "T"), [(1, 1, 1, 2), (2, 4, 2, 12), (3, 6, 1, 48), (12, 12, 12, 512)]
)
def test_a_picture_is_drawn_for_any_number_of_heads_groups_and_tokens(tmp_path, L, H, groups, T):
    image = drawn(tmp_path, L, H, [f"t{i}" for i in range(T)], groups)
    assert image.shape[0] > 90 and 600 < image.shape[1] < 2600


def test_the_cells_of_the_picture_are_the_weights(tmp_path):
    image = drawn(tmp_path, 1, 2, ["t"] * 8, groups=2)
    A, cell = maps(1, 2, 8), 10
    left = (image[75] == COLOURS[-1]).all(-1).argmax()  # the first cell of the first map: 1
    for head in range(2):
        for i in range(8):
            for j in range(i + 1):
                x = left + head * (8 * cell + 14) + j * cell + 5
                want = COLOURS[int(np.rint(255 * np.sqrt(A[0, head, i, j])))]
                assert (image[74 + i * cell + 5, x] == want).all()


@pytest.mark.filterwarnings("error")
def test_any_tokens_are_drawn_as_text_without_a_warning(tmp_path):
    words = [
        "</script>",
        "\0",
        "😀",
        "שלום",
        "\n\n    ",
        "$x^2",
        "a" * 5000,
        "\\frac",
        "\ufffd",
        "",
        " ",
        "\u202e",
        "\r\n",
        "a\r\n\r\n\r\n",
        "\t\x0b\x0c",
        "👩\u200d👧",
        "日本語",
    ]
    drawn(tmp_path, 1, 1, words)
    assert printable("\r\n") == "\\r\\n" and printable("    ") == "·×4"
