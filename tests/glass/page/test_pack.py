"""Packed maps decode within their promised error; as many snapshots as fit are kept."""

import base64
import zlib
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import LaterConfig, small
from pages import causal, check_maps, explain, make_run, read_back, snapshot, unpack

from generation.known_settings import MODEL_NUMBERS
from glass.page import pack
from glass.page import write as page
from glass.page.embedded_model import EmbeddedModel, embed_weights
from glass.page.fitting import embed_maps, pack_fitting_predictions
from glass.page.pack import Blobs
from glass.page.snapshots import PROBES, Snapshot
from run.run_dir import RunDir


def decode(part: str) -> bytes:
    return zlib.decompress(base64.b64decode(part))


@given(st.integers(1, 40), st.integers(1, 3), st.floats(0, 12), st.integers(0, 2**32))
def test_packed_maps_decode_within_the_promised_error(T, H, sharp, seed):
    A = causal(np.random.default_rng(seed), 1, H, T, sharp=sharp)
    A[..., 0] *= 20  # an attention sink
    A /= A.sum(axis=-1, keepdims=True)
    packed = pack.pack_maps(A, np.ones(A.shape[:3]))
    found, bound = unpack(decode(packed.parts[0]), 1, H, T)
    check_maps(found, A)
    assert (np.abs(found - A) <= bound[..., None] * 1.0001).all()
    assert (found[..., 0] == A[..., 0]).all()


def test_a_diffuse_row_keeps_its_sum_and_a_diverged_one_is_zero():
    row = np.r_[np.full(2000, 1.0), 3000.0]
    codes, largest = pack.quantize((row / row.sum())[None])
    assert abs((codes * largest[:, None] / pack.LEVELS).sum() - 1) < 0.01
    for broken in (np.full((3, 3), np.nan), np.zeros((3, 3))):
        assert not pack.quantize(broken)[0].any()


@pytest.mark.parametrize("content", [b"PK damaged", None])  # None: that of another step
def test_an_unreadable_snapshot_is_left_out_and_counted(tmp_path, content):
    run = make_run(tmp_path / "run")
    other = (run / "attention" / "step_00000020.npz").read_bytes()
    (run / "attention" / "step_00000010.npz").write_bytes(content or other)
    page_content, _ = read_back(page.write_page(RunDir(run)))
    assert page_content["steps"] == [0, 20] and page_content["unreadableSnapshots"] == 1


# What fits


def shot_of(step: int, arrays: dict[str, np.ndarray]) -> Snapshot:
    return Snapshot(step, lambda: nullcontext(arrays | {"step": step}))


@pytest.mark.parametrize(
    ("count", "with_weights", "steps"),
    [
        (6, [], [0, 10, 20, 30, 40, 50]),
        (3, [], [0, 20, 50]),
        (3, [10, 20], [10, 20, 50]),
        (1, [10], [50]),
        (0, [10], []),
    ],
)
def test_a_large_run_keeps_fewer_snapshots(count, with_weights, steps):
    arrays = snapshot(2, 2, 80)
    shots = [shot_of(step, arrays) for step in range(0, 60, 10)]
    room = count * sum(shots[0].pack_maps(name).size for name in PROBES)
    blobs = Blobs()
    found = embed_maps(shots, room, blobs, with_weights)
    assert found["steps"] == steps and found["snapshotCount"] == 6 and blobs.size <= room


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_predictions_of_the_newest_snapshots_are_kept(count):
    arrays = snapshot() | explain()
    shots = [shot_of(step, arrays) for step in (0, 10, 20)]
    size = shots[0].pack_predictions("text").size
    packed = pack_fitting_predictions(shots, count * size)
    assert list(packed) == [("text", step) for step in (20, 10, 0)[:count]]


def test_a_page_names_what_it_cannot_run():
    model = EmbeddedModel(small(smear_keys=True), {"kind": "char"}, {})
    assert embed_weights(model, 10**6, Blobs()) == {"cannotRun": "model.smear_keys=true"}
    model = EmbeddedModel(small(ngrams=3), {"kind": "char"}, {})
    assert embed_weights(model, 10**6, Blobs()) == {"cannotRun": "model.ngrams=3"}
    model = EmbeddedModel(small(), {"kind": "hf"}, {})
    assert "hf" in embed_weights(model, 10**6, Blobs())["cannotRun"]


@pytest.mark.parametrize("field", fields(LaterConfig), ids=lambda field: field.name)
def test_a_page_runs_no_value_of_a_setting_that_is_not_listed(field):
    if field.name in MODEL_NUMBERS:
        assert field.type not in (bool, str) and "choices" not in field.metadata
        return
    config = replace(LaterConfig(**vars(small())), **{field.name: "invented"})
    model = EmbeddedModel(config, {"kind": "char"}, {})
    expected = {"cannotRun": f"model.{field.name}=invented"}
    assert embed_weights(model, 10**6, Blobs()) == expected
