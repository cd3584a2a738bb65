"""Weights on disk belong to the configuration, the step and the hash that they are stored with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import lively
from run_folders import SHAPE, TEXT, write_run
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import UserError
from config import GPTConfig
from glass.heads.measure.snapshot_files import float16_weights, save_weights
from interop import load
from run.checkpoints import MODEL_FILE, read_manifest, write_manifest
from run.run_dir import RunDir
from train import open_starting_model
from training.safetensors_files import read_weights
from variants import build_model

NAME = "blocks.0.mlp.W_in.weight"
CONFIG = GPTConfig(len(TEXT), **SHAPE)


@pytest.mark.parametrize(
    "name, change",
    [
        (NAME, lambda tensors: tensors.pop(NAME)),
        (NAME, lambda tensors: tensors.update({NAME: tensors[NAME].T.contiguous()})),
        (NAME, lambda tensors: tensors.update({NAME: tensors[NAME][:1].clone()})),
        ("position_embedding.weight", lambda tensors: tensors.pop("position_embedding.weight")),
        ("head.weight", lambda tensors: tensors.update({"head.weight": torch.zeros(3, 16)})),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], object]
):
    write_run(tmp_path)
    folder = RunDir(tmp_path).checkpoint_folder(6)
    tensors = load_file(folder / MODEL_FILE)
    change(tensors)
    save_file(tensors, folder / MODEL_FILE)
    write_manifest(folder, read_manifest(folder))  # with the hashes of today
    for read in (
        lambda: load(tmp_path, "last"),
        lambda: open_starting_model(None, RunDir(tmp_path).find_start(pytest.fail), pytest.fail),
    ):
        with pytest.raises(UserError) as error:
            read()
        assert str(folder / MODEL_FILE) in str(error.value) and name in str(error.value)


# --- snapshots ------------------------------------------------------------------------------------


def write_snapshot(folder: Path, step: int) -> Path:
    path = folder / f"step_{step:08d}.safetensors"
    save_weights(path, step, lively(build_model(CONFIG), seed=step))
    return path


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Path:
    return write_snapshot(tmp_path_factory.mktemp("attention"), 4)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_changed_weights_of_a_snapshot_are_refused(snapshot, place, bits):
    content = bytearray(snapshot.read_bytes())
    content[int(place * len(content))] ^= bits
    changed = snapshot.with_name("changed") / snapshot.name
    changed.parent.mkdir(exist_ok=True)
    changed.write_bytes(content)
    try:
        tensors = read_weights(changed)
    except UserError as error:
        assert str(changed) in str(error)
    else:  # the header has spaces that mean nothing
        intact = read_weights(snapshot)
        assert all(tensor.equal(intact[name]) for name, tensor in tensors.items())


def test_the_weights_of_a_step_are_not_those_of_another_one(tmp_path):
    write_run(tmp_path)
    folder = tmp_path / "attention"
    folder.mkdir()
    paths = [write_snapshot(folder, step) for step in (4, 5)]
    weights = float16_weights(load(tmp_path, 5)[0])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(UserError, match="step 5") as error:
        load(tmp_path, 5)
    assert str(paths[1]) in str(error.value)
    save_file(weights, paths[1])  # as older versions wrote it
    assert float16_weights(load(tmp_path, 5)[0])[NAME].equal(weights[NAME])
