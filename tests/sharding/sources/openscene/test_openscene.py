"""OpenScene and NAVSIM: the synthetic world, ego status, commands and trajectories; faulty logs are named."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, parse_source
from fuelrail.sharding.verify.dataset import verify
from support.batches import load
from support.openscene_files import LENS, openscene_world, write_log
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.source_world import samples_of


class TestOpenScene(AtUrl, SourceSuite):
    kind = "openscene"
    states_sizes = False

    def world(self, **changes):
        return openscene_world(**changes)

    def write(self, world, root):
        for clip in world.clips:
            write_log(root, clip, folder="meta_datas")
        return str(root)


def relative_se2(origin, poses):
    """Poses x, y, heading in the frame of the origin, by the definition of NAVSIM's trajectories."""
    angle = -origin[2]
    turned = (poses[:, :2] - origin[:2]) @ np.array(
        [
            [math.cos(angle), math.sin(angle)],
            [-math.sin(angle), math.cos(angle)],
        ]
    )
    return np.c_[turned, (poses[:, 2] - origin[2] + math.pi) % (2 * math.pi) - math.pi]


def test_status_commands_and_trajectories_are_in_batches(tmp_path):
    world = openscene_world(every=5, num_clips=1, num_frames=60)
    (clip,) = world.clips
    del clip.frames[9]  # a frame that the logs leave out: steps are by time, not by number
    write_log(tmp_path / "root", clip)
    with pytest.raises(ConfigError, match="its content looks like openscene:"):
        parse_source(str(tmp_path / "root"), {})
    fr.shard(
        f"openscene:{tmp_path / 'root'}",
        tmp_path / "out",
        splits={"train": 1.0},
        workers=1,
    )
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    poses = np.array(
        [
            [
                *frame.ego2global[:2, 3],
                math.atan2(frame.ego2global[1, 0], frame.ego2global[0, 0]),
            ]
            for frame in clip.frames
        ]
    )
    times_s = np.array([frame.timestamp_ns for frame in clip.frames]) * 1e-9
    names = [
        "ego_trajectory",
        "driving_command",
        "roadblock_ids",
        "traffic_lights",
    ]
    num_steps = 0
    with load(tmp_path / "out", 1, select=[*names, "command", "has_route", "location"]) as loader:
        for batch in loader:
            position = int(batch["frame"])
            assert batch["driving_command"][0].tolist() == [
                int(position % 4 == number) for number in range(4)
            ]
            assert batch["command"] == [["left", "forward", "right", "unknown"][position % 4]]
            assert bool(batch["has_route"]) == (position > 0)
            assert batch["roadblock_ids"]["values"][0].tolist() == (
                [60100, 60205] if position else []
            )
            assert batch["traffic_lights"]["values"][0].tolist() == [
                [68, 1],
                [70 + position, 0],
            ]
            assert batch["sample_token"] == [f"drive-0{position:08x}"]
            for step, (x, y, _, yaw, later_s, is_valid) in enumerate(
                batch["ego_trajectory"][0].tolist()
            ):
                (near,) = np.flatnonzero(
                    abs(times_s - times_s[position] - (step - 4) * 0.5) < 0.01
                ).tolist() or [-1]
                assert bool(is_valid) == (near >= 0)
                if near >= 0:
                    expected = relative_se2(poses[position], poses[[near]])[0]
                    np.testing.assert_allclose(
                        [x, y, yaw], expected, atol=0.02
                    )  # theirs is flat, ego pitches by 0.02
                    np.testing.assert_allclose(later_s, (step - 4) * 0.5, atol=1e-6)
                    num_steps += 1
    assert num_steps == sum(
        any(abs(time_s - reference_s - step * 0.5) < 0.01 for time_s in times_s)
        for reference_s in times_s
        for step in range(-4, 13)
    )
    table = fr.open(tmp_path / "out").table
    tokens = zip(table["key"].to_pylist(), table["token"].to_pylist(), strict=True)
    keys = [key for key, token in tokens if token.endswith("2")]
    (tmp_path / "listed.txt").write_text("\n".join(keys))
    order = fr.OrderSpec(subset=str(tmp_path / "listed.txt"))
    with load(tmp_path / "out", 1, order=order, window={"frames": [-1, 0, 1]}) as loader:
        assert [(batch["sample_token"], batch["img"].shape[1]) for batch in loader] == [
            (["drive-000000002"], 3)
        ]
    sample = samples_of(tmp_path / "out")["drive-0-000001"]
    np.testing.assert_allclose(sample.geometry.ego_velocity[:2], [8.0, 0.5])
    np.testing.assert_allclose(sample.geometry.dist[0, :5], LENS)


def test_splits_are_the_folders_and_one_part_can_be_chosen(tmp_path):
    for clip, part in zip(openscene_world(num_clips=2).clips, ("trainval", "test"), strict=True):
        write_log(tmp_path, clip, part)
    info = scan_source(SourceSpec("openscene", str(tmp_path), {}))
    assert info.splits == {"train": ["drive-0"], "test": ["drive-1"]}
    assert scan_source(SourceSpec("openscene", str(tmp_path), {"part": "test"})).num_samples == 4
    with pytest.raises(SourceError, match=r"no logs of part 'mini'; it has: test, trainval"):
        scan_source(SourceSpec("openscene", str(tmp_path), {"part": "mini"}))


def test_a_download_of_some_cameras_is_sharded_with_an_option(tmp_path):
    write_log(tmp_path, openscene_world(num_clips=1).clips[0])
    for path in tmp_path.rglob("*.pcd"):
        path.unlink()
    for path in tmp_path.rglob("CAM_B0/*.jpg"):
        path.unlink()
    with pytest.raises(SourceError, match="points=false"):
        scan_source(SourceSpec("openscene", str(tmp_path), {"cameras": ["cam_f0", "cam_l0"]}))
    options = {"cameras": ["cam_f0", "cam_l0"], "points": False}
    assert scan_source(SourceSpec("openscene", str(tmp_path), options)).num_samples == 4
    info = scan_source(
        SourceSpec(
            "openscene",
            str(tmp_path),
            {"points": False, "missing_camera": "mask"},
        )
    )
    assert info.report.masked["cam_b0"] == {"no file": 4}


def without(name):
    return lambda row: row.pop(name)


BREAK = {
    "no cameras": (without("cams"), "no 'cams'"),
    "no pose": (without("ego2global_rotation"), "no 'ego2global_rotation'"),
    "a rotation that is none": (
        lambda row: row.update(ego2global_rotation=[2, 0, 0, 0]),
        "unit length",
    ),
    "a matrix of another shape": (
        lambda row: row["cams"]["CAM_F0"].update(cam_intrinsic=np.eye(4)),
        r"numbers \[4, 4\] where \[3, 3\]",
    ),
    "a route of words": (
        lambda row: row.update(roadblock_ids=["left"]),
        "invalid literal",
    ),
    "boxes of nothing": (
        lambda row: row["anns"].update(gt_boxes=[[0.0] * 7] * 3),
        "size",
    ),
    "a path out": (
        lambda row: row["cams"]["CAM_F0"].update(data_path="../../../secret.jpg"),
        "not inside the source",
    ),
    "another camera": (
        lambda row: row["cams"].update(CAM_X=row["cams"]["CAM_F0"]),
        "cam_x",
    ),
}


@pytest.mark.parametrize("name", BREAK)
def test_a_faulty_log_is_named(tmp_path, name):
    path, rows = write_log(tmp_path / "root", openscene_world(num_clips=1).clips[0])
    change, says = BREAK[name]
    change(rows[1])
    path.write_bytes(pickle.dumps(rows))
    with pytest.raises(SourceError, match=says):
        scan_source(SourceSpec("openscene", str(tmp_path / "root"), {}))


@pytest.mark.parametrize("value", [{}, [1], "log"])
def test_a_pickle_of_something_else_is_named(tmp_path, value):
    path, _ = write_log(tmp_path, openscene_world(num_clips=1).clips[0])
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(SourceError, match=r"drive-0\.pkl' is not a list of frames"):
        scan_source(SourceSpec("openscene", str(tmp_path), {}))
