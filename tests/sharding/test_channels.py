"""A dataset with further channels: true values, carried by every tool, checked against the table, read by others."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import cv2
import msgspec
import numpy as np
import pytest

from fuelrail.pipeline.channels.selection import decode_values, select
from fuelrail.pipeline.channels.sensors import BOXES_CHANNEL
from fuelrail.pipeline.errors import ManifestError, SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.rigid import rotation_matrices
from fuelrail.pipeline.sample.arrays import read_npy, write_npy
from fuelrail.sharding.api import reshard, shard, verify
from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample
from support.batches import batches, unlike
from support.edits import reseal
from support.sharding import members_of
from support.synth_channels import synth_with_channels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow
WORLD: dict[str, Any] = {
    "seed": 5,
    "clips": 2,
    "frames": 2,
    "size": (320, 180),
    "lidar_sweeps": 0,
    "workers": 1,
}


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("channels")
    synth_with_channels(base / "drive", **WORLD)
    shard(f"nuscenes:{base / 'drive'}", base / "out", workers=1, layout="none")
    shard(f"nuscenes:{base / 'drive'}", base / "packed", workers=1)
    return base


@pytest.fixture(scope="module")
def first(drive: Path) -> Path:
    """A dataset of the drive's first clip; the tests that join datasets add the second."""
    shard(
        f"nuscenes:{drive / 'drive'}",
        drive / "first",
        workers=1,
        select="clip_id == 'scene-9001'",
    )
    return drive / "first"


@pytest.fixture
def copy(drive: Path, tmp_path: Path) -> Path:
    shutil.copytree(drive / "drive", tmp_path / "drive")
    return tmp_path / "drive"


def values(dataset: Any, number: int) -> dict[str, Any]:
    sample = dataset[number]
    names = [channel.name for channel in dataset.manifest.extra_channels]
    return decode_values(sample.extra, select(dataset.manifest.channels, names, "it"), sample.key)


def faults(out: Path) -> list[str]:
    return [fault.text for fault in verify(out, deep=True, workers=1).faults]


def test_the_table_lists_cameras_lidar_boxes_and_what_the_source_adds(
    drive,
) -> None:
    stated = json.loads((drive / "packed" / "dataset.json").read_text())
    names = [channel["name"] for channel in stated["channels"]]
    assert names[:8] == [
        "cam_front",
        "cam_front_right",
        "cam_front_left",
        "cam_back",
        "cam_back_left",
        "cam_back_right",
        "lidar_top",
        "boxes",
    ]
    assert names[8:11] == ["radar", "instances_cam_front", "depth_cam_front"]
    assert "cameras" not in stated
    assert "lidars" not in stated
    codecs = {channel["field"]: channel["codec"] for channel in stated["channels"]}
    assert codecs["radar.npy"] == "zstd-p28"
    assert (codecs["boxes.safetensors"], codecs["depth_cam_front.npy"]) == (
        "zstd",
        "zstd-p4",
    )
    assert codecs["instances_cam_front.png"] == codecs["cam_front.jpg"] == "raw"
    assert stated["compression"]["codecs"].items() >= codecs.items()
    assert faults(drive / "packed") == faults(drive / "out") == []


def test_radar_points_lie_on_the_boxes_and_move_with_them(drive) -> None:
    dataset = open_dataset(drive / "packed")
    moving = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        radar = values(dataset, number)["radar"]
        boxes = sample.boxes
        turn = rotation_matrices(boxes.rotation_wxyz.astype(np.float64))
        for x, y, z, vx, vy, *_ in radar:
            offset = np.einsum("mji,mj->mi", turn, (x, y, z) - boxes.boxes3d[:, :3])
            inside = (np.abs(offset) <= boxes.boxes3d[:, 3:6] / 2 + 0.02).all(1)
            owners = np.flatnonzero(inside)
            if len(owners) == 1 and np.isfinite(boxes.velocity[owners[0]]).all():
                expected = boxes.velocity[owners[0], :2]
                assert (
                    np.hypot(*(expected - (vx, vy))) < 0.6
                )  # the tables' velocities are differences over 0.5 s
                moving += np.hypot(vx, vy) > 1.0
    assert moving > 10


def test_masks_lie_in_the_boxes_of_their_instances(drive, tmp_path) -> None:
    shard(
        f"nuscenes:{drive / 'drive'}",
        tmp_path / "out",
        workers=1,
        options={"channels": ["boxes2d"]},
    )
    dataset = open_dataset(tmp_path / "out")
    inside = []
    for number in range(len(dataset)):
        channels = values(dataset, number)
        for camera in ("cam_front", "cam_back_left"):
            mask = channels[f"instances_{camera}"]
            boxes = channels[f"boxes2d_{camera}"]
            assert mask.shape == (180, 320)
            for instance in set(mask.ravel().tolist()) - {0}:
                v, u = np.nonzero(mask == instance)
                found_in = (boxes["box"][:, :2] <= (u.min() + 1.5, v.min() + 1.5)).all(1)
                found_in &= (boxes["box"][:, 2:] >= (u.max() - 1.5, v.max() - 1.5)).all(1)
                inside.append(found_in.any())
    # The tables leave out what neither lidar nor radar sees.
    assert len(inside) > 20
    assert np.mean(inside) > 0.8


def test_depth_is_that_of_the_lidar_points_and_of_the_ground(drive) -> None:
    dataset = open_dataset(drive / "packed")
    compared = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        channels = values(dataset, number)
        (points,) = sample.points.values()
        ego2img = sample.geometry.ego2img()
        in_ego = np.c_[points[:, :3], np.ones(len(points))] @ sample.geometry.lidar2keyego().T
        for camera, name in enumerate(
            ("cam_front", "cam_front_right", "cam_front_left", "cam_back")
        ):
            depth = channels[f"depth_{name}"]
            assert depth.shape == (45, 80)
            u, v, z, _ = (in_ego @ ego2img[camera].T).T
            u, v = ((side / z + 0.5) / 4 for side in (u, v))
            is_visible = (z > 1) & (z < 40) & (u > 1) & (u < 79) & (v > 1) & (v < 44)
            rows = v[is_visible].astype(int)
            columns = u[is_visible].astype(int)
            # A point shows within a pixel of the map what its neighbours show: edges and occlusion aside.
            around = np.stack(
                [depth[rows + dv, columns + du] for dv in (-1, 0, 1) for du in (-1, 0, 1)]
            )
            near = (around.min(0) - 0.05 <= z[is_visible]) & (z[is_visible] <= around.max(0) + 0.05)
            assert near.mean() > 0.9
            compared += int(is_visible.sum())
    assert compared > 1000


def test_inspect_shows_the_channels(drive) -> None:
    text = describe_dataset(drive / "packed").as_text()
    assert "radar                      points  float32[any, 7] x y z vx vy rcs instance" in text
    assert "float32[45, 80]" in text
    key = open_dataset(drive / "packed").index.row(0).key
    assert "instances_cam_back.png" in describe_sample(drive / "packed", key).as_text()


def test_reshard_carries_them(drive, tmp_path) -> None:
    first = open_dataset(drive / "packed")
    reshard(
        drive / "packed",
        tmp_path / "again",
        workers=1,
        layout="frame",
        order="clip",
        seed=3,
    )
    resharded = open_dataset(tmp_path / "again")
    assert faults(tmp_path / "again") == []
    plain = [msgspec.structs.replace(channel, codec="") for channel in first.manifest.channels]
    assert [
        msgspec.structs.replace(channel, codec="") for channel in resharded.manifest.channels
    ] == plain
    for number in range(len(first)):
        sample = first[number]
        assert resharded[sample.key].extra == sample.extra


def test_append_carries_them(drive, first, tmp_path) -> None:
    shard(
        f"nuscenes:{drive / 'drive'}",
        tmp_path / "new",
        workers=1,
        select="clip_id == 'scene-9002'",
    )
    reshard([first, tmp_path / "new"], tmp_path / "both", append=True)
    assert faults(tmp_path / "both") == []
    appended = open_dataset(tmp_path / "both")
    packed = open_dataset(drive / "packed")
    assert len(appended) == len(packed)
    assert appended.manifest.channels == packed.manifest.channels
    for number in range(len(packed)):
        sample = packed[number]
        assert appended[sample.key].extra == sample.extra


def test_datasets_of_other_channels_do_not_become_one(first, copy, tmp_path) -> None:
    (copy / "v1.0-mini" / "channels.json").unlink()
    shard(
        f"nuscenes:{copy}",
        tmp_path / "new",
        workers=1,
        select="clip_id == 'scene-9002'",
    )
    for options in ({"workers": 1}, {"append": True}):
        with pytest.raises(
            SourceError,
            match=r"one dataset: their channels differ: radar: .* in the first, none in",
        ):
            reshard([first, tmp_path / "new"], tmp_path / "both", **options)


def edit_manifest(out: Path, name: str, **changes: object) -> None:
    """Change a channel of the manifest."""

    def edit(manifest: Any) -> Any:
        table = [
            entry | (changes if entry["name"] == name else {})
            for entry in msgspec.to_builtins(manifest.channels)
        ]
        return msgspec.structs.replace(
            manifest,
            channels=msgspec.convert(table, type=tuple[type(BOXES_CHANNEL), ...]),
        )

    reseal(out, edit)


def edit_table(drive: Path, channel: str, **changes: object) -> None:
    path = drive / "v1.0-mini" / "channels.json"
    table = json.loads(path.read_text())
    for entry in table:
        if entry["name"] == channel:
            entry.update(changes)
    path.write_text(json.dumps(table))


def rewrite(
    drive: Path,
    name: str,
    change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> None:
    """Change the first file of a channel, with no regard to the table."""
    path = min((drive / "channels" / name).iterdir())
    if path.suffix == ".npy":
        path.write_bytes(write_npy(change(read_npy(path.read_bytes()).copy())))
    else:
        cv2.imwrite(str(path), change(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)))


def with_nan(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    points[0, 0] = np.nan
    return points


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda drive: rewrite(drive, "radar", with_nan),
            "NaN at [0, 0]; the table of channel 'radar' forbids",
        ),
        (
            lambda drive: rewrite(drive, "radar", lambda rows: rows.astype(np.float64)),
            "channel 'radar' is float64",
        ),
        (
            lambda drive: rewrite(drive, "radar", lambda rows: rows[:, :5]),
            "the table has float32[any, 7]",
        ),
        (
            lambda drive: rewrite(drive, "instances_cam_back", lambda mask: mask[:-1]),
            "320 x 179 pixels; on the image of 'cam_back' of 320 x 180 at 1/1 it has 320 x 180",
        ),
        (
            lambda drive: min((drive / "channels" / "radar").iterdir()).unlink(),
            "is not there; bring it there",
        ),
        (
            lambda drive: edit_table(drive, "radar", kind="voxels"),
            "its kind 'voxels' is unknown; known: ",
        ),
        (
            lambda drive: edit_table(drive, "radar", name="cam_front", optional=True),
            "channel 'cam_front': the name occurs twice",
        ),
        (
            lambda drive: edit_table(drive, "instances_cam_back", law={"name": "image"}),
            "channel 'instances_cam_back': law 'image' needs its camera",
        ),
        (
            lambda drive: (drive / "v1.0-mini" / "channels.json").write_text("{"),
            "is not a list of channels",
        ),
        (
            lambda drive: edit_table(drive, "radar", colour="red"),
            "the field 'colour' is unknown",
        ),
    ],
)
def test_what_is_not_as_the_table_says_is_refused(copy, tmp_path, spoil, says) -> None:
    spoil(copy)
    with pytest.raises(SourceError) as caught:
        shard(f"nuscenes:{copy}", tmp_path / "out", workers=1)
    assert says in str(caught.value)


def test_a_missing_file_of_an_optional_channel_is_an_absent_member(copy, tmp_path) -> None:
    edit_table(copy, "radar", optional=True)
    min((copy / "channels" / "radar").iterdir()).unlink()
    shard(f"nuscenes:{copy}", tmp_path / "out", workers=1)
    dataset = open_dataset(tmp_path / "out")
    assert sum(values(dataset, number)["radar"] is None for number in range(len(dataset))) == 1
    assert faults(tmp_path / "out") == []


@pytest.mark.parametrize("images", [{"resize": 0.5}, {"size": (149, 73)}])
def test_what_lies_on_images_is_scaled_with_them(drive, tmp_path, images) -> None:
    """As the loader would move it: the mask of a half image is the mask of the image, resized to half by the loader."""
    source = f"nuscenes:{drive / 'drive'}"
    boxes2d = {"channels": ["boxes2d"]}
    shard(source, tmp_path / "out", workers=1, options=boxes2d, images=images)
    shard(source, tmp_path / "whole", workers=1, options=boxes2d)
    assert faults(tmp_path / "out") == []
    dataset = open_dataset(tmp_path / "out")
    before = open_dataset(tmp_path / "whole")
    width, height = images.get("size", (160, 90))
    for number in range(len(dataset)):
        scaled = values(dataset, number)
        full = values(before, before.position(dataset[number].key))
        mask = scaled["instances_cam_front"]
        v, u = (
            ((np.arange(to) + 0.5) * full_size / to).astype(int)
            for to, full_size in ((height, 180), (width, 320))
        )
        np.testing.assert_array_equal(mask, full["instances_cam_front"][v][:, u])
        boxes = scaled["boxes2d_cam_front"]["box"]
        all_boxes = full["boxes2d_cam_front"]["box"]
        scale = np.array([width / 320, height / 180] * 2)
        np.testing.assert_allclose(boxes, (all_boxes + 0.5) * scale - 0.5, atol=1e-3)
        depth = scaled["depth_cam_front"]
        assert depth.shape == (-(-height // 4), -(-width // 4))
        assert (depth > 0).mean() == pytest.approx((full["depth_cam_front"] > 0).mean(), abs=0.05)
    # 73 rows at 1/4 are 19, and half of 73 are 36, at 1/4 9: not half of 19.
    reshard(
        [tmp_path / "out"],
        tmp_path / "again",
        workers=1,
        images={"resize": 0.5},
    )
    assert faults(tmp_path / "again") == []


def test_a_channel_of_an_unknown_kind_is_refused_only_where_it_is_selected(drive, tmp_path) -> None:
    shutil.copytree(drive / "out", tmp_path / "out")

    edit_manifest(tmp_path / "out", "radar", kind="voxels")
    dataset = open_dataset(tmp_path / "out")
    assert dataset[0].extra.keys() == open_dataset(drive / "out")[0].extra.keys()
    with pytest.raises(ManifestError, match="channel 'radar': its kind 'voxels' is unknown"):
        select(dataset.manifest.channels, ["radar"], "out")
    assert faults(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "cam_front",
            {"dtype": "uint16", "field": "cam_front.png"},
            "'cam_front' is not as the format has camera",
        ),
        (
            "lidar_top",
            {"allows_nan": False},
            "channel 'lidar_top' is not as the format has lidar: allows_nan differ",
        ),
        (
            "boxes",
            {"frame": "global"},
            "channel 'boxes': law 'ego_boxes' needs the frame 'ego'",
        ),
        (
            "boxes",
            {"optional": False},
            "channel 'boxes' is not as the format has boxes: optional differ",
        ),
        (
            "instances_cam_front",
            {"law": {"name": "image", "camera": "cam_roof"}},
            "names the camera 'cam_roof'",
        ),
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(
    drive, tmp_path, name, changes, says
) -> None:
    shutil.copytree(drive / "out", tmp_path / "out")
    edit_manifest(tmp_path / "out", name, **changes)
    with pytest.raises(ManifestError) as caught:
        open_dataset(tmp_path / "out")
    assert says in str(caught.value)


def test_verify_reports_members_that_are_not_as_the_table_says(drive, tmp_path) -> None:
    shutil.copytree(drive / "out", tmp_path / "out")
    radar = next(
        channel
        for channel in open_dataset(tmp_path / "out").manifest.channels
        if channel.name == "radar"
    )
    edit_manifest(
        tmp_path / "out",
        "radar",
        shape=(None, 6),
        columns=radar.columns[:6],
        units=radar.units[:6],
    )
    reported = faults(tmp_path / "out")
    assert len(reported) == len(open_dataset(drive / "out"))
    assert all("member 'radar.npy': channel 'radar' is float32[" in text for text in reported)


@pytest.mark.parametrize("camera", ["cam_front", "cam_back"])
def test_one_camera_keeps_the_channels_that_lie_on_it(drive, tmp_path, camera) -> None:
    shard(
        f"nuscenes:{drive / 'drive'}",
        tmp_path / "made",
        workers=1,
        options={"cameras": [camera]},
    )
    reshard(drive / "packed", tmp_path / "again", cameras=[camera], workers=1)
    assert faults(tmp_path / "made") == faults(tmp_path / "again") == []
    assert members_of(tmp_path / "made") == members_of(tmp_path / "again")
    table = open_dataset(tmp_path / "made").manifest.channels
    assert {channel.law.camera for channel in table if channel.law.camera} == {camera}
    names = [
        channel.name for channel in table if channel.sensor is None and channel.name != "boxes"
    ]
    options = {"shuffle": False, "points": True, "select": names}
    loaded = batches(tmp_path / "made", 2, **options)
    for camera_batch, expected_batch in zip(
        loaded,
        batches(drive / "packed", 2, cameras=[camera], **options),
        strict=True,
    ):
        assert not unlike(camera_batch, expected_batch)
