"""Some 870 hostile datasets by name: each edits the parts of a small dataset (:mod:`support.hostile`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from fuelrail.pipeline.format.index import checks as index_checks
from fuelrail.pipeline.sample.arrays import write_tensors
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    Boxes,
    Geometry,
    decode_arrays,
)
from fuelrail.pipeline.storage.columns import numpy_dtype
from support.hostile import Member, Parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ESCAPE: Final = "\x1b]0;HACKED\x07\nfuelrail: all is well"
EVIL_PICKLE: Final = b"cos\nsystem\n(S'touch PWNED'\ntR."
POINTS: Final = "lidar_top.npy"
CAMERA: Final = "cam_front.jpg"
EDGES: Final = (-1, 0, 2**31 - 1, 2**62, -(2**63))
VALUES: Final[dict[str, Any]] = {
    "null": None,
    "minus": -9,
    "digits": 10**400,
    "long": "x" * 2_000_000,
    "escape": ESCAPE,
    "list": [[]],
    "object": {"a": 1},
    "true": True,
    "path": "../../evil",
    "surrogate": "\ud800",
}


@cache
def zeros(num_bytes: int) -> bytes:
    """A zstd frame of that many zeros, which states its size."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=num_bytes)
    block = bytes(min(num_bytes, 1 << 20))
    return b"".join(packer.compress(block) for _ in range(num_bytes // len(block))) + packer.flush()


def cases() -> dict[str, Callable[[Parts], None]]:
    """All cases by name."""
    edits: dict[str, Callable[[Parts], None]] = {}
    for make in (
        _tar,
        _names,
        _rows,
        _zstd,
        _json,
        _images,
        _arrays,
        _values,
        _manifest,
        _kinds,
        _arrow,
        _parquet,
    ):
        for name, edit in make().items():
            edits[f"{make.__name__[1:]}/{name}"] = edit
    return edits


def _set(parts: Parts, field: str, member: Member, index: int = 0) -> None:
    parts.samples[index].members[field] = member


def _splice(parts: Parts, position: int, data: bytes) -> None:
    parts.edit_span = lambda row, span: (
        span if row else span[:position] + data + span[position + len(data) :]
    )


def _tar() -> dict[str, Any]:
    texts = {
        "parent": (0, b"../../evil.bin\0"),
        "absolute": (0, b"/tmp/evil\0"),
        "empty": (0, b"\0"),
        "mode": (100, b"0007777\0"),
        "size": (124, b"77777777777\0"),
        "binary-size": (124, b"\x80" + b"\xff" * 11),
        "no-octal": (124, b"zzzzzzzzzzz\0"),
        "checksum": (148, b"000000\0 "),
        "magic": (257, b"evil!!"),
        "linkname": (157, b"/etc/passwd"),
        "zeros": (0, bytes(512)),
    }
    named_edits: dict[str, Any] = {
        name: partial(_splice, position=position, data=data)
        for name, (position, data) in texts.items()
    }
    return named_edits | {
        f"type-{flag}": partial(_splice, position=156, data=flag.encode())
        for flag in "1234567xgLKSs"
    }


def _key(parts: Parts, key: str) -> None:
    parts.samples[0].key = key


def _field(parts: Parts, field: str) -> None:
    _set(parts, field, Member(EVIL_PICKLE))


def _twice(parts: Parts) -> None:
    _set(parts, "x_b.bin", Member(b"evil", field=CAMERA))


def _same_key(parts: Parts) -> None:
    parts.samples[1].key = parts.samples[0].row.key


def _names() -> dict[str, Any]:
    keys = (
        "",
        "../../evil",
        "/abs",
        "a.b",
        ESCAPE,
        "k" * 600,
        "k" * 100_000,
        "\u202egnp",
        "__x__",
        "UPPER",
        "a/b",
        "%s%n",
        "-rf",
    )
    fields = (
        "x_evil.pickle",
        "x_a.pyd",
        "x_a.pth",
        "x_../../evil.bin",
        "x_" + "a" * 5000 + ".bin",
        "x_\x1b[2J.bin",
        "x_a.so",
        "x_a.\n",
        "nodot",
        "lidar_99.npy",
        "cam_99.jpg",
        "x_A.B",
        "x_a.json",
        "cam_front.png",
        "x_b.tar",
        "x_c.cls",
    )
    named_edits: dict[str, Any] = {
        f"key{number}": partial(_key, key=key) for number, key in enumerate(keys)
    }
    named_edits |= {
        f"field{number}": partial(_field, field=field) for number, field in enumerate(fields)
    }
    return named_edits | {"twice": _twice, "same-key": _same_key}


def _replace_column(parts: Parts, name: str, value: int) -> None:
    def edit(table: pa.Table) -> pa.Table:
        column_index = table.schema.get_field_index(name)
        kind = table.schema.field(name)
        values = table[name].to_pylist()
        low = np.iinfo(numpy_dtype(kind.type)).min
        high = np.iinfo(numpy_dtype(kind.type)).max
        return table.set_column(
            column_index,
            kind,
            pa.array([min(max(value, low), high), *values[1:]], kind.type),
        )

    parts.edit_table = edit


def _replace_entry(parts: Parts, name: str, value: int, member_index: int = 1) -> None:
    def edit(table: pa.Table) -> pa.Table:
        column = table["members"].combine_chunks()
        kind = table.schema.field("members")
        rows = column.to_pylist()
        low = 2**15 if name in ("name", "codec") else 2**63
        rows[0][member_index][name] = min(max(value, -low), low - 1)
        return table.set_column(
            table.schema.get_field_index("members"),
            kind,
            pa.array(rows, kind.type),
        )

    parts.edit_table = edit


def _many_members(parts: Parts) -> None:
    for number in range(6000):
        _set(parts, f"x_{number}.bin", Member(b""))


def _rows() -> dict[str, Any]:
    named_edits = {
        f"{name}={value}": partial(_replace_column, name=name, value=value)
        for name in (
            "frame",
            "timestamp_ns",
            "shard",
            "offset",
            "length",
            "xxh3",
        )
        for value in (*EDGES, 99)
    }
    named_edits |= {
        f"member-{name}={value}": partial(_replace_entry, name=name, value=value)
        for name in ("name", "codec", "offset", "stored_bytes", "raw_bytes")
        for value in EDGES
    }
    return named_edits | {"members": _many_members}


def _bomb(parts: Parts, fields: list[str], num_bytes: int, codec: str = "zstd") -> None:
    for field in fields:
        _set(parts, field, Member(b"", codec, zeros(num_bytes), num_bytes))


def _stored(parts: Parts, stored: bytes, raw_bytes: int) -> None:
    _set(parts, "x_z.bin", Member(b"", "zstd", stored, raw_bytes))


def _zstd() -> dict[str, Any]:
    named_edits: dict[str, Any] = {
        f"{field}-{size}": partial(_bomb, fields=[field], num_bytes=size << 20)
        for field in (META, GEOMETRY, BOXES, POINTS, CAMERA, "x_user.bin")
        for size in (1, 3, 100, 1024)
    }
    named_edits["four"] = partial(_bomb, fields=[f"x_{n}.bin" for n in range(4)], num_bytes=1 << 30)
    named_edits["four-allowed"] = partial(
        _bomb, fields=[f"x_{n}.bin" for n in range(4)], num_bytes=120 << 20
    )
    named_edits["planes"] = partial(_bomb, fields=[POINTS], num_bytes=120 << 20, codec="zstd-p20")
    named_edits["planes-of-one"] = partial(
        _bomb, fields=["x_p.bin"], num_bytes=120 << 20, codec="zstd-p4096"
    )
    small = zstandard.ZstdCompressor().compress(b"a" * 1000)
    for name, stored in (
        ("cut", small[:-3]),
        ("more", small + b"x"),
        ("two", small + small),
        ("skippable", b"\x50\x2a\x4d\x18\x04\0\0\0abcd"),
        ("none", b""),
        ("noise", bytes(range(256))),
        ("no-size", zstandard.ZstdCompressor().compressobj().flush()),
    ):
        named_edits[f"frame-{name}"] = partial(_stored, stored=stored, raw_bytes=1000)
    return named_edits


def _meta_value(parts: Parts, name: str, value: object) -> None:
    meta = msgspec.json.decode(parts.samples[0].members[META].raw) | {name: "@"}
    text = json.dumps(value)
    _set(
        parts,
        META,
        Member(msgspec.json.encode(meta).replace(b'"@"', text.encode()), "zstd"),
    )


def _meta_text(parts: Parts, text: bytes) -> None:
    _set(parts, META, Member(text, "zstd"))


def _json() -> dict[str, Any]:
    names = (
        "schema",
        "key",
        "sample_token",
        "clip_id",
        "clip_name",
        "frame_idx",
        "timestamp_ns",
        "prev_key",
        "cameras",
        "tags",
        "stats",
        "num_frames",
        "split",
    )
    named_edits: dict[str, Any] = {
        f"{name}={kind}": partial(_meta_value, name=name, value=value)
        for name in names
        for kind, value in VALUES.items()
        if kind != "path"
    }
    texts = {
        "deep": b"[" * 500_000,
        "empty": b"",
        "noise": bytes(range(256)),
        "nan": b'{"a": NaN}',
        "nul": b"\0" * 10_000,
        "lists": b"[" + b"[]," * 300_000 + b"[]]",
    }
    return named_edits | {
        f"text-{name}": partial(_meta_text, text=text) for name, text in texts.items()
    }


def _image(parts: Parts, position: int, data: bytes) -> None:
    raw = parts.samples[0].members[CAMERA].raw
    _set(
        parts,
        CAMERA,
        Member(raw[:position] + data + raw[position + len(data) :]),
    )


def _other_image(parts: Parts, data: bytes, field: str = CAMERA) -> None:
    _set(parts, field, Member(data))


def _images() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    named_edits: dict[str, Any] = {
        f"flip{position}": partial(_image, position=position, data=rng.bytes(1))
        for position in range(2, 640, 20)
    }
    # The frame header of the pictures of support.datasets: marker, length, precision, height, width.
    named_edits |= {
        f"head{n}": partial(_image, position=158 + n, data=b"\xff\xff\xff\xff")
        for n in range(0, 12, 3)
    }
    png = (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xff\0\0\xff\xff\0\0\x10\x06\0\0\0"
        + bytes(64)
        + b"\0\0\0\0IEND\xaeB`\x82"
    )
    images = (
        ("empty", b""),
        ("lfs", b"version https://git-lfs\n"),
        ("png", png),
        ("soi", b"\xff\xd8" * 50_000),
    )
    for name, data in images:
        named_edits[name] = partial(_other_image, data=data)
    return named_edits


def _npy(parts: Parts, head: str, tail: bytes = b"") -> None:
    text = head.encode("latin-1")
    _set(
        parts,
        POINTS,
        Member(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + tail),
    )


def _tensors(
    parts: Parts,
    header: bytes,
    tail: bytes = b"",
    field: str = BOXES,
    length: int | None = None,
) -> None:
    size = len(header) if length is None else length
    _set(parts, field, Member(size.to_bytes(8, "little") + header + tail))


def _arrays() -> dict[str, Any]:
    descr = "{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n"
    heads = [
        ("'|O'", "False", "(1,)"),
        ("'<f4'", "True", "(2, 5)"),
        ("'<f4'", "False", "(0, 999999999999999999)"),
        ("'<f4'", "False", "(2, 3)"),
        ("'<f4'", "False", "(-1, 5)"),
        ("'<f4'", "False", "(9**9**9, 1)"),
        ("'V99999999'", "False", "(1,)"),
        ("__import__('os').system('touch PWNED')", "False", "(1,)"),
        ("[('a', '|O')]", "False", "(1,)"),
        ("'<f8'", "False", "(1, 5)"),
        ("'<f4'", "False", "(" * 900),
        ("'<f4'", "False", "(1, 5, 1)"),
        ("'<f4'", "False", "(4294967296, 4294967296)"),
    ]
    named_edits: dict[str, Any] = {
        f"npy{n}": partial(_npy, head=descr % head, tail=bytes(24)) for n, head in enumerate(heads)
    }
    entry = b'{"boxes3d":{"dtype":"%s","shape":%s,"data_offsets":[%s]}}'
    bad = (
        (b"F32", b"[1,7]", b"0,28"),
        (b"F32", b"[99999999999,7]", b"0,28"),
        (b"F32", b"[-1]", b"0,4"),
        (b"EVIL", b"[1]", b"0,1"),
        (b"F32", b"[0,9223372036854775807]", b"0,0"),
        (b"F32", b"[1]", b"4,0"),
        (b"U8", b"[4]", b"9223372036854775807,3"),
    )
    for field in (BOXES, GEOMETRY):
        for number, values in enumerate(bad):
            named_edits[f"{field}{number}"] = partial(
                _tensors, header=entry % values, tail=bytes(28), field=field
            )
        for number, length in enumerate((0, 1, 2**63, 2**64 - 1, 1 << 20)):
            named_edits[f"{field}-length{number}"] = partial(
                _tensors, header=b"{}", field=field, length=length
            )
        named_edits[f"{field}-deep"] = partial(_tensors, header=b'{"a":' * 100_000, field=field)
    return named_edits


def _array_value(parts: Parts, field: str, name: str, value: float) -> None:
    kind: Any = Geometry if field == GEOMETRY else Boxes
    record = decode_arrays(parts.samples[1].members[field].raw, kind)
    arrays = {spec.name: np.array(getattr(record, spec.name)) for spec in dataclasses.fields(kind)}
    with np.errstate(all="ignore"):
        arrays[name][...] = np.float64(value).astype(arrays[name].dtype)
    _set(parts, field, Member(write_tensors(arrays), "zstd"), index=1)


def _rig(parts: Parts, num_cameras: int) -> None:
    record = decode_arrays(parts.samples[0].members[GEOMETRY].raw, Geometry)
    arrays = {
        spec.name: np.array(getattr(record, spec.name)) for spec in dataclasses.fields(Geometry)
    }
    for name in (
        "cam_valid",
        "cam_timestamp_ns",
        "img_wh",
        "intrinsics",
        "dist",
        "cam2ego",
        "cam_ego2global",
    ):
        arrays[name] = np.resize(arrays[name], (num_cameras, *arrays[name].shape[1:]))
    _set(parts, GEOMETRY, Member(write_tensors(arrays), "zstd"))


def _values() -> dict[str, Any]:
    named_edits: dict[str, Any] = {
        f"{spec.name}={value}": partial(_array_value, field=field, name=spec.name, value=value)
        for field, kind in ((GEOMETRY, Geometry), (BOXES, Boxes))
        for spec in dataclasses.fields(kind)
        for value in (float("nan"), float("inf"), -30000.0, 9999.0, 0.0, 1e308)
    }
    return named_edits | {
        f"cameras={count}": partial(_rig, num_cameras=count) for count in (0, 1, 3, 2000)
    }


def _manifest_value(parts: Parts, name: str, value: object) -> None:
    parts.manifest[name] = value


def _manifest_entry(parts: Parts, name: str, key: str, value: object) -> None:
    place = parts.manifest[name]
    (place["train"] if name == "splits" else place[0])[key] = value


def _many_cameras(parts: Parts) -> None:
    first = parts.manifest["channels"][0]
    parts.manifest["channels"] = [
        first | {"name": f"c{n}", "field": f"c{n}.jpg"} for n in range(100_000)
    ]


def _manifest() -> dict[str, Any]:
    names = (
        "name",
        "num_samples",
        "channels",
        "classes",
        "attributes",
        "time_base",
        "license",
        "compression",
        "splits",
        "lineage",
        "files",
        "provenance",
        "version",
        "order_unit",
        "fingerprint",
        "seed",
    )
    named_edits: dict[str, Any] = {
        f"{name}={kind}": partial(_manifest_value, name=name, value=value)
        for name in names
        for kind, value in VALUES.items()
        if kind in ("null", "minus", "digits", "long", "escape", "list", "object")
    }
    for name, value in (
        ("provenance", {"recipe": 5}),
        ("channels", []),
        ("lineage", []),
        ("splits", {}),
        ("classes", ["a"] * 100_000),
        ("provenance", {"recipe": {"source": ESCAPE, "tool": ESCAPE}}),
        ("compression", {"codecs": 5}),
    ):
        named_edits[f"{name}={str(value)[:20]}"] = partial(_manifest_value, name=name, value=value)
    for name, keys in (
        (
            "splits",
            ("first_shard", "num_shards", "first_sample", "num_samples"),
        ),
        ("files", ("name", "bytes")),
        (
            "channels",
            (
                "name",
                "kind",
                "field",
                "law",
                "dtype",
                "axes",
                "shape",
                "source_name",
                "sizes",
            ),
        ),
    ):
        for key in keys:
            for kind in ("minus", "escape", "path", "long"):
                named_edits[f"{name}.{key}={kind}"] = partial(
                    _manifest_entry, name=name, key=key, value=VALUES[kind]
                )
    return named_edits | {"many-cameras": _many_cameras}


def _socket(path: Path) -> None:
    with (
        contextlib.chdir(path.parent),
        socket.socket(socket.AF_UNIX) as bound,
    ):  # its path has 107 bytes at most
        bound.bind(path.name)


def _kind(parts: Parts, name: str, make: Callable[[Path], object]) -> None:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    parts.edit_folder = edit


def _kinds() -> dict[str, Any]:
    makers: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "socket": _socket,
        "zero": lambda path: path.symlink_to("/dev/zero"),
        "out": lambda path: path.symlink_to("/etc/hostname"),
        "loop": lambda path: path.symlink_to(path.name),
        "gone": lambda path: path.symlink_to("nothing"),
        "empty": lambda path: path.write_bytes(b""),
        "hole": lambda path: (path.touch(), os.truncate(path, 40 << 30)),
    }
    files = (
        "dataset.json",
        "index.arrow",
        "shards.arrow",
        "keys.arrow",
        "blocks.sha256",
        "train-000000.tar",
        "attributes.parquet",
    )
    return {
        f"{name}-{kind}": partial(_kind, name=name, make=make)
        for name in files
        for kind, make in makers.items()
    }


def _flip(parts: Parts, name: str, seed: int) -> None:
    def edit(data: bytes) -> bytes:
        rng = np.random.default_rng(seed)
        flipped = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 4)):
            flipped[position] = rng.integers(256)
        return bytes(flipped)

    parts.edit_files[name] = edit


def _compressed(parts: Parts, codec: str) -> None:
    def edit(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with (
            pa.ipc.open_file(data) as file,
            pa.ipc.new_file(
                sink,
                file.schema,
                options=pa.ipc.IpcWriteOptions(compression=codec),
            ) as writer,
        ):
            table = file.read_all()
            keys = pa.array(["k" * (400 << 20), *table["key"].to_pylist()[1:]])
            writer.write_table(table.set_column(0, table.schema.field("key"), keys))
        return sink.getvalue().to_pybytes()

    parts.edit_files["index.arrow"] = edit


def _patched(parts: Parts, place: str, value: int, name: str = "index.arrow") -> None:
    """State other places and sizes of the first record batch: the format string of ``place`` is of struct."""

    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        view = memoryview(data)
        footer_at = len(data) - 10 - struct.unpack_from("<i", data, len(data) - 10)[0]
        footer = view[footer_at:]
        blocks, _ = index_checks._vector(
            footer, index_checks._field(footer, index_checks._root(footer), 3)
        )
        start = struct.unpack_from("<q", footer, blocks)[0]
        message = view[start + 8 :]
        table = index_checks._root(message)
        header = index_checks._field(message, table, 2)
        batch = header + struct.unpack_from("<I", message, header)[0]
        buffers, count = index_checks._vector(message, index_checks._field(message, batch, 2))
        part, _, number = place.partition("-")
        buffer = start + 8 + buffers + 16 * (int(number or 0) % count)
        position, kind = {
            "offset": (buffer, "<q"),
            "length": (buffer + 8, "<q"),
            "rows": (start + 8 + index_checks._field(message, batch, 0), "<q"),
            "message": (
                start + 8 + index_checks._field(message, table, 3),
                "<q",
            ),
            "block": (footer_at + blocks, "<q"),
            "metadata": (footer_at + blocks + 8, "<i"),
            "body": (footer_at + blocks + 16, "<q"),
            "footer": (len(data) - 10, "<i"),
        }[part]
        limit = 2 ** (8 * struct.calcsize(kind) - 1)
        struct.pack_into(kind, changed, position, max(min(value, limit - 1), -limit))
        return bytes(changed)

    parts.edit_files[name] = edit


def _arrow() -> dict[str, Any]:
    named_edits: dict[str, Any] = {
        f"flip{seed}": partial(_flip, name="index.arrow", seed=seed) for seed in range(60)
    }
    places = (
        "offset-1",
        "offset-9",
        "length-1",
        "length-2",
        "length-9",
        "rows",
        "message",
        "block",
        "metadata",
        "body",
        "footer",
    )
    named_edits |= {
        f"{place}={value}": partial(_patched, place=place, value=value)
        for place in places
        for value in (-1, 0, 1 << 20, 1 << 40, 2**63 - 1)
    }
    for name in ("shards.arrow", "keys.arrow"):
        named_edits |= {
            f"{name}-flip{seed}": partial(_flip, name=name, seed=seed) for seed in range(20)
        }
        named_edits |= {
            f"{name}-{place}={value}": partial(_patched, place=place, value=value, name=name)
            for place in places
            for value in (-1, 1 << 40)
        }
    return named_edits | {codec: partial(_compressed, codec=codec) for codec in ("zstd", "lz4")}


def _table(parts: Parts, edit: Callable[[pa.Table], pa.Table]) -> None:
    def rewritten(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(edit(pq.read_table(pa.BufferReader(data))), sink, compression="zstd")
        return sink.getvalue().to_pybytes()

    parts.edit_files["attributes.parquet"] = rewritten


def _content(parts: Parts, edit: Callable[[bytes], bytes]) -> None:
    parts.edit_files["attributes.parquet"] = edit


def _parquet() -> dict[str, Any]:
    named_edits: dict[str, Any] = {
        f"flip{seed}": partial(_flip, name="attributes.parquet", seed=seed) for seed in range(30)
    }
    tables: dict[str, Callable[[pa.Table], pa.Table]] = {
        "no-key": lambda table: table.drop_columns(["key"]),
        "two-keys": lambda table: table.append_column("key", table["key"]),
        "giant-key": lambda table: table.set_column(
            0, "key", pa.array(["k" * (300 << 20), *"bcdefgh"])
        ),
        "giant-text": lambda table: table.append_column(
            "note", pa.array(["k" * (300 << 20)] * 2 + [""] * 6)
        ),
        "short-text": lambda table: table.append_column("note", pa.array(["text"] * 8)),
        "fewer": lambda table: table.slice(0, 2),
        "order": lambda table: table.take([1, 0, 2, 3, 4, 5, 6, 7]),
        "list": lambda table: table.append_column("note", pa.array([[1]] * 8)),
        "escape": lambda table: table.append_column(ESCAPE, pa.array([1] * 8)),
        "numbers": lambda table: table.set_column(0, "key", pa.array(range(8))),
        "columns": lambda table: pa.table(
            {
                **{name: table[name] for name in table.column_names},
                **{f"c{n}": pa.nulls(8, pa.int64()) for n in range(5000)},
            }
        ),
    }
    named_edits |= {name: partial(_table, edit=edit) for name, edit in tables.items()}
    named_edits |= {
        "empty": partial(_content, edit=lambda _: b""),
        "noise": partial(_content, edit=lambda _: bytes(range(256))),
    }
    return named_edits | {"cut": partial(_content, edit=lambda data: data[: len(data) // 2])}
