"""Transforms.camera_groups: rigs whose cameras differ, each group at a size of its own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fuelrail import (
    BevAugment,
    CameraGroup,
    ImageAugment,
    Normalize,
    PixelAugment,
)
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import ConfigError, StateMismatchError
from fuelrail.pipeline.transforms.image_map import ida_mats
from support.backends import needs_dali
from support.batches import batches, load
from support.datasets import build_dataset
from support.loaders import make_loader

FRONT = (96, 64)
BACK = (48, 80)
WIDE = ImageAugment(height=32, width=64, train=True, resize_range=(0.6, 0.9), flip_prob=0.5)
TALL = ImageAugment(height=56, width=40, train=True, resize_range=(0.7, 0.9), rotate_deg=(-5, 5))
GROUPS = {
    "tall": {"cameras": ["cam_back"], "image": TALL},
    "wide": CameraGroup(cameras=("cam_front",), image=WIDE),
}
PIXELS = PixelAugment(train=True, brightness=32, grid_mask_prob=0.7)
OPTIONS = {"seed": 3, "shuffle": False}
MASK = (
    Channel(
        name="mask",
        kind="array",
        field="mask.npy",
        dtype="uint8",
        axes=("height", "width"),
        shape=BACK[::-1],
        frame="image:cam_back",
        law=Law("image", camera="cam_back", fill=255.0),
    ),
    lambda row: np.arange(BACK[0] * BACK[1], dtype=np.uint8).reshape(BACK[::-1]) + np.uint8(row),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("groups") / "dataset"
    build_dataset(
        root,
        {"train": (6, 2)},
        size=FRONT,
        back_size=BACK,
        missing=frozenset({(3, "cam_back")}),
        extra=[MASK],
    )
    return root


def grouped(dataset, **options) -> list[dict]:
    return batches(dataset, 4, **OPTIONS, camera_groups=GROUPS, **options)


@pytest.mark.parametrize("window", [None, {"frames": [-1, 0], "pad": "mask"}])
@pytest.mark.parametrize(
    "decoder",
    [
        "turbo",
        "pillow",
        pytest.param("dali", marks=[needs_dali, pytest.mark.slow]),
    ],
)
def test_each_group_is_what_a_loader_of_its_size_shows(dataset, decoder, window) -> None:
    options = {
        "decoder": decoder,
        "window": window,
        "ego": BevAugment(train=True, rotate_deg=(-20, 20)),
    }
    options |= {
        "select": ["mask"],
        **({} if decoder == "dali" else {"pixels": PIXELS}),
    }
    grouped_batches = grouped(dataset, **options)
    wide, tall = (batches(dataset, 4, image=image, **OPTIONS, **options) for image in (WIDE, TALL))
    axes = () if window is None else (2,)
    for batch, front, back in zip(grouped_batches, wide, tall, strict=True):
        shapes = {
            "tall": (4, *axes, 1, 3, 56, 40),
            "wide": (4, *axes, 1, 3, 32, 64),
        }
        assert {name: images.shape for name, images in batch["img"].items()} == shapes
        assert torch.equal(batch["img"]["wide"], front["img"][..., :1, :, :, :])
        assert torch.equal(batch["img"]["tall"], back["img"][..., 1:, :, :, :])
        for name in (
            "ida_mat",
            "intrinsics",
            "ego2img",
            "lidar2img",
        ):  # of all cameras in rig order
            assert torch.equal(batch[name][..., :1, :, :], front[name][..., :1, :, :]), name
            assert torch.equal(batch[name][..., 1:, :, :], back[name][..., 1:, :, :]), name
        assert batch.keys() == front.keys()
        assert torch.equal(batch["mask"], back["mask"]) and batch["mask"].shape[-2:] == (56, 40)
        assert torch.equal(batch["bda_mat"], front["bda_mat"])


def test_maps_are_those_of_the_group(dataset) -> None:
    for batch in grouped(dataset):
        for index, row in enumerate(batch["global_index"].tolist()):
            for camera, (augment, size) in enumerate(((WIDE, FRONT), (TALL, BACK))):
                expected = augment.draw([size], seed=3, epoch=0, sample=row, cameras=[camera])
                if batch["cam_valid"][index, camera]:
                    assert np.allclose(
                        batch["ida_mat"][index, camera],
                        ida_mats(expected)[0],
                        atol=1e-6,
                    )


def test_one_group_may_hold_cameras_in_any_order(dataset) -> None:
    groups = {"all": {"cameras": ["cam_back", "cam_front"], "image": WIDE}}
    one_group = batches(dataset, 4, **OPTIONS, camera_groups=groups)
    for batch, plain in zip(one_group, batches(dataset, 4, **OPTIONS, image=WIDE), strict=True):
        assert torch.equal(batch["img"]["all"].flip(1), plain["img"])
        assert torch.equal(batch["ego2img"], plain["ego2img"])


def test_normalized_static_and_two_views(dataset) -> None:
    plain = grouped(dataset, two_views=True)
    normalize = Normalize(dtype="float32")
    options = {
        "camera_groups": GROUPS,
        "two_views": True,
        "normalize": normalize,
        "static": {"buffers": 2},
    }
    with load(dataset, 4, **OPTIONS, **options) as loader:
        addresses = []
        for batch, expected in zip(loader, plain, strict=True):
            assert expected["img"]["tall"].shape == (8, 1, 3, 56, 40)
            for name, images in batch["img"].items():
                assert torch.allclose(images, normalize.images(expected["img"][name]))
            addresses.append(
                {name: group_images.data_ptr() for name, group_images in batch["img"].items()}
            )
        repeated = [
            {name: group_images.data_ptr() for name, group_images in batch["img"].items()}
            for batch in loader
        ]
    assert repeated == addresses and addresses[0] != addresses[1]


def test_the_users_functions_get_the_groups(dataset) -> None:
    def darker(sample):
        sample["img"]["wide"] //= 2
        return sample

    for darkened, plain in zip(grouped(dataset, transform=darker), grouped(dataset), strict=True):
        assert torch.equal(darkened["img"]["wide"], plain["img"]["wide"] // 2)
        assert torch.equal(darkened["img"]["tall"], plain["img"]["tall"])
    for samples in grouped(dataset, collate_fn=list):
        assert [sample["img"]["tall"].shape for sample in samples] == [(1, 3, 56, 40)] * 4


def test_the_state_names_the_groups(dataset) -> None:
    state = load(dataset, 4, camera_groups=GROUPS).state_dict()
    load(dataset, 4, camera_groups=GROUPS).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="groups"):
        load(dataset, 4, image=WIDE).load_state_dict(state)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "must name a group or more"),
        (
            {"a": {"cameras": ["cam_front"], "image": WIDE}},
            "leaves out cameras that are loaded: cam_back",
        ),
        (
            GROUPS | {"c": {"cameras": ["cam_left"], "image": WIDE}},
            "names cameras that are not loaded: cam_left",
        ),
        (
            GROUPS | {"c": {"cameras": ["cam_front"], "image": WIDE}},
            "in several groups: cam_front",
        ),
        ({"a": {"cameras": ["cam_front"] * 2, "image": WIDE}}, "each once"),
        ({"a": {"cameras": [], "image": WIDE}}, "one camera or more"),
        ({"a": {"cameras": ["cam_front"]}}, "camera_groups.a"),
        ({"a": 3}, "camera_groups.a=3"),
        (3, "camera_groups"),
    ],
)
def test_groups_that_do_not_fit(dataset, groups, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(dataset, 4, camera_groups=groups)


def test_groups_take_the_place_of_image(dataset) -> None:
    with pytest.raises(ConfigError, match="leave image out"):
        make_loader(dataset, 4, camera_groups=GROUPS, image=WIDE)
