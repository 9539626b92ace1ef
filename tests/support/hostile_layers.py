"""Some 150 hostile layers by name: each edits the parts of a small one, whose base is whole (:mod:`support.hostile`)."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from support import hostile_cases as of_datasets
from support.hostile import Member, Parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEYS: Final = (
    "format",
    "version",
    "name",
    "num_samples",
    "num_clips",
    "num_bytes",
    "channels",
    "splits",
    "files",
    "lineage",
    "base",
    "view",
    "license",
    "digest",
    "provenance",
)
VALUES: Final = {
    name: of_datasets.VALUES[name]
    for name in ("null", "minus", "digits", "long", "escape", "list", "object")
}
"""Values in place of what a manifest states."""
MAY_PASS: Final = (
    "*/name=escape",
    "*/license=null",
    "*/license=escape",
    "*/provenance=object",
    "*/fields-source_name=escape",
    "*/fields-frame=null",
    "*/base-name=escape",
    "*/attributes-gone",
    "*/extra-file",
    "*/rows-swapped",
    "*/caption.txt-bomb",
    "*/digest=*",
    "*/num_bytes=*",
)
"""Layers that FORMAT.md allows, or whose fault shows only beside the base; and what the edit itself makes right again."""


def _with(parts: Parts, path: tuple[str | int, ...], value: object) -> None:
    place: Any = parts.manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value


def _manifests() -> dict[str, Any]:
    named_edits: dict[str, Any] = {
        f"{name}={kind}": partial(_with, path=(name,), value=value)
        for name in KEYS
        for kind, value in VALUES.items()
    }
    for name in ("fingerprint", "name", "num_samples", "sensors"):
        for kind in ("null", "minus", "long", "escape", "list"):
            named_edits[f"base-{name}={kind}"] = partial(
                _with, path=("base", name), value=VALUES[kind]
            )
    for name in (
        "name",
        "kind",
        "field",
        "dtype",
        "law",
        "shape",
        "axes",
        "optional",
        "source_name",
        "frame",
    ):
        for kind in ("null", "minus", "escape", "list"):
            named_edits[f"fields-{name}={kind}"] = partial(
                _with, path=("channels", 0, name), value=VALUES[kind]
            )
    views = (
        {"kind": "per_view"},
        {"kind": "per_view", "epoch": 1},
        {"kind": "per_view", "settings": {}},
        {"epoch": 1},
        {"settings": {"seed": 1}},
        {"kind": "none"},
        {"kind": "per_view", "epoch": -1, "settings": {}},
        {"kind": "per_view", "epoch": 10**400, "settings": {}},
        {"other": 1},
    )
    named_edits |= {
        f"view-{number}": partial(_with, path=("view",), value=view)
        for number, view in enumerate(views)
    }
    for name in (
        "boxes",
        "meta",
        "geometry",
        "../../x",
        "x" * 200,
        "cam_front",
    ):
        named_edits[f"channel-named-{name[:9].replace('/', '_')}"] = partial(_named, name=name)
    named_edits |= {
        "parent": partial(_with, path=("lineage", "parents"), value=["../../x"]),
        "split-named": partial(_with, path=("splits",), value={}),
        "other-split": _other_split,
        "law-of-no-camera": partial(
            _with,
            path=("channels", 0, "law"),
            value={"name": "image", "camera": "cam_9"},
        ),
        "sensor": partial(_with, path=("channels", 0, "sensor"), value="camera"),
        "sensors-none": partial(_with, path=("base", "sensors", 0, "sensor"), value=None),
        "dataset": partial(_with, path=("format",), value="fuelrail-dataset"),
        "key-twice": partial(
            _content,
            name="dataset.json",
            old=b'"seed": 0',
            new=b'"seed": 9, "seed": 0',
        ),
        "base-twice": partial(
            _content,
            name="dataset.json",
            old=b'"base": {',
            new=b'"base": {"name": "x",',
        ),
    }
    return named_edits


def _named(parts: Parts, name: str) -> None:
    entry = parts.manifest["channels"][1]
    old = entry["field"]
    entry["name"], entry["field"] = name, f"{name}.npy"
    for sample in parts.samples:
        sample.members[f"{name}.npy"] = sample.members.pop(old)


def _other_split(parts: Parts) -> None:
    parts.manifest["splits"] = {"train": parts.manifest["splits"]["layer"]}
    parts.edit_folder = lambda folder: [
        path.rename(folder / path.name.replace("layer", "train")) for path in folder.glob("*.tar")
    ]


def _content(parts: Parts, name: str, old: bytes, new: bytes) -> None:
    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    parts.edit_folder = edit


def _rows_file(parts: Parts, edit: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    def rewritten(data: bytes) -> bytes:
        file = io.BytesIO()
        np.save(file, edit(np.load(io.BytesIO(data))), allow_pickle=True)
        return file.getvalue()

    parts.edit_files["rows.npy"] = rewritten


def _set_rows(rows: np.ndarray[Any, Any], number: int, value: int) -> np.ndarray[Any, Any]:
    rows[np.flatnonzero(rows >= 0)[number]] = value
    return rows


def _bytes(parts: Parts, name: str, data: bytes) -> None:
    parts.edit_files[name] = lambda _: data


def _unnamed(parts: Parts, name: str) -> None:
    parts.manifest["files"] = [entry for entry in parts.manifest["files"] if entry["name"] != name]


def _extra_file(parts: Parts) -> None:
    parts.edit_folder = lambda folder: (folder / "other.bin").write_bytes(b"other")


def _rows() -> dict[str, Any]:
    edits: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
        **{
            f"row={value}": partial(_set_rows, number=1, value=value)
            for value in (-2, 99, 2**62, -(2**63))
        },
        "row-twice": lambda rows: _set_rows(rows, 1, int(rows.max())),
        "swapped": lambda rows: np.where(rows == 0, 1, np.where(rows == 1, 0, rows)),
        "shorter": lambda rows: rows[:-1],
        "longer": lambda rows: np.append(rows, -1),
        "none": lambda rows: rows[:0],
        "square": lambda rows: rows.reshape(2, -1),
        "int32": lambda rows: rows.astype(np.int32),
        "big": lambda rows: rows.astype(">i8"),
        "floats": lambda rows: rows.astype(float),
        "objects": lambda rows: rows.astype(object),
        "fortran": lambda rows: np.asfortranarray(np.stack([rows, rows])),
    }
    named_edits: dict[str, Any] = {
        f"rows-{name}": partial(_rows_file, edit=edit) for name, edit in edits.items()
    }
    head = b"\x93NUMPY\x01\x00"
    for name, data in (
        ("empty", b""),
        ("noise", bytes(range(256))),
        ("head", head + b"\xff\xff"),
        ("pickle", of_datasets.EVIL_PICKLE),
    ):
        named_edits[f"rows-{name}"] = partial(_bytes, name="rows.npy", data=data)
    named_edits["rows-unnamed"] = partial(_unnamed, name="rows.npy")
    named_edits["attributes-gone"] = partial(_unnamed, name="attributes.parquet")
    named_edits["extra-file"] = _extra_file
    for name in ("blocks.sha256", "keys.arrow", "shards.arrow", "index.arrow"):
        named_edits[f"unnamed-{name}"] = partial(_unnamed, name=name)
    return named_edits


def _member(parts: Parts, field: str, raw: bytes | None) -> None:
    if raw is None:
        del parts.samples[1].members[field]
    else:
        parts.samples[1].members[field] = Member(raw)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _members() -> dict[str, Any]:
    values = {
        "logits.npy": {
            "short": _npy(np.zeros(9, np.float16)),
            "wide": _npy(np.zeros(10)),
            "nan": _npy(np.full(10, np.nan, np.float16)),
            "none": None,
            "empty": b"",
            "pickle": of_datasets.EVIL_PICKLE,
            "objects": _npy(np.zeros(10, np.int8)),
            "huge": b"\x93NUMPY\x01\x00\x50\x00"
            + b"{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999,), }".ljust(79)
            + b"\n",
        },
        "loss.npy": {
            "other": _npy(np.float32(9)),
            "nan": _npy(np.float32("nan")),
            "square": _npy(np.zeros((2, 2), np.float32)),
            "none": None,
        },
        "caption.txt": {"latin": b"\xff\xfe", "bomb": b"x" * 5_000_000},
        "x_user.bin": {"added": b"1"},
        "meta.json": {"added": b"{}"},
        "logits.pickle": {"added": of_datasets.EVIL_PICKLE},
        "boxes.safetensors": {"added": b"1"},
        "../../evil.npy": {"added": b"1"},
    }
    return {
        f"{field.replace('/', '_')}-{name}": partial(_member, field=field, raw=raw)
        for field, raws in values.items()
        for name, raw in raws.items()
    } | {
        f"key{number}": partial(of_datasets._key, key=key)
        for number, key in enumerate(("", "../../x", "a.b", "k" * 600))
    }


def _tables() -> dict[str, Any]:
    edits: dict[str, Callable[[pa.Table], pa.Table]] = {
        "other-value": lambda table: table.set_column(5, "loss", pa.array([77.0] * len(table))),
        "null": lambda table: table.set_column(5, "loss", pa.nulls(len(table), pa.float64())),
        "text": lambda table: table.set_column(5, "loss", pa.array(["7"] * len(table))),
        "no-column": lambda table: table.drop_columns(["loss"]),
        "more": lambda table: table.append_column("night", pa.array([True] * len(table))),
        "no-clip": lambda table: table.drop_columns(["clip_id"]),
        "order": lambda table: table.take([1, 0, *range(2, len(table))]),
        "fewer": lambda table: table.slice(0, 2),
        "twice": lambda table: table.append_column("loss", table["loss"]),
    }
    named_edits: dict[str, Any] = {
        f"attributes-{name}": partial(of_datasets._table, edit=edit) for name, edit in edits.items()
    }
    for name in ("index.arrow", "shards.arrow", "keys.arrow"):
        named_edits |= {
            f"{name}-{place}={value}": partial(
                of_datasets._patched, place=place, value=value, name=name
            )
            for place in ("offset-1", "length-1", "rows", "body")
            for value in (-1, 1 << 40)
        }
    return named_edits


def _kinds() -> dict[str, Any]:
    makers: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "zero": lambda path: path.symlink_to("/dev/zero"),
        "out": lambda path: path.symlink_to("/etc/hostname"),
        "gone": lambda path: path.symlink_to("nothing"),
        "hole": lambda path: (path.touch(), os.truncate(path, 40 << 30)),
    }
    return {
        f"{name}-{kind}": partial(of_datasets._kind, name=name, make=make)
        for name in (
            "rows.npy",
            "layer-000000.tar",
            "index.arrow",
            "attributes.parquet",
        )
        for kind, make in makers.items()
    }


def cases() -> dict[str, Callable[[Parts], None]]:
    """All cases by name."""
    return {
        f"layers/{name}": edit
        for make in (_manifests, _rows, _members, _tables, _kinds)
        for name, edit in make().items()
    }
