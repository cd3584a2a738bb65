"""A checkpoint's manifest notices every changed byte, and its hashes are SHA-256."""

import hashlib
import json
from pathlib import Path

import pytest

from common.checkpoints import (
    CHECKPOINT_FILES,
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)

MANIFEST = Manifest(
    step=8, seconds={"train": 1.5}, metrics={"val/loss": 2.0}, fingerprint="f", losses=(6.5, 3)
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint folder of step 8 whose files have a few bytes each."""
    path = tmp_path / "step_00000008"
    path.mkdir()
    for name in CHECKPOINT_FILES:
        (path / name).write_bytes(f"content of {name}".encode())
    write_manifest(path, MANIFEST)
    return path


def test_a_manifest_is_read_back_and_has_the_size_and_sha256_of_each_file(folder):
    assert read_manifest(folder) == verify_checkpoint(folder) == MANIFEST
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
