"""Manifests: types and units of columns, values and attributes, and where their files are."""

from __future__ import annotations

import codecs
import json
import re

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import Geometry, decode_arrays
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.tables import tables
from fuelrail.sharding.verify.dataset import verify
from support.batches import load
from support.manifest_edits import OPTIONS, edit, put, scan, without
from support.manifest_world import write_table, write_wide
from support.sharding import scanned
from support.source_world import make_world


def geometries(root, tmp_path, **options):
    table = scanned("manifest", root, tmp_path, **{**OPTIONS, **options}).table
    return [decode_arrays(table.row(number).geometry, Geometry) for number in range(len(table))]


def test_other_types_are_cast_by_name(tmp_path):
    """Fixed-size lists, float32, dictionaries, Arrow's timestamps and large texts say the same."""
    plain = tmp_path / "plain"
    retyped = tmp_path / "other"
    for root in (plain, retyped):
        root.mkdir()
        write_wide(make_world(), root, "parquet")
    table = parquet.read_table(retyped / "frames.parquet")
    changes = {
        "clip_id": ("clip_id", pa.dictionary(pa.int32(), pa.string())),
        "timestamp_ns": ("timestamp", pa.timestamp("ns", "UTC")),
        "cam.cam_left.timestamp_us": ("cam.cam_left.timestamp_us", pa.uint64()),
        "cam.cam_left.path": ("cam.cam_left.path", pa.large_string()),
        "cam.cam_left.cam2ego": (
            "cam.cam_left.cam2ego",
            pa.list_(pa.float64(), 16),
        ),
        "cam.cam_left.intrinsics": (
            "cam.cam_left.intrinsics",
            pa.large_list(pa.float64()),
        ),
    }
    for name, (new, kind) in changes.items():
        position = table.schema.get_field_index(name)
        column = table[name].combine_chunks()
        column = column.dictionary_encode() if name == "clip_id" else column.cast(kind)
        table = table.set_column(position, new, column)
    parquet.write_table(table, retyped / "frames.parquet")
    for ours, theirs in zip(
        geometries(plain, tmp_path), geometries(retyped, tmp_path), strict=True
    ):
        for name in ("cam2ego", "intrinsics", "cam_timestamp_ns", "ego2global"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)


def test_corner_pixels_and_other_camera_axes(wide, tmp_path):
    plain = geometries(wide, tmp_path)[0]
    moved_ = geometries(wide, tmp_path, pixel_origin="corner", camera_axes={"cam_left": "flu"})[0]
    np.testing.assert_allclose(moved_.intrinsics[:, :2, 2], plain.intrinsics[:, :2, 2] - 0.5)
    np.testing.assert_allclose(moved_.cam2ego[0], plain.cam2ego[0])
    # The optical axis of a camera whose x is forward.
    np.testing.assert_allclose(moved_.cam2ego[1, :3, 2], plain.cam2ego[1, :3, 0], atol=1e-12)
    np.testing.assert_allclose(moved_.cam2ego[1, :3, 0], -plain.cam2ego[1, :3, 1], atol=1e-12)


def test_without_poses_they_are_the_identity_and_the_manifest_says_so(wide, tmp_path):
    prefixes = [
        "ego2global",
        *(f"cam.{name}.ego2global" for name in make_world().cameras),
    ]
    names = [f"{prefix}.{part}" for prefix in prefixes for part in ("t", "q_wxyz", "q_xyzw")]
    edit(wide, without(*names, "boxes"))
    assert scan(wide).facts == {"poses": "none"}
    np.testing.assert_array_equal(geometries(wide, tmp_path)[0].ego2global, np.eye(4))


def test_without_any_calibration_batches_lack_matrices_and_coefficients_of_cameras(wide, tmp_path):
    def stripped(rows, span=slice(None)):
        for row in rows[span]:
            for name in [
                name for name in row if re.match(r"cam\..*\.(intrinsics|[fc][xy]|cam2ego)\b", name)
            ]:
                row[name] = None

    edit(wide, lambda rows: stripped(rows, slice(1, 2)))
    with pytest.raises(SourceError, match=r"row 1: the camera of .* has no intrinsics"):
        scan(wide)
    names = {
        name
        for name in json.loads((wide / "frames.jsonl").read_text().splitlines()[0])
        if name[:4] == "cam."
    }
    edit(
        wide,
        without(*(name for name in names if re.search(r"\.(intrinsics|[fc][xy]|cam2ego)\b", name))),
    )
    assert scan(wide).facts == {"calibration": "none"}
    fr.shard(f"manifest:{wide}", tmp_path / "out", workers=1, options=OPTIONS)
    with load(tmp_path / "out", points=True) as loader:
        batch = next(iter(loader))
    assert (
        not {
            "intrinsics",
            "dist",
            "cam2ego",
            "cam2keyego",
            "ego2img",
            "lidar2img",
        }
        & batch.keys()
    )
    assert {
        "img",
        "ego2global",
        "lidar2ego",
        "points",
        "gt_boxes_3d",
    } <= batch.keys()


def test_a_frame_without_a_path_has_no_image(wide):
    edit(wide, put(1, cam__cam_left__path=None))
    with pytest.raises(SourceError, match=r"frame 1 has no image of cam_left \(no path\)"):
        scan(wide)
    assert scan(wide, missing_camera="mask").report.masked == {"cam_left": {"no path": 1}}


def test_measurements_too_far_from_the_frame_are_left_out(long):
    report = scan(long, tolerance_ms=4.0, missing_camera="mask").report
    assert report.masked == {
        "cam_back": {"no image within 4 ms": 8},
        "cam_front": {"no image within 4 ms": 8},
    }
    (long / "boxes.jsonl").unlink()
    assert (
        scan(
            long,
            reference="cam_back",
            tolerance_ms=20.0,
            missing_camera="mask",
            points=False,
        ).report.samples
        == 8
    )


def test_labels_of_some_frames_only(long, tmp_path):
    """A frame without rows is not labelled; a row without a category says that a frame has no boxes."""
    times = sorted(
        {
            row["timestamp_ns"]
            for row in map(json.loads, (long / "boxes.jsonl").read_text().splitlines())
        }
    )

    def change(rows):
        first_rows = [row for row in rows if row["timestamp_ns"] == times[0]]
        empty = dict.fromkeys(first_rows[0]) | {
            "clip_id": "drive-0",
            "timestamp_ns": times[1],
        }
        return [*first_rows, empty]

    edit(long, change, "boxes")
    table = scanned("manifest", long, tmp_path, **OPTIONS).table
    assert [table.row(number).boxes is None for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_lists_without_a_box_say_that_frames_are_labelled(wide, tmp_path):
    edit(
        wide,
        lambda rows: [{**row, "boxes": [] if index else None} for index, row in enumerate(rows)],
    )
    table = scanned("manifest", wide, tmp_path, **OPTIONS).table
    assert [table.row(number).boxes is None for number in range(3)] == [
        True,
        False,
        False,
    ]


def test_free_columns_are_attributes_and_the_split_is_the_source_s(wide, tmp_path):
    edit(
        wide,
        lambda rows: [
            {**row, "split": "val" if row["clip_id"] == "drive-1" else "train"} for row in rows
        ],
    )
    info = scan(wide)
    assert info.splits == {"train": ["drive-0"], "val": ["drive-1"]}
    source = make_source(SourceSpec("manifest", str(wide), OPTIONS))
    assert source.attribute_types["weather_code"] is int


def facts_of(number: int) -> dict:
    """Values and attributes of a row."""
    return {
        "value.action": [number + 0.25, 1, -2.5],
        "value.pose": [[1, number], [0, 1]],
        "value.gear": number % 3,
        "value.path": [[0.5, number]] * (number % 4),
        "value.caption": f"row {number}" if number % 2 else None,
        "value.braking": number % 2 == 0,
        "night": None if number == 3 else number > 4,
        "limit": number * 1.5,
        "crew": number,
        "town": "Ulm" if number < 4 else None,
    }


@pytest.mark.costly
@pytest.mark.parametrize("window", [None, {"frames": [-1, 0]}])
def test_values_and_attributes_of_rows_are_in_batches(wide, tmp_path, window):
    edit(
        wide,
        lambda rows: [{**row, **facts_of(number)} for number, row in enumerate(rows)],
    )
    fr.shard(
        f"manifest:{wide}",
        tmp_path / "out",
        workers=1,
        options=OPTIONS,
        splits={"train": 1.0},
    )
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    names = ["action", "pose", "gear", "path", "caption", "braking"]
    chosen = {
        "select": [*names, "night", "limit", "crew", "town"],
        "window": window,
    }
    with load(tmp_path / "out", 4, **chosen) as loader:
        loaded = list(loader)
        assert "town_valid" in str(loader.describe())
    assert len(loaded) == 2
    for batch in loaded:
        crew = batch["crew"].tolist()
        for sample, row in enumerate(crew):
            for t, number in enumerate([row] if window is None else row):
                place = (sample,) if window is None else (sample, t)
                for name, expected in facts_of(number).items():
                    name = name.removeprefix("value.")
                    value = batch[name]
                    is_valid = batch[f"{name}_valid"][place]
                    assert bool(is_valid) == (expected is not None), name
                    value = value["values"] if name == "path" else value
                    for index in place:
                        value = value[index]
                    if isinstance(expected, str) or (expected is None and name != "night"):
                        assert value == expected, name
                    elif expected is not None:
                        assert value.tolist() == expected, name
        dtypes = {
            name: str(batch[name].dtype)
            for name in ("action", "gear", "braking", "night", "limit", "crew")
        }
        assert dtypes == {
            "action": "torch.float64",
            "gear": "torch.int64",
            "braking": "torch.bool",
            "night": "torch.bool",
            "limit": "torch.float64",
            "crew": "torch.int64",
        }


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        (
            ["gear", "nigth"],
            "no channel or attribute 'nigth'; did you mean 'night'",
        ),
        (["frame"], "a batch has another entry 'frame'"),
        (
            "night",
            "select='night' must be a list of names of channels and attributes",
        ),
    ],
)
def test_attributes_that_cannot_be_in_a_batch(wide, tmp_path, attributes, match):
    edit(
        wide,
        lambda rows: [{**row, "night": True, "gear": 1, "value.gear": 2} for row in rows],
    )
    fr.shard(
        f"manifest:{wide}",
        tmp_path / "out",
        workers=1,
        options=OPTIONS,
        splits={"train": 1.0},
    )
    with pytest.raises(ConfigError, match=match):
        load(tmp_path / "out", 2, select=attributes)
    with load(tmp_path / "out", 2, select=["night", "gear"]) as loader:
        kinds = {entry.name: entry.kind for entry in loader.selected}
    assert kinds == {"gear": "array", "night": "array"}, "a name of both is the channel"


def test_one_file_is_a_location_too(wide):
    (wide / "frames.jsonl").rename(wide / "mine.jsonl")
    assert scan(wide / "mine.jsonl").num_samples == 8


@pytest.mark.costly
def test_a_table_longer_than_a_batch(tmp_path, monkeypatch):
    """Rows of a clip lie in several batches, and clips begin inside of one."""
    monkeypatch.setattr(tables, "_ROWS", 102)
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(1, 1), root, "jsonl")
    (row,) = map(json.loads, (root / "frames.jsonl").read_text().splitlines())
    rows = []
    for number in range(250):
        frame = {
            **row,
            "clip_id": f"c{number // 70}",
            "timestamp_ns": row["timestamp_ns"] + number * 100_000_000,
        }
        rows.append(
            {name: value for name, value in frame.items() if not name.endswith("timestamp_us")}
        )
    for form in ("jsonl", "parquet"):
        (root / "frames.jsonl").unlink(missing_ok=True)
        write_table(root, "frames", rows, form)
        info = scan(root)
        assert [clip.num_samples for clip in info.clips] == [70, 70, 70, 40]


def test_a_byte_order_mark_is_passed_over_and_an_image_is_what_its_bytes_are(wide, tmp_path):
    file = wide / "frames.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    image = wide / "drive-0" / "cam_left" / "0.jpg"
    cv2.imwrite(str(image.with_suffix(".png")), cv2.imread(str(image)))
    image.with_suffix(".png").rename(image)
    row = scanned("manifest", wide, tmp_path, **OPTIONS).table.row(0)
    assert {member.name for member in row.members} >= {
        "cam_left.png",
        "cam_front.jpg",
    }


def test_csv_of_spreadsheets(tmp_path):
    """Empty cells are null, a clip that looks like a date is a text."""
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(), root, "csv")
    table = csv.read_csv(root / "frames.csv")
    names = pa.array(
        ["2024-01-02" if clip == "drive-0" else "7" for clip in table["clip_id"].to_pylist()]
    )
    csv.write_csv(table.set_column(0, "clip_id", names), root / "frames.csv")
    (root / "boxes.csv").unlink()
    assert [clip.clip_name for clip in scan(root).clips] == ["2024-01-02", "7"]


@pytest.mark.parametrize("paths", ["file", "range", "tar"])
def test_paths_may_be_below_a_root_and_name_it(tmp_path, paths):
    root = tmp_path / "data"
    tables = tmp_path / "tables"
    root.mkdir()
    tables.mkdir()
    write_wide(make_world(), root, "jsonl", paths)
    (root / "frames.jsonl").rename(tables / "frames.jsonl")
    with pytest.raises(SourceError, match=r"data\.tar|missing_camera"):
        scan(tables)
    below = scanned("manifest", tables, tmp_path, **OPTIONS, root=str(root))
    members = [below.table.row(number).members for number in range(len(below.table))]
    (tmp_path / "absolute").mkdir()

    def absolute(rows):
        for row in rows:
            for name in [name for name in row if name.endswith(".path")]:
                is_tar = row[name].startswith("tar:")
                row[name] = f"{'tar:' if is_tar else ''}{root}/{row[name].removeprefix('tar:')}"

    edit(tables, absolute)
    named = scanned(
        "manifest",
        tables,
        tmp_path / "absolute",
        **OPTIONS,
        root=f"file://{root}/",
    )
    assert [named.table.row(number).members for number in range(len(named.table))] == members
    assert named.source.options == below.source.options
    assert str(tmp_path) not in json.dumps(named.source.options), (
        "no path of a machine is in a recipe"
    )
    (tables / "frames.jsonl").rename(root / "frames.jsonl")
    assert scan(root).num_samples == 8


def test_a_root_may_be_a_url(wide, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(wide), "/bucket/drive", recursive=True)
    (tmp_path / "tables").mkdir()
    (wide / "frames.jsonl").rename(tmp_path / "tables/frames.jsonl")
    edit(
        tmp_path / "tables",
        put(
            0,
            cam__cam_left__path="memory://bucket/drive/drive-0/cam_left/0.jpg",
        ),
    )
    options = {**OPTIONS, "root": "memory://bucket/drive"}
    assert scan_source(SourceSpec("manifest", str(tmp_path / "tables"), options)).num_samples == 8


def test_nan_in_json_lines_is_null_and_counted(wide):
    """Python's `json` writes it for what pandas does not have."""
    rows = [json.loads(line) for line in (wide / "frames.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"score": number / 2, "note": "a NaN, or -Infinity"}
    rows[2]["score"], rows[5]["score"] = float("nan"), float("-inf")
    (wide / "frames.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = fr.shard(f"manifest:{wide}", wide / "out", options=OPTIONS, workers=1)
    table = fr.open(wide / "out").table.to_pylist()
    scores = {row["timestamp_ns"]: row["score"] for row in table}
    missing = {rows[number]["timestamp_ns"] for number in (2, 5)}
    assert {time for time, score in scores.items() if score is None} == missing
    assert {row["note"] for row in table} == {"a NaN, or -Infinity"}
    assert report.scan.noted["NaN and infinities in JSON, read as null outside of lists"] == 2


def test_columns_that_all_datasets_have(wide):
    """Those that are worked out may be given; those of the index are refused, with advice."""
    columns = {
        "weather": "rain",
        "speed_mps": 3,
        "hour_utc": 7.5,
        "vehicle": "v",
        "log_id": "l",
    }
    edit(wide, lambda rows: [{**row, **columns} for row in rows])
    edit(wide, put(3, speed_mps=None))
    fr.shard(f"manifest:{wide}", wide / "out", options=OPTIONS, workers=1)
    rows = fr.open(wide / "out").table.to_pylist()
    assert all(
        row[name] == value for row in rows for name, value in columns.items() if "speed" not in name
    )
    assert sum(row["speed_mps"] != 3.0 for row in rows) == 1
    assert all(isinstance(row["speed_mps"], float) for row in rows)
    for name, advice in {
        "clip": "name it clip_id",
        "frame": "frame_number",
        "key": "source_key",
    }.items():
        edit(wide, lambda rows, name=name: [{**row, name: "a"} for row in rows])
        with pytest.raises(SourceError, match=f"every dataset has a column {name} .*{advice}"):
            scan(wide)
        edit(wide, without(name))
    edit(wide, put(0, hour_utc="noon"))
    edit(wide, lambda rows: [{**row, "hour_utc": "noon"} for row in rows])
    with pytest.raises(SourceError, match="the column hour_utc is string; all datasets have it"):
        scan(wide)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_texts_that_look_like_other_values_stay_texts(tmp_path, form):
    """Codes with leading zeros, numbers of many digits, dates."""
    (tmp_path / "1.jpg").write_bytes(cv2.imencode(".jpg", np.zeros((24, 32, 3)))[1].tobytes())
    free = {
        "code": ["007", "010", "1"],
        "serial": ["12345678901234567890", "1", "2"],
        "day": ["2020-01-31", "2020-02-01", "2020-02-02"],
        "number": [1, -2, 30],
        "share": [0.5, 1.0, -2.25],
        "night": [True, False, True],
        "word": ["a", "b", None],
    }
    rows = []
    for number in range(3):
        row = {
            "clip_id": "c",
            "timestamp_ns": 1_600_000_000_000_000_000 + number,
            "cam.f.path": "1.jpg",
        }
        rows.append(row | {name: values[number] for name, values in free.items()})
    if form == "jsonl":
        text = "\n".join(map(json.dumps, rows))
    else:
        cells = [
            ["" if value is None else str(value).lower() for value in row.values()] for row in rows
        ]
        text = "\n".join(map(",".join, [[*rows[0]], *cells])) + "\n"
    (tmp_path / f"frames.{form}").write_text(text)
    fr.shard(f"manifest:{tmp_path}", tmp_path / "out", workers=1)
    table = fr.open(tmp_path / "out").table.to_pylist()
    table.sort(key=lambda row: row["timestamp_ns"])
    for name, values in free.items():
        assert [row[name] for row in table] == values, name


def test_a_column_of_csv_that_becomes_another_type_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 200)
    lines = [f"c,{1_600_000_000_000_000_000 + number},1.jpg,{number}" for number in range(1, 40)]
    lines[-1] = lines[-1].rpartition(",")[0] + ",007"
    text = "\n".join(["clip_id,timestamp_ns,cam.f.path,code", *lines])
    (tmp_path / "frames.csv").write_text(text)
    with pytest.raises(
        SourceError,
        match="column code is int64 in the first rows, and has a text",
    ):
        scan(tmp_path)
