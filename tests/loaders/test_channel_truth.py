"""Channels of batches equal those computed afresh from the augmented boxes, points and matrices of the same batch.

The world is a synthetic drive with radar, instance masks and depth, with 2-D boxes of the tables. The
test adds files beside its tables: depth of the ground, occupancy of the boxes, their projections, poses and a caption.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail import BevAugment, DataLoader, ImageAugment, Transforms, World
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.api import shard
from fuelrail.sharding.sources.nuscenes.extras.groups import channel_file
from support.synth_channels import DEPTH_FRACTION, synth_with_channels

if TYPE_CHECKING:
    from pathlib import Path

    Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.slow

SIZE = (320, 180)
CAMERA = "cam_front"
EXTENT = (-20.0, -15.0, -2.0, 20.0, 15.0, 4.0)
CELLS = (40, 30, 6)
FAR_M = 15.0

DEPTH = Channel(
    name="depth",
    kind="array",
    field="depth.npy",
    dtype="float32",
    axes=("height", "width"),
    shape=SIZE[::-1],
    units=("m",),
    frame=f"image:{CAMERA}",
    law=Law("image", camera=CAMERA, interpolation="linear", fill=-1.0),
)
OCCUPANCY = Channel(
    name="occupancy",
    kind="array",
    field="occupancy.npy",
    dtype="uint8",
    axes=("x", "y", "z"),
    shape=CELLS,
    frame="ego",
    law=Law("ego_grid", extent_m=EXTENT),
)
PROJECTED = Channel(
    name="projected",
    kind="ragged",
    field="projected.safetensors",
    frame=f"image:{CAMERA}",
    arrays=(
        ArraySpec("box", "float32", (4,)),
        ArraySpec("centre", "float32", (2,)),
        ArraySpec("row", "int32"),
    ),
    law=Law(
        "image_points",
        camera=CAMERA,
        roles={"boxes": (("box",),), "points": (("centre",),)},
    ),
)
POSES = Channel(
    name="poses",
    kind="array",
    field="poses.npy",
    dtype="float64",
    axes=("pose", "row", "column"),
    shape=(2, 4, 4),
    frame="ego",
    law=Law("ego_poses"),
)
ADDED_CHANNELS = (DEPTH, OCCUPANCY, PROJECTED, POSES)
NAMES = [
    "radar",
    f"boxes2d_{CAMERA}",
    f"instances_{CAMERA}",
    f"depth_{CAMERA}",
    *(channel.name for channel in ADDED_CHANNELS),
]


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = tmp_path_factory.mktemp("truth")
    synth_with_channels(
        base / "drive",
        seed=5,
        clips=1,
        frames=3,
        size=SIZE,
        lidar_sweeps=0,
        workers=1,
    )
    shard(f"nuscenes:{base / 'drive'}", base / "plain", workers=1)
    plain = open_dataset(base / "plain")
    table = base / "drive" / "v1.0-mini" / "channels.json"
    entries = msgspec.json.decode(table.read_bytes(), type=tuple[Channel, ...])
    table.write_bytes(msgspec.json.encode((*entries, *ADDED_CHANNELS)))
    for channel in ADDED_CHANNELS:
        (base / "drive" / "channels" / channel.name).mkdir()
    for number in range(len(plain)):
        sample = plain[number]
        values = {
            "depth": ground_depth(
                sample.geometry.intrinsics[0],
                sample.geometry.cam2keyego()[0],
                *SIZE,
            ),
            "occupancy": (
                depth_inside(cell_centres(), sample.boxes.boxes3d.astype(np.float64)) > 0
            ).astype(np.uint8),
            "projected": projections(sample.geometry.ego2img()[0], sample.boxes.boxes3d),
            "poses": np.stack([np.eye(4), pose(sample.boxes.boxes3d[0])]),
        }
        for channel in ADDED_CHANNELS:
            file = base / "drive" / channel_file(channel, sample.meta.sample_token)
            file.write_bytes(KINDS[channel.kind].encode(values[channel.name], channel))
    shard(
        f"nuscenes:{base / 'drive'}",
        base / "out",
        workers=1,
        options={"channels": ["boxes2d"]},
    )
    return base / "out"


def ground_depth(intrinsics: Array, cam2ego: Array, width: int, height: int) -> Array:
    """Depth [m] along the camera's axis at which each pixel sees ego's plane z = 0; inf where it does not."""
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    rays = np.stack([u, v, np.ones_like(u)], -1) @ np.linalg.inv(intrinsics).T @ cam2ego[:3, :3].T
    with np.errstate(divide="ignore"):
        depth = -cam2ego[2, 3] / rays[..., 2]
    return np.where((depth > 0) & (depth < 1e3), depth, 1e3).astype(np.float32)


def pose(box: Array) -> Array:
    """A box's pose as a matrix, box to ego."""
    c = math.cos(box[6])
    s = math.sin(box[6])
    return np.array([[c, -s, 0, box[0]], [s, c, 0, box[1]], [0, 0, 1, box[2]], [0, 0, 0, 1]])


def box_corners(boxes: Array) -> Array:
    """Corners (M, 8, 3) of boxes x y z l w h yaw."""
    signs = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    poses = np.stack([pose(box) for box in boxes.astype(np.float64)])
    return (
        np.einsum("mij,mkj->mki", poses[:, :3, :3], signs * boxes[:, None, 3:6] / 2)
        + poses[:, None, :3, 3]
    )


def projections(ego2img: Array, boxes: Array) -> dict[str, Array]:
    """Bounds and centres in an image of the boxes that are 3 m before the camera at least; rows of them."""
    corners = np.concatenate([box_corners(boxes), boxes[:, None, :3]], 1)
    homogeneous = np.concatenate([corners, np.ones((*corners.shape[:2], 1))], 2) @ ego2img.T
    rows = np.flatnonzero((homogeneous[..., 2] > 3.0).all(1))
    pixels = homogeneous[rows, :, :2] / homogeneous[rows, :, 2:3]
    bounds = np.concatenate([pixels[:, :8].min(1), pixels[:, :8].max(1)], 1)
    return {
        "box": bounds.astype(np.float32),
        "centre": pixels[:, 8].astype(np.float32),
        "row": rows.astype(np.int32),
    }


def cell_centres() -> Array:
    sides = [
        low + (np.arange(size) + 0.5) * (high - low) / size
        for low, high, size in zip(EXTENT[:3], EXTENT[3:], CELLS, strict=True)
    ]
    return np.stack(np.meshgrid(*sides, indexing="ij"), -1)


def depth_inside(points: Array, boxes: Array) -> Array:
    """How deep points (..., 3) are in the deepest of the boxes (M, 7) [m]; negative outside, at least the distance."""
    deepest = np.full(points.shape[:-1], -np.inf)
    for box in boxes:
        local = (points - box[:3]) @ pose(box)[:3, :3]
        sides = box[3:6] / 2 - abs(local)
        inner = sides.min(-1)
        outer = -np.sqrt((np.minimum(sides, 0.0) ** 2).sum(-1))
        deepest = np.maximum(deepest, np.where(inner >= 0, inner, outer))
    return deepest


@st.composite
def augmentations(draw: st.DrawFn) -> Transforms:
    kind = draw(st.sampled_from(["width", "cover", "contain", "stretch", 0.5, "jitter", "range"]))
    factors: dict[str, Any] = {"resize": kind}
    if kind == "jitter":
        factors = {"resize": "width", "resize_jitter": (-0.06, 0.4)}
    if kind == "range":
        factors = {"resize_range": (0.3, 0.9)}
    degrees = draw(st.sampled_from([0.0, 5.4, 45.0]))
    image = ImageAugment(
        height=draw(st.integers(60, 140)),
        width=draw(st.integers(100, 260)),
        train=True,
        crop_y=draw(st.sampled_from(["bottom", "center", "top", "random"])),
        crop_x=draw(st.sampled_from(["random", "center", "left"])),
        flip_prob=draw(st.sampled_from([0.0, 0.5, 1.0])),
        rotate_deg=(-degrees, degrees),
        **factors,
    )
    ego = BevAugment(
        train=draw(st.booleans()),
        rotate_deg=(-180.0, 180.0),
        scale=(0.8, 1.25),
        flip_x_prob=0.5,
        flip_y_prob=0.5,
        translate_std_m=0.7,
    )
    return Transforms(image=image, ego=ego, decoder="pillow")


def batches(
    drive: Path, transforms: Transforms, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a batch, and the stored values of its samples."""
    transforms = msgspec.structs.replace(transforms, select=NAMES)
    with DataLoader(
        drive,
        3,
        shuffle=True,
        drop_last=True,
        transforms=transforms,
        seed=seed,
        num_workers=1,
        world=World(),
    ) as loader:
        batch = next(iter(loader))
    dataset = open_dataset(drive)
    channels = [channel for channel in dataset.manifest.channels if channel.name in NAMES]
    rows = batch["global_index"].tolist()
    stored = [dataset[row] for row in rows]
    return batch, [
        {
            **decode_values(sample.extra, channels, sample.key),
            "gt_boxes_3d": sample.boxes.boxes3d.astype(np.float64),
            # What the crops leave of the stored image [px], left, top, right, bottom, from its outer border.
            "seen": transforms.image.draw(
                sample.geometry.img_wh.tolist(), seed=seed, epoch=0, sample=row
            )[0].visible,
        }
        for row, sample in zip(rows, stored, strict=True)
    ]


def stored_places(ida_mat: Array, width: int, height: int) -> Array:
    """Where the centre of each output pixel is on the stored image (H, W, 2), centre-origin."""
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    inverse = np.linalg.inv(ida_mat[:3, :3].astype(np.float64))
    places = np.stack([u, v, np.ones_like(u)], -1) @ inverse.T
    return places[..., :2]


def border(places: Array, bounds: Array) -> Array:
    """Distance [px] of places on the stored image to the border of what the crops leave of it; negative outside."""
    return np.minimum(places + 0.5 - bounds[:2], np.array(bounds[2:]) - 0.5 - places).min(-1)


@given(augmentations(), st.integers(0, 2**32))
@settings(max_examples=12)
def test_every_channel_is_that_of_the_augmented_world(drive, transforms, seed) -> None:
    batch, stored = batches(drive, transforms, seed)
    for index, values in enumerate(stored):
        check_mask(batch, index, values)
        check_depth(batch, index, values)
        check_true_depth(batch, index, values)
        check_boxes(batch, index, values, turned=transforms.image.rotate_deg[1] > 0)
        check_radar(batch, index, values)
        check_occupancy(batch, index)
        check_poses(batch, index)


def check_mask(batch: dict[str, Any], index: int, values: dict[str, Any]) -> None:
    moved = batch[f"instances_{CAMERA}"][index].numpy()
    stored = values[f"instances_{CAMERA}"]
    places = stored_places(batch["ida_mat"][index, 0].numpy(), moved.shape[1], moved.shape[0])
    near = np.floor(places + 0.5).astype(int).clip(0, np.array(SIZE) - 1)
    expected = np.where(
        border(places, values["seen"]) > 0,
        stored[near[..., 1], near[..., 0]],
        0,
    )
    # The matrix is float32: a place on the line between two pixels may fall to either.
    clear = (abs(places + 0.5 - np.rint(places + 0.5)) > 1e-2).all(-1) & (
        abs(border(places, values["seen"])) > 1e-2
    )
    assert moved.dtype == np.uint16
    np.testing.assert_array_equal(moved[clear], expected[clear])


def check_depth(batch: dict[str, Any], index: int, values: dict[str, Any]) -> None:
    moved = batch["depth"][index].numpy()
    height, width = moved.shape
    # Depth is the stored camera's: the ego map is taken off the pose again, the image map stays in the intrinsics.
    cam2ego = np.linalg.inv(batch["bda_mat"][index].numpy()) @ batch["cam2keyego"][index, 0].numpy()
    afresh = ground_depth(
        batch["intrinsics"][index, 0].numpy().astype(np.float64),
        cam2ego,
        width,
        height,
    )
    places = stored_places(batch["ida_mat"][index, 0].numpy(), width, height)
    distance = border(places, values["seen"])
    inner = (distance > 0.6) & (afresh < FAR_M)
    np.testing.assert_allclose(moved[inner], afresh[inner], atol=0.03)
    assert (moved[distance < -0.01] == -1.0).all()


def check_true_depth(batch: dict[str, Any], index: int, values: dict[str, Any]) -> None:
    """The depth of the drive, at a quarter of the image: exactly the value of the stored pixel that is nearest."""
    moved = batch[f"depth_{CAMERA}"][index].numpy()
    stored = values[f"depth_{CAMERA}"]
    places = stored_places(batch["ida_mat"][index, 0].numpy(), moved.shape[1], moved.shape[0])
    cells = (places + 0.5) / DEPTH_FRACTION
    near = np.floor(cells).astype(int).clip(0, np.array(stored.shape[::-1]) - 1)
    expected = np.where(
        border(places, values["seen"]) > 0,
        stored[near[..., 1], near[..., 0]],
        0.0,
    )
    clear = (abs(cells - np.rint(cells)) > 1e-2).all(-1) & (
        abs(border(places, values["seen"])) > 1e-2
    )
    assert moved.dtype == np.float32
    np.testing.assert_array_equal(moved[clear], expected[clear])


def check_boxes(batch: dict[str, Any], index: int, values: dict[str, Any], *, turned: bool) -> None:
    ida = batch["ida_mat"][index, 0].numpy().astype(np.float64)
    height, width = batch["img"].shape[-2:]
    moved = {name: arrays[index].numpy() for name, arrays in batch["projected"].items()}
    afresh = projections(
        batch["ego2img"][index, 0].numpy().astype(np.float64),
        batch["gt_boxes_3d"][index].numpy(),
    )
    is_common = (
        np.isin(moved["row"], afresh["row"]),
        np.isin(afresh["row"], moved["row"]),
    )
    assert is_common[0].sum() >= len(moved["row"]) - 1  # the ego's scale moves the line at 3 m
    np.testing.assert_allclose(
        moved["centre"][is_common[0]], afresh["centre"][is_common[1]], atol=0.05
    )
    if not turned:
        corners = (np.array(values["seen"]).reshape(2, 2) - 0.5) @ ida[:2, :2].T + ida[:2, 2]
        low = corners.min(0).clip(-0.5, None)
        high = corners.max(0).clip(None, (width - 0.5, height - 0.5))
        low = low.clip(None, (width - 0.5, height - 0.5))
        high = high.clip(-0.5, None)
        boxes = afresh["box"][is_common[1]].reshape(-1, 2, 2).clip(low, high).reshape(-1, 4)
        np.testing.assert_allclose(moved["box"][is_common[0]], boxes, atol=0.05)
    # The boxes of the source: bounds of the turned corners, cut off at the output.
    batch_boxes = batch[f"boxes2d_{CAMERA}"]
    stored_boxes = values[f"boxes2d_{CAMERA}"]
    left, top, right, bottom = np.array(values["seen"]) - 0.5
    kept_boxes = (
        stored_boxes["box"]
        .astype(np.float64)
        .reshape(-1, 2, 2)
        .clip((left, top), (right, bottom))
        .reshape(-1, 4)
    )
    corners = kept_boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    corners = corners @ ida[:2, :2].T + ida[:2, 2]
    limits = (width - 0.5, height - 0.5)
    bounds = np.concatenate(
        [corners.min(1).clip(-0.5, limits), corners.max(1).clip(-0.5, limits)],
        1,
    )
    np.testing.assert_allclose(batch_boxes["box"][index].numpy(), bounds, atol=0.01)
    sides = np.minimum(bounds[:, 2:] - bounds[:, :2], kept_boxes[:, 2:] - kept_boxes[:, :2]).min(1)
    clear = (sides > 0.02) | (sides <= 0)
    np.testing.assert_array_equal(batch_boxes["visible"][index].numpy()[clear], (sides > 0)[clear])
    np.testing.assert_array_equal(
        batch_boxes["instance_id"][index].numpy(), stored_boxes["instance_id"]
    )


def check_radar(batch: dict[str, Any], index: int, values: dict[str, Any]) -> None:
    moved = batch["radar"][index].numpy().astype(np.float64)
    stored = values["radar"].astype(np.float64)
    bda = batch["bda_mat"][index].numpy().astype(np.float64)
    np.testing.assert_allclose(moved[:, :3], stored[:, :3] @ bda[:3, :3].T + bda[:3, 3], atol=1e-3)
    np.testing.assert_allclose(moved[:, 3:5], stored[:, 3:5] @ bda[:2, :2].T, atol=1e-4)
    np.testing.assert_array_equal(moved[:, 5:], stored[:, 5:])
    # They are on the sides of the augmented boxes where they are on those of the stored ones, and as far from the rest.
    afresh = depth_inside(moved[:, :3], batch["gt_boxes_3d"][index].numpy().astype(np.float64))
    scale = abs(np.linalg.det(bda[:2, :2])) ** 0.5
    np.testing.assert_allclose(
        afresh,
        scale * depth_inside(stored[:, :3], values["gt_boxes_3d"]),
        atol=2e-3,
    )
    assert (abs(afresh) < 2e-3).mean() > 0.5


def check_occupancy(batch: dict[str, Any], index: int) -> None:
    moved = batch["occupancy"][index].numpy()
    centres = cell_centres()
    bda = batch["bda_mat"][index].numpy().astype(np.float64)
    afresh = depth_inside(centres, batch["gt_boxes_3d"][index].numpy().astype(np.float64))
    back = (centres - bda[:3, 3]) @ np.linalg.inv(bda[:3, :3]).T
    inside = np.minimum(back - EXTENT[:3], np.array(EXTENT[3:]) - back).min(-1)
    half_cell = abs(np.linalg.det(bda[:2, :2])) ** 0.5 * math.sqrt(3 * 0.5**2) + 1e-3
    clear = (inside > 1e-3) & (abs(afresh) > half_cell)
    np.testing.assert_array_equal(moved[clear], afresh[clear] > 0)
    assert clear.mean() > 0.2
    assert not moved[inside < -1e-3].any()


def check_poses(batch: dict[str, Any], index: int) -> None:
    bda = batch["bda_mat"][index].numpy().astype(np.float64)
    box = batch["gt_boxes_3d"][index][0].numpy().astype(np.float64)
    moved = batch["poses"][index, 1].numpy()
    np.testing.assert_allclose(moved[:3, 3], box[:3], atol=1e-3)
    np.testing.assert_allclose(moved[:2, 0], (math.cos(box[6]), math.sin(box[6])), atol=1e-4)
    assert abs(np.linalg.det(moved[:3, :3]) - 1) < 1e-9
    np.testing.assert_allclose(batch["poses"][index, 0, :3, 3].numpy(), bda[:3, 3], atol=1e-6)
