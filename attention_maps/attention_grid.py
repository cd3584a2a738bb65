"""Draw the attention grid: the attention maps of every head of every layer in one PNG."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.files import atomic_write

# The color scale of the page (report/web/): lightness falls in even steps, from a pale yellow to
# dark indigo.
SCALE_STOPS = np.array(
    [
        [252, 247, 212],
        [245, 218, 160],
        [247, 185, 104],
        [247, 145, 56],
        [241, 104, 40],
        [224, 64, 57],
        [196, 28, 77],
        [161, 2, 91],
        [120, 6, 96],
        [78, 15, 87],
        [41, 16, 65],
        [12, 12, 34],
    ]
)
_STOP_POSITIONS = np.arange(len(SCALE_STOPS))
COLORS = np.stack(
    [
        np.interp(np.linspace(0, _STOP_POSITIONS[-1], 256), _STOP_POSITIONS, channel)
        for channel in SCALE_STOPS.T
    ],
    axis=-1,
).astype(np.uint8)  # (256, 3)
MASKED_COLOR = (243, 241, 238)  # of keys after the query
TEXT_COLOR = (29, 27, 38)
NOTE_COLOR = (99, 95, 109)
FRAME_COLOR = (59, 111, 181)

MAX_GRID_WIDTH = 1800  # pixels of all maps side by side; more tokens are thinned out
MIN_GRID_WIDTH = 620  # pixels, for the title
MAX_CELL = 10  # pixels of a weight
MIN_LABELED_CELL = 7  # pixels of a row from which its token is legible
MARGIN = 16
HEADER_HEIGHT = 74
HEAD_GAP = 14  # between maps of a layer; twice as much between groups
LAYER_GAP = 34  # between layers, where the names of the heads are
MAX_LABEL = 12  # characters of a token
VISIBLE_SPACES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "·"}


class Layout(NamedTuple):
    """Positions of a grid in pixels.

    Attributes:
        cell: Side of a weight's square.
        side: Side of a map.
        lefts: Left edge of each head's map, (H,).
        tops: Top edge of each layer's maps, (L,).
    """

    cell: int
    side: int
    lefts: np.ndarray
    tops: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image."""
        width, height = int(self.lefts[-1]) + self.side + 20, int(self.tops[-1]) + self.side + 20
        return max(MIN_GRID_WIDTH, width), height


def draw(maps: np.ndarray, tokens: list[str], path: Path, groups: int, title: str) -> None:
    """Draw attention maps and write them as a PNG.

    Colors follow the square root of a weight, so that the small weights of a diffuse head stay
    visible.

    Args:
        maps: Attention patterns (L, H, T, T).
        tokens: The T tokens.
        path: File to write.
        groups: Number of key/value heads; heads that share one have a common frame.
        title: First line of the image.
    """
    L, H, T, _ = maps.shape
    cell = min(MAX_CELL, max(1, MAX_GRID_WIDTH // (max(L, H) * T)))
    if max(L, H) * T > MAX_GRID_WIDTH:
        maps, tokens = _thin_tokens(maps, tokens, max(1, MAX_GRID_WIDTH // max(L, H)))
    labels = [token_label(token) for token in tokens] if cell >= MIN_LABELED_CELL else []
    font = ImageFont.load_default(max(8, cell))
    layout = _make_layout(L, H, maps.shape[-1], cell, groups, _label_width(labels, font))

    image = Image.new("RGB", layout.size, "white")
    pen = ImageDraw.Draw(image)
    _write_header(pen, title, is_grouped=groups < H)
    for layer, top in enumerate(layout.tops.tolist()):
        for head, left in enumerate(layout.lefts.tolist()):
            pixels = Image.fromarray(colorize(maps[layer, head]))
            size = (layout.side, layout.side)
            image.paste(pixels.resize(size, Image.Resampling.NEAREST), (left, top))
            name = f"L{layer}H{head}"
            pen.text((left, top - 15), name, fill=TEXT_COLOR, font=ImageFont.load_default(11))
        for row, label in enumerate(labels):
            place = (layout.lefts[0] - 6, top + (row + 0.5) * cell)
            pen.text(place, label, fill=TEXT_COLOR, font=font, anchor="rm")
        if groups < H:
            _frame_groups(pen, layout, top, groups)
    with atomic_write(path) as part:
        image.save(part, format="png", compress_level=1)


def _thin_tokens(maps: np.ndarray, tokens: list[str], count: int) -> tuple[np.ndarray, list[str]]:
    """Keep `count` evenly spread tokens."""
    kept = np.linspace(0, len(tokens), count, endpoint=False).astype(int)
    return maps[:, :, kept[:, None], kept], [tokens[i] for i in kept]


def _label_width(labels: list[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return max((int(font.getlength(label)) for label in labels), default=8)


def _make_layout(L: int, H: int, T: int, cell: int, groups: int, label_width: int) -> Layout:
    side = cell * T
    lefts = MARGIN + label_width + np.arange(H) * (side + HEAD_GAP)
    if groups < H:
        lefts = lefts + np.arange(H) // (H // groups) * HEAD_GAP
    tops = HEADER_HEIGHT + np.arange(L) * (side + LAYER_GAP)
    return Layout(cell, side, lefts, tops)


def _write_header(pen: ImageDraw.ImageDraw, title: str, is_grouped: bool) -> None:
    pen.text((MARGIN, 8), title, fill=TEXT_COLOR, font=ImageFont.load_default(15))
    note = "Beginning of the validation text; row: query token, column: key token"
    if is_grouped:
        note += "; frame: heads that share keys and values"
    pen.text((MARGIN, 30), note, fill=NOTE_COLOR, font=ImageFont.load_default(11))


def _frame_groups(pen: ImageDraw.ImageDraw, layout: Layout, top: int, groups: int) -> None:
    for lefts in layout.lefts.reshape(groups, -1).tolist():
        box = (lefts[0] - 5, top - 18, lefts[-1] + layout.side + 4, top + layout.side + 4)
        pen.rectangle(box, outline=FRAME_COLOR)


def colorize(A: np.ndarray) -> np.ndarray:
    """Return the colors (T, T, 3) of an attention pattern (T, T); masked keys are gray."""
    image = COLORS[np.rint(255 * np.sqrt(A.clip(0, 1))).astype(int)]
    image[np.triu(np.ones(A.shape, bool), 1)] = MASKED_COLOR
    return image


def token_label(token: str) -> str:
    """Return a token as a label: visible white space, ¤ for what the font may lack, shortened."""
    shortened_runs = re.sub(r"(\s)\1{2,}", lambda run: f"{run[1]}×{len(run[0])}", token)
    label = "".join(map(_visible_character, shortened_runs))
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"


def _visible_character(character: str) -> str:
    if character in VISIBLE_SPACES:
        return VISIBLE_SPACES[character]
    is_in_font = character.isprintable() and character < "\u0100"  # Latin-1
    return character if is_in_font else "¤"
