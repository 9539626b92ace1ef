"""Manifests: types and units of columns, matching by time, and bad input, which is named with table and row."""

from __future__ import annotations

import codecs
import io
import json

import cv2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import Geometry, decode_arrays
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared import arrow
from fuelrail.sharding.sources.shared.points import parse_points
from fuelrail.sharding.sources.tables import tables
from fuelrail.sharding.sources.tables.matching import nearest
from support.manifest_world import write_long, write_table, write_wide
from support.sharding import scanned
from support.source_world import make_world

OPTIONS = {"boxes_in": "global", "lidar_columns": ["x", "y", "z", "intensity", "ring"]}


def scan(root, **options):
    return scan_source(SourceSpec("manifest", str(root), {**OPTIONS, **options}))


def geometries(root, tmp_path, **options):
    table = scanned("manifest", root, tmp_path, **{**OPTIONS, **options}).table
    return [decode_arrays(table.row(number).geometry, Geometry) for number in range(len(table))]


@pytest.fixture
def wide(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(), root, "jsonl")
    return root


@pytest.fixture
def long(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_long(make_world(), root, "jsonl")
    return root


def edit(root, change, stem="frames"):
    file = root / f"{stem}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = change(rows) or rows
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put(number, **values):
    def change(rows):
        rows[number].update({name.replace("__", "."): value for name, value in values.items()})

    return change


def without(*names):
    def change(rows):
        return [{name: value for name, value in row.items() if name not in names} for row in rows]

    return change


def moved(rows):
    return [rows[0], *rows[4:], *rows[1:4]]


def in_units_of_us(rows):
    for row in rows:
        row["timestamp_us"] = row.pop("timestamp_ns")


BOX = {"x": 1.0, "y": 2.0, "z": 0.0, "length": 4.0, "width": 2.0, "height": 1.5, "yaw": 0.1, "category": "car"}
BAD_WIDE = {
    "no clips": (without("clip_id"), "no column clip_id"),
    "no time": (without("timestamp_ns"), r"no column of time, one of timestamp_ns"),
    "no path": (without("cam.cam_left.path"), r"no column cam.cam_left.path"),
    "no calibration": (without("cam.cam_left.intrinsics"), r"row 0: the camera of .* has no intrinsics"),
    "clips apart": (moved, r"row 5: clip 'drive-0' comes again.*sort the table by clip_id"),
    "twice": (lambda rows: [rows[0], *rows], r"row 1.*is also the time of row 0"),
    "empty clip": (put(2, clip_id=""), r"row 2: clip_id is empty"),
    "unit": (in_units_of_us, r"row 0, column timestamp_us.*check the unit"),
    "text for time": (put(2, timestamp_ns="noon"), r"row 2, column timestamp_ns: \"noon\" is not int64"),
    "fraction": (put(0, timestamp_ns=1.5), r"row 0, column timestamp_ns: 1.5 is not int64"),
    "NaN": (put(1, cam__cam_left__cam2ego__t=[0, float("nan"), 0]), r"row 1: not a JSON object"),
    "no unit quaternion": (put(1, cam__cam_left__cam2ego__q_wxyz=[1, 1, 0, 0]), r"row 1, column cam.cam_left.cam2ego"),
    "quaternion beyond squares": (put(1, ego2global__q_wxyz=[1e200, 0, 0, 0]), r"row 1, column ego2global: no unit"),
    "beyond the Earth": (put(1, ego2global__t=[1e200, 0, 0]), r"row 1, column ego2global: .* over 1e\+09 m"),
    "null for a number": (put(0, ego2global__t=[None, 0, 0]), r"row 0, column ego2global.t: \[null, 0, 0\] has null"),
    "NUL": (put(2, cam__cam_left__path="a\0.mp4#frame=1"), r"row 2, column cam.cam_left.path: 'a.*has a NUL"),
    "long clip": (put(3, clip_id="c" * 5000), r"row 3: clip_id 'c+.*' has 5000 bytes, allowed are 4096; shorten"),
    "matrix for quaternion": (put(1, ego2global__q_wxyz=[0.0] * 9), r"row 1, column ego2global.q_wxyz: it has 9"),
    "K of zeros": (put(3, cam__cam_back__intrinsics=[[0, 0, 0]] * 3), r"row 3, column cam.cam_back.intrinsics"),
    "out of the root": (put(0, cam__cam_left__path="../1.jpg"), "not inside the source"),
    "absent file": (put(0, cam__cam_left__path="1.jpg"), r"1.jpg.*no file.*missing_camera=mask"),
    "no range": (put(0, cam__cam_left__path="drive-0/cam_left/0.jpg#9+999999"), "999999 bytes in a file of"),
    "no tar": (put(0, cam__cam_left__path="tar:x.tar#1.jpg"), r"x.tar"),
    "no member": (put(0, cam__cam_left__path="tar:drive-0#1.jpg"), r"drive-0"),
    "other bytes": (put(0, cam__cam_left__num_bytes=5), r"image 'drive-0/cam_left/0.jpg' has \d+ bytes .*stated are 5"),
    "absent video": (put(0, cam__cam_left__path="a.mp4#frame=3"), r"a.mp4.*no file.*missing_camera=mask"),
    "time in a video": (put(0, cam__cam_left__path="a.mp4#pts=3"), r"row 0, column path.*by their numbers.*frame=12"),
    "no number": (put(0, cam__cam_left__path="a.mp4#frame=x"), r"row 0, column path.*must be VIDEO#frame=N"),
    "video out of the root": (put(0, cam__cam_left__path="../a.mp4#frame=1"), r"row 0.*not inside the source"),
    "sweep in a video": (put(0, lidar__lidar_top__path="a.mp4#frame=1"), r"is an image, but its sensor"),
    "unknown column": (put(0, cam__cam_left__pth="a"), r"cam.cam_left.pth is not known.*did you mean.*path"),
    "list as attribute": (put(0, ego2gobal=[1.0]), r"ego2gobal.*attributes are numbers.*did you mean.*ego2global"),
    "attribute of ours": (put(0, speed_mps=3.0), r"speed_mps"),
    "a struct for boxes": (lambda rows: [{**row, "boxes": {"yaw": 1.0}} for row in rows], "expected a list of structs"),
    "box column": (put(0, boxes=[{"category": "car", "heading": 1.0}]), r"boxes have no column heading"),
    "visibility": (put(0, boxes=[{**BOX, "visibility": 258}]), r"frame 0: visibility of a box is 258, out of range"),
    "size": (put(0, cam__cam_left__width=2**40, cam__cam_left__height=9), r"1099511627776 x 9 px"),
    "two splits": (put(1, split="val"), r"row 1, column split"),
    "sensor of no word": (
        lambda rows: [{**row, "cam.FRONT-LEFT.path": "a.jpg"} for row in rows],
        r"cam.FRONT-LEFT.path names the sensor 'FRONT-LEFT'; .* letters, digits and _, as cam.FRONT_LEFT.path",
    ),
    "two of three": (
        lambda rows: [{**row, "boxes": [{**BOX, "vx": 1.0, "vy": 0.0}]} for row in rows],
        r"has vx, vy of velocity, but no vz; write 0",
    ),
    "absolute": (put(0, cam__cam_left__path="/data/1.jpg"), r"row 0.*'/data/1.jpg' is not inside.*root=FOLDER_OR_URL"),
    "URL": (put(0, cam__cam_left__path="s3://a/1.jpg"), r"row 0.*'s3://a/1.jpg' is not inside.*root=FOLDER_OR_URL"),
    "range elsewhere": (put(0, cam__cam_left__path="/data/1.bin#0+9"), r"row 0.*not inside.*root=FOLDER_OR_URL"),
    "tar elsewhere": (put(0, cam__cam_left__path="tar:/data/1.tar#1.jpg"), r"row 0.*not inside.*root=FOLDER_OR_URL"),
    "plain q": (lambda rows: [{**row, "ego2global.q": [1, 0, 0, 0]} for row in rows], r"q_wxyz or ego2global.q_xyzw"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), BAD_WIDE.values(), ids=BAD_WIDE)
def test_bad_rows_of_frames_are_named(wide, change, match):
    edit(wide, change)
    with pytest.raises(SourceError, match=match):
        scan(wide)


BAD_LONG = {
    "uncalibrated": ("calibration", lambda rows: rows[1:], r"sensor 'cam_front' has no row in .*calibration"),
    "calibrated twice": ("calibration", lambda rows: [*rows, rows[0]], r"row 4: sensor 'cam_front' is there twice"),
    "no intrinsics": ("calibration", put(0, intrinsics=None), r"is an image, but its sensor has no intrinsics"),
    "two rows for one": ("sensor_data", lambda rows: [rows[0], *rows], r"row 1, column timestamp.*row 0"),
    "stranger": ("boxes", put(0, timestamp_ns=1_600_000_000_000_000_001), r"row 0.*the time of no frame"),
    "other clip": ("ego_pose", lambda rows: [{**rows[0], "clip_id": "x"}, *rows], r"ego_pose.*clip 'x' is not in"),
    "no rotation": ("ego_pose", put(2, ego2global__q_wxyz=[0, 0, 0, 0]), r"ego_pose.*row 2, column ego2global"),
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
        ("parquet", b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        ("parquet", b"PAR1 and nothing", "cannot be read"),
        ("jsonl", b'{"clip_id": "a"}\n{"clip_id": \n', "row 1: not a JSON object"),
        ("jsonl", b'{"clip_id": "a"}\n{"clip_id": "name \xe9"}\n', "row 1: .*write the file as UTF-8"),
        ("jsonl", b"\n", "no rows"),
        ("csv", b"clip_id,timestamp_ns\na,1,2\n", "cannot be read.*Expected 2 columns, got 3"),
        ("jsonl", b"[" * 100_000, "row 0: not a JSON object"),
        ("jsonl", b'{"a": ' * 100_000, "row 0: not a JSON object.*nested too deeply"),
        ("jsonl", b'{"clip_id": "a"}\n' + b" " * (70 << 20), "a row after row 1 has [0-9]+ bytes, of which at most"),
        ("csv", b"clip_id,\xff\xfe\na,1\n", "cannot be read: 'utf-8'"),
        ("csv", b"clip_id,timestamp_ns\n\xff,1\n", "cannot be read: .*UTF8"),
        ("csv", b"clip_id,timestamp_ns\n" + b"a" * (9 << 20), "cannot be read: .*block"),
        ("csv", b"clip_id,timestamp_ns\na,noon\n", "cannot be read.*'noon'"),
        ("csv", b"clip_id,timestamp_ns,ego2global\na,1,[1]\n", "CSV has no lists, and ego2global is one"),
    ],
)
def test_damaged_tables_are_named(tmp_path, form, data, match):
    (tmp_path / f"frames.{form}").write_bytes(data)
    with pytest.raises(SourceError, match=match):
        scan(tmp_path)


def test_a_column_that_is_too_large_is_named_before_it_is_read(tmp_path, monkeypatch):
    write_wide(make_world(), tmp_path, "parquet")
    monkeypatch.setattr(arrow, "_MOST_COLUMN", 100)
    with pytest.raises(SourceError, match=r"frames\.parquet': column '.*' has [0-9]+ bytes, of which at most 100 are"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("ref", "says"),
    [("blob.npy#1+" + "9" * 5000, "is not there|too long"), ("a.mp4#frame=" + "9" * 5000, "N from 0")],
)
def test_numbers_in_paths_that_no_file_has_are_named(wide, ref, says):
    def change(rows):
        rows[0].update({name: ref for name in rows[0] if name.startswith("cam.") and name.endswith(".path")})

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
    at = table.schema.get_field_index("timestamp_ns")
    parquet.write_table(table.set_column(at, "timestamp_ns", floats), root / "frames.parquet")
    with pytest.raises(SourceError, match="cannot hold nanoseconds"):
        scan(root)


def test_other_types_are_cast_by_name(tmp_path):
    """Fixed-size lists, float32, dictionaries, Arrow's timestamps and large texts say the same."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    for root in (plain, other):
        root.mkdir()
        write_wide(make_world(), root, "parquet")
    table = parquet.read_table(other / "frames.parquet")
    changes = {
        "clip_id": ("clip_id", pa.dictionary(pa.int32(), pa.string())),
        "timestamp_ns": ("timestamp", pa.timestamp("ns", "UTC")),
        "cam.cam_left.timestamp_us": ("cam.cam_left.timestamp_us", pa.uint64()),
        "cam.cam_left.path": ("cam.cam_left.path", pa.large_string()),
        "cam.cam_left.cam2ego": ("cam.cam_left.cam2ego", pa.list_(pa.float64(), 16)),
        "cam.cam_left.intrinsics": ("cam.cam_left.intrinsics", pa.large_list(pa.float64())),
    }
    for name, (new, kind) in changes.items():
        at = table.schema.get_field_index(name)
        column = table[name].combine_chunks()
        column = column.dictionary_encode() if name == "clip_id" else column.cast(kind)
        table = table.set_column(at, new, column)
    parquet.write_table(table, other / "frames.parquet")
    for ours, theirs in zip(geometries(plain, tmp_path), geometries(other, tmp_path), strict=True):
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
    prefixes = ["ego2global", *(f"cam.{name}.ego2global" for name in make_world().cameras)]
    names = [f"{prefix}.{part}" for prefix in prefixes for part in ("t", "q_wxyz", "q_xyzw")]
    edit(wide, without(*names, "boxes"))
    assert scan(wide).facts == {"poses": "none"}
    np.testing.assert_array_equal(geometries(wide, tmp_path)[0].ego2global, np.eye(4))


def test_a_frame_without_a_path_has_no_image(wide):
    edit(wide, put(1, cam__cam_left__path=None))
    with pytest.raises(SourceError, match=r"frame 1 has no image of cam_left \(no path\)"):
        scan(wide)
    assert scan(wide, missing_camera="mask").report.masked == {"cam_left": {"no path": 1}}


def test_measurements_too_far_from_the_frame_are_left_out(long):
    report = scan(long, tolerance_ms=4.0, missing_camera="mask").report
    assert report.masked == {"cam_back": {"no image within 4 ms": 8}, "cam_front": {"no image within 4 ms": 8}}
    (long / "boxes.jsonl").unlink()
    assert scan(long, reference="cam_back", tolerance_ms=20.0, missing_camera="mask", points=False).report.samples == 8


def test_labels_of_some_frames_only(long, tmp_path):
    """A frame without rows is not labelled; a row without a category says that a frame has no boxes."""
    times = sorted({row["timestamp_ns"] for row in map(json.loads, (long / "boxes.jsonl").read_text().splitlines())})

    def change(rows):
        kept = [row for row in rows if row["timestamp_ns"] == times[0]]
        empty = dict.fromkeys(kept[0]) | {"clip_id": "drive-0", "timestamp_ns": times[1]}
        return [*kept, empty]

    edit(long, change, "boxes")
    table = scanned("manifest", long, tmp_path, **OPTIONS).table
    assert [table.row(number).boxes is None for number in range(4)] == [False, False, True, True]


def test_lists_without_a_box_say_that_frames_are_labelled(wide, tmp_path):
    edit(wide, lambda rows: [{**row, "boxes": [] if at else None} for at, row in enumerate(rows)])
    table = scanned("manifest", wide, tmp_path, **OPTIONS).table
    assert [table.row(number).boxes is None for number in range(3)] == [True, False, False]


def test_free_columns_are_attributes_and_the_split_is_the_source_s(wide, tmp_path):
    edit(wide, lambda rows: [{**row, "split": "val" if row["clip_id"] == "drive-1" else "train"} for row in rows])
    info = scan(wide)
    assert info.splits == {"train": ["drive-0"], "val": ["drive-1"]}
    source = make_source(SourceSpec("manifest", str(wide), OPTIONS))
    assert source.attribute_types["weather_code"] is int


def test_one_file_is_a_location_too(wide):
    (wide / "frames.jsonl").rename(wide / "mine.jsonl")
    assert scan(wide / "mine.jsonl").num_samples == 8


def test_a_table_longer_than_a_batch(tmp_path, monkeypatch):
    """Rows of a clip lie in several batches, and clips begin inside of one."""
    monkeypatch.setattr(tables, "_ROWS", 102)
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(1, 1), root, "jsonl")
    (row,) = map(json.loads, (root / "frames.jsonl").read_text().splitlines())
    rows = []
    for number in range(250):
        own = {**row, "clip_id": f"c{number // 70}", "timestamp_ns": row["timestamp_ns"] + number * 100_000_000}
        rows.append({name: value for name, value in own.items() if not name.endswith("timestamp_us")})
    for form in ("jsonl", "parquet"):
        (root / "frames.jsonl").unlink(missing_ok=True)
        write_table(root, "frames", rows, form)
        info = scan(root)
        assert [clip.num_samples for clip in info.clips] == [70, 70, 70, 40]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.integers(0, 200),
)
def test_nearest_takes_each_once_and_none_that_is_too_far(frames, sensor, tolerance):
    found = nearest(np.array(frames, np.int64), np.array(sensor, np.int64), tolerance).tolist()
    assert len(found) == len(frames)
    taken = [at for at in found if at >= 0]
    assert taken == sorted(set(taken))
    for frame, at in zip(frames, found, strict=True):
        distances = [abs(time - frame) for time in sensor]
        if at >= 0:
            assert distances[at] == min(distances) <= tolerance
        elif distances and min(distances) <= tolerance:
            other = sensor[distances.index(min(distances))]
            assert min(abs(other - one) for one in frames if one != frame) <= min(distances)


def test_points_in_all_forms():
    points = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
    head = ("# .PCD v0.7\nVERSION 0.7\nFIELDS x y z t intensity\nSIZE 4 4 4 8 4\nTYPE F F F F F\nCOUNT 1 1 1 1 1\n"
            "WIDTH 7\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 7\nDATA ")  # fmt: skip
    table = np.zeros(7, [("x", "f4"), ("y", "f4"), ("z", "f4"), ("t", "f8"), ("intensity", "f4")])
    for at, name in enumerate(("x", "y", "z", "intensity")):
        table[name] = points[:, at]
    text = "\n".join(" ".join(f"{value:.9g}" for value in row) for row in table.tolist())
    forms = [points.tobytes(), (head + "binary\n").encode() + table.tobytes(), (head + "ascii\n" + text).encode()]
    for data in forms:
        np.testing.assert_array_equal(parse_points(data, ("x", "y", "z", "intensity"), "lidar"), points)
    objects = io.BytesIO()
    np.save(objects, np.array([{"x": 1}], object), allow_pickle=True)
    for data, match in (
        (forms[0][:-3], "rows of 4 float32"),
        (forms[1][:-3], "no sound PCD"),
        ((head + "binary_compressed\n").encode(), "binary_compressed"),
        (head.encode(), "without a line DATA"),
        (b"\x93NUMPY garbage", "no sound .npy"),
        (objects.getvalue(), "no sound .npy"),
        (b"version https://git-lfs", "git-LFS"),
    ):
        with pytest.raises(SourceError, match=match):
            parse_points(data, ("x", "y", "z", "intensity"), "lidar")
    with pytest.raises(SourceError, match="has no ring"):
        parse_points(forms[1], ("x", "y", "z", "ring"), "lidar")


def test_csv_with_another_separator_is_refused(tmp_path):
    write_wide(make_world(), tmp_path, "csv")
    file = tmp_path / "frames.csv"
    file.write_text(file.read_text().replace(",", ";"))
    with pytest.raises(SourceError, match=r"frames.csv' has the separator ';'; write it with commas"):
        scan(tmp_path)


def test_a_byte_order_mark_is_passed_over_and_an_image_is_what_its_bytes_are(wide, tmp_path):
    file = wide / "frames.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    image = wide / "drive-0" / "cam_left" / "0.jpg"
    cv2.imwrite(str(image.with_suffix(".png")), cv2.imread(str(image)))
    image.with_suffix(".png").rename(image)
    row = scanned("manifest", wide, tmp_path, **OPTIONS).table.row(0)
    assert {one.name for one in row.members} >= {"cam_left.png", "cam_front.jpg"}


def test_csv_of_spreadsheets(tmp_path):
    """Empty cells are null, a clip that looks like a date is a text."""
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(), root, "csv")
    table = csv.read_csv(root / "frames.csv")
    names = pa.array(["2024-01-02" if clip == "drive-0" else "7" for clip in table["clip_id"].to_pylist()])
    csv.write_csv(table.set_column(0, "clip_id", names), root / "frames.csv")
    (root / "boxes.csv").unlink()
    assert [clip.clip_name for clip in scan(root).clips] == ["2024-01-02", "7"]


@pytest.mark.parametrize("paths", ["file", "range", "tar"])
def test_paths_may_be_below_a_root_and_name_it(tmp_path, paths):
    root, tables = tmp_path / "data", tmp_path / "tables"
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
    named = scanned("manifest", tables, tmp_path / "absolute", **OPTIONS, root=f"file://{root}/")
    assert [named.table.row(number).members for number in range(len(named.table))] == members
    assert named.source.options == below.source.options
    assert str(tmp_path) not in json.dumps(named.source.options), "no path of a machine is in a recipe"
    (tables / "frames.jsonl").rename(root / "frames.jsonl")
    assert scan(root).num_samples == 8


def test_a_root_may_be_a_url(wide, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(wide), "/bucket/drive", recursive=True)
    (tmp_path / "tables").mkdir()
    (wide / "frames.jsonl").rename(tmp_path / "tables/frames.jsonl")
    edit(tmp_path / "tables", put(0, cam__cam_left__path="memory://bucket/drive/drive-0/cam_left/0.jpg"))
    options = {**OPTIONS, "root": "memory://bucket/drive"}
    assert scan_source(SourceSpec("manifest", str(tmp_path / "tables"), options)).num_samples == 8


def test_a_table_of_another_form_is_named(wide):
    (wide / "frames.jsonl").rename(wide / "frames.json")
    with pytest.raises(SourceError, match=r"frames.json' must end with .parquet, .jsonl, .csv \(JSON lines"):
        scan(wide / "frames.json")
