"""Single rows of an Arrow record batch as Python values, read straight from its buffers.

Scalar by scalar, by way of Arrow's own, a row of the scan table takes five times as long, and holds the interpreter's
lock all the while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

_FORMATS: Final[dict[str, Literal["i", "q"]]] = {"int32": "i", "int64": "q"}


def row_reader(array: pa.Array) -> Callable[[int], Any]:
    """What gives the value of a row of a column of int32, int64, strings, binaries, or lists of structs of those.

    A list comes as a list of tuples. Numbers and what is in lists have no nulls. The column is a batch's own, no slice
    of one.
    """
    assert array.offset == 0, "a whole column"
    kind = str(array.type)
    if kind in _FORMATS:
        return _view(array.buffers()[1], _FORMATS[kind]).__getitem__
    if kind in ("string", "binary"):
        return _bytes_reader(array, is_text=kind == "string")
    starts = _view(array.buffers()[1], "i")
    fields = [row_reader(array.values.field(number)) for number in range(array.type.value_type.num_fields)]

    def read(row: int) -> list[tuple[Any, ...]]:
        return [tuple([field(at) for field in fields]) for at in range(starts[row], starts[row + 1])]

    return read


def _bytes_reader(array: pa.Array, *, is_text: bool) -> Callable[[int], Any]:
    validity, ends, data = array.buffers()
    starts, view = _view(ends, "i"), memoryview(data or b"")
    is_valid = None if validity is None else memoryview(validity)

    def read(row: int) -> bytes | str | None:
        if is_valid is not None and not is_valid[row >> 3] >> (row & 7) & 1:
            return None
        value = view[starts[row] : starts[row + 1]]
        return str(value, "utf-8") if is_text else bytes(value)

    return read


def _view(buffer: pa.Buffer | None, of: Literal["i", "q"]) -> memoryview:
    return memoryview(buffer or b"").cast("B").cast(of)
