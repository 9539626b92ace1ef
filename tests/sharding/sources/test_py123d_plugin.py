"""The plug-in of py123d's logs, on logs that py123d itself wrote; skipped without it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from scipy.spatial.transform import Rotation

import fuelrail as fr
from fuelrail.pipeline.limits import TABLE, TABLE_OF_LOG
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.shared import arrow
from support.neutral_source import install_plugin
from support.source_world import samples_of

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "py123d"
START_US = 1_600_000_000_000_000
STEP_US = 100_000
FRAMES = 6
pytestmark = pytest.mark.costly


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    place = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"][
        "fuelrail.sources"
    ]
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "py123d", place["py123d"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(folder)


def ego_at(number):
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("z", 0.05 * number).as_matrix()
    pose[:3, 3] = 3.0 * number, 0.2 * number, 0.1
    return pose


def camera_mount():
    pose = np.eye(4)
    pose[:3, :3] = [[0, 0, 1], [-1, 0, 0], [0, -1, 0]]
    pose[:3, 3] = 1.6, 0.1, 1.4
    return pose


def picture(number):
    pixels = np.random.default_rng(number).integers(0, 255, (24, 32, 3)).astype(np.uint8)
    return cv2.imencode(".jpg", pixels)[1].tobytes()


def write_logs(root, store="jpeg_binary", **options):
    """Write two logs with py123d's own writer."""
    pytest.importorskip("py123d")
    from py123d.api.scene.arrow.arrow_log_writer import ArrowLogWriter
    from py123d.api.scene.arrow.utils.log_writer_config import LogWriterConfig
    from py123d.datatypes import LogMetadata, Timestamp
    from py123d.datatypes.detections.box_detections import (
        BoxDetectionAttributes,
        BoxDetectionSE3,
        BoxDetectionsSE3,
    )
    from py123d.datatypes.detections.box_detections_metadata import (
        BoxDetectionsSE3Metadata,
    )
    from py123d.datatypes.sensors.base_camera import CameraID
    from py123d.datatypes.sensors.pinhole_camera import (
        PinholeCameraMetadata,
        PinholeDistortion,
        PinholeIntrinsics,
    )
    from py123d.datatypes.vehicle_state.ego_state import EgoStateSE3
    from py123d.datatypes.vehicle_state.ego_state_metadata import (
        get_carla_lincoln_mkz_2020_metadata,
    )
    from py123d.geometry import BoundingBoxSE3, PoseSE3, Vector3D
    from py123d.parser.base_dataset_parser import ModalitiesSync, ParsedCamera
    from py123d.parser.registry import DefaultBoxDetectionLabel

    def pose(matrix):
        x, y, z, w = Rotation.from_matrix(matrix[:3, :3]).as_quat()
        return PoseSE3(*matrix[:3, 3].tolist(), w, x, y, z)

    ego_metadata = get_carla_lincoln_mkz_2020_metadata()
    boxes_metadata = BoxDetectionsSE3Metadata(DefaultBoxDetectionLabel)
    k = PinholeIntrinsics(30.0, 31.0, 15.5, 11.5)
    lens = PinholeDistortion(0.1, -0.02, 0.001, 0.002, 0.003)
    cameras = [
        PinholeCameraMetadata("front", CameraID.PCAM_F0, k, lens, 32, 24, pose(camera_mount())),
        PinholeCameraMetadata("back", CameraID.PCAM_B0, k, None, 32, 24, pose(camera_mount())),
    ]
    writer = ArrowLogWriter(
        LogWriterConfig(camera_store_option=store),
        root,
        root / "sensors",
        **options,
    )
    for split, log in (("made_train", "a"), ("made_val", "b")):
        assert writer.reset(LogMetadata("made", split, log, "town"))
        for number in range(FRAMES):
            time = Timestamp.from_us(START_US + number * STEP_US)
            ego = EgoStateSE3.from_imu(pose(ego_at(number)), ego_metadata, time)
            label = list(DefaultBoxDetectionLabel)[number % 2]
            box = BoundingBoxSE3(
                PoseSE3(10.0 + number, 2.0, 0.5, 1.0, 0.0, 0.0, 0.0),
                4.0,
                2.0,
                1.5,
            )
            detection = BoxDetectionSE3(
                BoxDetectionAttributes(label, "track", 7),
                box,
                Vector3D(10.0, 0.0, 0.0),
            )
            modalities = [
                ego,
                BoxDetectionsSE3([detection], time, boxes_metadata),
            ]
            for index, metadata in enumerate(cameras):
                if (number, index) != (2, 1):
                    stamp = Timestamp.from_us(START_US + number * STEP_US + index * 1000)
                    place = pose(ego_at(number) @ camera_mount()) if index == 0 else None
                    images = {"byte_string": picture(10 * number + index)}
                    if store == "path":
                        images = {
                            "dataset_root": root / "data",
                            "relative_path": f"{index}/{number}.jpg",
                        }
                    modalities.append(ParsedCamera(metadata, stamp, place, **images))
            writer.write_sync(ModalitiesSync(time, modalities))
        writer.close()
    return root


def test_cameras_poses_and_boxes_are_those_that_py123d_wrote(tmp_path):
    root = write_logs(tmp_path / "logs")
    fr.shard(
        f"py123d:{root}",
        tmp_path / "out",
        options={"missing_camera": "mask"},
        workers=1,
    )
    assert not fr.verify(tmp_path / "out", deep=True).faults
    dataset = fr.open(tmp_path / "out")
    samples = samples_of(tmp_path / "out")
    assert {name: split.num_samples for name, split in dataset.splits.items()} == {
        "train": FRAMES,
        "val": FRAMES,
    }
    names = [camera.channel for camera in dataset.manifest.cameras]
    assert set(names) == {"pcam_f0", "pcam_b0"}
    for sample in samples.values():
        number = (sample.meta.timestamp_ns // 1000 - START_US) // STEP_US
        np.testing.assert_allclose(sample.geometry.ego2global, ego_at(number), atol=1e-6)
        for index, camera in enumerate(("pcam_f0", "pcam_b0")):
            if index == 1 and number in (
                2,
                FRAMES - 1,
            ):  # not written; later than the last pose of ego
                assert camera not in sample.images
                continue
            place = names.index(camera)
            assert sample.images[camera] == picture(10 * number + index)
            assert (
                sample.geometry.cam_timestamp_ns[place]
                == (START_US + number * STEP_US + index * 1000) * 1000
            )
            np.testing.assert_allclose(sample.geometry.cam2ego[place], camera_mount(), atol=1e-6)
            np.testing.assert_allclose(
                sample.geometry.intrinsics[place],
                [[30, 0, 15.5], [0, 31, 11.5], [0, 0, 1]],
            )
        np.testing.assert_allclose(
            sample.geometry.dist[names.index("pcam_f0")][:5],
            [0.1, -0.02, 0.001, 0.002, 0.003],
        )
        (box,) = sample.boxes.boxes3d
        expected = np.linalg.inv(ego_at(number)) @ [10.0 + number, 2, 0.5, 1]
        np.testing.assert_allclose(box[:3], expected[:3], atol=1e-4)
        np.testing.assert_allclose(box[3:], [4, 2, 1.5, -0.05 * number], atol=1e-4)
        np.testing.assert_allclose(
            sample.boxes.velocity[0],
            ego_at(number)[:3, :3].T @ [10, 0, 0],
            atol=1e-4,
        )
        assert sample.boxes.num_lidar_pts[0] == 7


def test_images_may_be_paths_below_a_root(tmp_path):
    for camera_index in range(2):
        (tmp_path / "logs" / "data" / str(camera_index)).mkdir(parents=True)
        for number in range(FRAMES):
            (tmp_path / "logs" / "data" / str(camera_index) / f"{number}.jpg").write_bytes(
                picture(10 * number + camera_index)
            )
    root = write_logs(tmp_path / "logs", store="path")
    options = {"missing_camera": "mask", "root": str(root / "data")}
    fr.shard(f"py123d:{root}", tmp_path / "out", options=options, workers=1)
    for sample in samples_of(tmp_path / "out").values():
        number = (sample.meta.timestamp_ns // 1000 - START_US) // STEP_US
        assert sample.images["pcam_f0"] == picture(10 * number)


def test_what_is_not_read_is_named(tmp_path):
    root = write_logs(tmp_path / "logs", ipc_compression="lz4")
    with pytest.raises(
        fr.errors.SourceError,
        match="are compressed: write them with ipc_compression=None",
    ):
        scan_source(SourceSpec("py123d", str(root), {"missing_camera": "mask"}))
    path = root / "made_train" / "a" / "sync.arrow"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(fr.errors.SourceError, match=r"a/sync\.arrow' cannot be read"):
        scan_source(SourceSpec("py123d", str(root), {"missing_camera": "mask"}))


def test_a_file_without_metadata_is_refused(tmp_path):
    folder = tmp_path / "made_train" / "a"
    folder.mkdir(parents=True)
    table = pa.table({"sync.timestamp_us": [1]})
    with (
        pa.OSFile(str(folder / "sync.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    (folder / "camera.pcam_f0.arrow").write_bytes((folder / "sync.arrow").read_bytes())
    with pytest.raises(
        fr.errors.SourceError,
        match=r"sync\.arrow' cannot be read: no b'metadata'",
    ):
        scan_source(SourceSpec("py123d", str(tmp_path), {}))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            pa.array(np.zeros(3000)),
            "sync.arrow', decoded, has 24000 bytes, .* at most 20000",
        ),
        (
            pa.nulls(3000),
            "3000 rows, decoded, has 24000 bytes, .* at most 20000",
        ),
        (
            pa.RunEndEncodedArray.from_arrays(pa.array([3000], pa.int32()), pa.array(["x"])),
            "column 'sync.timestamp_us' of run_end_encoded.* is not read",
        ),
    ],
    ids=["compressed numbers", "rows without bytes", "runs"],
)
def test_a_table_that_decodes_to_more_than_the_limit_is_refused(
    tmp_path, monkeypatch, column, words
):
    folder = tmp_path / "made_train" / "a"
    folder.mkdir(parents=True)
    table = pa.table({"sync.timestamp_us": column})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(folder / "sync.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1000)  # each batch is within the limit
    (folder / "camera.pcam_f0.arrow").write_bytes((folder / "sync.arrow").read_bytes())
    monkeypatch.setattr(arrow, "TABLE", TABLE._replace(maximum=20_000))
    monkeypatch.setattr(arrow, "TABLE_OF_LOG", TABLE_OF_LOG._replace(maximum=20_000))
    with pytest.raises(fr.errors.SourceError, match=words):
        scan_source(SourceSpec("py123d", str(tmp_path), {}))
