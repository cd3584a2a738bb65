"""One PNG per snapshot: every head of every layer, on one colour scale."""

import re
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps, font_manager, patches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from attention_maps.capture import Snapshot
from files import atomic_write

DPI = 160
SMALLEST_LABEL = 4.0  # points; token labels smaller than this are left out
VISIBLE = {"\n": "⏎", "\r": "⇤", "\t": "⇥", " ": "·"}


def draw(snapshot: Snapshot, path: Path, groups: int, title: str) -> None:
    """Draw the snapshot's text maps (L, H, T, T), the heads of each of `groups` key/value heads framed together."""
    L, H, T, _ = snapshot.text.shape
    in_group = H // groups
    cell = max(0.9, min(3.2, 22 / max(L, H)))  # inches a map
    gap, group_gap = 0.14 * cell ** 0.5, 0.4 * cell ** 0.5
    labels = cell * 72 / T >= SMALLEST_LABEL
    left, bottom = (1.25, 0.95) if labels else (0.65, 0.35)
    scale = min(1.8, max(1.0, max(L, H) * cell / 13))  # of the writing: a larger picture is shown smaller
    top, right = 1.15 * scale, 0.95 * scale
    pad = group_gap * 0.28 if in_group > 1 else 0  # from the maps to the frame of their group
    xs = [left + h * (cell + gap) + (h // in_group) * (group_gap - gap if in_group > 1 else 0) for h in range(H)]
    ys = [bottom + (L - 1 - layer) * (cell + group_gap) for layer in range(L)]
    width, height = xs[-1] + cell + right, ys[0] + cell + top
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    page = figure.add_axes((0, 0, 1, 1))  # in inches from the lower left: every place below is one
    page.set(xlim=(0, width), ylim=(0, height))
    page.axis("off")

    norm = PowerNorm(0.5, vmin=0, vmax=1)  # square root: a diffuse head's small weights stay visible
    colours = colormaps["magma_r"]
    future = np.triu(np.ones((T, T), bool), 1)  # what a token may not look at is left blank, not drawn as a zero
    words = [printable(w) for w in snapshot.words]
    size = min(8.0, cell * 72 / T * 0.92)
    at = (np.arange(T) + 0.5) * cell / T
    for layer, y in enumerate(ys):
        page.text(0.12, y + cell / 2, f"layer {layer}", rotation=90, va="center", ha="left", fontsize=9 * scale, weight="bold")
        if labels:
            for place, w in zip(at, words):
                page.text(left - pad - 0.04, y + cell - place, w, fontsize=size, va="center", ha="right", parse_math=False)
        for head, x in enumerate(xs):
            axes = figure.add_axes((x / width, y / height, cell / width, cell / height))
            picture = axes.imshow(np.ma.array(snapshot.text[layer, head], mask=future), norm=norm, cmap=colours,
                                  interpolation="nearest", aspect="auto")
            axes.set(xticks=(), yticks=(), facecolor="0.96")
            for spine in axes.spines.values():
                spine.set(linewidth=0.4, color="0.6")
            name = f"L{layer}H{head}"
            page.text(x + cell / 2, y + cell + 0.035, name, fontsize=min(8, 5 + cell) * scale, va="bottom", ha="center")
        for group in range(groups if in_group > 1 else 0):
            x, edge = xs[group * in_group], xs[(group + 1) * in_group - 1] + cell
            page.add_patch(patches.FancyBboxPatch(
                (x - pad, y - pad), edge - x + 2 * pad, cell + 2 * pad + 0.13, boxstyle="round,pad=0,rounding_size=0.05",
                fill=False, linewidth=0.9, edgecolor="#3b6fb5"))
            if layer == 0:
                page.text(x - pad + 0.03, y + cell + pad + 0.16, f"key/value head {group}", fontsize=7.5 * scale, color="#3b6fb5", va="bottom")
    if labels:
        for x in xs:
            for place, w in zip(at, words):
                page.text(x + place, bottom - pad - 0.04, w, fontsize=size, va="top", ha="center", rotation=90, parse_math=False)

    page.text(left - pad, height - 0.14, title, fontsize=11 * scale, weight="bold", va="top", ha="left", parse_math=False)
    page.text(left - pad, height - 0.14 - 0.24 * scale, "on the beginning of the validation text; row: the token that looks, column: "
              "the token it looks at" + ("; · is a space, ⏎ a line end" if labels else "; the tokens are in the .npz beside this"),
              fontsize=7.5 * scale, color="0.35", va="top", ha="left")
    place = (1 - 0.62 * scale / width, bottom / height, 0.13 * scale / width, (ys[0] + cell - bottom) / height)
    bar = figure.colorbar(picture, cax=figure.add_axes(place), ticks=(0, 0.01, 0.05, 0.1, 0.25, 0.5, 1))
    bar.ax.set_yticklabels(["0", ".01", ".05", ".1", ".25", ".5", "1"], fontsize=7 * scale)
    bar.outline.set_linewidth(0.4)
    page.text(width - 0.555 * scale, ys[0] + cell + 0.06, "weight", fontsize=7 * scale, va="bottom", ha="center")
    with atomic_write(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=DPI)


def table_image(table: np.ndarray, cell: int = 24) -> np.ndarray:
    """A layers × heads table of scores as an image (L · cell, H · cell, 3) of bytes, in the map's colours: from 0 to 1, or to
    the largest where all are small or some above 1."""
    top = float(table.max())
    norm = PowerNorm(0.5, vmin=0, vmax=1 if 0.2 < top <= 1 else max(top, 1e-9), clip=True)
    return np.kron(colormaps["magma_r"](norm(table), bytes=True)[..., :3], np.ones((cell, cell, 1), np.uint8))


def printable(word: str, longest: int = 12) -> str:
    """A token as a label: white space visible, characters that the font lacks as a box, long ones cut."""
    known = _characters()
    word = re.sub(r"(\s)\1{2,}", lambda run: f"{run[1]}×{len(run[0])}", word)
    text = "".join(VISIBLE.get(c, c if ord(c) in known and c.isprintable() else "□") for c in word)
    return text if len(text) <= longest else text[:longest - 1] + "…"


@cache
def _characters() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())
