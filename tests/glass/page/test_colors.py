"""The colors of a run's page in both themes: how light they are, and whether text is legible."""

import numpy as np
import pytest
from pages import MIN_CONTRAST, contrast, luminance, make_run, read_back

from glass.page import write as page

THEMES = ("light", "dark")

# The color of each cell of a score's table, near its left upper corner, row by row.
READ_CELLS = """([score, rows, columns]) => {
  const canvas = document.querySelector(`[data-score=${score}] canvas`);
  const copy = new OffscreenCanvas(canvas.width, canvas.height)
    .getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const pixel = (x, y) => [...copy.getImageData(x, y, 1, 1).data];
  let left = 0; // of the cells, right of the rows' names
  while (pixel(left, 1)[3] === 0) left++;
  const bottom = Array.from({ length: canvas.height }, (_, y) => y)
    .find(y => pixel(left + 1, y)[3] === 0); // above the columns' names
  const at = (i, j) => pixel(
    Math.round(left + ((j + 0.1) / columns) * (canvas.width - left)),
    Math.round(((i + 0.1) / rows) * bottom),
  );
  return Array.from({ length: rows * columns }, (_, k) =>
    at(Math.floor(k / columns), k % columns).slice(0, 3));
}"""


def lightness(rgb) -> np.ndarray:
    """L* of CIELAB, from 0 to 100."""
    Y = luminance(rgb)
    return np.where(Y > 0.008856, 116 * np.cbrt(Y) - 16, 903.3 * Y)


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
def test_a_score_is_linear_in_lightness(open_page, tmp_path, theme):
    path = page.write_page(make_run(tmp_path / "run"))
    columns = read_back(path)[0]["scored"]["columns"]
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    values = np.array([columns[f"heads/induction/{head}"][-1] for head in heads])
    tab = open_page(path, color_scheme=theme)
    found = lightness(tab.evaluate(READ_CELLS, ["induction", 2, 4]))
    empty, full = (95, 5) if theme == "light" else (5, 95)
    assert found == pytest.approx(empty + values * (full - empty), abs=5)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("theme", THEMES)
def test_a_number_is_legible_on_every_color(engine_tab, theme, signed):
    engine_tab.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    pixels = engine_tab.evaluate("signed => [...engine.palette(signed)]", signed)
    colors = np.array(pixels, "<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    inks = engine_tab.evaluate("n => Array.from(Array(256), (_, k) => engine.inkOn(k, n))", signed)
    inks = [[{"#000": 0, "#fff": 255}[ink]] * 3 for ink in inks]
    assert contrast(colors, inks).min() >= MIN_CONTRAST
