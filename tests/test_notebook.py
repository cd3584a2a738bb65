"""docs/attention.ipynb has its outputs, and runs: it asserts that formulas and code agree."""

from dataclasses import replace

import pytest
from conftest import ROOT

import cli
from data.tokenizer import DEFAULT_VOCAB_SIZE
from training.flops import model_size

PATH = ROOT / "docs" / "attention.ipynb"


def notebook():
    return pytest.importorskip("nbformat").read(PATH, as_version=4)


def test_the_outputs_are_of_a_model_of_the_preset():
    preset = cli.compose_job(["experiment=induction"]).config
    vocab_size = preset.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    parameters, _ = model_size(replace(preset.model, vocab_size=vocab_size))
    assert f"{parameters:,} parameters" in PATH.read_text(encoding="utf-8")


@pytest.mark.soak
def test_every_cell_runs():
    from nbclient import NotebookClient

    fresh = notebook()
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        fresh,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(PATH.parent)}},
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in fresh.cells for output in cell.get("outputs", [])
    )
    assert "previous_token" in printed and "induction" in printed
