"""Foreign pickles as plain values: numbers, texts, lists, tuples, dicts, and numpy arrays of
numbers and texts.

Nothing that a pickle names is imported or called: the names that numpy's arrays need are answered
by functions of this module, and every other name is an error. The reader is the one in Python,
whose memo is a dict: the one in C takes memory for as many entries as a pickle claims.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.sources.shared.files import check_no_pointer
from fuelrail.sharding.sources.shared.foreign import parsing

_FORM: Final = re.compile(r"b1|[iu][1248]|f[248]|[SU]\d{1,4}")

_LAST_POINT: Final = 0x10FFFF
_SURROGATES: Final = 0xD800, 0xDFFF
"""Code points that are no characters, of which no text in UTF-8 can be made."""


def read_pickle(data: bytes, where: str) -> Any:
    """Read a pickle of protocol 3 to 5; an array may come as an object that ``np.asarray`` takes.

    Raises SourceError, naming ``where``, for one that is damaged or holds other objects.
    """
    check_no_pointer(data, where)
    with parsing(where, "is not a pickle of plain values"):
        return _Reader(io.BytesIO(data)).load()


class _Form:
    """The dtype of a pickle: a form such as "f8", whose state says the order of bytes."""

    def __init__(self, form: str, *_: object) -> None:
        if not isinstance(form, str) or not _FORM.fullmatch(form):
            raise ValueError(f"it has an array of dtype {form!r:.40}; numbers and texts are read")
        self.dtype = np.dtype(form)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(">" if state[1] == ">" else "<")


class _Array:
    """An array of a pickle, which its state fills unless it has its values."""

    def __init__(self, values: NDArray[Any] | None = None) -> None:
        self._values = values

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, form, is_fortran, data = state
        self._values = _fill_array(data, form, shape, "F" if is_fortran else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._values, dtype, copy=copy)


def _fill_array(
    data: bytes,
    form: _Form,
    shape: tuple[int, ...],
    order: Literal["C", "F"] = "C",
) -> NDArray[Any]:
    if len(data) != math.prod(shape) * form.dtype.itemsize:
        raise ValueError(f"an array {list(shape)} of {form.dtype} has {len(data)} bytes")
    if form.dtype.kind == "U":
        points = np.frombuffer(bytes(data), f"{form.dtype.str[0]}u4")
        is_wrong = (points > _LAST_POINT) | (
            (points >= _SURROGATES[0]) & (points <= _SURROGATES[1])
        )
        if is_wrong.any():
            code = int(points[np.argmax(is_wrong)])
            raise ValueError(f"a text has the code point {code:#x}, which is no character")
    values = np.frombuffer(bytes(data), form.dtype)
    return values.reshape(shape, order=order)


class _Name(NamedTuple):
    """What a name of a pickle stands for. A pickle can call it, and set no attribute of it."""

    make: Callable[..., Any]

    def __call__(self, *values: Any) -> Any:
        return self.make(*values)


_NAMES: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("numpy", "dtype"): _Form,
    ("numpy", "ndarray"): _Array,
}


for _core in ("numpy.core", "numpy._core"):
    _NAMES[f"{_core}.multiarray", "_reconstruct"] = lambda *_: _Array()
    _NAMES[f"{_core}.multiarray", "scalar"] = lambda form, data: _fill_array(data, form, ()).item()
    _NAMES[f"{_core}.numeric", "_frombuffer"] = lambda *values: _Array(_fill_array(*values))


class _Reader(pickle._Unpickler):  # noqa: SLF001 - the class in Python has no public name
    def find_class(self, module: str, name: str) -> Any:
        entry = _NAMES.get((module, name))
        if entry is None:
            raise ValueError(f"it holds an object of '{module}.{name}'")
        return _Name(entry)
