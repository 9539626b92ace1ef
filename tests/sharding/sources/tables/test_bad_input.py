"""Bad input of a manifest is named with table and row."""

from __future__ import annotations

import json
from functools import partial

import pyarrow as pa
import pytest
from pyarrow import parquet

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared import arrow
from support.manifest_edits import edit, put, scan, without
from support.manifest_world import write_wide
from support.source_world import make_world


def move_rows(rows):
    return [rows[0], *rows[4:], *rows[1:4]]


def in_units_of_us(rows):
    for row in rows:
        row["timestamp_us"] = row.pop("timestamp_ns")


BOX = {
    "x": 1.0,
    "y": 2.0,
    "z": 0.0,
    "length": 4.0,
    "width": 2.0,
    "height": 1.5,
    "yaw": 0.1,
    "category": "car",
}
BAD_WIDE = {
    "no clips": (without("clip_id"), "no column clip_id"),
    "no time": (
        without("timestamp_ns"),
        r"no column of time, one of timestamp_ns",
    ),
    "no path": (without("cam.cam_left.path"), r"no column cam.cam_left.path"),
    "no calibration": (
        without("cam.cam_left.intrinsics"),
        r"row 0: the camera of .* has no intrinsics",
    ),
    "clips apart": (
        move_rows,
        r"row 5: clip 'drive-0' comes again.*sort the table by clip_id",
    ),
    "twice": (
        lambda rows: [rows[0], *rows],
        r"row 1.*is also the time of row 0",
    ),
    "empty clip": (put(2, clip_id=""), r"row 2: clip_id is empty"),
    "unit": (in_units_of_us, r"row 0, column timestamp_us.*check the unit"),
    "text for time": (
        put(2, timestamp_ns="noon"),
        r"row 2, column timestamp_ns: \"noon\" is not int64",
    ),
    "fraction": (
        put(0, timestamp_ns=1.5),
        r"row 0, column timestamp_ns: 1.5 is not int64",
    ),
    "NaN": (
        put(1, cam__cam_left__cam2ego__t=[0, float("nan"), 0]),
        r"row 1, column cam.cam_left.cam2ego: .*not finite",
    ),
    "no unit quaternion": (
        put(1, cam__cam_left__cam2ego__q_wxyz=[1, 1, 0, 0]),
        r"row 1, column cam.cam_left.cam2ego",
    ),
    "quaternion beyond squares": (
        put(1, ego2global__q_wxyz=[1e200, 0, 0, 0]),
        r"row 1, column ego2global: no unit",
    ),
    "beyond the Earth": (
        put(1, ego2global__t=[1e200, 0, 0]),
        r"row 1, column ego2global: .* over 1e\+09 m",
    ),
    "null for a number": (
        put(0, ego2global__t=[None, 0, 0]),
        r"row 0, column ego2global.t: \[null, 0, 0\] has null",
    ),
    "NUL": (
        put(2, cam__cam_left__path="a\0.mp4#frame=1"),
        r"row 2, column cam.cam_left.path: 'a.*has a NUL",
    ),
    "long clip": (
        put(3, clip_id="c" * 5000),
        r"row 3: clip_id 'c+.*' has 5000 bytes, allowed are 4096; shorten",
    ),
    "matrix for quaternion": (
        put(1, ego2global__q_wxyz=[0.0] * 9),
        r"row 1, column ego2global.q_wxyz: it has 9",
    ),
    "K of zeros": (
        put(3, cam__cam_back__intrinsics=[[0, 0, 0]] * 3),
        r"row 3, column cam.cam_back.intrinsics",
    ),
    "out of the root": (
        put(0, cam__cam_left__path="../1.jpg"),
        "not inside the source",
    ),
    "absent file": (
        put(0, cam__cam_left__path="1.jpg"),
        r"1.jpg.*no file.*missing_camera=mask",
    ),
    "no range": (
        put(0, cam__cam_left__path="drive-0/cam_left/0.jpg#9+999999"),
        "999999 bytes in a file of",
    ),
    "no tar": (put(0, cam__cam_left__path="tar:x.tar#1.jpg"), r"x.tar"),
    "no member": (put(0, cam__cam_left__path="tar:drive-0#1.jpg"), r"drive-0"),
    "other bytes": (
        put(0, cam__cam_left__num_bytes=5),
        r"image 'drive-0/cam_left/0.jpg' has \d+ bytes .*stated are 5",
    ),
    "absent video": (
        put(0, cam__cam_left__path="a.mp4#frame=3"),
        r"a.mp4.*no file.*missing_camera=mask",
    ),
    "time in a video": (
        put(0, cam__cam_left__path="a.mp4#pts=3"),
        r"row 0, column path.*by their numbers.*frame=12",
    ),
    "no number": (
        put(0, cam__cam_left__path="a.mp4#frame=x"),
        r"column cam.cam_left.path.*must be VIDEO#frame=N",
    ),
    "video out of the root": (
        put(0, cam__cam_left__path="../a.mp4#frame=1"),
        r"row 0.*not inside the source",
    ),
    "sweep in a video": (
        put(0, lidar__lidar_top__path="a.mp4#frame=1"),
        r"is an image, but its sensor",
    ),
    "unknown column": (
        put(0, cam__cam_left__pth="a"),
        r"cam.cam_left.pth is not known.*did you mean.*path",
    ),
    "list as attribute": (
        put(0, ego2gobal=[1.0]),
        r"ego2gobal.*attributes are numbers.*did you mean.*ego2global",
    ),
    "attribute of ours": (
        put(0, num_boxes=3),
        r"every dataset has a column num_boxes",
    ),
    "a struct for boxes": (
        lambda rows: [{**row, "boxes": {"yaw": 1.0}} for row in rows],
        "expected a list of structs",
    ),
    "box column": (
        put(0, boxes=[{"category": "car", "heading": 1.0}]),
        r"boxes have no column heading",
    ),
    "visibility": (
        put(0, boxes=[{**BOX, "visibility": 258}]),
        r"frame 0: visibility of a box is 258, out of range",
    ),
    "size": (
        put(0, cam__cam_left__width=2**40, cam__cam_left__height=9),
        r"1099511627776 x 9 px",
    ),
    "two splits": (put(1, split="val"), r"row 1, column split"),
    "sensor of no word": (
        lambda rows: [{**row, "cam.FRONT-LEFT.path": "a.jpg"} for row in rows],
        r"cam.FRONT-LEFT.path names the sensor 'FRONT-LEFT'; .* letters, digits and _, as cam.FRONT_LEFT.path",
    ),
    "two of three": (
        lambda rows: [{**row, "boxes": [{**BOX, "vx": 1.0, "vy": 0.0}]} for row in rows],
        r"has vx, vy of velocity, but no vz; write 0",
    ),
    "absolute": (
        put(0, cam__cam_left__path="/data/1.jpg"),
        r"row 0.*'/data/1.jpg' is not inside.*root=FOLDER_OR_URL",
    ),
    "URL": (
        put(0, cam__cam_left__path="s3://a/1.jpg"),
        r"row 0.*'s3://a/1.jpg' is not inside.*root=FOLDER_OR_URL",
    ),
    "range elsewhere": (
        put(0, cam__cam_left__path="/data/1.bin#0+9"),
        r"row 0.*not inside.*root=FOLDER_OR_URL",
    ),
    "tar elsewhere": (
        put(0, cam__cam_left__path="tar:/data/1.tar#1.jpg"),
        r"row 0.*not inside.*root=FOLDER_OR_URL",
    ),
    "plain q": (
        lambda rows: [{**row, "ego2global.q": [1, 0, 0, 0]} for row in rows],
        r"q_wxyz or ego2global.q_xyzw",
    ),
}


@pytest.mark.parametrize(("change", "match"), BAD_WIDE.values(), ids=BAD_WIDE)
def test_bad_rows_of_frames_are_named(wide, change, match):
    edit(wide, change)
    with pytest.raises(SourceError, match=match):
        scan(wide)


BAD_LONG = {
    "uncalibrated": (
        "calibration",
        lambda rows: rows[1:],
        r"sensor 'cam_front' has no row in .*calibration",
    ),
    "calibrated twice": (
        "calibration",
        lambda rows: [*rows, rows[0]],
        r"row 4: sensor 'cam_front' is there twice",
    ),
    "no intrinsics": (
        "calibration",
        put(0, intrinsics=None),
        r"is an image, but its sensor has no intrinsics",
    ),
    "two rows for one": (
        "sensor_data",
        lambda rows: [rows[0], *rows],
        r"row 1, column timestamp.*row 0",
    ),
    "stranger": (
        "boxes",
        put(0, timestamp_ns=1_600_000_000_000_000_001),
        r"row 0.*the time of no frame",
    ),
    "other clip": (
        "ego_pose",
        lambda rows: [{**rows[0], "clip_id": "x"}, *rows],
        r"ego_pose.*clip 'x' is not in",
    ),
    "no rotation": (
        "ego_pose",
        put(2, ego2global__q_wxyz=[0, 0, 0, 0]),
        r"ego_pose.*row 2, column ego2global",
    ),
}


@pytest.mark.parametrize(("table", "change", "match"), BAD_LONG.values(), ids=BAD_LONG)
def test_bad_rows_of_long_tables_are_named(long, table, change, match):
    edit(long, change, table)
    with pytest.raises(SourceError, match=match):
        scan(long)


@pytest.mark.parametrize(
    ("form", "data", "match"),
    [
        ("parquet", b"", "is empty"),
        (
            "parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "git-LFS pointer",
        ),
        ("parquet", b"PAR1 and nothing", "cannot be read"),
        (
            "jsonl",
            b'{"clip_id": "a"}\n{"clip_id": \n',
            "row 1: not a JSON object",
        ),
        (
            "jsonl",
            b'{"clip_id": "a"}\n{"clip_id": "name \xe9"}\n',
            "row 1: .*write the file as UTF-8",
        ),
        ("jsonl", b"\n", "no rows"),
        (
            "csv",
            b"clip_id,timestamp_ns\na,1,2\n",
            "cannot be read.*Expected 2 columns, got 3",
        ),
        ("jsonl", b"[" * 100_000, "row 0: not a JSON object"),
        (
            "jsonl",
            b'{"a": ' * 100_000,
            "row 0: not a JSON object.*(nested too deeply|truncated)",  # Python 3.14 goes on
        ),
        (
            "jsonl",
            partial(b'{"clip_id": "a"}\n'.ljust, 70 << 20),
            "a row after row 1 has [0-9]+ bytes, of which at most",
        ),
        ("csv", b"clip_id,\xff\xfe\na,1\n", "cannot be read: 'utf-8'"),
        ("csv", b"clip_id,timestamp_ns\n\xff,1\n", "cannot be read: .*UTF8"),
        (
            "csv",
            partial(b"clip_id,timestamp_ns\n".ljust, 9 << 20, b"a"),
            "cannot be read: .*block",
        ),
        ("csv", b"clip_id,timestamp_ns\na,noon\n", "cannot be read.*'noon'"),
        (
            "csv",
            b"clip_id,timestamp_ns,ego2global\na,1,[1]\n",
            "CSV has no lists, and ego2global is one",
        ),
    ],
)
def test_damaged_tables_are_named(tmp_path, form, data, match):
    """Data of megabytes is made in the test: what parameters hold, each worker holds to its end."""
    (tmp_path / f"frames.{form}").write_bytes(data if isinstance(data, bytes) else data())
    with pytest.raises(SourceError, match=match):
        scan(tmp_path)


def test_a_column_that_is_too_large_is_named_before_it_is_read(tmp_path, monkeypatch):
    write_wide(make_world(), tmp_path, "parquet")
    monkeypatch.setattr(arrow, "_MOST_COLUMN", 100)
    with pytest.raises(
        SourceError,
        match=r"frames\.parquet': column '.*' has [0-9]+ bytes, of which at most 100 are",
    ):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("blob.npy#1+" + "9" * 5000, "is not there|too long"),
        ("a.mp4#frame=" + "9" * 5000, "N from 0"),
    ],
)
def test_numbers_in_paths_that_no_file_has_are_named(wide, ref, says):
    def change(rows):
        rows[0].update(
            {name: ref for name in rows[0] if name.startswith("cam.") and name.endswith(".path")}
        )

    edit(wide, change)
    with pytest.raises(SourceError, match=says):
        scan(wide)


def test_two_tables_of_one_name_are_refused(wide):
    (wide / "frames.csv").write_text("clip_id\n")
    with pytest.raises(SourceError, match=r"frames.parquet|frames.jsonl and frames.csv"):
        scan(wide)


def test_floats_cannot_hold_nanoseconds(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(), root, "parquet")
    table = parquet.read_table(root / "frames.parquet")
    floats = table["timestamp_ns"].cast(pa.float64(), safe=False)
    position = table.schema.get_field_index("timestamp_ns")
    parquet.write_table(
        table.set_column(position, "timestamp_ns", floats),
        root / "frames.parquet",
    )
    with pytest.raises(SourceError, match="cannot hold nanoseconds"):
        scan(root)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([1, [2]], "jsonl"),
        (
            [1.0, 2.0],
            r"column value.x cannot become a channel: samples differ in shape: \[3, 1\] and \[3, 2\]",
        ),
    ],
)
def test_values_that_are_not_alike_are_named(wide, value, match):
    edit(
        wide,
        lambda rows: (
            [{**row, "value.x": [[1.0]] * 3} for row in rows[:-1]]
            + [{**rows[-1], "value.x": [value] * 3}]
        ),
    )
    with pytest.raises(SourceError, match=match):
        scan(wide)


def test_csv_with_another_separator_is_refused(tmp_path):
    write_wide(make_world(), tmp_path, "csv")
    file = tmp_path / "frames.csv"
    file.write_text(file.read_text().replace(",", ";"))
    with pytest.raises(
        SourceError,
        match=r"frames.csv' has the separator ';'; write it with commas",
    ):
        scan(tmp_path)


def test_a_table_of_another_form_is_named(wide):
    (wide / "frames.jsonl").rename(wide / "frames.json")
    with pytest.raises(
        SourceError,
        match=r"frames.json' must end with .parquet, .jsonl, .csv \(JSON lines",
    ):
        scan(wide / "frames.json")


def test_more_attributes_than_a_dataset_takes_are_refused_by_the_scan(tmp_path):
    write_wide(make_world(1, 2, lidars=()), tmp_path, "jsonl")
    path = tmp_path / "frames.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    spec = SourceSpec("manifest", str(tmp_path), {})
    num_attributes = len(make_source(spec).attribute_types)
    for number, is_allowed in (
        (4096 - 5 - num_attributes, True),
        (4096 - 4 - num_attributes, False),
    ):
        columns = {f"a{column}": 1 for column in range(number)}
        path.write_text("".join(json.dumps({**row, **columns}) + "\n" for row in rows))
        if is_allowed:
            fr.shard(f"manifest:{tmp_path}", tmp_path / "out", workers=1)
            assert not fr.verify(tmp_path / "out").faults
        else:
            with pytest.raises(SourceError, match=r"has 4,092 attributes, .* takes 4,091"):
                scan_source(spec)
