"""One PNG per picture: every head of every layer, on one colour scale."""

import re
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps, font_manager, patches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Affine2D
from PIL import Image

from attention_maps.capture import Snapshot
from files import atomic_write

DPI = 160
SMALLEST_LABEL = 4.0  # points; token labels smaller than this are left out
VISIBLE = {"\n": "⏎", "\r": "⇤", "\t": "⇥", " ": "·"}
# Square root: a diffuse head's small weights stay visible.
NORM, COLOURS = PowerNorm(0.5, vmin=0, vmax=1), colormaps["magma_r"]
GROUP_COLOUR = "#3b6fb5"


class Layout:
    """Where everything is, in inches from the lower left corner."""

    def __init__(self, L: int, H: int, T: int, groups: int):
        self.in_group = H // groups
        cell = self.cell = max(0.9, min(3.2, 22 / max(L, H)))  # a map's side
        gap, group_gap = 0.14 * cell ** 0.5, 0.4 * cell ** 0.5
        self.labels = cell * 72 / T >= SMALLEST_LABEL
        self.left, self.bottom = (1.25, 0.95) if self.labels else (0.65, 0.35)
        # Of the writing: a larger picture is shown smaller.
        self.scale = min(1.8, max(1.0, max(L, H) * cell / 13))
        # From the maps to the frame of their group.
        self.pad = group_gap * 0.28 if self.in_group > 1 else 0
        between_groups = group_gap - gap if self.in_group > 1 else 0
        self.xs = [self.left + h * (cell + gap) + (h // self.in_group) * between_groups
                   for h in range(H)]
        self.ys = [self.bottom + (L - 1 - layer) * (cell + group_gap) for layer in range(L)]
        self.width = self.xs[-1] + cell + 0.95 * self.scale
        self.top = self.ys[0] + cell  # of the uppermost maps
        self.height = self.top + 1.15 * self.scale


def draw(snapshot: Snapshot, path: Path, groups: int, title: str) -> None:
    """Draw the snapshot's text maps (L, H, T, T), framing the heads that share one of the `groups`
    key/value heads."""
    L, H, T, _ = snapshot.text.shape
    at = Layout(L, H, T, groups)
    figure = Figure(figsize=(at.width, at.height), dpi=DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.suppressComposite = True  # each map an image of its own, in an SVG too
    draw_maps(figure, at, snapshot.text)
    if at.labels:
        draw_words(figure, at, [printable(w) for w in snapshot.probes.words])
    draw_groups(figure, at, groups)
    draw_title(figure, at, title)
    draw_bar(figure, at)
    with atomic_write(path) as part:
        if path.suffix == ".svg":
            figure.savefig(part, format="svg", dpi=DPI)
            return
        canvas.draw()
        image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
        # Runs of one colour are most of it: told so, zlib takes half the time.
        image.convert("RGB").save(part, "png", dpi=(DPI, DPI), compress_level=1,
                                  compress_type=zlib.Z_RLE)


def write(figure: Figure, x: float, y: float, text: str, size: float, **more) -> None:
    """Text at a place in inches; nothing in it is mathematics."""
    figure.text(x, y, text, fontsize=size, transform=figure.dpi_scale_trans, parse_math=False,
                **more)


def add(figure: Figure, patch: patches.Patch) -> None:
    """A patch whose places are in inches."""
    patch.set_transform(figure.dpi_scale_trans)
    figure.add_artist(patch)


def draw_maps(figure: Figure, at: Layout, maps: np.ndarray) -> None:
    """The maps (L, H, T, T), each with its name; what a token may not look at is left blank."""
    T, side = maps.shape[-1], round(at.cell * DPI)
    colours = COLOURS(NORM(maps), bytes=True)[..., :3]  # (L, H, T, T, 3)
    colours[..., np.triu(np.ones((T, T), bool), 1), :] = 245
    pixel = np.arange(side) * T // side  # the token that each pixel is of
    for layer, y in enumerate(at.ys):
        write(figure, 0.12, y + at.cell / 2, f"layer {layer}", 9 * at.scale, rotation=90,
              va="center", ha="left", weight="bold")
        for head, x in enumerate(at.xs):
            figure.figimage(colours[layer, head][pixel][:, pixel], x * DPI, y * DPI, origin="upper")
            add(figure, patches.Rectangle((x, y), at.cell, at.cell, fill=False, linewidth=0.4,
                                          edgecolor="0.6"))
            write(figure, x + at.cell / 2, y + at.cell + 0.035, f"L{layer}H{head}",
                  min(8, 5 + at.cell) * at.scale, va="bottom", ha="center")


def draw_words(figure: Figure, at: Layout, words: list[str]) -> None:
    """The tokens to the left of each layer's maps and below each head's.

    Outlined once for all of them, since to lay out text takes long.
    """
    step = at.cell / len(words)
    size = min(8.0, step * 72 * 0.92)
    outlines = [outline(word, size / 72) for word in words]
    beside, below = [], []
    for i, word in enumerate(outlines):
        right = word.vertices[:, 0].max(initial=0)
        middle = -0.36 * size / 72  # half of a capital's height
        place = (i + 0.5) * step
        beside.append(
            Affine2D().translate(-right, middle + at.cell - place).transform_path(word))
        below.append(
            Affine2D().translate(-right, middle).rotate_deg(90).translate(place, 0)
            .transform_path(word))
    beside, below = Outline.make_compound_path(*beside), Outline.make_compound_path(*below)
    places = [(beside, at.left - at.pad - 0.04, y) for y in at.ys]
    places += [(below, x, at.bottom - at.pad - 0.04) for x in at.xs]
    for path, x, y in places:
        moved = Affine2D().translate(x, y).transform_path(path)
        add(figure, patches.PathPatch(moved, facecolor="black", linewidth=0))


def outline(text: str, size: float) -> Outline:
    """The letters as a path whose base line begins at 0, 0."""
    vertices, codes = text_to_path.get_text_path(FontProperties(), text, ismath=False)
    if not len(vertices):
        return Outline(np.empty((0, 2)))
    return Outline(np.asarray(vertices) * (size / text_to_path.FONT_SCALE), codes)


def draw_groups(figure: Figure, at: Layout, groups: int) -> None:
    """A frame around the heads that share a key/value head, where they are several."""
    if at.in_group == 1:
        return
    for layer, y in enumerate(at.ys):
        for group in range(groups):
            x = at.xs[group * at.in_group] - at.pad
            edge = at.xs[(group + 1) * at.in_group - 1] + at.cell + at.pad
            add(figure, patches.FancyBboxPatch(
                (x, y - at.pad), edge - x, at.cell + 2 * at.pad + 0.13, fill=False, linewidth=0.9,
                boxstyle="round,pad=0,rounding_size=0.05", edgecolor=GROUP_COLOUR))
            if layer == 0:
                write(figure, x + 0.03, at.top + at.pad + 0.16, f"key/value head {group}",
                      7.5 * at.scale, va="bottom", color=GROUP_COLOUR)


def draw_title(figure: Figure, at: Layout, title: str) -> None:
    left, top = at.left - at.pad, at.height - 0.14
    write(figure, left, top, title, 11 * at.scale, weight="bold", va="top")
    words = "· is a space, ⏎ a line end" if at.labels else "the tokens are in the .npz beside this"
    write(figure, left, top - 0.24 * at.scale, "on the beginning of the validation text; row: the "
          f"token that looks, column: the token it looks at; {words}", 7.5 * at.scale,
          color="0.35", va="top")


def draw_bar(figure: Figure, at: Layout) -> None:
    """The colours of the weights, from 0 to 1."""
    x, wide, high = at.width - 0.62 * at.scale, 0.13 * at.scale, at.top - at.bottom
    shares = np.linspace(1, 0, round(high * DPI))  # of the bar's height, from the top
    column = COLOURS(shares, bytes=True)[:, None, :3].repeat(round(wide * DPI), axis=1)
    figure.figimage(column, x * DPI, at.bottom * DPI, origin="upper")
    for weight in (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1):
        write(figure, x + wide + 0.05, at.bottom + NORM(weight) * high,
              f"{weight:g}".replace("0.", "."), 7 * at.scale, va="center")
    write(figure, x + wide / 2, at.top + 0.06, "weight", 7 * at.scale, va="bottom", ha="center")


def table_image(table: np.ndarray, cell: int = 24) -> np.ndarray:
    """A table (L, H) of scores as an image (L · cell, H · cell, 3) of bytes, in the maps' colours:
    from 0 to 1, or to the largest where all are small or some above 1."""
    top = float(table.max())
    norm = PowerNorm(0.5, vmin=0, vmax=1 if 0.2 < top <= 1 else max(top, 1e-9), clip=True)
    return np.kron(COLOURS(norm(table), bytes=True)[..., :3], np.ones((cell, cell, 1), np.uint8))


def printable(word: str, longest: int = 12) -> str:
    """A token as a label: white space visible, what the font lacks as a box, long ones cut."""
    known = _characters()
    word = re.sub(r"(\s)\1{2,}", lambda run: f"{run[1]}×{len(run[0])}", word)
    text = "".join(VISIBLE.get(c, c if ord(c) in known and c.isprintable() else "□") for c in word)
    return text if len(text) <= longest else text[:longest - 1] + "…"


@cache
def _characters() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())
