"""Numbers are legible on the colors of a page in both themes."""

import numpy as np
import pytest
from pages import MIN_CONTRAST, contrast

THEMES = ("light", "dark")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("theme", THEMES)
def test_a_number_is_legible_on_every_color(engine_tab, theme, signed):
    engine_tab.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    pixels = engine_tab.evaluate("signed => [...engine.palette(signed)]", signed)
    colors = np.array(pixels, "<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    inks = engine_tab.evaluate("n => Array.from(Array(256), (_, k) => engine.inkOn(k, n))", signed)
    inks = [[{"#000": 0, "#fff": 255}[ink]] * 3 for ink in inks]
    assert contrast(colors, inks).min() >= MIN_CONTRAST
