"""What a sample may hold: the writer refuses, verify reports, the loader skips or raises, inspect and view say it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from fuelrail import ImageAugment, World
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import SchemaError, SourceError
from fuelrail.pipeline.format import rules
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.rules import (
    Rig,
    are_rigid,
    broken_boxes,
    broken_calibration,
    broken_names,
)
from fuelrail.pipeline.sample.schema import (
    ARRAYS,
    BOXES,
    GEOMETRY,
    META,
    Boxes,
    Geometry,
    decode_arrays,
    encode_arrays,
    encode_points,
)
from fuelrail.sharding.verify.dataset import verify
from support.datasets import make_boxes, make_geometry
from support.edits import edit_attributes, replace_index, reseal, rewrite
from support.loaders import make_loader
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes
from support.shared_data import shared_data

IMAGE = ImageAugment(height=16, width=32)
NAN = float("nan")
INF = float("inf")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    base = tmp_path_factory.mktemp("rules")
    build_nuscenes(base / "source", {"a": 3, "b": 3}, cameras=("CAM_FRONT", "CAM_BACK"))
    shard_nuscenes(base / "source", base / "out", splits={"train": 1.0}, layout="none")
    return base / "out"


@pytest.fixture
def out(original, tmp_path):
    shutil.copytree(original, tmp_path / "out")
    return tmp_path / "out"


def arrays(member, **values):
    """A change of arrays of a safetensors member: name to (index, value), or to a function of the array."""

    def change(raw):
        record = decode_arrays(raw[member], Geometry if member == GEOMETRY else Boxes)
        changed = {}
        for name, value in values.items():
            array = getattr(record, name).copy()
            if callable(value):
                array = value(array)
            else:
                array[value[0]] = value[1]
            changed[name] = array
        raw[member] = encode_arrays(replace(record, **changed))

    return change


def change_geometry(**values):
    return arrays(GEOMETRY, **values)


def change_boxes(**values):
    return arrays(BOXES, **values)


def change_meta(edit):
    def change(raw):
        meta = json.loads(raw[META])
        edit(meta)
        raw[META] = json.dumps(meta).encode()

    return change


def set_member(name, data):
    return lambda raw: raw.update({name: data})


def fewer_cameras(raw):
    geometry = decode_arrays(raw[GEOMETRY], Geometry)
    names = (
        "cam_valid",
        "cam_timestamp_ns",
        "img_wh",
        "intrinsics",
        "dist",
        "cam2ego",
        "cam_ego2global",
    )
    raw[GEOMETRY] = encode_arrays(
        replace(geometry, **{name: getattr(geometry, name)[:1] for name in names})
    )


def empty_points(raw):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 999999999999999999), }"
    header = header.ljust(117) + b"\n"
    raw["lidar_top.npy"] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


BROKEN = {
    "nan_intrinsics": (
        change_geometry(intrinsics=((0, 0, 0), NAN)),
        "intrinsics[0] is [[nan,",
    ),
    "inf_cam_ego2global": (
        change_geometry(cam_ego2global=((1, 0, 3), INF)),
        "cam_ego2global[1] is",
    ),
    "large_intrinsics": (
        change_geometry(intrinsics=((0, 0, 0), 1e308)),
        "intrinsics[0] is [[1e+308,",
    ),
    "zero_intrinsics": (
        change_geometry(intrinsics=(0, 0.0)),
        "intrinsics[0] is [[0.0,",
    ),
    "zero_cam2ego": (change_geometry(cam2ego=(1, 0.0)), "cam2ego[1] is [[0.0,"),
    "skewed_cam2ego": (
        change_geometry(cam2ego=((1, slice(0, 3), 0), 0.5)),
        "cam2ego[1] is",
    ),
    "far_ego2global": (
        change_geometry(ego2global=((0, 3), 1e308)),
        "ego2global[0] is",
    ),
    "nan_lidar2ego": (
        change_geometry(lidar2ego=(0, NAN)),
        "lidar2ego[0] is [[nan,",
    ),
    "inf_ego_velocity": (
        change_geometry(ego_velocity=(0, INF)),
        "ego_velocity[0] is inf",
    ),
    "inf_dist": (change_geometry(dist=((0, 0), INF)), "dist[0] is [inf"),
    "nan_boxes": (change_boxes(boxes3d=((0, 0), NAN)), "boxes3d[0] is [nan,"),
    "box_without_size": (change_boxes(boxes3d=((1, 3), 0.0)), "boxes3d[1] is"),
    "box_rotation": (
        change_boxes(rotation_wxyz=(0, 0.0)),
        "rotation_wxyz[0] is [0.0,",
    ),
    "inf_velocity": (change_boxes(velocity=((0, 1), INF)), "velocity[0] is"),
    "label_9999": (
        change_boxes(label=(0, 9999)),
        "label[0] is 9999; allowed: -1 to 9",
    ),
    "label_negative": (
        change_boxes(label=(0, -30000)),
        "label[0] is -30000; allowed: -1 to 9",
    ),
    "visibility_100": (
        change_boxes(visibility=(0, 100)),
        "visibility[0] is 100; allowed: -1 (unknown) or 1 to 4",
    ),
    "visibility_0": (change_boxes(visibility=(0, 0)), "visibility[0] is 0"),
    "attribute_9999": (
        change_boxes(attribute=(0, 9999)),
        "attribute[0] is 9999; allowed: -1 to 1",
    ),
    "negative_img_wh": (
        change_geometry(img_wh=((0, 0), -(2**31))),
        "img_wh[0] is [-2147483648,",
    ),
    "zero_img_wh": (
        change_geometry(img_wh=((0, 1), 0)),
        "img_wh[0] is [48, 0]",
    ),
    "points_of_3_columns": (
        set_member("lidar_top.npy", encode_points(np.zeros((2, 3), np.float32))),
        "its points have 3 columns, the manifest has 5",
    ),
    "points_of_many_columns": (
        empty_points,
        "its points have 999999999999999999 columns, the manifest has 5",
    ),
    "field_twice": (
        lambda raw: [*raw.items(), ("lidar_top.npy", raw["lidar_top.npy"])],
        "has this field twice",
    ),
    "camera_twice": (
        set_member("cam_front.png", b"x"),
        "camera 'cam_front' has two images",
    ),
    "geometry_of_fewer_cameras": (
        fewer_cameras,
        "cam_valid is [1], but of the cameras cam_front, cam_back",
    ),
    "frame_idx_negative": (
        change_meta(lambda meta: meta.update(frame_idx=-9)),
        "at 'frame_idx': must be a whole number from 0 to 2147483647; got -9",
    ),
    "frame_idx_of_4000_digits": (
        change_meta(lambda meta: meta.update(frame_idx=10**3999)),
        "at 'frame_idx': must be a whole number from 0 to",
    ),
    "timestamp_beyond_64_bits": (
        change_meta(lambda meta: meta.update(timestamp_ns=2**70)),
        "at 'timestamp_ns': must be a whole number from",
    ),
    "stats_beyond_64_bits": (
        change_meta(lambda meta: meta.update(stats={"a": 2**70})),
        "at 'stats.a': must be",
    ),
}
"""Change of a sample, and what each command says of it."""

BROKEN_NAMES = {
    "field_outside_the_folder": (
        set_member("x_../../evil.bin", b"x"),
        "field name 'x_../../evil.bin' is not allowed",
    ),
    "field_of_no_channel": (set_member("cam_roof.jpg", b"x"), "no such field"),
    "unknown_dist_model": (
        change_meta(lambda meta: meta["cameras"]["cam_front"].update(dist_model="fish")),
        "the dist_model of cam_front is 'fish'; known: none, opencv_radtan",
    ),
    "coefficients_without_model": (
        change_geometry(dist=((0, 0), 0.5)),
        "dist of cam_front has 1 coefficients",
    ),
    "nan_between_coefficients": (
        lambda raw: (
            change_geometry(dist=((0, 1), 0.5))(raw),
            change_meta(
                lambda meta: meta["cameras"]["cam_front"].update(dist_model="opencv_radtan")
            )(raw),
        ),
        "dist of cam_front has NaN before a coefficient",
    ),
    "size_of_meta": (
        change_geometry(img_wh=((0, 0), 49)),
        "the image of cam_front is 48 x 32; geometry.safetensors has 49 x 32",
    ),
    "camera_not_described": (
        change_meta(lambda meta: meta["cameras"].pop("cam_front")),
        "it does not describe camera 'cam_front', which has an image",
    ),
    "frame_beyond_its_clip": (
        change_meta(lambda meta: meta.update(num_frames=0)),
        "frame_idx is 0 of 0 frames",
    ),
}
"""Rules that do not concern what a batch holds: verify, inspect and reshard know them, the loader does not look."""


@pytest.fixture
def broken(out, request):
    change, says = (BROKEN | BROKEN_NAMES)[request.param]
    return out, rewrite(out, 1, change).key, says


def by_name(table):
    return pytest.mark.parametrize("broken", table, indirect=True)


@by_name(BROKEN | BROKEN_NAMES)
def test_verify_deep_reports_it(broken):
    out, key, says = broken
    faults = verify(out, deep=True, num_threads=1).faults
    assert [fault.key for fault in faults] == [key] * len(faults)
    assert any(says in fault.text for fault in faults), faults


@by_name(BROKEN)
def test_the_loader_refuses_it(broken):
    out, key, says = broken
    with pytest.raises(SchemaError, match=key) as caught:
        list(make_loader(out, 1, image=IMAGE, world=World(), points=True, shuffle=False))
    assert says in str(caught.value)


@pytest.mark.parametrize("broken", ["nan_intrinsics", "label_9999", "field_twice"], indirect=True)
def test_the_loader_substitutes_it(broken, tmp_path):
    out, key, says = broken
    log = tmp_path / "bad.jsonl"
    options = {
        "image": IMAGE,
        "points": True,
        "on_error": "substitute",
        "file": log,
    }
    loader = make_loader(out, 1, world=World(), shuffle=False, **options)
    keys = [batch["sample_key"][0] for batch in loader]
    assert len(keys) == 6
    assert key not in keys
    assert loader.stats().bad_samples == 1
    assert says in log.read_text()


@by_name(BROKEN | BROKEN_NAMES)
def test_inspect_says_it_in_a_sentence(broken, capsys):
    out, key, says = broken
    assert main(["inspect", str(out), key]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


@by_name(BROKEN)
def test_view_says_it_in_a_sentence(broken, tmp_path, capsys):
    out, key, says = broken
    assert main(["view", str(out), key, "--output", str(tmp_path / "a.png")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


@by_name(BROKEN | BROKEN_NAMES)
def test_reshard_refuses_to_write_it(broken, tmp_path, capsys):
    out, key, _ = broken
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 2
    captured = capsys.readouterr().err
    assert key in captured
    assert "Traceback" not in captured
    assert not (tmp_path / "again" / "dataset.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "x_evil.pickle",
        "x_evil.pkl.gz",
        "x_evil.pyd",
        "x_model.pth",
        "x_lib.so",
        "x_run.py",
        "x_run.sh",
        "x_a.exe",
    ],
)
def test_verify_names_members_with_executable_endings(out, tmp_path, capsys, name):
    key = rewrite(out, 1, set_member(name, b"x")).key
    for deep in (False, True):
        (fault,) = verify(out, deep=deep, num_threads=1).faults
        assert (
            fault.key,
            fault.text.startswith(f"member '{name}': names with '."),
        ) == (key, True)
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 2
    assert name in capsys.readouterr().err


def test_a_users_plain_member_is_fine(out, tmp_path):
    rewrite(out, 1, set_member("x_notes.txt", b"x"))
    assert verify(out, deep=True, num_threads=1).faults == []
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 0


def with_key(key):
    def change(raw):
        change_meta(lambda meta: meta.update(key=key))(raw)

    return change


def test_keys_that_break_the_rule_are_reported(out):
    key = "../a.b"
    rewrite(out, 1, with_key(key), key=key)
    edit_attributes(out, "key", 1, key)
    (fault,) = verify(out, deep=True, num_threads=1).faults
    assert "sample key '../a.b' is not allowed" in fault.text


def manifest_edits(field):
    def of_split(manifest):
        split = msgspec.structs.replace(manifest.splits["train"], num_clips=7)
        return msgspec.structs.replace(manifest, splits={"train": split})

    def of_camera(manifest):
        front = msgspec.structs.replace(manifest.channels[0], sizes=((48, 32), (9, 9)))
        return msgspec.structs.replace(manifest, channels=(front, *manifest.channels[1:]))

    return {
        "num_clips": lambda manifest: msgspec.structs.replace(manifest, num_clips=9),
        "splits": of_split,
        "classes": lambda manifest: msgspec.structs.replace(
            manifest, classes=("car", *manifest.classes[:-1])
        ),
        "attributes": lambda manifest: msgspec.structs.replace(manifest, attributes=("a", "a")),
        "sizes": of_camera,
    }[field]


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("num_clips", "num_clips is 9, the index has 2"),
        ("splits", "num_clips of split 'train' is 7, the index has 2"),
        ("classes", "the classes have 'car' 2 times; each is allowed once"),
        ("attributes", "the attributes have 'a' 2 times"),
        (
            "sizes",
            "sizes of camera 'cam_front' are [[48, 32], [9, 9]], its images have [[48, 32]]",
        ),
    ],
)
def test_a_wrong_manifest_is_reported(out, field, says):
    reseal(out, manifest_edits(field))
    (fault,) = verify(out, deep=True, num_threads=1).faults
    assert (fault.file, says in fault.text) == ("dataset.json", True)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("clip_id", "zz", "row 2 has the clip_id zz, the index has"),
        ("frame", 77, "the frame 77, the index has"),
    ],
)
def test_wrong_attributes_are_reported(out, column, value, says):
    edit_attributes(out, column, 2, value)
    (fault,) = verify(out, deep=True, num_threads=1).faults
    assert (fault.file, fault.key) == (
        "attributes.parquet",
        open_dataset(out).index.row(2).key,
    )
    assert says in fault.text


def test_reshard_of_a_key_that_occurs_twice(out, tmp_path, capsys):
    index = open_dataset(out).index
    first = index.row(0)
    for position in range(1, len(index)):
        row = index.row(position)
        if row.clip_id == first.clip_id:
            break

    def change(raw):
        change_meta(lambda meta: meta.update(key=first.key, frame_idx=first.frame))(raw)

    rewrite(out, position, change, key=first.key)
    dataset = open_dataset(out)
    rows = [dataset.index.row(number) for number in range(len(dataset.index))]
    rows[position] = rows[position]._replace(frame=first.frame)
    replace_index(out, dataset, rows)
    reseal(out)
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 2
    captured = capsys.readouterr().err
    assert f"comes after frame {first.frame} of its clip: the source has it twice" in captured


def test_reshard_of_metadata_of_another_frame(out, tmp_path, capsys):
    key = rewrite(out, 1, change_meta(lambda meta: meta.update(frame_idx=2))).key
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 2
    assert f"sample '{key}': its meta.json is of sample '{key}'" in capsys.readouterr().err


def test_reshard_refuses_points_that_are_none(out, tmp_path, capsys):
    rewrite(out, 1, set_member("lidar_top.npy", bytes(1 << 20)))
    assert main(["reshard", str(out), str(tmp_path / "again"), "--workers", "1"]) == 2
    assert "lidar_top.npy: not a .npy file of version 1.0" in capsys.readouterr().err


def test_cameras_without_an_image_may_be_unknown(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 3}, cameras=("CAM_FRONT", "CAM_BACK"))
    rows = source.tables["sample_data"]
    rows.remove(
        next(row for row in rows if row["is_key_frame"] and "/CAM_BACK/" in row["filename"])
    )
    source.write("sample_data")
    shard_nuscenes(
        tmp_path / "source",
        tmp_path / "out",
        splits={"train": 1.0},
        missing_camera="mask",
    )
    assert verify(tmp_path / "out", deep=True, num_threads=1).faults == []
    batches = list(make_loader(tmp_path / "out", 1, image=IMAGE, world=World()))
    assert sorted(batch["cam_valid"][0].tolist() for batch in batches) == [
        [True, False],
        [True, True],
        [True, True],
    ]


@pytest.mark.real
def test_real_keyframes_break_no_rule(tmp_path):
    root = shared_data("nuscenes-mini")
    shard_nuscenes(root, tmp_path / "out", version="v1.0-derived", splits={"train": 1.0})
    assert verify(tmp_path / "out", deep=True, num_threads=2).faults == []
    assert len(list(make_loader(tmp_path / "out", 1, image=IMAGE, world=World(), points=True))) == 3


class TestRules:
    geometry = make_geometry(
        np.random.default_rng(1),
        width=160,
        height=90,
        timestamp_ns=10**18,
        valid=(1, 0),
    )
    rig = Rig(("cam_front", "cam_back"), (("lidar_top", 5),), 2, 0)

    def test_rigid(self):
        poses = np.repeat(self.geometry.cam2ego[:1], 5, axis=0)
        poses[1, :3, 0] *= -1  # a mirror
        poses[2, :3, :3] *= 1.01
        poses[3, 0, 3] = 2e9
        poses[4, 3, 0] = 1e-3
        assert are_rigid(poses).tolist() == [True, False, False, False, False]

    @pytest.mark.parametrize("name", ["intrinsics", "cam2ego", "cam_ego2global"])
    def test_only_cameras_without_an_image_may_be_unknown(self, name):
        for camera, allowed in ((0, False), (1, True)):
            values = getattr(self.geometry, name).copy()
            values[camera] = NAN
            assert (
                list(broken_calibration(replace(self.geometry, **{name: values}))) == []
            ) is allowed
        values = getattr(self.geometry, name).copy()
        values[1, 0, 0] = NAN  # in part
        assert list(broken_calibration(replace(self.geometry, **{name: values}))) != []

    def test_lidars_without_a_sweep_may_be_unknown(self):
        values = {name: np.full((1, 4, 4), NAN) for name in ("lidar2ego", "lidar_ego2global")}
        assert list(broken_calibration(replace(self.geometry, **values))) != []
        values["lidar_timestamp_ns"] = np.array([-1])
        assert list(broken_calibration(replace(self.geometry, **values))) == []

    def test_none_and_good_boxes(self):
        for count in (0, 1, 9):
            assert list(broken_boxes(make_boxes(np.random.default_rng(2), count), self.rig)) == []

    def test_names(self):
        good = (
            META,
            GEOMETRY,
            BOXES,
            "cam_front.jpg",
            "cam_back.png",
            "lidar_top.npy",
            "lidar_top_sweeps.safetensors",
        )
        assert broken_names((*good, "x_logits.npy"), self.rig) == ()
        texts = [
            text
            for _, text in broken_names(
                (*good, "cam_front.png", "radar.pcd", "X.jpg", META), self.rig
            )
        ]
        assert [text.split(":")[0][:24] for text in texts] == [
            "the sample has 'cam_fron",
            "no such field",
            "field name 'X.jpg' is no",
            "the sample has 'meta.jso",
        ]


def test_the_writer_refuses_a_source_that_breaks_a_rule(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 3}, cameras=("CAM_FRONT", "CAM_BACK"))
    source.tables["sample_annotation"][0]["size"][1] = (
        1e-50  # over 0 as float64, and stored as float32
    )
    source.write("sample_annotation")
    with pytest.raises(
        SourceError,
        match=r"cannot be stored: boxes.safetensors: boxes3d\[0\] is .* 0.0",
    ):
        shard_nuscenes(tmp_path / "source", tmp_path / "out", splits={"train": 1.0})
    assert list((tmp_path / "out").glob("*.tar")) == []


def _limits(dtype):
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def test_one_look_at_all_values_finds_what_the_rules_find_one_by_one(
    monkeypatch,
):
    rng = np.random.default_rng(0)
    rig = Rig(
        ("cam_front", "cam_back"),
        (("lidar_top", 5),),
        num_classes=3,
        num_attributes=2,
    )
    values = (
        NAN,
        INF,
        -INF,
        0,
        1,
        -1,
        -2,
        2,
        5,
        1e-3,
        1 + 1e-3,
        1e6,
        1e9,
        1.1e9,
        65_535,
        65_536,
    )
    records = {
        Geometry: make_geometry(rng, width=64, height=48, timestamp_ns=10**18, valid=(1, 1)),
        Boxes: make_boxes(rng, 4),
    }
    is_broken: list[bool] = []
    for kind, record in records.items():
        names = [spec[0] for spec in ARRAYS[kind] if "timestamp" not in spec[0]]
        for _ in range(600):
            name = rng.choice(names)
            array = getattr(record, name).copy()
            value = rng.choice(values)
            if not array.size or (
                array.dtype.kind != "f" and value != np.clip(value, *_limits(array.dtype))
            ):
                continue
            array.flat[rng.integers(array.size)] = value
            changed = replace(record, **{name: array})
            broken = broken_calibration if kind is Geometry else partial(broken_boxes, rig=rig)
            at_once = list(broken(changed))
            with monkeypatch.context() as patch:
                patch.setattr(rules, "_is_whole", lambda _: False)
                patch.setattr(rules, "_are_whole", lambda *_, **__: False)
                assert list(broken(changed)) == at_once, (name, value)
            is_broken.append(bool(at_once))
    assert 0.1 < np.mean(is_broken) < 0.9
