"""Boxes in ego and in the lidar's frame: each lands in the images through the matrix that it pairs with."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from nuscenes.eval.common.utils import quaternion_yaw
from nuscenes.utils.data_classes import Box
from pyquaternion import Quaternion

from fuelrail import ImageAugment
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.channels.sensors import channel_table
from fuelrail.pipeline.errors import ConfigError, SchemaError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.sharding.demo.synth import synth
from support.batches import load
from support.datasets import build_dataset
from support.edits import reseal
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
WH = (320, 180)
IMAGE = ImageAugment(height=64, width=176)
BEV = BevAugment(
    train=True,
    rotate_deg=(-30, 30),
    scale=(0.9, 1.1),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
    translate_std_m=0.5,
)


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """A rendered drive, whose boxes and pictures come from one world."""
    base = tmp_path_factory.mktemp("frames")
    synth(
        base / "world",
        seed=3,
        clips=1,
        frames=4,
        size=WH,
        lidar_sweeps=0,
        workers=1,
    )
    shard_nuscenes(base / "world", base / "OUT", splits={"train": 1.0})
    return base


@pytest.fixture(scope="module")
def samples(drive):
    reader = SampleReader(open_dataset(drive / "OUT"))
    return {sample.key: sample for sample in map(reader.sample, range(4))}


def projected(matrix, points):
    """Pixels (..., 2) of points (..., 3) through a (4, 4) projection, NaN behind the camera."""
    homogeneous = (
        np.concatenate([points, np.ones_like(points[..., :1])], -1)
        @ np.asarray(matrix, np.float64).T
    )
    depth = np.where(homogeneous[..., 2:3] > 0.5, homogeneous[..., 2:3], np.nan)
    return homogeneous[..., :2] / depth


def corners(boxes):
    """(M, 8, 3) corners of boxes x y z l w h yaw."""
    boxes = np.asarray(boxes, np.float64)
    signs = np.array([[x, y, z] for x in (1, -1) for y in (1, -1) for z in (1, -1)]) / 2
    local = signs * boxes[:, None, 3:6]
    cos = np.cos(boxes[:, 6, None])
    sin = np.sin(boxes[:, 6, None])
    x = cos * local[..., 0] - sin * local[..., 1]
    y = sin * local[..., 0] + cos * local[..., 1]
    return np.stack([x, y, local[..., 2]], -1) + boxes[:, None, :3]


def seen_share(projections, ida_mats, boxes, is_clear):
    """The share of the boxes in plain view whose centre lies in at least one stored image."""
    inside = np.zeros(len(boxes), bool)
    for matrix, ida in zip(projections, ida_mats, strict=True):
        pixels = projected(
            np.linalg.inv(np.asarray(ida, np.float64)) @ np.asarray(matrix, np.float64),
            boxes[:, :3],
        )
        inside |= ((pixels >= 0) & (pixels <= np.array(WH) - 1)).all(-1)
    return inside[is_clear].mean()


def test_the_readme_snippet_pairs_boxes_with_their_projection(drive, samples, monkeypatch):
    text = README.read_text()
    block = re.search(r"In place of torch's DataLoader[^:]*:\n\n```diff\n(.*?)```", text, re.DOTALL)
    lines = [line[1:] for line in block[1].splitlines() if not line.startswith("-")]
    code = "\n".join(lines).replace("range(24)", "range(1)").replace('"dataset"', '"OUT"')
    if not torch.cuda.is_available():
        code = code.replace(', device="cuda"', "")
    batches = []

    def model(img, projection, boxes, labels):
        batches.append((img.cpu(), projection.cpu(), [b.cpu() for b in boxes], labels))

    monkeypatch.chdir(drive)
    names = {"model": model, "checkpoint": {}}
    exec(compile(code, "README.md", "exec"), names)
    batch = names["batch"]
    ((img, projection, boxes, labels),) = batches
    assert img.shape == (4, 6, 3, 256, 704)
    right = []
    wrong = []
    for row, key in enumerate(batch["sample_key"]):
        sample = samples[key]
        batch_boxes = boxes[row].numpy().astype(np.float64)
        assert len(labels[row]) == len(batch_boxes) == len(sample.boxes.label)
        stored = sample.geometry.ego2img()
        ida = batch["ida_mat"][row].numpy()
        for camera in range(6):
            for points, truth in (
                (
                    batch_boxes[:, :3],
                    sample.boxes.boxes3d[:, :3].astype(np.float64),
                ),
                (
                    corners(batch_boxes),
                    sample.boxes.corners().astype(np.float64),
                ),
            ):
                expected = projected(ida[camera].astype(np.float64) @ stored[camera], truth)
                pixels = projected(projection[row, camera], points)
                near = np.isfinite(expected).all(-1) & (np.abs(expected) < 5000).all(-1)
                np.testing.assert_allclose(pixels[near], expected[near], atol=0.5)
        clear = sample.boxes.visibility == 4
        right.append(seen_share(projection[row], ida, batch_boxes, clear))
        for camera in range(6):
            matrices = batch["lidar2img"][row, camera], projection[row, camera]
            apart = np.subtract(*(projected(matrix, batch_boxes[:, :3]) for matrix in matrices))
            wrong += np.linalg.norm(apart, axis=1)[np.isfinite(apart).all(1)].tolist()
    assert np.mean(right) > 0.95
    assert np.median(wrong) > 50, "the lidar's matrix puts boxes in ego elsewhere"


@pytest.mark.parametrize("frames", [None, [-1, 0]])
@pytest.mark.parametrize("bev", [BevAugment(), BEV])
def test_lidar_boxes_pair_with_lidar2img(drive, bev, frames):
    options = {
        "image": IMAGE,
        "seed": 5,
        "ego": bev,
        "points": True,
        "frames": frames,
    }
    count = 0
    loaders = (load(drive / "OUT", 2, box_frame=frame, **options) for frame in ("ego", "lidar"))
    for ego, lidar in zip(*loaders, strict=True):
        assert ego["sample_key"] == lidar["sample_key"]
        for name in ("img", "ego2img", "lidar2img", "bda_mat", "lidar2ego"):
            assert torch.equal(ego[name], lidar[name])
        for row in range(2):
            frame_index = (row,) if frames is None else (row, -1)
            a = ego["gt_boxes_3d"][row].numpy()
            b = lidar["gt_boxes_3d"][row].numpy()
            assert b.dtype == np.float32
            np.testing.assert_array_equal(a[:, 3:6], b[:, 3:6])
            lidar2ego = lidar["lidar2ego"][frame_index].numpy().astype(np.float64)
            rotation = lidar2ego[:3, :3]
            np.testing.assert_allclose(
                b[:, :3] @ rotation.T + lidar2ego[:3, 3], a[:, :3], atol=1e-3
            )
            velocity = lidar["gt_velocity"][row].numpy() @ rotation.T
            np.testing.assert_allclose(velocity, ego["gt_velocity"][row].numpy(), atol=1e-3)
            for camera in range(6):
                # The lidar is tilted by half a degree or so, which a yaw cannot say: corners are off by some pixels.
                for first, second, off_px in (
                    (a[:, :3], b[:, :3], 0.1),
                    (corners(a), corners(b), 3.0),
                ):
                    expected = projected(ego["ego2img"][frame_index][camera], first)
                    pixels = projected(lidar["lidar2img"][frame_index][camera], second)
                    near = np.isfinite(expected).all(-1) & np.isfinite(pixels).all(-1)
                    near &= (np.abs(expected) < 250).all(-1)
                    np.testing.assert_allclose(pixels[near], expected[near], atol=off_px)
                    count += int(near.sum())
    assert count > 100


def test_lidar_boxes_are_those_of_nuscenes_devkit(drive, samples):
    (batch,) = load(drive / "OUT", 4, image=IMAGE, box_frame="lidar")
    for row, key in enumerate(batch["sample_key"]):
        sample = samples[key]
        ego2lidar = invert_rigid(sample.geometry.lidar2keyego())
        turn = Quaternion(matrix=ego2lidar[:3, :3], atol=1e-6, rtol=1e-6)
        batch_boxes = batch["gt_boxes_3d"][row].numpy()
        assert len(batch_boxes) == len(sample.boxes.label)
        for number, values in enumerate(batch_boxes):
            x, y, z, length, width, height, _ = sample.boxes.boxes3d[number].tolist()
            box = Box(
                [x, y, z],
                [width, length, height],
                Quaternion(sample.boxes.rotation_wxyz[number].astype(np.float64)),
                velocity=tuple(sample.boxes.velocity[number].tolist()),
            )
            box.rotate(turn)
            box.translate(ego2lidar[:3, 3])
            np.testing.assert_allclose(values[:3], box.center, atol=1e-4)
            np.testing.assert_allclose(values[3:6], box.wlh[[1, 0, 2]], rtol=1e-6)
            off = (values[6] - quaternion_yaw(box.orientation) + np.pi) % (2 * np.pi) - np.pi
            assert abs(off) < 1e-4
            np.testing.assert_allclose(batch["gt_velocity"][row][number], box.velocity, atol=1e-4)


def test_a_sample_without_a_sweep_is_a_bad_one(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 4}, cameras=("CAM_FRONT",))
    rows = source.tables["sample_data"]
    rows.remove(
        next(row for row in rows if row["is_key_frame"] and "/LIDAR_TOP/" in row["filename"])
    )
    source.write("sample_data")
    shard_nuscenes(tmp_path / "source", tmp_path / "out", splits={"train": 1.0})
    options = {"image": IMAGE, "box_frame": "lidar"}
    with pytest.raises(SchemaError, match="the first lidar has no sweep"):
        list(load(tmp_path / "out", 1, **options))
    loader = load(tmp_path / "out", 1, on_error="substitute", file=None, **options)
    assert all(torch.isfinite(batch["gt_boxes_3d"][0]).all() for batch in loader)
    assert loader.stats().bad_samples == 1


def test_box_frame_needs_a_lidar(tmp_path):
    build_dataset(tmp_path / "tiny", {"train": (4,)})
    reseal(
        tmp_path / "tiny",
        lambda manifest: msgspec.structs.replace(
            manifest, channels=channel_table(manifest.cameras, ())
        ),
    )
    with pytest.raises(
        ConfigError,
        match="box_frame='lidar' needs a lidar, and dataset 'tiny' has none",
    ):
        load(tmp_path / "tiny", 1, image=IMAGE, box_frame="lidar")
