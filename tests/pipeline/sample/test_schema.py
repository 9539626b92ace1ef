"""The sample schema: exact round trips, strict decoding, and matrices checked against independent ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import invert_rigid, rigid, rotation_matrices
from fuelrail.pipeline.sample.arrays import write_npy, write_tensors
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    SCHEMA,
    Boxes,
    CameraMeta,
    Geometry,
    Meta,
    decode_arrays,
    decode_meta,
    decode_points,
    decode_sample,
    encode_arrays,
    encode_meta,
    encode_points,
)
from support.datasets import CAMERAS, make_boxes, make_geometry
from support.shared_data import shared_data

finite = st.floats(-1e6, 1e6)


def geometry() -> Geometry:
    return make_geometry(
        np.random.default_rng(3),
        width=160,
        height=90,
        timestamp_ns=10**18,
        valid=(1, 1),
    )


def boxes(count: int = 4) -> Boxes:
    return make_boxes(np.random.default_rng(4), count)


def meta(**changes) -> Meta:
    camera = CameraMeta(token="t", timestamp_ns=1, width=160, height=90)
    example = Meta(
        schema=SCHEMA,
        dataset="d",
        key="clip-0-000001",
        sample_token="s",
        clip_id="clip-0",
        clip_token="c",
        clip_name="Clip 0",
        log_id="log",
        vehicle="car",
        frame_idx=1,
        num_frames=3,
        prev_key="clip-0-000000",
        next_key=None,
        timestamp_ns=1_533_151_603_547_590_000,
        is_key_frame=True,
        split="train",
        cameras=dict.fromkeys(CAMERAS, camera),
        tags={"night": True, "where": {"city": "ü"}},
        stats={"num_boxes": 2},
    )
    return msgspec.structs.replace(example, **changes)


def same_bits(a: Geometry | Boxes, b: Geometry | Boxes) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


class TestMeta:
    def test_round_trip(self) -> None:
        assert decode_meta(encode_meta(meta())) == meta()
        assert decode_meta(memoryview(encode_meta(meta()))) == meta()

    def test_is_plain_json_in_schema_order(self) -> None:
        text = encode_meta(meta()).decode()
        assert list(json.loads(text)) == list(Meta.__struct_fields__)
        assert json.loads(text)["timestamp_ns"] == 1_533_151_603_547_590_000  # not through a float
        assert "ü" in text

    @given(st.integers(-(2**63), 2**63 - 1))
    def test_times_are_exact(self, time_ns) -> None:
        assert decode_meta(encode_meta(meta(timestamp_ns=time_ns))).timestamp_ns == time_ns


class TestArrays:
    @pytest.mark.parametrize(
        "record",
        [geometry(), boxes(), boxes(0)],
        ids=["geometry", "boxes", "no boxes"],
    )
    def test_round_trip_is_exact_nan_included(self, record) -> None:
        assert same_bits(decode_arrays(encode_arrays(record), type(record)), record)

    def test_arrays_are_read_only_views(self) -> None:
        data = encode_arrays(geometry())
        decoded = decode_arrays(data, Geometry)
        for f in fields(decoded):
            array = getattr(decoded, f.name)
            assert not array.flags.writeable
            assert np.shares_memory(array, np.frombuffer(data, np.uint8))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                {"cam_valid": np.ones(2, np.int64)},
                "'cam_valid' is int64[2]; wanted uint8[2]",
            ),
            (
                {"cam_valid": np.ones((2, 1), np.uint8)},
                "'cam_valid' is uint8[2, 1]; wanted uint8[2]",
            ),
            (
                {"cam_timestamp_ns": np.ones(3, np.int64)},
                "'cam_timestamp_ns' is int64[3]; wanted int64[2]",
            ),
            (
                {"intrinsics": np.ones((2, 3, 4))},
                "'intrinsics' is float64[2, 3, 4]; wanted float64[2, 3, 3]",
            ),
            (
                {"ego2global": np.eye(4)[None]},
                "'ego2global' is float64[1, 4, 4]; wanted float64[4, 4]",
            ),
            (
                {"lidar2ego": np.ones((2, 4, 4))},
                "'lidar_ego2global' is float64[1, 4, 4]; wanted float64[2, 4, 4]",
            ),
            ({"dist": np.float64(0)}, "'dist' is float64[]"),
            ({"dist": np.zeros((2, 14), ">f8")}, "'dist' is >f8[2, 14]"),
        ],
    )
    def test_wrong_arrays_are_refused_when_written_and_when_read(self, change, words) -> None:
        wrong = replace(geometry(), **change)
        with pytest.raises(SchemaError) as caught:
            encode_arrays(wrong)
        assert words in str(caught.value)
        if ">f8" not in words:  # stored, there is but one byte order
            data = write_tensors(
                {f.name: np.asarray(getattr(wrong, f.name)) for f in fields(wrong)}
            )
            with pytest.raises(SchemaError) as caught:
                decode_arrays(data, Geometry)
            assert words in str(caught.value)

    def test_missing_and_unknown_arrays_are_named(self) -> None:
        arrays = {f.name: getattr(boxes(), f.name) for f in fields(Boxes)}
        label = arrays.pop("label")
        with pytest.raises(SchemaError, match="array 'label' is missing"):
            decode_arrays(write_tensors(arrays), Boxes)
        with pytest.raises(SchemaError, match="array 'label' is missing"):
            decode_arrays(write_tensors({**arrays, "labels": label}), Boxes)
        with pytest.raises(SchemaError, match="unknown array 'labels'; known: boxes3d, "):
            decode_arrays(
                write_tensors({**arrays, "labels": label, "label": label}),
                Boxes,
            )

    def test_a_record_of_the_other_kind_is_refused(self) -> None:
        with pytest.raises(SchemaError):
            decode_arrays(encode_arrays(boxes()), Geometry)


class TestPoints:
    @given(hnp.arrays("<f4", st.tuples(st.integers(0, 20), st.integers(0, 6))))
    def test_round_trip_is_exact(self, points) -> None:
        decoded = decode_points(encode_points(points))
        assert (decoded.dtype, decoded.shape, decoded.tobytes()) == (
            points.dtype,
            points.shape,
            points.tobytes(),
        )

    @pytest.mark.parametrize(
        "points",
        [np.zeros((2, 5)), np.zeros(5, "f4"), np.zeros((1, 2, 3), "f4")],
    )
    def test_other_arrays_are_refused_both_ways(self, points) -> None:
        with pytest.raises(SchemaError, match="wanted float32"):
            encode_points(points)
        with pytest.raises(SchemaError, match="wanted float32"):
            decode_points(write_npy(points))


def members(**changes: bytes) -> dict[str, bytes]:
    return {
        META: encode_meta(meta()),
        GEOMETRY: encode_arrays(geometry()),
        BOXES: encode_arrays(boxes()),
        "cam_front.jpg": b"jpeg",
        "cam_back.png": b"png",
        "lidar_top.npy": encode_points(np.ones((3, 5), np.float32)),
        "x_note.json": b"not JSON",
        "x_array.npy": b"not an array",
        "odd.bin": b"odd",
        **changes,
    }


class TestSample:
    def test_members_go_where_they_belong(self) -> None:
        sample = decode_sample(meta().key, members())
        assert sample.key == sample.meta.key
        assert same_bits(sample.geometry, geometry())
        assert sample.boxes is not None
        assert same_bits(sample.boxes, boxes())
        assert list(sample.images.items()) == [
            ("cam_front", b"jpeg"),
            ("cam_back", b"png"),
        ]
        assert sample.points["lidar_top"].shape == (3, 5)
        assert sample.extra == {
            "x_note.json": b"not JSON",
            "x_array.npy": b"not an array",
            "odd.bin": b"odd",
        }
        assert repr(sample).endswith(
            "images cam_front, cam_back; 4 boxes; 3 points of lidar_top; x_note.json; x_array.npy; odd.bin)"
        )

    def test_boxes_may_be_absent(self) -> None:
        encoded = members()
        del encoded[BOXES]
        assert decode_sample(meta().key, encoded).boxes is None

    @pytest.mark.parametrize("name", [META, GEOMETRY])
    def test_a_needed_member_is_missed(self, name) -> None:
        encoded = members()
        del encoded[name]
        with pytest.raises(SchemaError, match="the member is missing") as caught:
            decode_sample(meta().key, encoded)
        assert (caught.value.key, caught.value.member) == (meta().key, name)

    @pytest.mark.parametrize("name", [META, GEOMETRY, BOXES, "lidar_top.npy"])
    def test_what_is_wrong_is_named_with_key_and_member(self, name) -> None:
        with pytest.raises(SchemaError) as caught:
            decode_sample(meta().key, members() | {name: b"{"})
        assert (caught.value.key, caught.value.member) == (meta().key, name)
        assert str(caught.value).startswith(f"{meta().key}.{name}: ")

    def test_the_metadata_of_another_sample_is_refused(self) -> None:
        with pytest.raises(
            SchemaError,
            match=r"clip-9\.meta\.json: key 'clip-0-000001' is not the sample's key",
        ):
            decode_sample("clip-9", members())


class TestGeometry:
    def test_a_point_goes_the_long_way_to_its_pixel(self) -> None:
        """ego to global to the ego of the camera's exposure to camera to pixel, one step after the other."""
        rig = geometry()
        point = np.array([12.0, -1.0, 0.5, 1.0])
        for camera in range(len(CAMERAS)):
            in_global = rig.ego2global @ point
            in_ego_then = np.linalg.solve(rig.cam_ego2global[camera], in_global)
            in_camera = np.linalg.solve(rig.cam2ego[camera], in_ego_then)
            pixel = rig.intrinsics[camera] @ in_camera[:3]
            np.testing.assert_allclose(rig.ego2img()[camera] @ point, [*pixel, 1], atol=1e-9)
            np.testing.assert_allclose(rig.ego2cam()[camera] @ point, in_camera, atol=1e-9)

    def test_the_lidar_is_seen_through_its_own_time(self) -> None:
        rig = geometry()
        moved = replace(
            rig,
            lidar_ego2global=rig.lidar_ego2global
            @ rigid(np.array([1.0, 0, 0, 0.1]), np.ones(3))[None],
        )
        for g in (rig, moved):
            point = np.array([5.0, 2.0, -1.0, 1.0])
            in_global = g.lidar_ego2global[0] @ g.lidar2ego[0] @ point
            in_ego = np.linalg.solve(g.ego2global, in_global)
            np.testing.assert_allclose(g.lidar2keyego() @ point, in_ego, atol=1e-9)
            np.testing.assert_allclose(g.lidar2img() @ point, g.ego2img() @ in_ego, atol=1e-6)
        assert not np.allclose(rig.lidar2img(), moved.lidar2img())

    def test_the_camera_ahead_sees_what_is_ahead(self) -> None:
        rig = geometry()
        u, v, depth, _ = rig.ego2img()[CAMERAS.index("cam_front")] @ [
            20.0,
            0.0,
            1.5,
            1.0,
        ]
        assert depth == pytest.approx(20 - 1.5)
        assert (u / depth, v / depth) == pytest.approx((79.5, 44.5))  # the image's centre, 160 x 90
        pixel = rig.ego2img()[CAMERAS.index("cam_front")] @ [
            20.0,
            3.0,
            1.5,
            1.0,
        ]
        assert pixel[0] / pixel[2] < 79.5  # y is left
        assert (rig.ego2img()[CAMERAS.index("cam_back")] @ [20.0, 0.0, 1.5, 1.0])[2] < 0

    def test_stacked_samples_have_the_same_matrices_to_the_bit(self) -> None:
        rng = np.random.default_rng(3)
        turns = rigid(rng.normal(size=(6, 4)), rng.normal(size=(6, 3)) * 1000)
        single = [
            replace(
                geometry(),
                ego2global=turn,
                cam_ego2global=turn @ turns[: len(CAMERAS)],
            )
            for turn in turns
        ]
        methods = (
            Geometry.cam2keyego,
            Geometry.ego2cam,
            Geometry.ego2img,
            Geometry.lidar2keyego,
            Geometry.lidar2img,
        )
        stacked = Geometry.stack(single)
        windows = Geometry.stack(single, 2, 3)
        for method in methods:
            expected = np.stack([method(sample_geometry) for sample_geometry in single])
            np.testing.assert_array_equal(method(stacked), expected)
            np.testing.assert_array_equal(
                method(windows), expected.reshape(2, 3, *expected.shape[1:])
            )
        assert windows.cam_valid.shape == (2, 3, len(CAMERAS))
        key = windows.ego2global[:, 2]
        for step in range(3):
            cam2keyego = np.stack(
                [replace(single[3 * b + step], ego2global=key[b]).cam2keyego() for b in range(2)]
            )
            np.testing.assert_array_equal(windows.cam2keyego(key[:, None])[:, step], cam2keyego)

    def test_stacked_samples_keep_the_lidars_that_all_have(self) -> None:
        rig = geometry()
        lidars = ("lidar2ego", "lidar_ego2global", "lidar_timestamp_ns")
        without = replace(rig, **{name: getattr(rig, name)[:0] for name in lidars})
        assert Geometry.stack([rig, rig]).lidar2ego.shape == (2, 1, 4, 4)
        assert Geometry.stack([rig, without], 2, 1).lidar2ego.shape == (
            2,
            1,
            0,
            4,
            4,
        )


class TestBoxes:
    def test_corners_of_a_turned_box(self) -> None:
        yaw = np.pi / 2
        box = replace(
            boxes(1),
            boxes3d=np.array([[10, 5, 1, 4, 2, 1.5, yaw]], np.float32),
            rotation_wxyz=np.array([[np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]], np.float32),
        )
        corners = box.corners()[0]
        assert corners.dtype == np.float32
        # Front is now +y, left is now -x: front left top comes first, back right bottom last.
        np.testing.assert_allclose(corners[0], [10 - 1, 5 + 2, 1 + 0.75], atol=1e-5)
        np.testing.assert_allclose(corners[7], [10 + 1, 5 - 2, 1 - 0.75], atol=1e-5)

    @given(st.integers(0, 2**32))
    def test_corners_are_a_box(self, seed) -> None:
        rng = np.random.default_rng(seed)
        boxes = replace(
            make_boxes(rng, 3),
            rotation_wxyz=rng.normal(size=(3, 4)).astype(np.float32),
        )
        corners = boxes.corners().astype(np.float64)
        np.testing.assert_allclose(corners.mean(1), boxes.boxes3d[:, :3], atol=1e-4)
        edges = [
            np.linalg.norm(corners[:, a] - corners[:, b], axis=-1)
            for a, b in ((0, 4), (0, 2), (0, 1))
        ]
        np.testing.assert_allclose(np.stack(edges, -1), boxes.boxes3d[:, 3:6], rtol=1e-4)

    def test_no_boxes_have_no_corners(self) -> None:
        assert boxes(0).corners().shape == (0, 8, 3)


@pytest.mark.real
class TestNuScenes:
    """The calibration and poses of two real rigs."""

    @pytest.fixture
    def tables(self) -> dict[str, list[dict]]:
        folder = shared_data("nuscenes-mini") / "v1.0-derived"
        return {
            name: json.loads((folder / f"{name}.json").read_text())
            for name in (
                "calibrated_sensor",
                "ego_pose",
                "sample_data",
                "sensor",
            )
        }

    def test_every_calibration_and_pose_is_rigid(self, tables) -> None:
        rows = tables["calibrated_sensor"] + tables["ego_pose"]
        matrices = rigid(
            np.array([r["rotation"] for r in rows]),
            np.array([r["translation"] for r in rows]),
        )
        rotations = matrices[:, :3, :3]
        np.testing.assert_allclose(
            rotations @ np.swapaxes(rotations, 1, 2),
            np.tile(np.eye(3), (len(rows), 1, 1)),
            atol=1e-14,
        )
        np.testing.assert_allclose(np.linalg.det(rotations), 1, atol=1e-12)
        np.testing.assert_allclose(invert_rigid(matrices), np.linalg.inv(matrices), atol=1e-9)

    def test_matrices_are_those_of_the_devkit(self, tables) -> None:
        devkit = pytest.importorskip(
            "nuscenes.utils.geometry_utils",
            reason="nuscenes-devkit is not installed",
        )
        quaternion = pytest.importorskip("pyquaternion").Quaternion
        for row in tables["calibrated_sensor"] + tables["ego_pose"]:
            oracle = devkit.transform_matrix(row["translation"], quaternion(row["rotation"]))
            ours = rigid(np.array(row["rotation"]), np.array(row["translation"]))
            np.testing.assert_allclose(ours, oracle, atol=1e-12)
            inverse = devkit.transform_matrix(
                row["translation"], quaternion(row["rotation"]), inverse=True
            )
            np.testing.assert_allclose(invert_rigid(ours), inverse, atol=1e-9)

    def test_cameras_look_where_their_names_say(self, tables) -> None:
        channel = {row["token"]: row["channel"] for row in tables["sensor"]}
        bearing_deg = {
            "CAM_FRONT": 0,
            "CAM_FRONT_LEFT": 55,
            "CAM_BACK_LEFT": 110,
            "CAM_BACK": 180,
            "CAM_BACK_RIGHT": -110,
            "CAM_FRONT_RIGHT": -55,
        }
        cameras = set()
        for row in tables["calibrated_sensor"]:
            name = channel[row["sensor_token"]]
            if name in bearing_deg:
                axis = rotation_matrices(np.array(row["rotation"])) @ [
                    0,
                    0,
                    1,
                ]  # a camera looks along its z
                off = np.angle(
                    np.exp(1j * (np.arctan2(axis[1], axis[0]) - np.radians(bearing_deg[name]))),
                    deg=True,
                )
                assert abs(off) < 10, name
                cameras.add(name)
        assert cameras == set(bearing_deg)
