"""safetensors and .npy, read straight from a buffer into numpy views.

Writing goes through the ``safetensors`` library. Reading a handful of small tensors is on every sample's path, so it is
done here on numpy views: same result (a property test holds it to the library), a tenth of the time, and every
size in the untrusted header is checked before use.
"""

from __future__ import annotations

import ast
import io
import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from safetensors.numpy import save as _save

from fuelrail.pipeline.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fuelrail.pipeline.buffers import Buffer

_DTYPES: Final = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
        "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    }.items()
}  # fmt: skip
_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_NPY_HEADER_BYTES: Final = 10_000  # numpy's own bound on what it evaluates as a literal
_NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_header_decoder = msgspec.json.Decoder(dict[str, _Entry])


def write_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Serialise named arrays as safetensors (little-endian, C order); the same arrays give the same bytes."""
    return bytes(_save({name: np.asarray(array, order="C") for name, array in tensors.items()}))


def read_tensors(data: Buffer) -> dict[str, NDArray[np.generic]]:
    """Read all tensors of a safetensors buffer as read-only views into it.

    Raises SchemaError where header or offsets do not describe the buffer exactly. The ``__metadata__`` entry that the
    format permits is refused: Fuelrail writes none.
    """
    view = memoryview(data)
    if len(view) < 8:
        raise SchemaError(f"{len(view)} bytes are too few for safetensors")
    header_bytes = int.from_bytes(view[:8], "little")
    start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > len(view):
        raise SchemaError(f"safetensors header of {header_bytes} bytes in a buffer of {len(view)}")
    try:
        entries = _header_decoder.decode(view[8:start])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"safetensors header: {error}") from error
    position = 0
    for begin, end in sorted(entry.data_offsets for entry in entries.values()):
        if begin != position:
            raise SchemaError(f"a tensor at byte {begin} where byte {position} is the next: a hole or an overlap")
        position = end
    if start + position != len(view):
        raise SchemaError(f"tensors end at byte {position} of {len(view) - start}")
    tensors: dict[str, NDArray[np.generic]] = {}
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        begin, end = entry.data_offsets
        if dtype is None:
            raise SchemaError(f"tensor '{name}' has dtype {entry.dtype!r}; known: {', '.join(_DTYPES)}")
        count = math.prod(entry.shape)
        if end - begin != count * dtype.itemsize:
            raise SchemaError(f"tensor '{name}' {entry.dtype}{list(entry.shape)} does not fit bytes {begin} to {end}")
        try:
            array = np.frombuffer(view, dtype, count, start + begin).reshape(entry.shape)
        except (ValueError, OverflowError) as error:  # a shape beyond numpy's limits that holds nothing
            raise SchemaError(f"tensor '{name}' {entry.dtype}{list(entry.shape)}: {error}") from error
        array.flags.writeable = False
        tensors[name] = array
    return tensors


def write_npy(array: NDArray[np.generic]) -> bytes:
    """Serialise one array as ``.npy`` version 1.0, C order; never pickles."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def read_npy(data: Buffer) -> NDArray[np.generic]:
    """Read a ``.npy`` 1.0 buffer as a read-only view; raises SchemaError for anything else, object arrays included."""
    view = memoryview(data)
    if bytes(view[:8]) != _NPY_MAGIC or len(view) < 10:
        raise SchemaError("not a .npy file of version 1.0")
    start = 10 + int.from_bytes(view[8:10], "little")
    if start > min(len(view), _MAX_NPY_HEADER_BYTES):
        raise SchemaError(f".npy header of {start} bytes in a buffer of {len(view)}")
    try:
        header = ast.literal_eval(bytes(view[10:start]).decode("latin-1"))
        if header.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("its keys are not descr, fortran_order and shape")
        descr, shape = header["descr"], header["shape"]
        if not isinstance(descr, str | list) or not isinstance(shape, tuple) or header["fortran_order"] is not False:
            raise ValueError("Fortran order and odd types are refused")
        dtype = np.dtype(descr)
        if dtype.hasobject or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("object arrays and odd shapes are refused")
        array = np.frombuffer(view, dtype, math.prod(shape), start).reshape(shape)
    except (
        ValueError, SyntaxError, AttributeError, TypeError, OverflowError, MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise SchemaError(f".npy header: {error}") from error
    if start + array.nbytes != len(view):
        raise SchemaError(f".npy of {array.dtype}{list(array.shape)} in {len(view)} bytes")
    array.flags.writeable = False
    return array
