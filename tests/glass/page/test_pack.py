"""Packed maps and predictions decode to what was captured; as many snapshots as fit are kept."""

import base64
import os
import zlib
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import small
from pages import causal, check_maps, explain, make_run, read_back, snapshot, unpack

from glass.page import pack
from glass.page import write as page
from glass.page.embedded_model import EmbeddedModel, embed_weights
from glass.page.pack import Blobs
from glass.page.snapshots import PROBES, Snapshot, pack_fitting_maps, pack_fitting_predictions


def packed(maps: np.ndarray) -> bytes:
    return zlib.decompress(base64.b64decode(pack.pack_maps(maps, np.ones(maps.shape[:3])).parts[0]))


@given(st.integers(1, 40), st.integers(1, 3), st.floats(0, 12), st.integers(0, 2**32))
def test_packed_maps_decode_within_the_promised_error(T, H, sharp, seed):
    A = causal(np.random.default_rng(seed), 1, H, T, sharp=sharp)
    found, bound = unpack(packed(A), 1, H, T)
    check_maps(found, A)
    assert (np.abs(found - A) <= bound[..., None] * 1.0001).all()


def test_a_diffuse_row_keeps_its_sum_and_a_diverged_one_is_zero():
    row = np.r_[np.full(2000, 1.0), 3000.0]
    codes, largest = pack.quantize((row / row.sum())[None])
    assert abs((codes * largest[:, None] / pack.LEVELS).sum() - 1) < 0.01
    for broken in (np.full((3, 3), np.nan), np.zeros((3, 3))):
        assert not pack.quantize(broken)[0].any()


def test_packed_predictions_decode_to_what_was_measured():
    held = explain() | explain(prefix="repeated_")
    for name, prefix in (("text", ""), ("repeated", "repeated_")):
        found = pack.pack_predictions(held, name)
        floats, ids = (zlib.decompress(base64.b64decode(part)) for part in found.parts)
        need = held[f"{prefix}token_effect"]
        whole = [
            *(held[prefix + key][np.tri(16, dtype=bool)] for key in pack.TRIANGLES),
            *(held[prefix + key] for key in pack.FLOATS),
        ]
        numbers = np.frombuffer(floats, np.uint8).reshape(2, -1).T.copy().view("<f2").ravel()
        expected = np.concatenate([part.ravel() for part in whole]).astype(np.float16)
        assert np.array_equal(numbers, expected, equal_nan=True)
        whole = [held[prefix + key].ravel() for key in pack.IDS]
        assert np.array_equal(np.frombuffer(ids, "<i4"), np.concatenate(whole))
        assert found.words[3] == " n3" and found.largest == pytest.approx(np.nanmax(np.abs(need)))
    assert pack.pack_predictions(snapshot(), "text") is None


@pytest.mark.parametrize(
    "change",
    [
        {"text": np.array(["a"])},
        {"text": np.zeros((2, 4, 3, 16), "f2")},
        {"text": 7},
        {"text_value_norms": np.zeros((2, 4, 16), int)},
        {"text_tokens": np.zeros(3)},
        {"repeated_periods": np.array([1e400])},
        {"repeated_periods": np.array(["x"])},
    ],
)
def test_an_unreadable_snapshot_is_left_out_and_counted(tmp_path, change):
    run = make_run(tmp_path / "run")
    np.savez(run / "attention" / "step_00000010.npz", **(snapshot(step=10) | change))
    os.mkfifo(run / "attention" / "step_00000030.npz")
    (run / "attention" / "step_00000020.safetensors").write_text("none")
    content, _ = read_back(page.write_page(run))
    assert content["steps"] == [0, 20] and content["unreadableSnapshots"] == 2
    held = snapshot() | explain() | {"logit_lens": np.array(["a"]), "named_ids": np.zeros(3)}
    assert Snapshot(0, lambda: nullcontext(held)).pack("text", "predictions") is None


# What fits


def test_a_small_run_is_packed_completely(tmp_path):
    run = make_run(tmp_path / "run")
    path = page.write_page(run)
    assert path == run / "report.html"
    assert {p.name for p in run.iterdir()} == {
        "attention",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "samples.jsonl",
    }
    content, blobs = read_back(path)
    assert content["steps"] == [0, 10, 20]
    text, repeat = content["probes"]
    assert repeat["tokens"] == [f"r{i % 8}" for i in range(16)]
    for k, step in enumerate(content["steps"]):
        held = snapshot(step=step)
        maps, norms, largest = text["maps"][k]
        check_maps(unpack(blobs[maps], 2, 4, 16)[0], held["text"])
        assert (np.frombuffer(blobs[norms], "<f4") == held["text_value_norms"].reshape(-1)).all()
        product = held["text"] * held["text_value_norms"][:, :, None]
        assert largest == pytest.approx(product.max(), rel=1e-3)
        maps = repeat["maps"][k][0]  # of the longest period
        check_maps(unpack(blobs[maps], 2, 4, 16)[0], held["repeated"][:, 1])


@pytest.mark.parametrize(("room", "steps"), [(180_000, 6), (100_000, 3), (40_000, 1)])
def test_a_large_run_keeps_fewer_snapshots(room, steps):
    shots = [
        Snapshot(step, lambda step=step: nullcontext(snapshot(2, 2, 80, step)))
        for step in range(0, 60, 10)
    ]
    blobs = pack.Blobs()
    found = pack_fitting_maps(shots, PROBES, room, blobs)
    assert len(found["steps"]) == steps and found["snapshotCount"] == 6 and found["steps"][-1] == 50
    assert sum(map(len, blobs)) <= room
    assert pack_fitting_maps(shots, PROBES, 100, blobs) is None


def test_the_steps_whose_weights_are_in_the_page_keep_their_maps():
    arrays = snapshot(2, 2, 80)
    shots = [Snapshot(step, lambda: nullcontext(arrays)) for step in range(0, 60, 10)]
    found = pack_fitting_maps(shots, PROBES, 140_000, pack.Blobs(), {10, 20})
    assert found["steps"] == [0, 10, 20, 50]


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_predictions_of_the_newest_snapshots_are_kept(count):
    arrays = snapshot() | explain() | explain(prefix="repeated_")
    shots = [Snapshot(step, lambda: nullcontext(arrays)) for step in (0, 10, 20)]
    size = shots[0].pack("text", "predictions").size
    packed = pack_fitting_predictions(shots, ["text"], count * size)
    assert list(packed) == [("text", step) for step in (20, 10, 0)[:count]]


def test_a_page_names_the_setting_that_it_cannot_run():
    model = EmbeddedModel(small(smear_keys=True), {"kind": "char"}, 1, {})
    assert embed_weights(model, Blobs()) == {"cannotRun": "model.smear_keys=true"}
