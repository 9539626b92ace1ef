"""Lidar sweeps in files: ``.npy``, raw float32 rows, and PCD."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SchemaError, SourceError
from fuelrail.pipeline.sample.arrays import read_npy
from fuelrail.sharding.sources.shared.files import check_no_pointer
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32

_NPY: Final = b"\x93NUMPY"
_PCD: Final = (b"# .PCD", b"VERSION")
_PCD_TYPES: Final = (
    "F2",
    "F4",
    "F8",
    "I1",
    "I2",
    "I4",
    "I8",
    "U1",
    "U2",
    "U4",
    "U8",
)
"""TYPE and SIZE of fields; in lower case they are numpy's names."""
_HEADER_BYTES: Final = 1 << 12


def parse_points(data: bytes, columns: Sequence[str], where: str) -> F32:
    """Read points (P, C): ``.npy`` of (P, C), binary or text PCD with these columns, or rows of C
    float32.

    The form is known by the first bytes, and nothing is unpickled. Raises SourceError, naming
    ``where``.
    """
    check_no_pointer(data, where)
    if data.startswith(_NPY):
        try:
            array = read_npy(data, any_order=True)
        except SchemaError as error:
            raise SourceError(f"{where} is not a valid .npy: {error}") from error
        has_columns = array.ndim == 2 and array.shape[1] == len(columns)
        if not has_columns or array.dtype.kind not in "fiu":
            raise SourceError(
                f"{where} is {array.dtype}{list(array.shape)}, wanted are numbers [P, "
                f"{len(columns)}]: {', '.join(columns)}"
            )
        return np.asarray(array, np.float32)
    if data.startswith(_PCD):
        fields = read_pcd(data, where)
        missing = [name for name in columns if name not in fields]
        if missing:
            raise SourceError(f"{where} has no {missing[0]}, its fields are {', '.join(fields)}")
        arrays = [fields[name].astype(np.float32) for name in columns]
        return np.stack(arrays, 1)
    if len(data) % (4 * len(columns)):
        raise SourceError(
            f"{where} of {len(data)} bytes does not hold rows of {len(columns)} float32 "
            f"({', '.join(columns)})"
        )
    return np.frombuffer(data, "<f4").reshape(-1, len(columns))


def read_pcd(data: bytes, where: str) -> dict[str, NDArray[Any]]:
    """Read the fields (P,) of points by name, as they are stored; raise SourceError, naming
    ``where``.

    Point Cloud Library's format 0.7, DATA ascii or binary, each field of one number.
    """
    check_no_pointer(data, where)
    head: dict[str, list[str]] = {}
    position = 0
    while "DATA" not in head:
        end = data.find(b"\n", position)
        if end < 0 or end > _HEADER_BYTES:
            raise SourceError(f"{where} is a PCD without a line DATA")
        words = data[position:end].decode("ascii", "replace").split()
        position = end + 1
        if words and not words[0].startswith("#"):
            head[words[0].upper()] = words[1:]
    names = head.get("FIELDS", [])
    kinds = head.get("TYPE", [])
    counts = head.get("COUNT", [])
    sizes = head.get("SIZE", [])
    forms = [f"{kind}{size}" for kind, size in zip(kinds, sizes, strict=False)]
    if not len(names) == len(kinds) == len(forms) or set(counts) - {"1"}:
        raise SourceError(
            f"{where} has FIELDS {' '.join(names):.200}, TYPE and SIZE "
            f"{' '.join(forms):.200} and COUNT {' '.join(counts):.80}; wanted are fields of "
            "one number each"
        )
    unknown = [form for form in forms if form not in _PCD_TYPES]
    if unknown:
        raise SourceError(
            f"{where} has a field of TYPE and SIZE {unknown[0]:.20}; known are "
            f"{', '.join(_PCD_TYPES)}"
        )
    points_text = " ".join(head.get("POINTS", []))
    is_number = points_text.isdecimal() and len(points_text) <= 18
    if not is_number or int(points_text) > len(data):
        raise SourceError(
            f"{where} has POINTS {points_text!r:.80}; expected a number of points in "
            f"{len(data)} bytes"
        )
    number = int(points_text)
    with parsing(where, "is not a valid PCD"):
        if head["DATA"] == ["ascii"]:
            rows = np.loadtxt(
                io.BytesIO(data[position:]),
                ndmin=2,
                max_rows=number or None,
            ).reshape(-1, len(names))
            return dict(zip(names, rows.T, strict=True))
        if head["DATA"] != ["binary"]:
            raise SourceError(
                f"{where} has DATA {' '.join(head['DATA']):.80}; read are ascii and binary"
            )
        pairs = zip(names, forms, strict=True)
        dtype = np.dtype([(name, f"<{form.lower()}") for name, form in pairs])
        if len(data) - position < number * dtype.itemsize:
            raise SourceError(
                f"{where} has {len(data) - position} bytes after its header; {number} points have "
                f"{number * dtype.itemsize}: the file is cut off"
            )
        table = np.frombuffer(data, dtype, number, position)
        return {name: table[name] for name in names}
