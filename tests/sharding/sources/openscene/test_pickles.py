"""Foreign pickles: values and arrays as they were, and nothing that they name is called."""

from __future__ import annotations

import io
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.openscene.pickles import read_pickle

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)
ARRAYS = npst.arrays(
    st.one_of(
        npst.integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?", sizes=(32, 64)),
        npst.boolean_dtypes(),
        npst.unicode_string_dtypes(endianness="?"),
    ),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(PLAIN, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_they_were(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol), "log") == value


@given(ARRAYS, st.booleans(), st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_arrays_are_read_as_they_were(array, is_fortran, protocol):
    value = np.asfortranarray(array) if is_fortran else array
    result = np.asarray(read_pickle(pickle.dumps([value], protocol), "log")[0])
    assert result.shape == value.shape
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result, value)


def test_numbers_of_numpy_become_numbers():
    value = [np.float64(0.1), np.int64(-7), np.bool_(True), np.str_("red")]
    assert read_pickle(pickle.dumps(value), "log") == [0.1, -7, True, "red"]


@given(ARRAYS, st.data())
def test_a_damaged_pickle_is_an_error_or_a_value(array, data):
    content = bytearray(pickle.dumps({"a": array, "b": [1, "x"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(content[: data.draw(st.integers(0, len(content)))]), "log")
    except SourceError as error:
        assert "log is not a pickle of plain values" in str(error)


class Command:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def build(obj: bytes, state: bytes) -> bytes:
    """A pickle that sets the state of an object."""
    return b"\x80\x04" + obj + state + b"b."


DTYPE = b"cnumpy\ndtype\n"
HOSTILE = {
    "a command": (
        pickle.dumps(Command()),
        r"it holds an object of '(posix|nt)\.system'",
    ),
    "an attribute of a name": (
        build(DTYPE, b"N}X\x04\x00\x00\x00makeK\x01s\x86"),
        "attribute",
    ),
    "attributes of a list": (
        build(b"]", b"}X\x01\x00\x00\x00aK\x01s"),
        "attribute",
    ),
    "an array of objects": (pickle.dumps(np.array([{}, None])), r"dtype 'O8'"),
    "a text beyond the last character": (
        pickle.dumps(np.array([0x110000], "<u4").view("<U1")),
        "code point 0x110000, which is no character",
    ),
    "a text of half a character": (
        pickle.dumps(np.array([65, 0xD800], "<u4").view("<U2")),
        "code point 0xd800",
    ),
    "such a text in the other order": (
        pickle.dumps(np.array([0x110000], ">u4").view(">U1")),
        "code point 0x110000",
    ),
    "records": (pickle.dumps(np.zeros(2, "i4,f8")), "dtype 'V12'"),
    "another class": (pickle.dumps(io.BytesIO()), r"'_io\.BytesIO'"),
    "a set of a class": (
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        r"'builtins\.eval'",
    ),
    "an extension": (b"\x80\x02\x82\x01.", "extension code"),
    "something persistent": (b"Pabc\n.", "persistent"),
    "a claim of 4 GB": (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 32) + b"abc.",
        "it is cut off",
    ),
    "a memo of 2^31": (
        b"\x80\x02K\x01r" + struct.pack("<I", (1 << 31) - 1) + b"c..",
        None,
    ),
    "nothing": (b"", "it is cut off"),
    "text": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "LFS",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, says = HOSTILE[name]
    with pytest.raises(SourceError, match=says):
        read_pickle(data, "log 'a.pkl'")
    assert not list(tmp_path.iterdir())
