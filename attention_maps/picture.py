"""One PNG per picture: every head of every layer, on one colour scale."""

import re
import zlib
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from files import atomic_write

DPI = 160
SMALLEST_LABEL = 4.0  # points; token labels smaller than this are left out
VISIBLE = {"\n": "⏎", "\r": "⇤", "\t": "⇥", " ": "·"}
# Square root: a diffuse head's small weights stay visible.
NORM, COLOURS = PowerNorm(0.5, vmin=0, vmax=1), colormaps["magma_r"]
GROUP_COLOUR = "#3b6fb5"


def draw(maps: np.ndarray, words: list[str], path: Path, groups: int, title: str) -> None:
    """Draw maps (L, H, T, T) of the tokens `words`, framing the heads that share one of the
    `groups` key/value heads.

    All stand in one subplot, whose places are in inches from its first map's upper left corner: one
    for each would take ten times as long.
    """
    L, H, T, _ = maps.shape
    side = max(0.9, min(3.2, 22 / max(L, H)))  # of a map
    scale = min(1.8, max(1.0, max(L, H) * side / 13))  # of the writing: a large picture is shrunk
    gap = 0.14 * side ** 0.5
    pad = 0.8 * gap if groups < H else 0
    tops, lefts = np.arange(L) * (side + 3 * gap), np.arange(H) * (side + gap)
    lefts += np.arange(H) // (H // groups) * 2.5 * pad
    labels = [printable(word) for word in words] if side / T * 72 >= SMALLEST_LABEL else []
    axes = make_axes(lefts[-1] + side, tops[-1] + side, 1.3 if labels else 0.35, scale)
    draw_maps(axes, maps, lefts, tops, side)
    for (layer, top), (head, left) in product(enumerate(tops), enumerate(lefts)):
        axes.text(left + side / 2, top - 0.05, f"L{layer}H{head}", ha="center",
                  fontsize=min(8, 5 + side) * scale)
    draw_words(axes, labels, lefts, tops, side, pad)
    if groups < H:
        draw_groups(axes, lefts.reshape(groups, -1), tops, side, pad, scale)
    what = "· is a space, ⏎ a line end" if labels else "the tokens are in the .npz beside this"
    axes.text(0, -0.95 * scale, title, fontsize=11 * scale, weight="bold", parse_math=False)
    axes.text(0, -0.72 * scale, "on the beginning of the validation text; row: the token that "
              f"looks, column: the token it looks at; {what}", fontsize=7.5 * scale, color="0.35")
    # Runs of one colour are most of it: told so, zlib takes half the time.
    quick = {"compress_level": 1, "compress_type": zlib.Z_RLE}
    with atomic_write(path) as part:
        axes.figure.savefig(part, format="png", pil_kwargs=quick)


def make_axes(width: float, height: float, margin: float, scale: float) -> Axes:
    """Axes in inches that fill a figure, with room around the maps and the weights' colours."""
    right, above = 0.95 * scale, 1.2 * scale
    figure = Figure(figsize=(margin + width + right, above + height + margin), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-margin, width + right),
                           ylim=(height + margin, -above), autoscale_on=False)
    axes.set_axis_off()
    bar = axes.inset_axes((width + 0.38, 0, 0.13 * scale, height), transform=axes.transData)
    figure.colorbar(ScalarMappable(NORM, COLOURS), bar, format="%g",
                    ticks=(0, 0.01, 0.05, 0.1, 0.25, 0.5, 1))
    bar.tick_params(labelsize=7 * scale)
    bar.set_title("weight", fontsize=7 * scale)
    return axes


def draw_maps(axes: Axes, maps: np.ndarray, lefts: np.ndarray, tops: np.ndarray,
              side: float) -> None:
    """The maps (L, H, T, T); what a token may not look at is left blank."""
    if maps.shape[-1] > side * DPI:
        seen = np.linspace(0, maps.shape[-1], round(side * DPI), endpoint=False).astype(int)
        maps = maps[:, :, seen[:, None], seen]
    colours = COLOURS(NORM(maps), bytes=True)[..., :3]  # (L, H, T, T, 3)
    colours[..., np.triu(np.ones(maps.shape[-2:], bool), 1), :] = 245
    for (top, left), image in zip(product(tops, lefts), colours.reshape(-1, *colours.shape[2:])):
        axes.imshow(image, interpolation="nearest", aspect="auto",
                    extent=(left, left + side, top + side, top))
        axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor="0.6",
                                 linewidth=0.4))


def draw_words(axes: Axes, words: list[str], lefts: np.ndarray, tops: np.ndarray, side: float,
               pad: float) -> None:
    """The tokens to the left of each layer's maps and below each head's."""
    for i, word in enumerate(words):
        cell = side / len(words)
        style = {"fontsize": min(8.0, cell * 66), "parse_math": False, "rotation_mode": "anchor",
                 "ha": "right", "va": "center_baseline"}
        for top in tops:
            axes.text(-pad - 0.04, top + (i + 0.5) * cell, word, **style)
        for left in lefts:
            axes.text(left + (i + 0.5) * cell, tops[-1] + side + pad + 0.04, word, rotation=90,
                      **style)


def draw_groups(axes: Axes, lefts: np.ndarray, tops: np.ndarray, side: float, pad: float,
                scale: float) -> None:
    """A frame around the heads that share a key/value head, whose maps begin at lefts (G, H/G)."""
    width = lefts[0, -1] + side + 2 * pad
    for group, left in enumerate(lefts[:, 0] - pad):
        for top in tops:
            axes.add_patch(Rectangle((left, top - 2 * pad), width, side + 3 * pad, fill=False,
                                     edgecolor=GROUP_COLOUR, linewidth=0.9))
        axes.text(left, -2 * pad - 0.06, f"key/value head {group}", color=GROUP_COLOUR,
                  fontsize=7.5 * scale)


def printable(word: str, longest: int = 12) -> str:
    """A token as a label: white space visible, what the font lacks as a box, long ones cut."""
    known = _characters()
    word = re.sub(r"(\s)\1{2,}", lambda run: f"{run[1]}×{len(run[0])}", word)
    text = "".join(VISIBLE.get(c, c if ord(c) in known and c.isprintable() else "□") for c in word)
    return text if len(text) <= longest else text[:longest - 1] + "…"


@cache
def _characters() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())
