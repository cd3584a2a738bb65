"""Safetensors files written tensor by tensor are those of the library, byte by byte."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from config import UserError
from training.tensors import opened, write_tensors

SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.dictionaries(st.text("abz019._/", min_size=1, max_size=8), SHAPES, max_size=5),
       st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_file_has_the_bytes_of_the_librarys(tmp_path_factory, shapes, dtype):
    folder = tmp_path_factory.mktemp("tensors")
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    write_tensors(folder / "ours", tensors, (tensors[name] for name in sorted(tensors)))
    save_file(tensors, folder / "theirs")
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_tensors_are_whole_two_at_a_time_at_most(tmp_path):
    like, made = {f"{n}": torch.empty(100, device="meta") for n in range(9)}, []

    def values():
        for _ in like:
            gc.collect()
            assert sum(tensor() is not None for tensor in made) <= 1
            tensor = torch.zeros(100)
            made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    write_tensors(tmp_path / "x", like, values())
    assert len(made) == 9


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100])
def test_a_file_that_is_none_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="x cannot be read as safetensors"), \
            opened(tmp_path / "x"):
        pass
