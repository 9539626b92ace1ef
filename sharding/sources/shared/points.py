"""Lidar sweeps in files: ``.npy``, raw float32 rows, and PCD."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SchemaError, SourceError
from fuelrail.pipeline.sample.arrays import read_npy
from fuelrail.sharding.sources.shared.files import check_no_pointer
from fuelrail.sharding.sources.shared.foreign import parsing

_NPY: Final = b"\x93NUMPY"
_PCD: Final = (b"# .PCD", b"VERSION")
_PCD_TYPES: Final = {"F": "f", "U": "u", "I": "i"}
_HEADER_BYTES: Final = 1 << 12


def parse_points(data: bytes, columns: Sequence[str], where: str) -> NDArray[np.float32]:
    """Read points (P, C): ``.npy`` of (P, C), binary or text PCD with these columns, or rows of C float32.

    The form is known by the first bytes. Raises SourceError, naming ``where``; nothing is unpickled.
    """
    check_no_pointer(data, where)
    if data.startswith(_NPY):
        return _npy(data, columns, where)
    if data.startswith(_PCD):
        return _pcd(data, columns, where)
    if len(data) % (4 * len(columns)):
        raise SourceError(
            f"{where} of {len(data)} bytes does not hold rows of {len(columns)} float32 ({', '.join(columns)})"
        )
    return np.frombuffer(data, "<f4").reshape(-1, len(columns))


def _npy(data: bytes, columns: Sequence[str], where: str) -> NDArray[np.float32]:
    try:
        found = read_npy(data, any_order=True)
    except SchemaError as error:
        raise SourceError(f"{where} is not a valid .npy: {error}") from error
    if found.ndim != 2 or found.shape[1] != len(columns) or found.dtype.kind not in "fiu":
        raise SourceError(
            f"{where} is {found.dtype}{list(found.shape)}, wanted are numbers [P, {len(columns)}]: {', '.join(columns)}"
        )
    return np.asarray(found, np.float32)


def _pcd(data: bytes, columns: Sequence[str], where: str) -> NDArray[np.float32]:
    found = read_pcd(data, where)
    if missing := [name for name in columns if name not in found]:
        raise SourceError(f"{where} has no {missing[0]}, its fields are {', '.join(found)}")
    return np.stack([found[name].astype(np.float32) for name in columns], 1)


def read_pcd(data: bytes, where: str) -> dict[str, NDArray[Any]]:
    """Read the fields (P,) of points by name, as they are stored; raise SourceError, naming ``where``.

    Point Cloud Library's format 0.7, DATA ascii or binary, each field of one number.
    """
    check_no_pointer(data, where)
    head: dict[str, list[str]] = {}
    at = 0
    while "DATA" not in head:
        end = data.find(b"\n", at)
        if end < 0 or end > _HEADER_BYTES:
            raise SourceError(f"{where} is a PCD without a line DATA")
        words = data[at:end].decode("ascii", "replace").split()
        at = end + 1
        if words and not words[0].startswith("#"):
            head[words[0].upper()] = words[1:]
    with parsing(where, "is not a valid PCD"):
        names, number = head["FIELDS"], int(head["POINTS"][0])
        if not 0 <= number <= len(data):
            raise ValueError(f"POINTS {number} in a file of {len(data)} bytes")
        sizes, kinds = head["SIZE"], [_PCD_TYPES[kind] for kind in head["TYPE"]]
        if any(count != "1" for count in head.get("COUNT", ())) or not len(names) == len(sizes) == len(kinds):
            raise SourceError(f"{where}: fields of one number each are wanted, COUNT is {head.get('COUNT')}")
        form = np.dtype([(name, f"<{kind}{size}") for name, kind, size in zip(names, kinds, sizes, strict=True)])
        if head["DATA"] == ["ascii"]:
            rows = np.loadtxt(io.BytesIO(data[at:]), ndmin=2, max_rows=number or None).reshape(-1, len(names))
            return dict(zip(names, rows.T, strict=True))
        if head["DATA"] != ["binary"]:
            raise SourceError(f"{where} has DATA {' '.join(head['DATA'])}; read are ascii and binary")
        table = np.frombuffer(data, form, number, at)
        return {name: table[name] for name in names}
