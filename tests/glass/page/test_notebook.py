"""Pages under the cells of a notebook, in the frames of its export to HTML, in Chromium."""

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient
from nbconvert import HTMLExporter

CELLS = [
    "import glass",
    "opened = glass.open({!r})",
    "opened.show('the glass the glass', head='L1H0', token=-4)",
    "[page] = [opened.show(head='L0H1') for step, opened in glass.series({!r}, [12])]; page",
]
EDITED = "the glass the"


@pytest.mark.slow
def test_a_notebook_shows_the_pages_of_a_text_and_of_a_run(open_page, finished_run, tmp_path):
    cells = [nbformat.v4.new_code_cell(cell.format(str(finished_run))) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    exported, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    (tmp_path / "notebook.html").write_text(exported, encoding="utf-8")
    tab = open_page(tmp_path / "notebook.html")

    frames = [tab.frame_locator("iframe >> nth=0"), tab.frame_locator("iframe >> nth=1")]
    for frame, head in zip(frames, ("layer 1, head 0", "layer 0, head 1")):
        selected = frame.get_by_role("radio", name=head, checked=True)
        selected.wait_for()
        selected.locator("canvas").wait_for()
        frame.locator(f"#large[data-map=attention][data-heads=L{head[6]}H{head[-1]}]").wait_for()
    assert tab.evaluate("[scrollY, document.activeElement.tagName]") == [0, "BODY"]
    of_text = tab.frames[1]
    assert of_text.get_attribute("#text .lit", "aria-label").startswith("token 15:")
    page = (finished_run / "report.html").read_text("utf-8")
    assert tab.get_attribute("iframe >> nth=1", "srcdoc") == page

    of_text.get_by_role("radio", name="layer 0, head 1").click()
    of_text.click("#ablate-head")
    of_text.fill("#typed", EDITED)
    frames[0].locator("#own-text-status", has_text=f"{len(EDITED)} tokens").wait_for()
    frames[0].locator("#mean-loss", has_text="L0H1 ablated").wait_for()
