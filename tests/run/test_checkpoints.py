"""A checkpoint's manifest notices every changed byte, and its hashes are SHA-256."""

import hashlib
import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from run.checkpoints import (
    CHECKPOINT_FILES,
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from run.loss_history import best_row
from run.run_dir import RunDir

MANIFEST = Manifest(
    step=8, seconds={"train": 1.5}, metrics={"val/loss": 2.0}, fingerprint="f", losses=(6.5, 3)
)


def save(run: Path, manifest: Manifest) -> Path:
    """Write a checkpoint folder whose files have a few bytes each."""
    path = RunDir(run).checkpoint_folder(manifest.step)
    path.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        (path / name).write_bytes(f"content of {name}".encode())
    write_manifest(path, manifest)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of step 8."""
    return save(tmp_path, MANIFEST)


def test_the_best_checkpoint_has_the_lowest_loss_of_those_that_were_trained(tmp_path):
    for step, loss in ((0, 0.5), (9, nan), (4, 3.0), (8, 2.0), (12, 2.0)):
        save(tmp_path, replace(MANIFEST, step=step, metrics={"val/loss": loss}))
        best = RunDir(tmp_path).checkpoint("best")
        assert best.step == (step if step in (0, 9) else min(step, 8))
        is_trained = step not in (0, 9)
        assert best_row([best.manifest.row]) == (best.manifest.row if is_trained else None)


def test_checkpoints_are_preferred_by_their_loss_and_those_without_one_by_their_step(tmp_path):
    losses: dict[int, dict] = {0: {"val/loss": 0.5}, 4: {}, 6: {"val/loss": nan}}
    losses |= {8: {"val/loss": 2.0}, 9: {"val/loss": 3.0}, 10: {"val/loss": 2.0}}
    for step, metrics in losses.items():
        save(tmp_path, replace(MANIFEST, step=step, metrics=metrics))
    assert RunDir(tmp_path).preferred_steps("best") == [8, 10, 9, 6, 4, 0]


def test_a_manifest_is_read_back_and_has_the_size_and_sha256_of_each_file(folder):
    assert read_manifest(folder) == verify_checkpoint(folder).manifest == MANIFEST
    files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    contents = {name: (folder / name).read_bytes() for name in CHECKPOINT_FILES}
    assert files == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }


@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, MANIFEST_FILE])
def test_every_changed_byte_of_every_file_is_noticed(folder, name):
    path = folder / name
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytes([original[position] ^ 1])
        path.write_bytes(original[:position] + changed + original[position + 1 :])
        with pytest.raises(ValueError):
            verify_checkpoint(folder)
    path.write_bytes(original)
    verify_checkpoint(folder)
    path.write_bytes(original + b"\n")
    with pytest.raises(ValueError):
        verify_checkpoint(folder)
    path.unlink()
    with pytest.raises(ValueError):
        verify_checkpoint(folder)
