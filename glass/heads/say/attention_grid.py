"""Draw the attention grid: one image with the attention maps of all heads."""

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.text import VISIBLE_SPACES, pluralize

# The color scale of the page (glass/page/web/), whose lightness falls in even steps.
SCALE_HEX = "fcf7d4 f5daa0 f7b968 f79138 f16828 e04039 c41c4d a1025b 780660 4e0f57 291041 0c0c22"
MASKED_COLOR = (243, 241, 238)  # color of keys after the query
TEXT_COLOR = (29, 27, 38)
NOTE_COLOR = (99, 95, 109)
FRAME_COLOR = (59, 111, 181)

# All in pixels
MAX_GRID_WIDTH = 1800  # of a layer's maps; larger ones are drawn smaller
MIN_IMAGE_WIDTH = 620  # so that the title fits
MAX_CELL = 10  # side of the square of one weight
MIN_LABELED_CELL = 7  # token labels on smaller squares would be illegible
LEFT_MARGIN = 16
END_MARGIN = 20  # right of the maps and below them
HEADER_HEIGHT = 74
HEAD_GAP = 14  # between maps of a layer; doubled between groups
LAYER_GAP = 34  # between layers, which leaves room for the names of the heads
LABEL_GAP = 6  # between the token labels and the first map

MIN_SINK_WEIGHT = 0.01  # more than the rounding of float16 weights can leave
MAX_LABEL = 12  # characters of a token label

FONTS = ["", "DejaVuSans.ttf"]  # files; "" is Pillow's own font, which has Latin letters
COMPARED_SIZE = 40  # of the glyphs that show whether a font has a character
NO_CHARACTER = "\uffff"  # drawn as what a font lacks


def interpolate_scale() -> np.ndarray:
    """Return the 256 colors of the scale, (256, 3): the first is of weight 0, the last of 1."""
    stops = np.frombuffer(bytes.fromhex(SCALE_HEX), np.uint8).reshape(-1, 3)
    positions = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(positions, np.arange(len(stops)), channel) for channel in stops.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


WEIGHT_COLORS = interpolate_scale()


def draw_attention_grid(
    maps: np.ndarray,
    tokens: Sequence[str],
    groups: int,
    title: str,
    log: Callable[[str], object] = print,
) -> Image.Image:
    """Draw the attention patterns (L, H, T, T) in a grid with a row per layer.

    The color encodes the square root of a weight, so that small weights remain visible. A frame
    joins the heads that share one of `groups` key/value heads. If the weights of a query sum to
    less than 1, a last column shows the rest: the sink's.
    """
    n_layer, n_head, n_tokens, _ = maps.shape
    shares_keys = groups < n_head
    sink = 1 - maps.sum(axis=-1, keepdims=True, dtype=np.float32)  # (L, H, T, 1)
    has_sink = bool(sink.max() > MIN_SINK_WEIGHT)
    if has_sink:
        maps = np.concatenate((maps, sink), axis=-1)  # (L, H, T, T + 1)

    # Sizes and places of the maps, in pixels
    cell = min(MAX_CELL, MAX_GRID_WIDTH // (max(n_layer, n_head) * n_tokens))
    height = cell * n_tokens or MAX_GRID_WIDTH // max(n_layer, n_head)
    width = height * maps.shape[-1] // n_tokens
    labels = make_labels(tuple(tokens), max(8, cell), log) if cell >= MIN_LABELED_CELL else []
    label_width = max((int(font.getlength(label)) for label, font in labels), default=8)
    heads = np.arange(n_head)
    lefts = LEFT_MARGIN + label_width + heads * (width + HEAD_GAP)
    if shares_keys:
        lefts += heads // (n_head // groups) * HEAD_GAP
    tops = HEADER_HEIGHT + np.arange(n_layer) * (height + LAYER_GAP)
    right = int(lefts[-1]) + width + END_MARGIN
    bottom = int(tops[-1]) + height + END_MARGIN

    # The image: a row of maps for each layer, with labels and frames
    image = Image.new("RGB", (max(MIN_IMAGE_WIDTH, right), bottom), "white")
    pen = ImageDraw.Draw(image)
    _draw_heading(pen, title, has_sink, shares_keys)
    for layer, top in enumerate(tops.tolist()):
        for head, left in enumerate(lefts.tolist()):
            pixels = Image.fromarray(colorize(maps[layer, head]))
            image.paste(pixels.resize((width, height), Image.Resampling.NEAREST), (left, top))
            name = f"L{layer}H{head}"
            pen.text((left, top - 15), name, fill=TEXT_COLOR, font=ImageFont.load_default(11))
        for row, (label, font) in enumerate(labels):
            end = (lefts[0] - LABEL_GAP, top + (row + 0.5) * cell)
            pen.text(end, label, fill=TEXT_COLOR, font=font, anchor="rm")
        if shares_keys:
            for group in lefts.reshape(groups, -1).tolist():
                frame = (group[0] - 5, top - 18, group[-1] + width + 4, top + height + 4)
                pen.rectangle(frame, outline=FRAME_COLOR)
    return image


def _draw_heading(pen: ImageDraw.ImageDraw, title: str, has_sink: bool, shares_keys: bool) -> None:
    note = "First tokens of the validation data; row: query token, column: key token"
    if has_sink:
        note += "; last column: sink"
    if shares_keys:
        note += "; frame: heads that share keys and values"
    pen.text((LEFT_MARGIN, 8), title, fill=TEXT_COLOR, font=ImageFont.load_default(15))
    pen.text((LEFT_MARGIN, 30), note, fill=NOTE_COLOR, font=ImageFont.load_default(11))


def colorize(A: np.ndarray) -> np.ndarray:
    """Map a pattern (T, T), or (T, T + 1) with a sink's column, to RGB; later keys are gray."""
    weights = np.nan_to_num(A).clip(0, 1)
    image = WEIGHT_COLORS[np.rint(255 * np.sqrt(weights)).astype(int)]
    T = len(A)
    is_later_key = np.triu(np.ones((T, T), bool), 1)
    image[:, :T][is_later_key] = MASKED_COLOR
    return image


@lru_cache(maxsize=1)  # the grids of a run have the same tokens, so that a note is logged once
def make_labels(
    tokens: tuple[str, ...], size: int, log: Callable[[str], object]
) -> list[tuple[str, ImageFont.FreeTypeFont]]:
    """Label tokens in fonts that have their characters; what no font has becomes a code point."""
    visible = [token.translate(VISIBLE_SPACES) for token in tokens]
    characters = filter(str.isprintable, sorted({*"".join(visible)}))
    missing = [c for c in characters if not any(has_glyph(font, c) for font in FONTS)]
    fonts = [*FONTS, find_font("".join(missing))] if missing else FONTS
    if missing := [c for c in missing if not has_glyph(fonts[-1], c)]:
        log(
            f"note: the attention grid shows {pluralize(len(missing), 'character')}, such as "
            f"{missing[0]}, as code points (U+{ord(missing[0]):04X}): install a font that has them"
        )
    labels = []
    for text in visible:
        font = max(fonts, key=lambda font: sum(has_glyph(font, c) for c in text))
        label = "".join(c if has_glyph(font, c) else f"U+{ord(c):04X}" for c in text)
        label = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"
        labels.append((label, load_font(font, size)))
    return labels


def find_font(characters: str) -> str:
    """Return the file of the font of this machine that has most of some characters; "" if none."""
    pattern = "sans:charset=" + " ".join(f"{ord(c):x}" for c in characters)
    with suppress(OSError):  # there is no fontconfig
        command = ["fc-match", "--format=%{file}", pattern]
        return subprocess.run(command, capture_output=True, check=False, errors="replace").stdout
    return ""


@cache
def load_font(file: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a font by the name or path of its file."""
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


@cache
def has_glyph(font: str, character: str) -> bool:
    """Return whether a font has a printable character."""
    with suppress(OSError):  # without the font, or with pictures of one size instead of outlines
        draw = load_font(font, COMPARED_SIZE).getmask
        return character.isprintable() and [*draw(character)] != [*draw(NO_CHARACTER)]
    return False
