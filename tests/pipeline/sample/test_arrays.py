"""The fast readers against their oracles: the safetensors library and numpy.load; damaged bytes are SchemaErrors."""

from __future__ import annotations

import ast
import io
import itertools
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

DTYPES = [
    np.dtype(code)
    for code in (
        "?",
        "u1",
        "i1",
        "<u2",
        "<i2",
        "<f2",
        "<u4",
        "<i4",
        "<f4",
        "<u8",
        "<i8",
        "<f8",
    )
]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
TENSORS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), ARRAYS, max_size=5)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal dtype, shape and bits: NaN payloads and negative zeros count."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(TENSORS)
def test_bytes_are_those_of_the_library_in_any_order_and_are_read_back(
    named,
) -> None:
    ours = write_tensors(named)
    assert ours == safetensors.numpy.save(named) == write_tensors(dict(reversed(named.items())))
    arrays = read_tensors(ours)
    assert arrays.keys() == named.keys()
    assert all(same(arrays[name], array) for name, array in named.items())


@given(
    st.dictionaries(st.text("abc", max_size=3), ARRAYS, min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_stacked_records_are_those_written_one_by_one(named, num_records) -> None:
    records = [
        {name: np.roll(array, shift) for name, array in named.items()}
        for shift in range(num_records)
    ]
    stacked = {name: np.stack([record[name] for record in records]) for name in named}
    assert write_stacked(stacked) == [write_tensors(record) for record in records]


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
)
def test_parts_are_those_written_one_by_one(counts, dtypes) -> None:
    shapes = [(), (3,), (2, 2), (0,)]
    named = {
        f"a{index}": np.arange(sum(counts) * math.prod(shape)).reshape(-1, *shape).astype(dtype)
        if shape != (0,)
        else np.zeros((sum(counts), 0), dtype)
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=False))
    }
    ends = np.cumsum([0, *counts]).tolist()
    cut = [{name: array[a:b] for name, array in named.items()} for a, b in itertools.pairwise(ends)]
    assert write_parts(named, counts) == [write_tensors(record) for record in cut]


def test_layout_in_memory_does_not_matter() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    wide = np.zeros((3, 8), "<f4")
    wide[:, ::2] = array
    for layout in (np.asfortranarray(array), wide[:, ::2], array.astype(">f4")):
        assert write_tensors({"a": layout}) == write_tensors({"a": array})


def test_tensors_are_read_only_views() -> None:
    data = write_tensors({"a": np.arange(4)})
    array = read_tensors(data)["a"]
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert not read_tensors(bytearray(data))["a"].flags.writeable


def test_equal_headers_are_parsed_once() -> None:
    a, b = (write_tensors({"n": np.array([n])}) for n in (1, 2))
    assert read_layout(a) is read_layout(b)
    assert (read_tensors(a)["n"], read_tensors(b)["n"]) == (1, 2)
    with pytest.raises(SchemaError, match="of a buffer of"):
        read_layout(a).views(b + b"x")
    long = write_tensors({f"n{i}": np.array([i]) for i in range(200)})
    assert read_layout(long) is not read_layout(long)  # what is kept is bounded
    assert {name: int(array[0]) for name, array in read_tensors(long).items()} == {
        f"n{i}": i for i in range(200)
    }


STRUCTURED = np.dtype([("x", "<f4"), ("ring", "u1"), ("t", "<i8")])
NPY_DTYPES = [
    *DTYPES,
    *map(np.dtype, (">f4", "<c8", "<M8[ns]", "S3", "<U2")),
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


@given(
    hnp.array_dtypes(hnp.integer_dtypes()),
    hnp.array_shapes(min_dims=0, max_dims=6, min_side=0),
    st.booleans(),
)
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
        assert same(
            read_npy(buffer.getvalue(), any_order=True),
            np.load(io.BytesIO(buffer.getvalue())),
        )


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


def test_object_arrays_are_never_written() -> None:
    with pytest.raises(ValueError, match="allow_pickle=False"):
        write_npy(np.array([{}], dtype=object))
