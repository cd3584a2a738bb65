"""docs/example.html, which a reader opens before anything is installed."""

import pytest
from conftest import ROOT, wait_until

EXAMPLE = ROOT / "docs" / "example.html"
MAX_BYTES = 1_500_000


@pytest.mark.slow
def test_the_example_is_small_and_runs_its_model_at_four_steps_without_a_network(open_page):
    assert EXAMPLE.stat().st_size <= MAX_BYTES
    tab = open_page(EXAMPLE)
    assert "Induction head" in tab.inner_text("#headline")
    assert tab.locator("#ticks .has-weights").count() == 4
    tab.fill("#typed", "pythonpython")
    tab.wait_for_selector("#large[data-probe='your text']")
    wait_until(tab, "document.querySelector('#mean-loss').textContent !== ''")
