"""The fast readers against their oracles: the safetensors library and numpy.load; damaged bytes are SchemaErrors."""

from __future__ import annotations

import ast
import io
import itertools
import json
import math
import warnings

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.sample.arrays import (
    read_layout,
    read_npy,
    read_tensors,
    write_npy,
    write_parts,
    write_stacked,
    write_tensors,
)

DTYPES = [np.dtype(code) for code in ("?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
TENSORS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), ARRAYS, max_size=5)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal dtype, shape and bits: NaN payloads and negative zeros count."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(TENSORS)
def test_tensors_agree_with_the_library_both_ways(named) -> None:
    ours = write_tensors(named)
    for found in (read_tensors(ours), safetensors.numpy.load(ours), read_tensors(safetensors.numpy.save(named))):
        assert found.keys() == named.keys()
        assert all(same(found[name], array) for name, array in named.items())


@given(TENSORS)
def test_bytes_are_those_of_the_library(named) -> None:
    assert write_tensors(named) == safetensors.numpy.save(named)


@given(st.dictionaries(st.text("abc", max_size=3), ARRAYS, min_size=1, max_size=4), st.integers(1, 3))
def test_stacked_records_are_those_written_one_by_one(named, num_records) -> None:
    records = [{name: np.roll(array, shift) for name, array in named.items()} for shift in range(num_records)]
    stacked = {name: np.stack([record[name] for record in records]) for name in named}
    assert write_stacked(stacked) == [write_tensors(record) for record in records]


@given(st.lists(st.integers(0, 4), max_size=4), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
def test_parts_are_those_written_one_by_one(counts, dtypes) -> None:
    shapes = [(), (3,), (2, 2), (0,)]
    named = {
        f"a{at}": np.arange(sum(counts) * math.prod(shape)).reshape(-1, *shape).astype(dtype)
        if shape != (0,) else np.zeros((sum(counts), 0), dtype)
        for at, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=False))
    }  # fmt: skip
    ends = np.cumsum([0, *counts]).tolist()
    cut = [{name: array[a:b] for name, array in named.items()} for a, b in itertools.pairwise(ends)]
    assert write_parts(named, counts) == [write_tensors(record) for record in cut]


@given(TENSORS)
def test_equal_tensors_are_equal_bytes_in_any_order(named) -> None:
    assert write_tensors(named) == write_tensors(dict(reversed(named.items())))


def test_layout_in_memory_does_not_matter() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    wide = np.zeros((3, 8), "<f4")
    wide[:, ::2] = array
    for other in (np.asfortranarray(array), wide[:, ::2], array.astype(">f4")):
        assert write_tensors({"a": other}) == write_tensors({"a": array})


def test_tensors_are_read_only_views() -> None:
    data = write_tensors({"a": np.arange(4)})
    array = read_tensors(data)["a"]
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert not read_tensors(bytearray(data))["a"].flags.writeable


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (bytes(7), "too few"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes"),
        ((9).to_bytes(8, "little") + b"{}", "header of 9 bytes in a buffer of 10"),
        (safetensors_bytes([]), "Expected `object`"),
        ((3).to_bytes(8, "little") + b"{a}", "malformed"),
        (safetensors_bytes({"__metadata__": {"a": "b"}}), "unknown field `a`"),
        (safetensors_bytes({"a": entry("F4", [], 0, 1)}, b"x"), "dtype 'F4'; known: BOOL, U8"),
        (safetensors_bytes({"a": entry("U8", [2], 1, 3)}, b"abc"), "hole or an overlap"),
        (safetensors_bytes({"a": entry("U8", [2], -2, 0)}, b"ab"), ">= 0 - at `$[...].data_offsets[0]`"),
        (safetensors_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"ab"), "hole or an overlap"),
        (safetensors_bytes({"a": entry("U8", [2], 0, 2)}, b"abc"), "the tensors end at byte 74 of a buffer of 75"),
        (safetensors_bytes({"a": entry("U8", [4], 0, 4)}, b"abc"), "the tensors end at byte 76 of a buffer of 75"),
        (safetensors_bytes({"a": entry("U8", [3], 0, 2)}, b"ab"), "U8[3] does not fit bytes 0 to 2"),
        (safetensors_bytes({"a": entry("F32", [-1, -1], 0, 4)}, b"abcd"), ">= 0 - at `$[...].shape[0]`"),
        (safetensors_bytes({"a": entry("U8", [0, 1 << 62, 4], 0, 0)}), "U8[0, 4611"),
        (safetensors_bytes({"a": entry("U8", [0, 10**30], 0, 0)}), "shape[1]"),
        (safetensors_bytes({"a": entry("U8", [1] * 65, 0, 1)}, b"a"), "maximum supported dimension"),
        (safetensors_bytes({"a": entry("U8", [1], 0, 10**30)}), "header"),
        (
            safetensors_bytes({"a": entry("U8", ["9" * 5000], 0, 1)}).replace(b'"999', b"999").replace(b'9"', b"9"),
            "safetensors header",
        ),
        (safetensors_bytes({"a": {**entry("U8", [1], 0, 1), "x": 1}}, b"a"), "unknown field `x`"),
    ],
)
def test_wrong_headers_are_schema_errors(data, words) -> None:
    with pytest.raises(SchemaError) as caught:
        read_tensors(data)
    assert words in str(caught.value)


def test_equal_headers_are_parsed_once() -> None:
    a, b = (write_tensors({"n": np.array([n])}) for n in (1, 2))
    assert read_layout(a) is read_layout(b)
    assert (read_tensors(a)["n"], read_tensors(b)["n"]) == (1, 2)
    with pytest.raises(SchemaError, match="of a buffer of"):
        read_layout(a).views(b + b"x")
    long = write_tensors({f"n{i}": np.array([i]) for i in range(200)})
    assert read_layout(long) is not read_layout(long)  # what is kept is bounded
    assert {name: int(array[0]) for name, array in read_tensors(long).items()} == {f"n{i}": i for i in range(200)}


SMALL = write_tensors({"points": np.arange(6, dtype="<f4").reshape(2, 3), "n": np.array([7]), "none": np.zeros((0, 7))})


@given(st.integers(0, len(SMALL) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_a_schema_error_or_what_the_library_reads(at, flip) -> None:
    damaged = bytearray(SMALL)
    damaged[at] ^= flip
    try:
        found = read_tensors(damaged)
    except SchemaError:
        return
    oracle = safetensors.numpy.load(bytes(damaged))
    assert found.keys() == oracle.keys()
    assert all(same(found[name], oracle[name]) for name in found)


def test_cut_tensors_are_refused_wherever_they_are_cut() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(SchemaError):
            read_tensors(SMALL[:length])


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda b: len(b).to_bytes(8, "little") + b))
def test_any_bytes_are_tensors_or_a_schema_error(data) -> None:
    try:
        read_tensors(data)
    except SchemaError as error:
        assert str(error)


STRUCTURED = np.dtype([("x", "<f4"), ("ring", "u1"), ("t", "<i8")])
NPY_DTYPES = [
    *DTYPES,
    np.dtype(">f4"),
    np.dtype("<c8"),
    np.dtype("<M8[ns]"),
    np.dtype("S3"),
    np.dtype("<U2"),
    STRUCTURED,
]


@given(st.sampled_from(NPY_DTYPES), SHAPES, st.data())
def test_npy_agrees_with_numpy_both_ways(dtype, shape, data) -> None:
    count = int(np.prod(shape))
    raw = data.draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "U":
        raw = bytes(len(raw))
    array = np.frombuffer(raw, dtype, count).reshape(shape) if count else np.zeros(shape, dtype)
    ours = write_npy(array)
    assert same(np.load(io.BytesIO(ours), allow_pickle=False), array)
    theirs = io.BytesIO()
    np.lib.format.write_array(theirs, array, version=(1, 0), allow_pickle=False)
    assert theirs.getvalue() == ours
    assert same(read_npy(ours), array)


def test_npy_is_a_read_only_view() -> None:
    data = write_npy(np.arange(4))
    assert np.shares_memory(read_npy(data), np.frombuffer(data, np.uint8))
    assert not read_npy(bytearray(data)).flags.writeable


@given(hnp.array_dtypes(hnp.integer_dtypes()), hnp.array_shapes(min_dims=0, max_dims=6, min_side=0), st.booleans())
@example(np.dtype("<f4"), (), False)
@example(np.dtype("<f2"), (3, 4), True)
@example(np.dtype("<M8[ns]"), (1, 2, 3), True)
def test_what_numpy_writes_is_read_as_numpy_reads_it(dtype, shape, fortran) -> None:
    array = np.zeros(shape, dtype, order="F" if fortran else "C")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy on names that are not Latin
        np.save(buffer, array)
    if buffer.getvalue()[6] > 1 or (array.flags.f_contiguous and not array.flags.c_contiguous):
        with pytest.raises(SchemaError):
            read_npy(buffer.getvalue())
    if buffer.getvalue()[6] == 1:
        assert same(read_npy(buffer.getvalue(), any_order=True), np.load(io.BytesIO(buffer.getvalue())))


def test_a_dtype_is_evaluated_again_where_the_interpreter_fails() -> None:
    """CPython 3.11 may raise SystemError from `ast.literal_eval` in threads."""
    errors = [SystemError("AST constructor recursion depth mismatch")] * 3
    evaluate = ast.literal_eval

    def fail(text):
        if errors:
            raise errors.pop()
        return evaluate(text)

    data = write_npy(np.zeros((3, 5), [("x", "<i2"), ("only here", "u1")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "literal_eval", fail)
        assert read_npy(data).shape == (3, 5)
    assert not errors


def npy_bytes(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1") + data


def npy_header(descr: str = "'<f4'", fortran_order: str = "False", shape: str = "(1,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n"


def test_the_hand_written_header_is_right() -> None:
    assert read_npy(npy_bytes(npy_header(), bytes(4))).shape == (1,)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00\x00",
        b"\x93NUMPY\x02\x00" + bytes(20),
        npy_bytes(""),
        npy_bytes("[1]"),
        npy_bytes("{}"),
        npy_bytes("{'descr': '<f4', 'shape': (1,)}", bytes(4)),
        npy_bytes(npy_header("'|O'"), bytes(8)),
        npy_bytes(npy_header("[('a', '|O')]"), bytes(8)),
        npy_bytes(npy_header("None", shape="(0,)")),
        npy_bytes(npy_header("'|S0'"), b""),
        npy_bytes(npy_header("'no type'"), bytes(4)),
        npy_bytes(npy_header(fortran_order="True"), bytes(4)),
        npy_bytes(npy_header(fortran_order="0"), bytes(4)),
        npy_bytes(npy_header(shape="[1]"), bytes(4)),
        npy_bytes(npy_header(shape="1"), bytes(4)),
        npy_bytes(npy_header(shape="(True,)"), bytes(4)),
        npy_bytes(npy_header(shape="(-1,)"), bytes(4)),
        npy_bytes(npy_header(shape="(1.0,)"), bytes(4)),
        npy_bytes(npy_header(shape="(2,)"), bytes(4)),
        npy_bytes(npy_header(shape="(1,)"), bytes(8)),
        npy_bytes(npy_header(shape=f"({10**30},)"), bytes(4)),
        npy_bytes(npy_header(shape=f"(0, {10**30})")),
        npy_bytes(npy_header(shape="(" + "1," * 70 + ")"), bytes(4)),
        npy_bytes("-" * 9_000 + "1"),
        npy_bytes("(" * 9_000),
        npy_bytes(npy_header() + " " * 20_000, bytes(4)),
        npy_bytes("__import__('os').getcwd()"),
        b"\x93NUMPY\x01\x00\xff\xff" + npy_header().encode(),
    ],
)
def test_wrong_npy_is_a_schema_error(data) -> None:
    with pytest.raises(SchemaError, match=r"\.npy"):
        read_npy(data)


SMALL_NPY = write_npy(np.arange(10, dtype="<f4").reshape(2, 5))


@given(st.integers(0, len(SMALL_NPY) - 1), st.integers(1, 255))
@example(SMALL_NPY.index(b"<"), ord("<") ^ ord(">"))
def test_a_flipped_npy_byte_is_a_schema_error_or_what_numpy_reads(at, flip) -> None:
    damaged = bytearray(SMALL_NPY)
    damaged[at] ^= flip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy on dtypes it will drop
        try:
            found = read_npy(damaged)
        except SchemaError:
            return
        assert same(found, np.load(io.BytesIO(bytes(damaged)), allow_pickle=False))


def test_cut_npy_is_refused_wherever_it_is_cut() -> None:
    for length in range(len(SMALL_NPY)):
        with pytest.raises(SchemaError):
            read_npy(SMALL_NPY[:length])


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_an_array_or_a_schema_error(data, framed) -> None:
    try:
        read_npy(npy_bytes("", b"")[:8] + len(data).to_bytes(2, "little") + data if framed else data)
    except SchemaError as error:
        assert str(error)


def test_object_arrays_are_never_written() -> None:
    with pytest.raises(ValueError, match="allow_pickle=False"):
        write_npy(np.array([{}], dtype=object))
