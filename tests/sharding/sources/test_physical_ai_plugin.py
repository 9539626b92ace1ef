"""The plug-in of PhysicalAI-AV on logs in its layout: chunks of clips, videos in zips, f-theta lenses, egomotion."""

from __future__ import annotations

import csv
import io
import json
import tomllib
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.spatial.transform import Rotation

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from support.manifest_world import write_video
from support.neutral_source import install_plugin
from support.source_world import OPTICAL, samples_of

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "physical_ai"
CAMERAS = ("camera_front_wide_120fov", "camera_rear_tele_30fov")
FORWARD = [0.0, 32.0, 0.3, -1.5, 0.1]
CLIPS = {"0a1b2c3d-aaaa": (3, "train"), "1a1b2c3d-bbbb": (3, "val"), "2a1b2c3d-cccc": (4, "train")}
FRAMES, FPS = 24, 30
TIMES_US = -33_333 + (np.arange(FRAMES) * 1e6 / FPS).astype(np.int64)
FIRST_US = 1_000_000
MOTION_US = np.arange(-100_000, 900_000, 10_000)


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    place = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]["fuelrail.sources"]
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "physical_ai", place["physical_ai"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(folder)


def parquet(columns, index=()):
    """A table as pandas writes one with this index."""
    table = pa.table(columns)
    about = json.dumps({"index_columns": list(index), "columns": []})
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"pandas": about}), out)
    return out.getvalue()


def pose_at(time_us):
    """Ego in the anchor frame: 10 m/s forward, turning left by 0.2 rad/s."""
    seconds = time_us * 1e-6
    found = np.eye(4)
    found[:3, :3] = Rotation.from_euler("z", 0.2 * seconds).as_matrix()
    found[:3, 3] = 50 * np.sin(0.2 * seconds), 50 * (1 - np.cos(0.2 * seconds)), 0
    return found


def picture(camera, number):
    return np.full((48, 64, 3), 20 + 8 * number if camera == CAMERAS[0] else 230 - 8 * number, np.uint8)


def mount(camera):
    turned = Rotation.from_euler("z", 0.0 if camera == CAMERAS[0] else np.pi).as_matrix() @ OPTICAL
    return turned, [1.7, 0.1, 1.4]


def write(root):
    """Write the download of two chunks; the second has no videos."""
    zips = {camera: ("camera", {"video": "{clip_id}.%s.mp4", "frame_timestamps": "{clip_id}.%s.timestamps.parquet"})
            for camera in CAMERAS}  # fmt: skip
    zips["egomotion"] = ("labels", {"egomotion": "{clip_id}.%s.parquet"})
    rows = []
    for feature, (directory, files) in zips.items():
        path = f"{directory}/{feature}/{feature}.chunk_{{chunk_id:04d}}.zip"
        members = json.dumps({alias: name % feature for alias, name in files.items()})
        rows.append({"feature": feature, "directory": directory, "chunk_path": path, "clip_files_in_zip": members})
    for feature in ("camera_intrinsics", "sensor_extrinsics"):
        path = f"calibration/{feature}/{feature}.chunk_{{chunk_id:04d}}.parquet"
        rows.append({"feature": feature, "directory": "calibration", "chunk_path": path, "clip_files_in_zip": ""})
    root.mkdir()
    with (root / "features.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    index = {"clip_id": list(CLIPS), "chunk": [chunk for chunk, _ in CLIPS.values()]}
    index |= {"split": [split for _, split in CLIPS.values()], "clip_is_valid": [True] * len(CLIPS)}
    (root / "clip_index.parquet").write_bytes(parquet(index, ["clip_id"]))
    for row in rows:
        for chunk in {chunk for chunk, _ in CLIPS.values()}:
            if chunk == 4 and row["directory"] == "camera":
                continue
            path = root / row["chunk_path"].format(chunk_id=chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            clips = [clip for clip, (own, _) in CLIPS.items() if own == chunk]
            if row["directory"] == "calibration":
                path.write_bytes(calibration(row["feature"], clips))
                continue
            with zipfile.ZipFile(path, "w") as file:
                for clip in clips:
                    for alias, name in json.loads(row["clip_files_in_zip"]).items():
                        file.writestr(name.format(clip_id=clip), member(alias, row["feature"], root))
    return root


def calibration(feature, clips):
    keys = [(clip, camera) for clip in clips for camera in CAMERAS]
    columns = {"clip_id": [clip for clip, _ in keys], "camera_name": [camera for _, camera in keys]}
    if feature == "camera_intrinsics":
        values = {"width": 64, "height": 48, "cx": 31.0, "cy": 23.5}
        values |= {f"fw_poly_{power}": value for power, value in enumerate(FORWARD)}
        columns |= {name: [value] * len(keys) for name, value in values.items()}
    else:
        found = [(Rotation.from_matrix(mount(camera)[0]).as_quat(), mount(camera)[1]) for _, camera in keys]
        columns |= {name: [q[at] for q, _ in found] for at, name in enumerate(("qx", "qy", "qz", "qw"))}
        columns |= {name: [t[at] for _, t in found] for at, name in enumerate("xyz")}
    return parquet(columns, ["clip_id", "camera_name"])


def member(alias, feature, root):
    if alias == "frame_timestamps":
        return parquet({"timestamp": TIMES_US + (0 if feature == CAMERAS[0] else 4_000)})
    if alias == "video":
        write_video(root / "made.mp4", [picture(feature, number) for number in range(FRAMES)])
        return (root / "made.mp4").read_bytes()
    poses = [pose_at(time) for time in MOTION_US]
    quaternions = Rotation.from_matrix([pose[:3, :3] for pose in poses]).as_quat()
    columns = {"timestamp": MOTION_US}
    columns |= {name: quaternions[:, at] for at, name in enumerate(("qx", "qy", "qz", "qw"))}
    columns |= {name: [pose[at, 3] for pose in poses] for at, name in enumerate("xyz")}
    motion = ("vx", "vy", "vz", "ax", "ay", "az", "curvature")
    return parquet({**columns, **{name: MOTION_US * 1e-6 + at for at, name in enumerate(motion)}})


def test_frames_poses_lenses_and_egomotion_are_those_of_the_download(tmp_path):
    root = write(tmp_path / "download")
    report = fr.shard(
        f"physical_ai:{root}", tmp_path / "out", options={"missing_camera": "mask", "rate": 10.0}, workers=1
    )
    assert not fr.verify(tmp_path / "out", deep=True).faults
    assert report.scan.noted["clips left out, not downloaded"] == 1
    manifest = fr.open(tmp_path / "out").manifest
    assert {name: split.num_clips for name, split in manifest.splits.items()} == {"train": 1, "val": 1}
    samples = samples_of(tmp_path / "out")
    kept_us = TIMES_US[::3]
    assert len(samples) == 2 * len(kept_us)
    for sample in samples.values():
        time_us = kept_us[sample.meta.frame_idx]
        assert sample.meta.timestamp_ns == (time_us + FIRST_US) * 1000
        np.testing.assert_allclose(sample.geometry.ego2global, pose_at(time_us), atol=1e-4)
        for camera in CAMERAS:
            at = [one.channel for one in manifest.cameras].index(camera)
            turned, place = mount(camera)
            np.testing.assert_allclose(sample.geometry.cam2ego[at][:3, :3], turned, atol=1e-9)
            np.testing.assert_allclose(sample.geometry.cam2ego[at][:3, 3], place, atol=1e-9)
            np.testing.assert_allclose(sample.geometry.dist[at][:5] * FORWARD[1], FORWARD, atol=1e-12)
            number = 3 * sample.meta.frame_idx
            exposed_us = TIMES_US[number] + (0 if camera == CAMERAS[0] else 4_000)
            assert sample.geometry.cam_timestamp_ns[at] == (exposed_us + FIRST_US) * 1000
            data = cv2.imdecode(np.frombuffer(sample.images[camera], np.uint8), cv2.IMREAD_COLOR)
            assert abs(data.astype(int) - picture(camera, number)).max() <= 4
    window = {"egomotion": {"from": -0.05, "to": 0.1, "hz": 100}}
    transforms = {"channels": ["egomotion"], "undistort": {}, "image": {"height": 48, "width": 64}}
    order = {"transforms": transforms, "window": window}
    with fr.DataLoader(tmp_path / "out", 1, split="val", **order) as loader:
        for batch in loader:
            times_s = int(batch["timestamp_ns"][0]) * 1e-9 - FIRST_US * 1e-6 + np.arange(-5, 11) * 0.01
            valid = batch["egomotion_valid"][0].numpy()
            np.testing.assert_allclose(batch["egomotion"][0].numpy()[valid, 0], times_s[valid], atol=1e-6)
            assert valid.any()


def test_what_is_missing_or_damaged_is_named(tmp_path):
    root = write(tmp_path / "download")
    spec = SourceSpec("physical_ai", str(root), {"cameras": list(CAMERAS)})
    path = root / "calibration" / "camera_intrinsics" / "camera_intrinsics.chunk_0003.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"camera_intrinsics\.chunk_0003\.parquet"):
        scan_source(spec)
    path.write_bytes(whole)
    path = root / "labels" / "egomotion" / "egomotion.chunk_0003.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"egomotion\.chunk_0003\.zip"):
        scan_source(spec)
