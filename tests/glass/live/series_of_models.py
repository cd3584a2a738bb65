"""A folder with the steps of a model, and a count of those that are in memory."""

import weakref
from pathlib import Path

from models import lively, small

from data.tokenizer import CharTokenizer
from interop import save_hf
from training.stored_model import StoredModel
from variants import build_model

SEEDS = {0: 9, 5: 5, 10: 7, 20: 9}  # the weights of step 0 are those of step 20
COUNTED = [5, 10, 20]


def write_steps(folder: Path) -> Path:
    """Write models of four steps, each into a subfolder."""
    for step, seed in SEEDS.items():
        model = lively(build_model(small(vocab_size=8)), seed)
        save_hf(model, folder / f"checkpoint-{step}", CharTokenizer("abcdefgh"))
    return folder


def count_models(monkeypatch) -> list[int]:
    """Return a list to which each load adds how many of the loaded models are then in memory."""
    models, counts = weakref.WeakSet(), []
    build = StoredModel.build

    def build_and_count(stored, *arguments):
        model = build(stored, *arguments)
        models.add(model)
        counts.append(len(models))
        return model

    monkeypatch.setattr(StoredModel, "build", build_and_count)
    return counts
