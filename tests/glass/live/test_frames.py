"""Frames give back the values that they were made of."""

import json
import struct

import numpy as np
import pytest
from frame_reader import decode_frames
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.errors import UserError
from glass.live.frames import encode_error, encode_frame

TEXTS = st.text(st.characters(exclude_categories=[]), max_size=5)  # also lone surrogates
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
ARRAYS = arrays.arrays(
    st.sampled_from([np.dtype(name) for name in ("float32", "float16", "int32", ">f4")]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
).filter(lambda value: "'array':" not in repr(value))


def assert_same(value, decoded):
    if isinstance(value, np.ndarray):
        assert decoded.dtype == value.dtype.newbyteorder("=")
        np.testing.assert_array_equal(decoded, value.ravel())  # NaN equals NaN
    elif isinstance(value, list):
        assert len(value) == len(decoded)
        for one, other in zip(value, decoded):
            assert_same(one, other)
    elif isinstance(value, dict):
        assert value.keys() == decoded.keys()
        for key in value:
            assert_same(value[key], decoded[key])
    else:
        assert decoded == value and type(decoded) is type(value)


@given(st.lists(st.tuples(st.sampled_from(["part", "answer"]), VALUES), max_size=3))
def test_a_stream_of_frames_gives_back_its_values(frames):
    stream = b"".join(encode_frame(kind, value) for kind, value in frames)
    decoded = decode_frames(stream)
    assert [kind for kind, _ in decoded] == [kind for kind, _ in frames]
    for (_, value), (_, other) in zip(frames, decoded):
        assert_same(value, other)


def test_arrays_begin_at_multiples_of_four_bytes():
    frame = encode_frame("part", [np.ones(n, np.float16) for n in (1, 0, 3, 2)])
    text_size, binary_size = struct.unpack_from("<II", frame)
    described = json.loads(frame[8 : 8 + text_size])["part"]
    assert all(array["offset"] % 4 == 0 for array in described)
    assert len(frame) == 8 + text_size + binary_size
    assert binary_size % 4 == 0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_json_lacks_is_refused_outside_arrays(number):
    with pytest.raises(ValueError):
        encode_frame("answer", {"loss": [float(number)]})


@pytest.mark.parametrize("value", [np.ones(2), np.ones(2, np.int64), np.float32(1), {1, 2}, b"1"])
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(TypeError):
        encode_frame("answer", value)


class StepChanged(UserError):
    pass


@pytest.mark.parametrize(
    "error, name",
    [
        (UserError("i=9 is not a token of 4"), "UserError"),
        (StepChanged("step=3"), "StepChanged"),
        (MemoryError(), "UserError"),
    ],
)
def test_an_error_that_the_user_can_fix_is_explained(error, name, capsys):
    try:
        raise error
    except Exception as e:
        [(kind, value)] = decode_frames(encode_error(e))
    assert (kind, value["name"]) == ("error", name)
    assert str(error) in value["message"]
    assert capsys.readouterr().err == ""


def test_a_bug_is_sent_without_details_and_its_traceback_printed(capsys):
    try:
        {"a": 1}["secret"]
    except KeyError as e:
        [(kind, value)] = decode_frames(encode_error(e))
    assert (kind, value["name"]) == ("error", "InternalError")
    assert "secret" not in value["message"]
    assert "Traceback" in capsys.readouterr().err
