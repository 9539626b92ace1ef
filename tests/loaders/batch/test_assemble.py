"""A batch's tensors: shapes and dtypes as the table says, matrices that map points where one-by-one arithmetic does."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fuelrail.loaders.batch.assemble import assemble
from fuelrail.loaders.records import (
    BatchSlot,
    FrameTask,
    Parsed,
    Source,
    Task,
    batch_entries,
)
from fuelrail.pipeline.channels.sensors import LidarEntry
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.sample.schema import META, Sample, decode_meta
from fuelrail.pipeline.transforms.ego import IDENTITY
from fuelrail.pipeline.transforms.image import ImageAugment
from support.datasets import CAMERAS, LIDAR, _sample, make_boxes, make_geometry

SIZE = (96, 64)
OUT = (32, 24)  # width, height
AUGMENT = ImageAugment(
    height=OUT[1],
    width=OUT[0],
    train=True,
    resize_range=(0.4, 0.6),
    flip_prob=0.5,
    rotate_deg=(-10, 10),
)
TOP = LidarEntry(
    channel=LIDAR,
    source_name="LIDAR_TOP",
    columns=("x", "y", "z", "intensity", "ring"),
)


def make_sample(number: int, *, labelled: bool = True, lidars: int = 1) -> Sample:
    rng = np.random.default_rng(number)
    raw = _sample(
        rng,
        row=number,
        key=f"clip-0-{number:06d}",
        split="train",
        size=SIZE,
        missing=frozenset(),
        labelled=False,
        lens=("none", []),
        back_size=None,
    )
    geometry = make_geometry(rng, *SIZE, 10**18 + number, (1, number % 2))
    turn = rigid(np.array([1.0, 0.02, -0.01, 0.1]), np.array([0.1, 0.2, 0.0]))
    geometry = replace(
        geometry,
        lidar2ego=np.repeat(geometry.lidar2ego, lidars, 0),
        lidar_ego2global=np.repeat(geometry.lidar_ego2global @ turn, lidars, 0),
        lidar_timestamp_ns=np.repeat(geometry.lidar_timestamp_ns, lidars),
    )
    points = {LIDAR: np.full((3 + number, 5), number, np.float32)} if lidars else {}
    boxes = make_boxes(rng, number) if labelled else None
    return Sample(
        key=f"clip-0-{number:06d}",
        meta=decode_meta(raw[META]),
        geometry=geometry,
        boxes=boxes,
        images={},
        points=points,
        extra={},
    )


SOURCE = Source(
    name=None,
    dataset=None,
    first_row=0,
    base=0,
    storage=None,
    reader=None,
    attributes=None,
)


def decoded(*samples: Sample, valid: tuple[bool, ...] | None = None) -> list[Parsed]:
    images = np.arange(len(samples) * len(CAMERAS) * 3 * OUT[0] * OUT[1], dtype=np.uint32).astype(
        np.uint8
    )
    flags = {
        "lane": np.arange(len(samples)),
        "prev_exists": np.arange(len(samples)) % 2 == 1,
    }
    slot = BatchSlot(
        2,
        5,
        images.reshape((len(samples), len(CAMERAS), 3, OUT[1], OUT[0])),
        flags,
    )
    return [
        Parsed(
            task=Task(
                slot=slot,
                batch_row=row,
                source=SOURCE,
                frames=(FrameTask(100 + row, True, None, None),),
                current=0,
                valid=valid is None or valid[row],
                position=row,
            ),
            samples=(sample,),
            maps=(
                AUGMENT.draw(
                    sample.geometry.img_wh.tolist(),
                    seed=1,
                    epoch=2,
                    sample=100 + row,
                ),
            ),
            changes=(),
            bev=IDENTITY,
        )
        for row, sample in enumerate(samples)
    ]


ENTRIES = decoded(*(make_sample(n) for n in range(4)), valid=(True, True, True, False))
BATCH = assemble(ENTRIES, lidar=TOP)


def test_names_shapes_and_dtypes_are_those_of_the_table() -> None:
    """`Batch` is the contract; every form of it that depends on no option is checked against a batch."""
    sizes = {"B": 4, "N": len(CAMERAS), "H": OUT[1], "W": OUT[0], "C": 5}
    stated = batch_entries()
    with_options = {
        "ego2key",
        "frame_valid",
        "frame_global_index",
        "gt_mask",
        "points_mask",
        "dataset",
        "seed",
        "view",
        "weight",
    }
    pack_entries = {
        "pack",
        "pack_offsets",
        "cu_seqlens",
        "max_seqlen",
        "position_ids",
        "sequence_ids",
        "bucket",
    }
    assert stated.keys() - with_options - pack_entries == BATCH.keys()
    for name, value in BATCH.items():
        kind = re.sub(r"\(T(,| of)\) |, \(T\)", "", stated[name][0])
        if kind == "int":
            assert type(value) is int, name
        elif kind == "list of str":
            assert [type(v) for v in value] == [str] * 4, name
        else:
            match = re.fullmatch(r"(list of )?\[(.*)\] (\w+)", kind)
            assert match is not None, kind
            axes = [sizes.get(axis, axis) for axis in match[2].split(", ")]
            tensors = value if match[1] else [value]
            assert len(tensors) == (4 if match[1] else 1)
            for tensor in tensors:
                assert str(tensor.dtype) == f"torch.{match[3]}", name
                assert tensor.ndim == len(axes), name
                fixed = [
                    (n, int(axis))
                    for n, axis in zip(tensor.shape, axes, strict=True)
                    if axis not in ("M", "P")
                ]
                assert all(n == axis for n, axis in fixed), name


def test_scalars_and_identity() -> None:
    assert BATCH["sample_key"] == [f"clip-0-{n:06d}" for n in range(4)]
    assert BATCH["global_index"].tolist() == [100, 101, 102, 103]
    assert BATCH["valid"].tolist() == [True, True, True, False]
    assert (BATCH["epoch"], BATCH["step"]) == (2, 5)
    assert BATCH["cam_valid"].tolist() == [[True, bool(n % 2)] for n in range(4)]
    assert BATCH["timestamp_ns"].tolist() == [entry.sample.meta.timestamp_ns for entry in ENTRIES]
    assert BATCH["img_timestamp_ns"].tolist() == [
        e.sample.geometry.cam_timestamp_ns.tolist() for e in ENTRIES
    ]


def test_images_are_the_slots_buffer_not_a_copy() -> None:
    assert BATCH["img"].data_ptr() == ENTRIES[0].slot.images.__array_interface__["data"][0]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("camera", range(len(CAMERAS)))
def test_a_point_goes_the_long_way_to_its_output_pixel(row, camera) -> None:
    """ego, global, ego at the exposure, camera, stored pixel, output pixel: one step after the other, in float64."""
    geometry = ENTRIES[row].sample.geometry
    image_map = ENTRIES[row].maps[0][camera]
    for point in (
        [12.0, 1.0, 0.5, 1.0],
        [-9.0, -2.0, 1.0, 1.0],
        [30.0, 7.0, 2.0, 1.0],
    ):
        in_ego_then = np.linalg.solve(geometry.cam_ego2global[camera], geometry.ego2global @ point)
        in_camera = np.linalg.solve(geometry.cam2ego[camera], in_ego_then)
        u, v, depth = geometry.intrinsics[camera] @ in_camera[:3]
        pixel = (image_map.centre_matrix() @ [u / depth, v / depth, 1.0])[:2]
        homogeneous = BATCH["ego2img"][row, camera].numpy() @ point
        np.testing.assert_allclose(homogeneous[:2] / homogeneous[2], pixel, atol=2e-3)  # px
        assert homogeneous[2] == pytest.approx(depth, rel=1e-5)
        # The same through the other matrices of the batch.
        projected = BATCH["intrinsics"][row, camera].numpy() @ in_camera[:3]
        np.testing.assert_allclose(projected[:2] / projected[2], pixel, atol=2e-3)
        stored = BATCH["ida_mat"][row, camera].numpy() @ [
            u / depth,
            v / depth,
            1.0,
            1.0,
        ]
        np.testing.assert_allclose(stored[:2], pixel, atol=2e-3)
        in_key_ego = BATCH["cam2keyego"][row, camera].numpy().astype(np.float64) @ in_camera
        np.testing.assert_allclose(in_key_ego, point, atol=1e-4)


@pytest.mark.parametrize("row", range(4))
def test_the_lidar_is_seen_through_its_own_pose(row) -> None:
    geometry = ENTRIES[row].sample.geometry
    point = np.array([8.0, -3.0, -1.0, 1.0])
    in_ego = np.linalg.solve(
        geometry.ego2global,
        geometry.lidar_ego2global[0] @ geometry.lidar2ego[0] @ point,
    )
    np.testing.assert_allclose(BATCH["lidar2ego"][row].numpy() @ point, in_ego, atol=1e-4)
    for camera in range(len(CAMERAS)):
        homogeneous = BATCH["lidar2img"][row, camera].numpy() @ point
        expected = BATCH["ego2img"][row, camera].numpy() @ in_ego
        np.testing.assert_allclose(
            homogeneous[:2] / homogeneous[2],
            expected[:2] / expected[2],
            atol=5e-3,
        )


def test_nothing_in_a_batch_is_a_view_of_a_shard() -> None:
    """Labels and points may be changed in place, and must not hold a mapped file."""
    batch = assemble(decoded(make_sample(2)), lidar=TOP)
    for name in ("gt_boxes_3d", "gt_velocity", "instance_id", "points"):
        batch[name][0] += 1
    assert not np.array_equal(batch["points"][0], BATCH["points"][2])
    np.testing.assert_array_equal(
        assemble(decoded(make_sample(2)), lidar=TOP)["points"][0],
        BATCH["points"][2],
    )


@pytest.mark.parametrize("first", [True, False])
def test_half_labelled_batches_name_the_sample(first) -> None:
    with pytest.raises(
        SchemaError,
        match=r"clip-0-00000\d: the sample has no boxes, others of its batch have",
    ):
        assemble(
            decoded(
                make_sample(1, labelled=first),
                make_sample(2, labelled=not first),
            )
        )


class TestPoints:
    def test_only_when_asked_for(self) -> None:
        assert "points" not in assemble(ENTRIES)

    def test_of_the_lidar_asked_for_and_no_other(self) -> None:
        rear = replace_points(make_sample(1), lidar_rear=np.ones((2, 4), np.float32))
        only_rear = replace_points(rear, **{LIDAR: None})
        batch = assemble(decoded(rear, only_rear), lidar=TOP)
        assert [tuple(points.shape) for points in batch["points"]] == [
            (4, 5),
            (0, 5),
        ]
        rear_lidar = msgspec.structs.replace(
            TOP, channel="lidar_rear", columns=("x", "y", "z", "intensity")
        )
        assert [
            tuple(p.shape)
            for p in assemble(decoded(rear, make_sample(2)), lidar=rear_lidar)["points"]
        ] == [
            (2, 4),
            (0, 4),
        ]

    def test_a_rig_without_lidar_has_no_lidar_matrices(self) -> None:
        batch = assemble(decoded(make_sample(1, lidars=0)))
        assert not [name for name in batch if "lidar" in name]


def replace_points(sample: Sample, **points: np.ndarray | None) -> Sample:
    return replace(
        sample,
        points={k: v for k, v in {**sample.points, **points}.items() if v is not None},
    )


def test_a_decoded_sample_says_what_it_is() -> None:
    assert str(ENTRIES[1]) == "sample 'clip-0-000001', row 101 (epoch 2, step 5)"
