"""The example of a plug-in: PandaSet, as a package of at most 75 lines of code."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

import fuelrail as fr
from support.neutral_source import install_plugin
from support.shared_data import shared_data
from support.source_suite import SourceSuite
from support.source_world import samples_of

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "pandaset"
CAMERAS = (
    "front_camera",
    "front_right_camera",
    "front_left_camera",
    "back_camera",
    "left_camera",
    "right_camera",
)
LIDAR2EGO = np.array([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    place = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"][
        "fuelrail.sources"
    ]
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "pandaset", place["pandaset"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(folder)


def test_it_is_short():
    tree = ast.parse((FOLDER / "fuelrail_pandaset.py").read_text())
    docstrings = {
        id(node.body[0]) for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)
    }
    lines = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and id(node) not in docstrings and not hasattr(node, "body")
        for line in range(node.lineno, node.end_lineno + 1)
    }
    heads = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and hasattr(node, "body")
    }
    assert len(lines | heads) <= 75


def poses_json(matrices):
    """Make a pose as PandaSet writes it: position and heading by name."""
    quaternions = Rotation.from_matrix([matrix[:3, :3] for matrix in matrices]).as_quat()
    return json.dumps(
        [
            {
                "position": dict(zip("xyz", matrix[:3, 3].tolist(), strict=True)),
                "heading": dict(zip("wxyz", [q[3], q[0], q[1], q[2]], strict=True)),
            }
            for matrix, q in zip(matrices, quaternions.tolist(), strict=True)
        ]
    )


class TestPandaSet(SourceSuite):
    kind = "pandaset"
    impossible = ("no record",)
    states_sizes = False

    def world(self, **changes):
        cameras = changes.pop("cameras", dict.fromkeys(CAMERAS, (64, 48)))
        world = super().world(**{"cameras": cameras, "lidars": (), "num_boxes": 0, **changes})
        for number, clip in enumerate(world.clips):
            clip.name = f"{number + 1:03d}"
        return world

    compare = {"labelled": False, "pose_m": 2e-3}  # noqa: RUF012

    def write(self, world, root):
        from support.source_world import ego_at

        for number, clip in enumerate(world.clips):
            folder = root / clip.name
            times = [frame.timestamp_ns for frame in clip.frames]
            around = [
                times[0] - 100_000_000,
                *times,
                times[-1] + 100_000_000,
            ]  # more poses than pictures
            self._write_sensor(
                folder / "lidar",
                around,
                [ego_at(number, t) @ LIDAR2EGO for t in around],
            )
            for index, name in enumerate(world.cameras):
                images = [frame.images[name] for frame in clip.frames]
                stamps = [image.timestamp_ns for image in images]
                stamps = [
                    stamps[0] - 100_000_000,
                    *stamps,
                    stamps[-1] + 100_000_000,
                ]
                poses = [ego_at(number, t) @ images[0].cam2ego for t in stamps]
                self._write_sensor(folder / "camera" / name, stamps, poses)
                k = images[0].intrinsics
                (folder / "camera" / name / "intrinsics.json").write_text(
                    json.dumps(
                        {
                            "fx": k[0, 0],
                            "fy": k[1, 1],
                            "cx": k[0, 2],
                            "cy": k[1, 2],
                        }
                    )
                )
                for frame, image in enumerate(images, 1):
                    (folder / "camera" / name / f"{frame:02d}.jpg").write_bytes(image.jpeg)
                assert index < 6
        return str(root)

    @staticmethod
    def _write_sensor(folder, times, poses):
        folder.mkdir(parents=True)
        (folder / "timestamps.json").write_text(json.dumps([time / 1e9 for time in times]))
        (folder / "poses.json").write_text(poses_json(poses))


@pytest.mark.real
def test_the_real_clip(tmp_path):
    root = shared_data("pandaset-002")
    report = fr.shard(f"pandaset:{root}", tmp_path / "out", workers=1)
    assert (report.num_samples, report.num_clips) == (12, 1)
    assert not fr.verify(tmp_path / "out", deep=True).faults
    looks = {
        "front_camera": (1, 0),
        "left_camera": (0, 1),
        "right_camera": (0, -1),
        "back_camera": (-1, 0),
    }
    for sample in samples_of(tmp_path / "out").values():
        geometry = sample.geometry
        for index, name in enumerate(CAMERAS):
            rows = json.loads((root / "002" / "camera" / name / "poses.json").read_text())
            stamps = json.loads((root / "002" / "camera" / name / "timestamps.json").read_text())
            row = int(np.argmin(np.abs(np.array(stamps) * 1e9 - geometry.cam_timestamp_ns[index])))
            heading = rows[row]["heading"]
            position = rows[row]["position"]
            cam2global = geometry.cam_ego2global[index] @ geometry.cam2ego[index]
            np.testing.assert_allclose(
                cam2global[:3, 3], [position[axis] for axis in "xyz"], atol=1e-6
            )
            expected = Rotation.from_quat([heading[part] for part in "xyzw"]).as_matrix()
            np.testing.assert_allclose(cam2global[:3, :3], expected, atol=1e-6)
            if name in looks:
                assert geometry.cam2ego[index][:2, 2] @ looks[name] > 0.95, (
                    f"{name} looks elsewhere"
                )
            # The rig is rigid: extrinsics of a frame are those of the manual, to the noise of the poses.
            assert np.linalg.norm(geometry.cam2ego[index][:3, 3]) < 3


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("lidar/poses.json", b"[{}]"),
        ("lidar/poses.json", b"{}"),
        ("lidar/timestamps.json", b"[1.5, null]"),
        ("lidar/timestamps.json", b"[" * 100_000),
        ("camera/back_camera/intrinsics.json", b"[]"),
        ("camera/back_camera/timestamps.json", b"[]"),
        ("camera/left_camera/poses.json", b"\xff"),
        ("camera/left_camera/99.jpg", b""),
        ("camera/left_camera/x.jpg", b""),
    ],
)
def test_altered_files_are_named(tmp_path, file, content):
    root = tmp_path / "001"
    pose = {
        "heading": {"w": 1, "x": 0, "y": 0, "z": 0},
        "position": {"x": 0, "y": 0, "z": 0},
    }
    for folder in ("lidar", *(f"camera/{camera}" for camera in CAMERAS)):
        (root / folder).mkdir(parents=True)
        (root / folder / "poses.json").write_text(json.dumps([pose, pose]))
        (root / folder / "timestamps.json").write_text("[1557539924.5, 1557539924.6]")
        (root / folder / "intrinsics.json").write_text('{"fx": 9, "fy": 9, "cx": 1, "cy": 1}')
    (root / file).write_bytes(content)
    with pytest.raises(fr.errors.SourceError, match="001"):
        fr.check_source(f"pandaset:{tmp_path}")
