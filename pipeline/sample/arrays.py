"""safetensors and .npy, read straight from a buffer into numpy views.

Headers are written by the ``safetensors`` library, once for each set of names, dtypes and shapes.
Reading a handful of small tensors is on every sample's path, so it is done here, with headers
parsed once and numpy views on the bytes: same result (a property test holds it to the library) in a
fraction of the time (``bench/micro/metadata.py``). Every size in the untrusted header is checked
before use.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
)

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.settings import explain
from fuelrail.pipeline.text import repeated_key, shortened

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPE_CODES: Final = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_DTYPES: Final = {name: np.dtype(code) for name, code in _DTYPE_CODES.items()}

_LITTLE: Final = "<|=" if sys.byteorder == "little" else "<|"

_MAX_HEADER_BYTES: Final = 1 << 20

_MAX_KNOWN_HEADER_BYTES: Final = 1 << 12  # bounds the memory of the layouts that are kept

_MAX_RECORD_BYTES: Final = 1 << 20

_MAX_NPY_HEADER_BYTES: Final = 10_000  # numpy's own bound on what it evaluates as a literal

_NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"

_NPY_HEADER: Final = re.compile(
    rb"\{'descr': (.{1,9000}), 'fortran_order': (True|False), 'shape': \(([\d, ]{0,600})\), \} *\n"
)

_SIZE: Final = re.compile(rb"0|[1-9]\d{0,17}")

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A contiguous run of bytes. Views into mapped shards are ``memoryview`` and read-only."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_header_decoder = msgspec.json.Decoder(dict[str, _Entry])


def write_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Serialise named arrays as safetensors (little-endian, C order); the same arrays give the
    same bytes.
    """
    arrays = {name: _plain(array) for name, array in tensors.items()}
    specs = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    header, order = _header(tuple(specs))
    return b"".join((header, *(arrays[name].data for name in order)))


def write_stacked(tensors: Mapping[str, NDArray[np.generic]]) -> list[bytes]:
    """Do :func:`write_tensors` for many records at once: all arrays have one more axis in front,
    of the same length.
    """
    arrays = {name: _plain(array) for name, array in tensors.items()}
    specs = [(name, array.dtype, array.shape[1:]) for name, array in arrays.items()]
    header, order = _header(tuple(specs))
    num_records = len(arrays[order[0]])
    header_bytes = np.frombuffer(header, np.uint8)
    parts = [np.broadcast_to(header_bytes, (num_records, len(header)))]
    for name in order:
        array = arrays[name]
        if array.size:
            parts.append(array.reshape(num_records, -1).view(np.uint8))
    records = np.concatenate(parts, axis=1)
    return [record.tobytes() for record in records]


def write_parts(
    tensors: Mapping[str, NDArray[np.generic]],
    counts: Sequence[int],
) -> list[bytes]:
    """Do :func:`write_tensors` for many records at once, whose rows follow each other;
    ``counts`` are rows of each.
    """
    arrays = {name: _plain(array) for name, array in tensors.items()}
    headers = {}
    for count in set(counts):
        specs = []
        for name, array in arrays.items():
            shape = (count, *array.shape[1:])
            specs.append((name, array.dtype, shape))
        headers[count] = _header(tuple(specs))
    array_bytes = {}
    row_sizes = {}
    for name, array in arrays.items():
        array_bytes[name] = array.reshape(-1).view(np.uint8).data
        row_sizes[name] = array.itemsize * math.prod(array.shape[1:])
    records = []
    first = 0
    for count in counts:
        header, order = headers[count]
        end = first + count
        parts: list[Buffer] = [header]
        for name in order:
            row_size = row_sizes[name]
            parts.append(array_bytes[name][first * row_size : end * row_size])
        records.append(b"".join(parts))
        first = end
    return records


def _plain(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array in little-endian and C order, itself where it is so already."""
    if array.flags.c_contiguous and array.dtype.byteorder in _LITTLE:
        return array
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


@functools.lru_cache(maxsize=512)
def _header(
    specs: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...],
) -> tuple[bytes, tuple[str, ...]]:
    """Return length and header as the library writes them for these kinds of arrays, and the
    order of their data.
    """
    # Imported here, for orders need no arrays of samples.
    from safetensors.numpy import save

    zeros = {name: np.zeros(shape, dtype) for name, dtype, shape in specs}
    document = bytes(save(zeros))
    header_end = 8 + int.from_bytes(document[:8], "little")
    entries = _header_decoder.decode(document[8:header_end])
    order = sorted(entries, key=lambda name: entries[name].data_offsets)
    return document[:header_end], tuple(order)


def read_tensors(data: Buffer) -> dict[str, NDArray[np.generic]]:
    """Read all tensors of a safetensors buffer as read-only views into it.

    Raises SchemaError where header or offsets do not describe the buffer exactly. The
    ``__metadata__`` entry that the format permits is refused: Fuelrail writes none.
    """
    return read_layout(data).views(data)


class TensorSpec(NamedTuple):
    """One tensor of a safetensors buffer: dtype, shape, and where it begins [bytes from the
    buffer's start].
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class TensorLayout:
    """The header of a safetensors buffer: tensors without holes or overlaps up to the buffer's end.

    Samples of one rig have equal headers, so a layout is parsed and checked once and then found by
    its header's bytes. ``fits`` is for callers: the record types that they have found it to fit.
    """

    __slots__ = ("_record", "fits", "num_bytes", "specs")

    def __init__(self, specs: dict[str, TensorSpec], num_bytes: int) -> None:
        self.specs = specs
        self.num_bytes = num_bytes
        self.fits: set[type] = set()
        self._record: np.dtype[Any] | None = None
        if num_bytes <= _MAX_RECORD_BYTES and "" not in specs:
            formats = [(spec.dtype, spec.shape) for spec in specs.values()]
            offsets = [spec.offset for spec in specs.values()]
            with contextlib.suppress(ValueError):  # shapes that a record may not have
                self._record = np.dtype(
                    {
                        "names": [*specs],
                        "formats": formats,
                        "offsets": offsets,
                        "itemsize": num_bytes,
                    }
                )

    def views(self, data: Buffer) -> dict[str, NDArray[np.generic]]:
        """Return the tensors of a buffer of this layout, as read-only views into it; raise
        SchemaError if it is cut.
        """
        view = memoryview(data).toreadonly()
        if len(view) != self.num_bytes:
            raise SchemaError(
                f"the tensors end at byte {self.num_bytes} of a buffer of {len(view)}"
            )
        if self._record is None:
            return {
                name: np.ndarray(shape, dtype, view, offset)
                for name, (dtype, shape, offset) in self.specs.items()
            }
        # A field of a record costs a quarter of an array of its own.
        record: NDArray[np.void] = np.ndarray((), self._record, view)
        return {name: record[name] for name in self.specs}


def read_layout(data: Buffer) -> TensorLayout:
    """Return the layout of a safetensors buffer; raise SchemaError where its header describes
    none.
    """
    view = memoryview(data)
    if len(view) < 8:
        raise SchemaError(f"{len(view)} bytes are too few for safetensors")
    header_bytes = int.from_bytes(view[:8], "little")
    if header_bytes > min(len(view) - 8, _MAX_HEADER_BYTES):
        raise SchemaError(f"safetensors header of {header_bytes} bytes in a buffer of {len(view)}")
    header_end = 8 + header_bytes
    header = bytes(view[8:header_end])
    if header_bytes <= _MAX_KNOWN_HEADER_BYTES:
        return _known_layout(header)
    return _parse(header)


def _parse(header: bytes) -> TensorLayout:
    start = 8 + len(header)
    try:
        entries = _header_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = explain(error, header, dict[str, _Entry])
        raise SchemaError(f"safetensors header: {fault}") from error
    twice = repeated_key(header, entries)
    if twice is not None:
        raise SchemaError(f"safetensors header: '{shortened(twice)}' occurs twice")
    position = 0
    spans = [entry.data_offsets for entry in entries.values()]
    for begin, end in sorted(spans):
        if begin != position:
            raise SchemaError(
                f"a tensor at byte {begin} where byte {position} is the next: a hole or an overlap"
            )
        position = end
    specs: dict[str, TensorSpec] = {}
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        begin, end = entry.data_offsets
        if dtype is None:
            raise SchemaError(
                f"tensor '{name}' has dtype {entry.dtype!r}; known: {', '.join(_DTYPES)}"
            )
        num_bytes = math.prod(entry.shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise SchemaError(
                f"tensor '{name}' {entry.dtype}{list(entry.shape)} does not fit bytes "
                f"{begin} to {end}"
            )
        try:
            np.broadcast_to(np.empty((), dtype), entry.shape)
        except ValueError as error:  # more than numpy can hold, in a tensor that holds nothing
            raise SchemaError(
                f"tensor '{name}' {entry.dtype}{list(entry.shape)}: {error}"
            ) from error
        specs[name] = TensorSpec(dtype, entry.shape, start + begin)
    return TensorLayout(specs, start + position)


_known_layout = functools.lru_cache(maxsize=512)(_parse)


def write_npy(array: NDArray[np.generic]) -> bytes:
    """Serialise one array as ``.npy`` version 1.0, C order; never pickles."""
    contiguous = np.asarray(array, order="C")
    header = _npy_start(contiguous.dtype, contiguous.shape)
    # As bytes: a buffer cannot say every dtype there is (datetime64).
    data = contiguous.reshape(-1).view(np.uint8).data
    return b"".join((header, data))


@functools.lru_cache(maxsize=512)
def _npy_start(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return all bytes before the data of a ``.npy`` file, as numpy's own writer makes them."""
    if dtype.hasobject:
        raise ValueError("object arrays cannot be written when allow_pickle=False")
    buffer = io.BytesIO()
    facts = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


def read_npy(data: Buffer, *, any_order: bool = False) -> NDArray[np.generic]:
    """Read a ``.npy`` 1.0 buffer as a read-only view, in Fortran order too with ``any_order``.

    Raises SchemaError for anything else, object arrays included. ``numpy.load`` evaluates each
    header as a Python literal, which in CPython 3.11 may fail in threads
    (https://github.com/python/cpython/issues/106905); this does not.
    """
    view = memoryview(data).toreadonly()
    if bytes(view[:8]) != _NPY_MAGIC or len(view) < 10:
        raise SchemaError("not a .npy file of version 1.0")
    start = 10 + int.from_bytes(view[8:10], "little")
    if start > min(len(view), _MAX_NPY_HEADER_BYTES):
        raise SchemaError(f".npy header of {start} bytes in a buffer of {len(view)}")
    try:
        dtype, shape, order = _npy_header(bytes(view[10:start]))
        if order == "F" and not any_order:
            raise ValueError("Fortran order is refused")
        array: NDArray[np.generic] = np.ndarray(shape, dtype, view, start, order=order)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise SchemaError(f".npy header: {error}") from error
    if start + array.nbytes != len(view):
        raise SchemaError(f".npy of {array.dtype}{list(array.shape)} in {len(view)} bytes")
    return array


@functools.lru_cache(maxsize=512)
def _npy_header(
    header: bytes,
) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return dtype, shape and order of a header as numpy writes it; raise an error of
    :func:`read_npy` for a fault.
    """
    match = _NPY_HEADER.fullmatch(header)
    if match is None:
        raise ValueError("not as numpy writes it for an array of numbers")
    dtype = _npy_dtype(match[1])
    sizes = match[3].replace(b" ", b"").split(b",")
    if not sizes[-1]:
        sizes.pop()
    elif len(sizes) == 1:
        raise ValueError("its shape is not a tuple")
    if not all(map(_SIZE.fullmatch, sizes)):
        raise ValueError("odd shapes are refused")
    order: Literal["C", "F"] = "F" if match[2] == b"True" else "C"
    return dtype, tuple(map(int, sizes)), order


@functools.lru_cache(maxsize=512)
def _npy_dtype(descr: bytes) -> np.dtype[Any]:
    text = descr.decode("latin-1")
    for _ in range(20):
        try:
            value = ast.literal_eval(text)
            dtype: np.dtype[Any] = np.dtype(value)
        except SystemError:  # the interpreter's own fault, see `read_npy`; not when asked again
            continue
        except (SyntaxError, AttributeError, RecursionError, KeyError) as error:
            raise ValueError(f"its dtype {text:.100} is none") from error
        if dtype.hasobject or not dtype.itemsize or not isinstance(value, str | list):
            raise ValueError("object arrays and odd types are refused")
        return dtype
    raise ValueError(f"its dtype {text:.100} could not be read")
