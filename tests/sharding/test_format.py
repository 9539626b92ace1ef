"""FORMAT.md is enough to read a dataset: a reader written from that page alone, without this package's readers."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_points,
)
from support.nuscenes_tables import build_nuscenes
from support.plain_tables import check_files, read_shards
from support.sharding import shard_nuscenes

DTYPES = {
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F32": "<f4",
    "F64": "<f8",
}


@pytest.fixture(scope="module", params=["member", "frame", "dictionary"])
def out(request, tmp_path_factory):
    how = {"dictionary_bytes": 1024} if request.param == "dictionary" else {"layout": request.param}
    base = tmp_path_factory.mktemp("format")
    build_nuscenes(base / "source", {"a": 3, "bé": 2, "c": 1}, num_points=61)
    options = {
        "shard_size_bytes": 25_000,
        "splits": {"train": 0.7, "val": 0.3},
        "license": "öffentlich",
        **how,
    }
    shard_nuscenes(base / "source", base / "out", **options)
    return base / "out"


# Section 2.


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_manifest(out):
    manifest = json.loads((out / "dataset.json").read_text("utf-8"))
    assert (manifest["format"], manifest["version"]) == ("fuelrail-dataset", 1)
    left_out = (
        "name",
        "fingerprint",
        "seed",
        "order_unit",
        "license",
        "compression",
        "lineage",
        "provenance",
        "digest",
    )
    covered = {name: value for name, value in manifest.items() if name not in left_out}
    covered["files"] = [
        file
        for file in covered["files"]
        if file["name"] in ("shards.arrow", "index.arrow", "zstd.dict")
    ]
    assert hashlib.sha256(canonical(covered)).hexdigest() == manifest["fingerprint"]
    check_files(out, manifest)
    shards = read_shards(out, manifest)
    assert sum(shard["bytes"] for shard in shards) == manifest["num_bytes"]
    position = 0
    for shard in shards:
        assert shard["first_sample"] == position
        position += shard["num_samples"]
    assert position == manifest["num_samples"] == 6
    for name, split in manifest["splits"].items():
        run = shards[split["first_shard"] :][: split["num_shards"]]
        assert {shard["split"] for shard in run} == {name}
        assert run[0]["first_sample"] == split["first_sample"]
        assert sum(shard["num_samples"] for shard in run) == split["num_samples"]


# Sections 3 and 5.


def read_index(out):
    with (
        pa.OSFile(str(out / "index.arrow")) as source,
        pa.ipc.open_file(source) as file,
    ):
        table = file.read_all()
    metadata = table.schema.metadata
    assert metadata[b"fuelrail.index.version"] == b"1"
    return (
        table.to_pylist(),
        json.loads(metadata[b"fuelrail.members"]),
        json.loads(metadata[b"fuelrail.codecs"]),
    )


def decode(codec, stored, raw_bytes, out):
    if codec == "raw":
        return stored
    dictionary = (
        zstandard.ZstdCompressionDict((out / "zstd.dict").read_bytes())
        if codec == "zstd-dict"
        else None
    )
    raw = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(stored)
    assert len(raw) == raw_bytes
    if codec in ("zstd", "zstd-dict"):
        return raw
    row = int(codec.removeprefix("zstd-p"))
    head = len(raw) % row
    count = len(raw) // row
    planes = [raw[head + j * count : head + (j + 1) * count] for j in range(row)]
    return raw[:head] + bytes(planes[j][i] for i in range(count) for j in range(row))


def read_samples(out):
    manifest = json.loads((out / "dataset.json").read_text("utf-8"))
    rows, names, codecs = read_index(out)
    shards = read_shards(out, manifest)
    for row in rows:
        name = shards[row["shard"]]["name"]
        shard = (out / name).read_bytes()
        span = shard[row["offset"] : row["offset"] + row["length"]]
        assert xxhash.xxh3_64(span).intdigest() == row["xxh3"]
        if name.endswith(".tar.zst"):
            span = zstandard.ZstdDecompressor().decompress(span)
            last = row["members"][-1]
            assert len(span) == -(-(last["offset"] + last["stored_bytes"]) // 512) * 512
        members = {}
        for entry in row["members"]:
            stored = span[entry["offset"] : entry["offset"] + entry["stored_bytes"]]
            members[names[entry["name"]]] = decode(
                codecs[entry["codec"]], stored, entry["raw_bytes"], out
            )
        yield row, members


def test_samples(out):
    dataset = open_dataset(out)
    manifest = json.loads((out / "dataset.json").read_text("utf-8"))
    order = ["meta.json", "geometry.safetensors", "boxes.safetensors"]
    order += [channel["field"] for channel in manifest["channels"] if "sensor" in channel]
    for position, (row, members) in enumerate(read_samples(out)):
        assert list(members) == order
        meta = json.loads(members["meta.json"])
        assert meta["schema"] == "fuelrail/1"
        assert (meta["key"], meta["clip_id"], meta["frame_idx"]) == (
            row["key"],
            row["clip_id"],
            row["frame"],
        )
        assert row["key"] == dataset.index.row(position).key
        for name, record in (
            ("geometry.safetensors", Geometry),
            ("boxes.safetensors", Boxes),
        ):
            ours = read_tensors(members[name])
            theirs = decode_arrays(members[name], record)
            assert set(ours) == set(record.__dataclass_fields__)
            for field, array in ours.items():
                np.testing.assert_array_equal(array, getattr(theirs, field))
                assert array.dtype == getattr(theirs, field).dtype
        np.testing.assert_array_equal(
            read_points(members["lidar_top.npy"]),
            decode_points(members["lidar_top.npy"]),
        )


# Section 6.


def read_tensors(data):
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], DTYPES[entry["dtype"]])
        arrays[name] = values.reshape(entry["shape"])
    return arrays


def read_points(data):
    assert data[:8] == b"\x93NUMPY\x01\x00"
    (length,) = struct.unpack("<H", data[8:10])
    return np.frombuffer(data[10 + length :], "<f4").reshape(61, 5)


# Section 4.


def test_seek_table(out):
    manifest = json.loads((out / "dataset.json").read_text("utf-8"))
    rows = read_index(out)[0]
    for number, shard in enumerate(read_shards(out, manifest)):
        if not shard["name"].endswith(".tar.zst"):
            continue
        data = (out / shard["name"]).read_bytes()
        count, descriptor, magic = struct.unpack("<IBI", data[-9:])
        assert (count, descriptor, magic) == (
            shard["num_samples"] + 1,
            0,
            0x8F92EAB1,
        )
        table = data[-9 - 8 * count - 8 :]
        assert struct.unpack("<II", table[:8]) == (0x184D2A5E, len(table) - 8)
        offset = 0
        for row, (stored, raw) in zip(
            [*(row for row in rows if row["shard"] == number), None],
            struct.iter_unpack("<II", table[8:-9]),
            strict=True,
        ):
            assert row is None or (row["offset"], row["length"]) == (
                offset,
                stored,
            )
            frame = zstandard.get_frame_parameters(data[offset : offset + stored])
            assert (frame.content_size, frame.has_checksum, frame.dict_id) == (
                raw,
                True,
                0,
            )
            offset += stored
        assert data[offset:] == table


def test_tar_blocks(out):
    rows, names, codecs = read_index(out)
    suffixes = {
        "raw": "",
        "zstd": ".zst",
        "zstd-dict": ".dict.zst",
        "zstd-p20": ".p20.zst",
    }
    expected = [
        [f"{row['key']}.{names[m['name']]}{suffixes[codecs[m['codec']]]}" for m in row["members"]]
        for row in rows
    ]
    members = []
    for shard in read_shards(out, json.loads((out / "dataset.json").read_text("utf-8"))):
        data = (out / shard["name"]).read_bytes()
        offset = 0
        if shard["name"].endswith(".tar.zst"):
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        while data[offset : offset + 512] != bytes(512):
            header = data[offset : offset + 512]
            name = header[:100].rstrip(b"\0").decode()
            size = int(header[124:135], 8)
            assert header[100:124] == b"0000644\x000000000\x000000000\x00"
            assert header[135:148] == b"\x0000000000000\x00"
            assert int(header[148:154], 8) == sum(header[:148]) + 8 * 32 + sum(header[156:])
            assert header[154:157] == b"\x00 0"
            assert header[157:257] == bytes(100)
            assert header[257:265] == b"ustar\x0000"
            assert header[265:329] == bytes(64)
            assert header[329:345] == b"0000000\x000000000\x00"
            assert header[345:] == bytes(167)
            end = offset + 512 + size
            offset = end + -end % 512
            assert data[end:offset] == bytes(offset - end)
            members.append(name)
        assert data[offset:] == bytes(1024)
    assert members == [name for names_of_sample in expected for name in names_of_sample]
