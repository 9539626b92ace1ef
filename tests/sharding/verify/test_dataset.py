"""Verification finds every kind of damage, and says where."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.tar import END_OF_ARCHIVE
from fuelrail.sharding.verify.dataset import verify
from support.edits import replace_index, reseal, rewrite
from support.sharding import flip


@pytest.fixture(scope="module")
def original(dataroot, sharded):
    source = dataroot("a3 b3", cameras=("CAM_FRONT", "CAM_BACK"))
    return sharded(source, shard_size_bytes=15_000, splits={"train": 0.5, "val": 0.5})


@pytest.fixture
def out(original, tmp_path):
    shutil.copytree(original, tmp_path / "out")
    return tmp_path / "out"


def faults(out, *, deep=False):
    return verify(out, deep=deep, num_threads=2).faults


def change_row(out, position, change):
    """Change a row of the index, all digests right; return it as it was."""
    dataset = open_dataset(out)
    rows = [dataset.index.row(number) for number in range(6)]
    old = rows[position]
    rows[position] = change(rows[position])
    replace_index(out, dataset, rows)
    reseal(out)
    return old


def test_a_good_dataset(original):
    report = verify(original, deep=True, num_threads=2)
    assert report.faults == []
    assert (report.num_samples, report.num_images) == (6, 12)
    assert report.num_bytes == sum(path.stat().st_size for path in original.glob("*.tar"))
    assert report.as_text().endswith("12 images decoded: OK, no errors found\n")


def test_every_flipped_byte_of_a_shard_is_found(out):
    path = out / "train-000000.tar"
    content = path.read_bytes()
    rows = [open_dataset(out).index.row(position) for position in range(6)]
    for position in [
        0,
        100,
        156,
        300,
        511,
        512,
        600,
        len(content) // 2,
        len(content) - 1025,
        len(content) - 1024,
        len(content) - 1,
    ]:
        flip(path, position, 0x55)
        reported = faults(out)
        assert reported[0].file == path.name
        assert reported[0].text == "SHA-256 does not match the manifest"
        if position < len(content) - len(END_OF_ARCHIVE):
            owner = next(
                row
                for row in rows
                if row.shard == 0 and row.offset <= position < row.offset + row.length
            )
            assert ("train-000000.tar", owner.offset, owner.key) in [
                (f.file, f.offset, f.key) for f in reported
            ]
        path.write_bytes(content)
    assert faults(out) == []


@pytest.mark.parametrize(
    ("name", "harm", "says"),
    [
        ("train-000000.tar", "gone", "cannot be read: No such file"),
        ("train-000000.tar", "empty", "is empty, the manifest says"),
        ("val-000000.tar", "cut", "bytes, the manifest says"),
        ("val-000000.tar", "longer", "bytes, the manifest says"),
        ("val-000000.idx", "gone", "cannot be read: No such file"),
        ("val-000000.idx", "flipped", "SHA-256 does not match the manifest"),
        ("val-000000.idx", "cut", "bytes, the manifest says"),
        (
            "attributes.parquet",
            "flipped",
            "SHA-256 does not match the manifest",
        ),
        ("index.arrow", "gone", "has no index.arrow"),
        ("index.arrow", "cut", "bytes, the manifest says"),
        ("shards.arrow", "gone", "has no shards.arrow"),
        ("shards.arrow", "cut", "bytes, the manifest says"),
        (
            "shards.arrow",
            "flipped",
            "do not match their SHA-256 in blocks.sha256",
        ),
        ("keys.arrow", "gone", "cannot be read: No such file"),
        ("keys.arrow", "flipped", "SHA-256 does not match the manifest"),
    ],
)
def test_damaged_files(out, name, harm, says):
    path = out / name
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "flipped":
        flip(path)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": data[: len(data) // 2],
                "longer": data + bytes(512),
            }[harm]
        )
    reported = faults(out)
    assert name in {fault.file for fault in reported}
    assert any(says in fault.text for fault in reported if fault.file == name), reported
    assert {fault.file for fault in reported} == {name}


@pytest.mark.costly
def test_a_flipped_index_is_found_and_what_it_says_is_not_trusted(out):
    content = (out / INDEX_FILE).read_bytes()
    for position in range(64, len(content) - 64, max(len(content) // 40, 1)):
        flip(out / INDEX_FILE, position, 0x55)
        assert INDEX_FILE in {fault.file for fault in faults(out, deep=True)}
        (out / INDEX_FILE).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"name": "boxes.safetensors"},
            "the index says '{key}.boxes.safetensors.zst' of {size} bytes at {at}; ",
        ),
        (
            {"stored_bytes": 99},
            "the index says '{key}.geometry.safetensors.zst' of 99 bytes at {at}; the tar has",
        ),
        (
            {"codec": "raw"},
            "the index says '{key}.geometry.safetensors' of {size} bytes at {at}; the tar has",
        ),
    ],
)
def test_members_that_differ_from_the_index(out, change, says):
    def edit(row):
        first, second, *remaining = row.members
        return row._replace(members=(first, second._replace(**change), *remaining))

    row = change_row(out, 1, edit)
    (fault,) = faults(out)
    assert (fault.key, fault.offset) == (row.key, row.offset)
    said = says.format(
        key=row.key,
        size=row.members[1].stored_bytes,
        at=row.offset + row.members[1].offset,
    )
    assert fault.text.startswith(said), fault.text


def test_a_member_whose_digest_in_the_index_is_another(out):
    def edit(row):
        *members, last = row.members
        return row._replace(members=(*members, last._replace(xxh3=last.xxh3 ^ 1)))

    row = change_row(out, 1, edit)
    (fault,) = faults(out, deep=True)
    assert f"member '{row.members[-1].name}': checksum mismatch" in fault.text
    assert fault.key == row.key


def test_a_member_that_the_index_does_not_know(out):
    row = change_row(out, 1, lambda row: row._replace(members=row.members[:-1]))
    assert f"member '{row.key}.lidar_top.npy.p20.zst' is not in the index" in [
        fault.text for fault in faults(out)
    ]


def test_a_key_twice_in_the_metadata_is_found_and_what_may_be_left_out_is_not_missed(
    out,
):
    def left_out(raw):
        meta = json.loads(raw["meta.json"])
        for name in ("tags", "stats", "sync", "license"):
            del meta[name]
        for camera in meta["cameras"].values():
            for name in (
                "dist_model",
                "rolling_shutter",
                "readout_ns",
                "exposure_ns",
            ):
                del camera[name]
        raw["meta.json"] = json.dumps({**meta, "unknown": 1}).encode()

    before = open_dataset(out)[0].meta
    rewrite(out, 0, left_out)
    assert faults(out, deep=True) == []
    after = open_dataset(out)[0].meta
    assert (after.tags, after.stats, after.sync, after.license) == (
        {},
        {},
        {},
        None,
    )
    assert after.cameras == before.cameras

    def twice(raw):
        raw["meta.json"] = raw["meta.json"].replace(b'"vehicle"', b'"frame_idx": 99, "vehicle"')

    rewrite(out, 0, twice)
    (fault,) = faults(out, deep=True)
    assert fault.text == "member 'meta.json': the key 'frame_idx' occurs twice in an object"


def test_attributes_of_other_types_and_without_the_columns_of_the_index_are_found(
    out,
):
    attributes = pq.read_table(out / "attributes.parquet")
    for table, says in (
        (
            attributes.append_column("list", pa.array([[1]] * 6)),
            "column 'list' has the type list",
        ),
        (
            attributes.append_column("small", pa.array([1] * 6, pa.int8())),
            "column 'small' has the type int8",
        ),
        (attributes.drop_columns(["frame"]), "has no column 'frame'"),
    ):
        pq.write_table(table, out / "attributes.parquet")
        reseal(out)
        (fault,) = faults(out)
        assert fault.file == "attributes.parquet"
        assert says in fault.text


def test_spans_that_do_not_tile_the_shard(out):
    last = open_dataset(out).manifest.splits["train"].num_samples - 1
    change_row(out, last, lambda row: row._replace(offset=row.offset + 512))
    assert any("the index has it in shard number" in fault.text for fault in faults(out))


def test_listings_that_are_of_another_shard(out):
    shutil.copy(out / "val-000000.idx", out / "train-000000.idx")
    reseal(out)
    assert [fault.text for fault in faults(out)] == [
        "does not list the members of train-000000.tar"
    ]


def test_a_key_twice_and_a_clip_in_two_splits(out):
    clip = open_dataset(out).index.row(0).clip_id
    change_row(out, 5, lambda row: row._replace(clip_id=clip))
    assert [fault.text for fault in faults(out)] == [
        f"clip '{clip}' is in the splits train and val",
        "row 5 has the clip_id a, the index has b",
    ]


def test_attributes_in_another_order(out):
    table = pq.read_table(out / "attributes.parquet")
    pq.write_table(table.take(np.array([1, 0, 2, 3, 4, 5])), out / "attributes.parquet")
    reseal(out)
    assert [fault.text for fault in faults(out)] == [
        "row 0 has the key b-000001, the index has b-000000"
    ]
    pq.write_table(table.slice(0, 4), out / "attributes.parquet")
    reseal(out)
    assert [fault.text.partition("' ")[2] for fault in faults(out)] == [
        "has 4 rows for 6 samples of the index"
    ]


def change_meta(name, value):
    def change(raw):
        meta = json.loads(raw["meta.json"])
        meta[name] = value
        raw["meta.json"] = json.dumps(meta).encode()

    return change


def flip_scan(raw):
    data = bytearray(raw["cam_back.jpg"])
    begin = data.index(b"\xff\xda") + 14
    data[begin : begin + 40] = bytes(40)
    raw["cam_back.jpg"] = bytes(data[:-60]) + b"\xff\xd9"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            change_meta("timestamp_ns", 5),
            "meta.json has the timestamp_ns 5, index and manifest have",
        ),
        (
            change_meta("split", "val"),
            "meta.json has the split 'val', index and manifest have 'train'",
        ),
        (change_meta("dataset", "x"), "meta.json has the dataset 'x'"),
        (
            change_meta("schema", "fuelrail/9"),
            "this version reads 'fuelrail/1'",
        ),
        (
            lambda raw: raw.update({"geometry.safetensors": b"x" * 100}),
            "geometry.safetensors: ",
        ),
        (
            lambda raw: raw.pop("geometry.safetensors"),
            "geometry.safetensors: the member is missing",
        ),
        (
            lambda raw: raw.pop("cam_back.jpg"),
            "cam_front, cam_back these have an image: [1, 0]",
        ),
        (flip_scan, "cam_back.jpg: a damaged JPEG"),
        (
            lambda raw: raw.update({"cam_back.jpg": raw["cam_back.jpg"][:-2]}),
            "cam_back.jpg: a truncated JPEG",
        ),
        (
            lambda raw: raw.update({"lidar_top.npy": raw["lidar_top.npy"][:-1]}),
            "lidar_top.npy: ",
        ),
    ],
)
def test_only_deep_verification_sees_what_a_writer_got_wrong(out, change, says):
    row = rewrite(out, 1, change)
    assert faults(out) == []
    reported = faults(out, deep=True)
    assert len(reported) == 1
    assert (reported[0].key, reported[0].offset) == (row.key, row.offset)
    assert says in reported[0].text
