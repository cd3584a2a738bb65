"""One PNG per picture: every head of every layer, on one colour scale."""

import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.files import atomic_write

# As on the page (report/draw.js): lightness falls in even steps, from a pale yellow to dark indigo.
STOPS = np.array(
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
COLOURS = np.stack(
    [np.interp(np.linspace(0, 11, 256), np.arange(12), channel) for channel in STOPS.T], axis=-1
).astype(np.uint8)  # (256, 3)
BLANK, INK, QUIET, FRAME = (243, 241, 238), (29, 27, 38), (99, 95, 109), (59, 111, 181)
WIDEST = 1800  # pixels of all maps side by side, about
LEGIBLE = 7  # pixels of a token's row from which its text stands beside it
VISIBLE = {"\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "·"}


def draw(maps: np.ndarray, words: list[str], path: Path, groups: int, title: str) -> None:
    """Draw maps (L, H, T, T) of the tokens `words`, framing the heads that share one of the
    `groups` key/value heads. A weight's colour goes by its square root: a diffuse head's small
    weights stay visible."""
    L, H, T, _ = maps.shape
    cell = min(10, max(1, WIDEST // (max(L, H) * T)))  # pixels of a weight
    if max(L, H) * T > WIDEST:
        seen = np.linspace(0, T, max(1, WIDEST // max(L, H)), endpoint=False).astype(int)
        maps, words = maps[:, :, seen[:, None], seen], [words[i] for i in seen]
    side, gap = cell * maps.shape[-1], 14
    labels = [printable(word) for word in words] if cell >= LEGIBLE else []
    small, large = (ImageFont.load_default(size) for size in (max(8, cell), 15))
    left = 16 + max((int(small.getlength(label)) for label in labels), default=8)
    lefts = left + np.arange(H) * (side + gap) + np.arange(H) // (H // groups) * (groups < H) * gap
    tops = 74 + np.arange(L) * (side + 34)
    image = Image.new(
        "RGB", (max(620, int(lefts[-1]) + side + 20), int(tops[-1]) + side + 20), "white"
    )
    pen = ImageDraw.Draw(image)
    pen.text((16, 8), title, fill=INK, font=large)
    shared = "; a frame: heads that share keys and values" if groups < H else ""
    pen.text(
        (16, 30),
        "on the beginning of the validation text; row: the token that looks, column:"
        f" the token it looks at{shared}",
        fill=QUIET,
        font=ImageFont.load_default(11),
    )
    for layer, top in enumerate(tops.tolist()):
        for head, x in enumerate(lefts.tolist()):
            image.paste(
                Image.fromarray(coloured(maps[layer, head])).resize(
                    (side, side), Image.Resampling.NEAREST
                ),
                (x, top),
            )
            pen.text((x, top - 15), f"L{layer}H{head}", fill=INK, font=ImageFont.load_default(11))
        for i, label in enumerate(labels):
            pen.text((left - 6, top + (i + 0.5) * cell), label, fill=INK, font=small, anchor="rm")
        for group in lefts.reshape(groups, -1).tolist() if groups < H else ():
            pen.rectangle(
                (group[0] - 5, top - 18, group[-1] + side + 4, top + side + 4), outline=FRAME
            )
    with atomic_write(path) as part:
        image.save(part, format="png", compress_level=1)


def coloured(A: np.ndarray) -> np.ndarray:
    """A map (T, T) in colours (T, T, 3); what a token may not look at is left blank."""
    image = COLOURS[np.rint(255 * np.sqrt(A.clip(0, 1))).astype(int)]
    image[np.triu(np.ones(A.shape, bool), 1)] = BLANK
    return image


def printable(word: str, longest: int = 12) -> str:
    """A token as a label: white space visible, what the font may lack as ¤, long ones cut."""
    word = re.sub(r"(\s)\1{2,}", lambda run: f"{run[1]}×{len(run[0])}", word)
    text = "".join(VISIBLE.get(c, c if c.isprintable() and c < "\u0100" else "¤") for c in word)
    return text if len(text) <= longest else text[: longest - 1] + "…"
