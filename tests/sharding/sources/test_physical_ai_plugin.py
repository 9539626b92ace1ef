"""The plug-in of PhysicalAI-AV on logs in its layout: chunks, videos in zips, lenses, lidar, radars, egomotion."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.spatial.transform import Rotation

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, FuelrailError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from support.manifest_world import write_video
from support.neutral_source import install_plugin
from support.source_world import OPTICAL, samples_of
from support.spoil import LFS_POINTER

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "physical_ai"
CAMERAS = ("camera_front_wide_120fov", "camera_rear_tele_30fov")
FORWARD = [0.0, 32.0, 0.3, -1.5, 0.1]
CLIPS = {
    "0a1b2c3d-aaaa": (3, "train"),
    "1a1b2c3d-bbbb": (3, "val"),
    "2a1b2c3d-cccc": (4, "train"),
}
FRAMES = 24
FPS = 30
TIMES_US = -33_333 + (np.arange(FRAMES) * 1e6 / FPS).astype(np.int64)
FIRST_US = 1_000_000
RADARS = ("radar_front_center_srr_0", "radar_rear_left_mrr_2")
LIDAR = "lidar_top_360fov"
SPIN_US = np.arange(-20_000, 780_000, 100_000)
SCAN_US = np.arange(5_000, 700_000, 50_000)
MOTION_US = np.arange(-100_000, 900_000, 10_000)


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    place = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"][
        "fuelrail.sources"
    ]
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "physical_ai", place["physical_ai"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(folder)


def parquet(columns, index=()):
    """A table as pandas writes one with this index."""
    table = pa.table(columns)
    metadata = json.dumps({"index_columns": list(index), "columns": []})
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"pandas": metadata}), out)
    return out.getvalue()


def pose_at(time_us):
    """Ego in the anchor frame: 10 m/s forward, turning left by 0.2 rad/s."""
    seconds = time_us * 1e-6
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("z", 0.2 * seconds).as_matrix()
    pose[:3, 3] = (
        50 * np.sin(0.2 * seconds),
        50 * (1 - np.cos(0.2 * seconds)),
        0,
    )
    return pose


def picture(camera, number):
    return np.full(
        (48, 64, 3),
        20 + 8 * number if camera == CAMERAS[0] else 230 - 8 * number,
        np.uint8,
    )


def mount(camera):
    if camera not in CAMERAS:
        return Rotation.from_euler("zyx", [0.3 * len(camera), 0.1, -0.05]).as_matrix(), [
            len(camera) / 10,
            -0.4,
            0.6,
        ]
    turned = Rotation.from_euler("z", 0.0 if camera == CAMERAS[0] else np.pi).as_matrix() @ OPTICAL
    return turned, [1.7, 0.1, 1.4]


def returns(radar):
    """The returns of a radar in its own axes, as rows; the last one of a scan has no distance."""
    rng = np.random.default_rng(len(radar))
    rows = []
    for scan, time in enumerate(SCAN_US):
        for number in range(3 + scan % 3):
            azimuth = rng.uniform(-1, 1)
            elevation = rng.uniform(-0.2, 0.2)
            distance = rng.uniform(1, 90)
            rows.append(
                {
                    "scan_index": scan,
                    "timestamp": time,
                    "sensor_timestamp": time + number,
                    "num_returns": 3 + scan % 3,
                    "doppler_ambiguity": 22.5,
                    "max_returns": 300,
                    "detection_index": number,
                    "radar_model": 1,
                    "azimuth": azimuth,
                    "elevation": elevation,
                    "distance": distance if number else 0.0,
                    "radial_velocity": rng.uniform(-9, 9),
                    "rcs": rng.uniform(-60, 60),
                    "snr": 20.0,
                    "exist_probb": 90,
                }
            )
    return rows


def spin(number):
    """The points of a spin with the attributes that the dataset states."""
    rng = np.random.default_rng(number)
    points = rng.uniform(-40, 40, (50 + number, 3)).astype(np.float32)
    times = np.maximum(SPIN_US[number] + np.sort(rng.integers(0, 100_000, len(points))), 0).astype(
        np.uint32
    )
    rows = rng.integers(0, 128, (len(points), 2)).astype(np.uint16)
    intensity = rng.integers(0, 256, (len(points), 1)).astype(np.uint8)
    return points, {
        "intensity": intensity,
        "timestamp": times[:, None],
        "model_element": rows,
    }


def spins():
    """The table of a clip's spins, a row group each."""
    draco = pytest.importorskip("DracoPy")
    encoded = []
    for number in range(len(SPIN_US)):
        points, stated = spin(number)
        encoded.append(
            draco.encode(
                points,
                quantization_bits=20,
                generic_attributes=stated,
                preserve_order=True,
            )
        )
    columns = {
        "spin_index": np.arange(len(SPIN_US)),
        "spin_start_timestamp": SPIN_US,
        "spin_end_timestamp": SPIN_US + 100_000,
        "draco_encoded_pointcloud": encoded,
    }
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=1)
    return out.getvalue()


def write(root, radars=(), lidar=None):
    """Write the download of two chunks; the second has no videos. ``lidar`` are the bytes of a clip's spins."""
    zips = {
        camera: (
            "camera",
            {
                "video": "{clip_id}.%s.mp4",
                "frame_timestamps": "{clip_id}.%s.timestamps.parquet",
            },
        )
        for camera in CAMERAS
    }
    zips["egomotion"] = ("labels", {"egomotion": "{clip_id}.%s.parquet"})
    zips |= {radar: ("radar", {"radar": "{clip_id}.%s.parquet"}) for radar in radars}
    zips |= {LIDAR: ("lidar", {"lidar": "{clip_id}.%s.parquet"})} if lidar else {}
    rows = []
    for feature, (directory, files) in zips.items():
        path = f"{directory}/{feature}/{feature}.chunk_{{chunk_id:04d}}.zip"
        members = json.dumps({alias: name % feature for alias, name in files.items()})
        rows.append(
            {
                "feature": feature,
                "directory": directory,
                "chunk_path": path,
                "clip_files_in_zip": members,
            }
        )
    for feature in ("camera_intrinsics", "sensor_extrinsics"):
        path = f"calibration/{feature}/{feature}.chunk_{{chunk_id:04d}}.parquet"
        rows.append(
            {
                "feature": feature,
                "directory": "calibration",
                "chunk_path": path,
                "clip_files_in_zip": "",
            }
        )
    root.mkdir()
    with (root / "features.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    index = {
        "clip_id": list(CLIPS),
        "chunk": [chunk for chunk, _ in CLIPS.values()],
    }
    index |= {
        "split": [split for _, split in CLIPS.values()],
        "clip_is_valid": [True] * len(CLIPS),
    }
    (root / "clip_index.parquet").write_bytes(parquet(index, ["clip_id"]))
    for row in rows:
        for chunk in {chunk for chunk, _ in CLIPS.values()}:
            if chunk == 4 and row["directory"] in ("camera", "radar", "lidar"):
                continue
            path = root / row["chunk_path"].format(chunk_id=chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            clips = [clip for clip, (clip_chunk, _) in CLIPS.items() if clip_chunk == chunk]
            if row["directory"] == "calibration":
                path.write_bytes(calibration(row["feature"], clips))
                continue
            with zipfile.ZipFile(path, "w") as file:
                for clip in clips:
                    if row["feature"] == RADARS[1] and CLIPS[clip][1] == "val":
                        continue  # not all clips have all radars
                    for alias, name in json.loads(row["clip_files_in_zip"]).items():
                        data = (
                            lidar
                            if row["feature"] == LIDAR
                            else member(alias, row["feature"], root)
                        )
                        file.writestr(name.format(clip_id=clip), data)
    return root


def calibration(feature, clips):
    sensors = CAMERAS if feature == "camera_intrinsics" else (*CAMERAS, *RADARS, LIDAR)
    keys = [(clip, camera) for clip in clips for camera in sensors]
    columns = {
        "clip_id": [clip for clip, _ in keys],
        "camera_name": [camera for _, camera in keys],
    }
    if feature == "camera_intrinsics":
        values = {"width": 64, "height": 48, "cx": 31.0, "cy": 23.5}
        values |= {f"fw_poly_{power}": value for power, value in enumerate(FORWARD)}
        columns |= {name: [value] * len(keys) for name, value in values.items()}
    else:
        mounts = [
            (Rotation.from_matrix(mount(camera)[0]).as_quat(), mount(camera)[1])
            for _, camera in keys
        ]
        columns |= {
            name: [q[axis] for q, _ in mounts] for axis, name in enumerate(("qx", "qy", "qz", "qw"))
        }
        columns |= {name: [t[axis] for _, t in mounts] for axis, name in enumerate("xyz")}
    return parquet(columns, ["clip_id", "camera_name"])


def member(alias, feature, root):
    if alias == "radar":
        rows = returns(feature)
        return parquet(
            {name: [row[name] for row in rows] for name in rows[0]},
            ["scan_index"],
        )
    if alias == "frame_timestamps":
        return parquet({"timestamp": TIMES_US + (0 if feature == CAMERAS[0] else 4_000)})
    if alias == "video":
        write_video(
            root / "made.mp4",
            [picture(feature, number) for number in range(FRAMES)],
        )
        return (root / "made.mp4").read_bytes()
    poses = [pose_at(time) for time in MOTION_US]
    quaternions = Rotation.from_matrix([pose[:3, :3] for pose in poses]).as_quat()
    columns = {"timestamp": MOTION_US}
    columns |= {name: quaternions[:, axis] for axis, name in enumerate(("qx", "qy", "qz", "qw"))}
    columns |= {name: [pose[axis, 3] for pose in poses] for axis, name in enumerate("xyz")}
    motion = ("vx", "vy", "vz", "ax", "ay", "az", "curvature")
    return parquet(
        {
            **columns,
            **{name: MOTION_US * 1e-6 + offset for offset, name in enumerate(motion)},
        }
    )


def test_frames_poses_lenses_and_egomotion_are_those_of_the_download(tmp_path):
    root = write(tmp_path / "download")
    report = fr.shard(
        f"physical_ai:{root}",
        tmp_path / "out",
        options={"missing_camera": "mask", "rate": 10.0},
        workers=1,
    )
    assert not fr.verify(tmp_path / "out", deep=True).faults
    assert report.scan.noted["clips left out, not downloaded"] == 1
    manifest = fr.open(tmp_path / "out").manifest
    assert {name: split.num_clips for name, split in manifest.splits.items()} == {
        "train": 1,
        "val": 1,
    }
    samples = samples_of(tmp_path / "out")
    kept_us = TIMES_US[::3]
    assert len(samples) == 2 * len(kept_us)
    for sample in samples.values():
        time_us = kept_us[sample.meta.frame_idx]
        assert sample.meta.timestamp_ns == (time_us + FIRST_US) * 1000
        np.testing.assert_allclose(sample.geometry.ego2global, pose_at(time_us), atol=1e-4)
        for camera in CAMERAS:
            index = [entry.channel for entry in manifest.cameras].index(camera)
            turned, place = mount(camera)
            np.testing.assert_allclose(sample.geometry.cam2ego[index][:3, :3], turned, atol=1e-9)
            np.testing.assert_allclose(sample.geometry.cam2ego[index][:3, 3], place, atol=1e-9)
            np.testing.assert_allclose(
                sample.geometry.dist[index][:5] * FORWARD[1],
                FORWARD,
                atol=1e-12,
            )
            number = 3 * sample.meta.frame_idx
            exposed_us = TIMES_US[number] + (0 if camera == CAMERAS[0] else 4_000)
            assert sample.geometry.cam_timestamp_ns[index] == (exposed_us + FIRST_US) * 1000
            data = cv2.imdecode(np.frombuffer(sample.images[camera], np.uint8), cv2.IMREAD_COLOR)
            assert abs(data.astype(int) - picture(camera, number)).max() <= 4
    window = {"egomotion": {"from": -0.05, "to": 0.1, "hz": 100}}
    transforms = {
        "select": ["egomotion"],
        "undistort": {},
        "image": {"height": 48, "width": 64},
    }
    order = {"transforms": transforms, "window": window}
    with fr.DataLoader(tmp_path / "out", 1, split="val", **order) as loader:
        for batch in loader:
            times_s = (
                int(batch["timestamp_ns"][0]) * 1e-9 - FIRST_US * 1e-6 + np.arange(-5, 11) * 0.01
            )
            valid = batch["egomotion_valid"][0].numpy()
            np.testing.assert_allclose(
                batch["egomotion"][0].numpy()[valid, 0],
                times_s[valid],
                atol=1e-6,
            )
            assert valid.any()


def transform_points(matrix, points):
    return points @ matrix[:3, :3].T + matrix[:3, 3]


def test_radars_are_the_nearest_scans_in_ego(tmp_path):
    root = write(tmp_path / "download", radars=RADARS)
    options = {"missing_camera": "mask", "rate": 10.0, "radars": True}
    report = fr.shard(f"physical_ai:{root}", tmp_path / "out", options=options, workers=1)
    assert not fr.verify(tmp_path / "out", deep=True).faults
    assert not any("lidar" in text for text in report.scan.noted)
    dataset = fr.open(tmp_path / "out")
    num_seen = 0
    for position in range(len(dataset)):
        sample = dataset.read(position)
        time_us = sample["meta"].timestamp_ns / 1000 - FIRST_US
        for radar in RADARS:
            nearest = SCAN_US[np.abs(SCAN_US - time_us).argmin()]
            has_radar = radar == RADARS[0] or sample["meta"].split == "train"
            if not has_radar or abs(nearest - time_us) > 26_000:
                assert radar not in sample
                continue
            rows = [
                row for row in returns(radar) if row["timestamp"] == nearest and row["distance"] > 0
            ]
            turned, place = mount(radar)
            sensor2ego = np.eye(4)
            sensor2ego[:3, :3], sensor2ego[:3, 3] = turned, place
            moved = np.linalg.inv(pose_at(time_us)) @ pose_at(nearest) @ sensor2ego
            radar_points = sample[radar]
            assert radar_points.shape == (len(rows), 12) and len(rows)
            for point, row in zip(radar_points, rows, strict=True):
                # Tilted down by the elevation about y, then turned left by the azimuth about z.
                ray = Rotation.from_euler("ZY", [row["azimuth"], -row["elevation"]]).apply(
                    [1, 0, 0]
                )
                np.testing.assert_allclose(
                    point[:3],
                    transform_points(moved, ray * row["distance"]),
                    atol=2e-3,
                )
                np.testing.assert_allclose(
                    point[3:6],
                    moved[:3, :3] @ ray * row["radial_velocity"],
                    atol=1e-3,
                )
                rest = [
                    row[name]
                    for name in (
                        "radial_velocity",
                        "rcs",
                        "snr",
                        "exist_probb",
                        "doppler_ambiguity",
                    )
                ]
                np.testing.assert_allclose(point[6:11], rest, rtol=1e-6)
                assert point[11] == pytest.approx((time_us - nearest) * 1e-6, abs=1e-6)
            num_seen += 1
    assert num_seen > 10
    with fr.DataLoader(
        tmp_path / "out",
        2,
        transforms={
            "select": list(RADARS),
            "image": {"height": 48, "width": 64},
        },
        shuffle=False,
    ) as loader:
        assert any(
            points is not None and points.shape[1] == 12
            for batch in loader
            for points in batch[RADARS[1]]
        )


def test_spins_are_the_points_of_draco(tmp_path):
    root = write(tmp_path / "download", lidar=spins())
    options = {"missing_camera": "mask", "rate": 10.0}
    fr.shard(f"physical_ai:{root}", tmp_path / "out", options=options, workers=1)
    assert not fr.verify(tmp_path / "out", deep=True).faults
    dataset = fr.open(tmp_path / "out")
    num_seen = 0
    (lidar,) = dataset.manifest.lidars
    assert (lidar.channel, tuple(lidar.columns)) == (
        LIDAR,
        ("x", "y", "z", "intensity", "ring", "time"),
    )
    for position in range(len(dataset)):
        sample = dataset.read(position)
        time_us = sample["meta"].timestamp_ns / 1000 - FIRST_US
        number = int(np.abs(SPIN_US - time_us).argmin())
        points, stated = spin(number)
        if LIDAR not in sample:
            assert abs(SPIN_US[number] - time_us) > 50_000
            continue
        assert sample["geometry"].lidar_timestamp_ns[0] == (SPIN_US[number] + FIRST_US) * 1000
        np.testing.assert_allclose(
            sample["geometry"].lidar2ego[0][:3, 3], mount(LIDAR)[1], atol=1e-9
        )
        np.testing.assert_allclose(
            sample["geometry"].lidar_ego2global[0],
            pose_at(SPIN_US[number]),
            atol=1e-4,
        )
        lidar_points = sample[LIDAR]
        np.testing.assert_allclose(lidar_points[:, :3], points, atol=1e-3)
        np.testing.assert_allclose(lidar_points[:, 3], stated["intensity"][:, 0] / 255, atol=1e-6)
        np.testing.assert_array_equal(lidar_points[:, 4], stated["model_element"][:, 0])
        seconds = (stated["timestamp"][:, 0].astype(np.int64) - SPIN_US[number]) * 1e-6
        np.testing.assert_allclose(lidar_points[:, 5], seconds, atol=1e-6)
        num_seen += 1
    assert num_seen > 10


def test_lidar_is_left_out_with_a_word_where_draco_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "DracoPy", None)
    root = write(tmp_path / "download", lidar=b"never read")
    info = scan_source(SourceSpec("physical_ai", str(root), {"missing_camera": "mask"}))
    assert info.report.noted["lidar left out, its points are Draco's: pip install DracoPy"] == 1
    assert not info.lidars


def test_damaged_spins_and_scans_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "DracoPy", types.ModuleType("DracoPy"))
    root = write(tmp_path / "download", radars=RADARS[:1], lidar=b"no table")
    spec = SourceSpec("physical_ai", str(root), {"missing_camera": "mask", "radars": True})
    with pytest.raises(
        SourceError,
        match=rf"{LIDAR}\.chunk_0003\.zip.*{LIDAR}\.parquet cannot be read",
    ):
        scan_source(spec)
    spec.options["points"] = False
    path = root / "radar" / RADARS[0] / f"{RADARS[0]}.chunk_0003.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match=rf"{RADARS[0]}\.chunk_0003\.zip"):
        scan_source(spec)


def test_what_is_missing_or_damaged_is_named(tmp_path):
    root = write(tmp_path / "download")
    spec = SourceSpec("physical_ai", str(root), {"cameras": list(CAMERAS)})
    path = root / "calibration" / "camera_intrinsics" / "camera_intrinsics.chunk_0003.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"camera_intrinsics\.chunk_0003\.parquet"):
        scan_source(spec)
    path.write_bytes(content)
    path = root / "labels" / "egomotion" / "egomotion.chunk_0003.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"egomotion\.chunk_0003\.zip"):
        scan_source(spec)


def flip_bits(data):
    """Change eight bits, always the same ones of a file."""
    changed = bytearray(data)
    rng = np.random.default_rng(len(data))
    for place in rng.integers(0, max(len(data), 1), 8 if data else 0).tolist():
        changed[place] ^= 1 << (place % 8)
    return bytes(changed)


ALTERATIONS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "shorter": lambda data: data[:-1],
    "flipped": flip_bits,
    "pointer": lambda data: LFS_POINTER + b"oid sha256:0\nsize 1\n",
    "zeros": lambda data: bytes(len(data)),
}


def alter_member(path, alter):
    """Alter the first member of a zip, which is whole."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for number, (name, data) in enumerate(members.items()):
            file.writestr(name, data if number else alter(data))


@pytest.fixture(scope="module")
def download(tmp_path_factory):
    return write(tmp_path_factory.mktemp("download") / "sound", radars=RADARS)


@pytest.mark.costly
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_altered_files_end_in_a_sentence_or_are_counted(download, alteration, tmp_path):
    """Each file of a download, and the first member of each zip: no other error, and nothing lost unsaid."""
    options = {"missing_camera": "mask", "rate": 3.0, "radars": True}
    names = sorted({path.relative_to(download) for path in download.rglob("*") if path.is_file()})
    whole = fr.shard(
        f"physical_ai:{download}",
        tmp_path / "whole",
        options=options,
        workers=1,
    )
    alter = ALTERATIONS[alteration]
    num_errors = 0
    for number, name in enumerate(names):
        if name.suffix == ".mp4":  # left by `write`
            continue
        for inside in (False, True) if name.suffix == ".zip" else (False,):
            root = tmp_path / f"{number}-{inside}"
            shutil.copytree(download, root)
            path = root / name
            if inside:
                alter_member(path, alter)
            else:
                path.write_bytes(alter(path.read_bytes()))
            try:
                report = fr.shard(
                    f"physical_ai:{root}",
                    root / "out",
                    options=options,
                    workers=1,
                )
            except FuelrailError as error:
                num_errors += 1
                assert str(error)
            else:
                assert not fr.verify(root / "out", deep=True).faults
                lost = whole.num_samples - report.num_samples
                said = sum(report.scan.noted.values()) + sum(report.scan.dropped_samples.values())
                assert not lost or said, name
            shutil.rmtree(root)
    assert num_errors


def test_policies_on_damaged_images_are_refused(download):
    """Its images are frames of video, which are decoded after the scan."""
    for answer in ("mask", "drop"):
        options = {"missing_camera": "mask", "damaged_image": answer}
        with pytest.raises(
            ConfigError,
            match=f"damaged_image={answer} is not for the images of",
        ):
            scan_source(SourceSpec("physical_ai", str(download), options))
