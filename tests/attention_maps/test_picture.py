import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from attention_maps.capture import Snapshot
from attention_maps.picture import DPI, draw, printable, table_image
from attention_maps.probe import Probes


def snapshot(L: int, H: int, T: int, words=None) -> Snapshot:
    A = np.tril(np.random.default_rng(0).random((L, H, T, T)).astype(np.float32) ** 4 + 1e-6)
    A /= A.sum(axis=-1, keepdims=True)
    words = words or [f"t{i}" for i in range(T)]
    ids = np.arange(T)
    probes = Probes(ids, words, ids[None], [words], ids[None], np.array([2]))
    return Snapshot(5, probes, A, np.ones((L, H, T)), A[:, None], np.ones((L, 1, H, T)), A[:, None],
                    np.zeros((1, T)))


@pytest.mark.slow
@pytest.mark.parametrize(("L", "H", "groups"), [(1, 1, 1), (2, 2, 2), (2, 4, 2), (3, 6, 1)])
def test_a_picture_is_drawn_for_any_number_of_heads_and_groups(tmp_path, L, H, groups):
    draw(snapshot(L, H, 12), tmp_path / "map.png", groups, "a title")
    image = imread(tmp_path / "map.png")
    assert image.shape[0] > 200 and image.shape[1] > 200
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]


def test_the_cells_of_the_picture_are_the_weights(tmp_path):
    snap = snapshot(1, 1, 8)
    draw(snap, tmp_path / "map.png", 1, "")
    image = imread(tmp_path / "map.png")[:, :-150, :3]  # without the figures of the bar
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
    words = ["</script>", "\0", "😀", "שלום", "\n\n    ", "$x^2", "a" * 5000, "\\frac", "\ufffd",
             "",
             " ", "\u202e"]
    draw(snapshot(1, 2, 12, words), tmp_path / "map.png", 2, "$title_{")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


@pytest.mark.filterwarnings("error")
def test_line_ends_of_windows_control_characters_emoji_and_chinese_are_drawn_without_a_warning(
        tmp_path):
    words = ["\r\n", "\r", "a\r\n\r\n\r\n", "\t\x0b\x0c", "👩\u200d👧", "日本語", "\u2028",
             "e\u0301"]
    words += [chr(c) for c in [*range(32), *range(0x7F, 0xA0)]]
    draw(snapshot(1, 2, len(words), words), tmp_path / "map.png", 2, "a title")
    for first in range(0, len(words), 12):  # few enough that their labels are drawn
        part = (words[first:] + words)[:12]
        draw(snapshot(1, 1, 12, part), tmp_path / "map.png", 1, "a title")
    assert printable("\r\n") == "⇤⏎"


def test_labels_show_white_space_and_stay_short():
    assert printable("\n        ") == "⏎·×8"
    assert printable(" word") == "·word"
    assert len(printable("x" * 100)) <= 12


def test_labels_stand_at_the_rows_and_columns_of_their_tokens(tmp_path):
    for words in ([""] * 12, ["", *["mm"] * 2, *[""] * 9]):
        draw(snapshot(1, 2, 12, words), tmp_path / f"{len(''.join(words))}.png", 2, "")
    bare, written = (imread(tmp_path / f"{n}.png")[..., 0] for n in (0, 4))
    rows, columns = np.nonzero(np.abs(bare - written) > 0.3)
    beside = columns < 1.25 * DPI
    assert beside.any() and (~beside).any()
    cell = 3.2 * DPI / 12
    top = written.shape[0] - (0.95 + 3.2) * DPI
    assert rows[beside].min() > top + cell - 3 and rows[beside].max() < top + 3 * cell + 3
    first = columns[~beside & (columns < (1.25 + 3.2) * DPI)]
    assert first.min() > 1.25 * DPI + cell - 3 and first.max() < 1.25 * DPI + 3 * cell + 3
    assert columns.max() > (1.25 + 3.2) * DPI  # below the second head too


def test_a_snapshot_is_drawn_as_svg_too_with_its_labels_as_text_or_paths(tmp_path):
    draw(snapshot(2, 2, 12), tmp_path / "map.svg", 2, "a title")
    assert (tmp_path / "map.svg").read_text().count("<image") >= 4


@pytest.mark.parametrize("top", [0.01, 0.7, 30.0])
def test_a_table_of_scores_is_an_image_of_cells_in_the_order_of_layers_and_heads(top):
    table = np.array([[0.0, top / 4, top], [top / 2, 0.0, -1.0]])
    image = table_image(table, cell=5)
    assert image.shape == (10, 15, 3) and image.dtype == np.uint8
    cells = image[2::5, 2::5].astype(int).sum(axis=-1)  # lightness falls with the score
    assert cells[0, 0] > cells[0, 1] > cells[1, 0] > cells[0, 2]
    assert cells[1, 1] == cells[1, 2] == cells[0, 0]
    assert (image[5:10, 10:15] == image[5, 10]).all()

