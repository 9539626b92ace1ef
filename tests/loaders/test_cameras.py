"""Transforms.cameras: some cameras of the rig are loaded, and of them all is as in a loader of all cameras."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from fuelrail import BevAugment, ImageAugment, PixelAugment, StorageOptions
from fuelrail.loaders.batch import samples
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import (
    ConfigError,
    SchemaError,
    StateMismatchError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.backends import needs_dali
from support.batches import batches, check_one_sequence, load, unlike
from support.cameras import CHANNELS, write_cameras
from support.datasets import CAMERAS, build_dataset

OF_CAMERAS = {
    *(
        "img",
        "cam_valid",
        "intrinsics",
        "dist",
        "ida_mat",
        "cam2ego",
        "cam2keyego",
        "ego2img",
        "lidar2img",
    ),
    "img_timestamp_ns",
}
SIZE = (96, 64)
BACK = (48, 80)
DRAWN = {
    "image": ImageAugment(
        height=32,
        width=48,
        train=True,
        resize_range=(0.6, 0.9),
        flip_prob=0.5,
        scope="camera",
    ),
    "ego": BevAugment(train=True, rotate_deg=(-20, 20)),
}
PIXELS = PixelAugment(train=True, brightness=32, grid_mask_prob=0.7, scope="camera")


def mask_of(camera: str, size: tuple[int, int]) -> Channel:
    return Channel(
        name=f"mask_{camera}",
        kind="array",
        field=f"mask_{camera}.npy",
        dtype="uint8",
        axes=("height", "width"),
        shape=size[::-1],
        frame=f"image:{camera}",
        law=Law("image", camera=camera, fill=255.0),
    )


EXTRA = [
    (
        mask_of("cam_front", SIZE),
        lambda row: np.full(SIZE[::-1], row, np.uint8),
    ),
    (
        mask_of("cam_back", BACK),
        lambda row: np.full(BACK[::-1], 100 + row, np.uint8),
    ),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("cameras") / "dataset"
    missing = frozenset({(3, "cam_back"), (5, "cam_front")})
    build_dataset(
        root,
        {"train": (8, 4)},
        size=SIZE,
        back_size=BACK,
        missing=missing,
        extra=EXTRA,
    )
    return root


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    root = tmp_path_factory.mktemp("six") / "dataset"
    write_cameras(root, 8, num_shards=2)
    return root


def part(batch: dict, camera: int) -> dict:
    """What a loader of one camera gives, taken out of a batch of all; windows have one axis more before the cameras."""
    axis = batch["cam_valid"].ndim - 1
    return {
        name: value.narrow(axis, camera, 1) if name in OF_CAMERAS else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("camera", CAMERAS)
@pytest.mark.parametrize("window", [None, {"frames": [-1, 0], "pad": "mask"}])
@pytest.mark.parametrize(
    "decoder",
    [
        "turbo",
        "pillow",
        pytest.param("dali", marks=[needs_dali, pytest.mark.slow]),
    ],
)
def test_every_entry_is_that_of_the_same_camera_in_a_batch_of_all(
    dataset, camera, window, decoder
) -> None:
    options = {
        "decoder": decoder,
        "window": window,
        "points": True,
        "select": [f"mask_{camera}"],
        **DRAWN,
    }
    options |= {} if decoder == "dali" else {"pixels": PIXELS}
    all_batches = batches(dataset, 4, seed=3, **options)
    camera_batches = batches(dataset, 4, seed=3, cameras=[camera], **options)
    assert len(camera_batches) == len(all_batches) == 3
    for batch, full_batch in zip(camera_batches, all_batches, strict=True):
        assert batch["img"].shape[-4] == 1 and "lidar2img" in batch
        assert not unlike(batch, part(full_batch, CAMERAS.index(camera)))


@pytest.mark.parametrize(
    "order",
    [
        {"kind": "sequential"},
        {"kind": "shuffled", "seed": 5},
        {"kind": "lanes"},
    ],
)
def test_orders_do_not_depend_on_the_cameras(dataset, order) -> None:
    options = {"order": order, "two_views": True, **DRAWN}
    for batch, full_batch in zip(
        batches(dataset, 2, cameras=["cam_back"], **options),
        batches(dataset, 2, **options),
        strict=True,
    ):
        assert not unlike(batch, part(full_batch, 1))


@pytest.mark.costly
def test_any_ranks_and_restarts_give_one_sequence(dataset) -> None:
    check_one_sequence(
        lambda batch_size, **where: load(
            dataset, batch_size, cameras=["cam_back"], seed=1, **where, **DRAWN
        )
    )


def test_the_state_names_the_cameras(dataset) -> None:
    state = load(dataset, 4, cameras=["cam_back"]).state_dict()
    assert '"cameras":["cam_back"]' in state["identity"]
    load(dataset, 4, cameras=["cam_back"]).load_state_dict(state)
    with pytest.raises(
        StateMismatchError,
        match=r"cameras: state has \['cam_back'\], loader has \['cam_front'\]",
    ):
        load(dataset, 4, cameras=["cam_front"]).load_state_dict(state)
    # All cameras, in any order, are what a loader without the setting has.
    assert load(dataset, 4, cameras=CAMERAS[::-1]).state_dict() == load(dataset, 4).state_dict()


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["pread", "remote"])
def test_fewer_bytes_are_fetched_and_fewer_images_decoded(six, backend, monkeypatch) -> None:
    decoded = []
    decode = samples.decode_images
    monkeypatch.setattr(
        samples,
        "decode_images",
        lambda *a: decoded.append(len(a[1])) or decode(*a),
    )

    def run(**options) -> tuple[list[dict], set[int], float]:
        """Batches, the images of each sample that was decoded, and the bytes of each that was fetched."""
        decoded.clear()
        options |= {
            "storage": StorageOptions(backend),
            "image": {"height": 90, "width": 160},
        }
        with load(six, 4, shuffle=False, **options) as loader:
            loaded = list(loader)
            stats = loader.stats().storage
            return loaded, set(decoded), stats.span_bytes / stats.spans

    all_batches, num_whole, bytes_whole = run()
    assert (len(all_batches), num_whole) == (2, {6})
    for camera, max_share in (("cam_front", 0.2), ("cam_back", 0.75)):
        loaded, num_images, bytes_of_camera = run(cameras=[camera])
        assert num_images == {1} and bytes_of_camera < max_share * bytes_whole
        for batch, full_batch in zip(loaded, all_batches, strict=True):
            assert not unlike(batch, part(full_batch, CHANNELS.index(camera)))


def test_what_a_layer_has_of_another_camera_is_left_out(dataset, tmp_path) -> None:
    masks = [msgspec.to_builtins(channel) for channel, _ in EXTRA]
    with LayerWriter(dataset, tmp_path / "layer", channels=masks) as writer:
        for row in range(12):
            writer.write(row, {channel.name: make(row) for channel, make in EXTRA})
    writer.finish()
    for batch in batches(dataset, 4, cameras=["cam_back"], layers={"own": tmp_path / "layer"}):
        assert "own.mask_cam_back" in batch and "own.mask_cam_front" not in batch


@pytest.mark.costly
def test_rigs_that_share_the_cameras_can_be_mixed(six, tmp_path) -> None:
    write_cameras(tmp_path / "one", 4, num_shards=1, channels=["cam_front"])
    roots = {"six": six, "one": tmp_path / "one"}
    options = {"mix": {"six": 1, "one": 1}, "shuffle": False}
    with pytest.raises(ConfigError, match="their cameras differ"):
        load(roots, 2, **options)
    mixed_batches = batches(roots, 2, cameras=["cam_front"], **options)
    assert all(
        sorted(batch["dataset"]) == ["one", "six"] and batch["img"].shape[1] == 1
        for batch in mixed_batches
    )


def test_what_is_shown_has_the_cameras_that_are_loaded(dataset) -> None:
    with (
        load(dataset, 2, cameras=["cam_back"]) as back_loader,
        load(dataset, 2) as full_loader,
    ):
        assert back_loader.cameras == ("cam_back",) and full_loader.cameras == CAMERAS
        assert back_loader.show().pixels.shape[1] < full_loader.show().pixels.shape[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cameras": ["cam_frnt"]},
            "has no camera 'cam_frnt'; did you mean 'cam_front'?; it has: cam_front, cam_back",
        ),
        (
            {"cameras": []},
            "must name a camera or more, each once; there are: cam_front, cam_back",
        ),
        (
            {"cameras": ["cam_back", "cam_back"]},
            "must name a camera or more, each once",
        ),
        (
            {"cameras": "cam_back"},
            "cameras='cam_back' must be a list of names of cameras, a dict of dataset to such",
        ),
        (
            {"cameras": ["cam_back"], "select": ["mask_cam_front"]},
            "'mask_cam_front' lies on the image of 'cam_front', and the loader has the cameras cam_back only",
        ),
        (
            {
                "cameras": ["cam_back"],
                "camera_groups": {"a": {"cameras": ["cam_front"], "image": DRAWN["image"]}},
            },
            "names cameras that are not loaded: cam_front",
        ),
    ],
)
def test_cameras_that_cannot_be_loaded(dataset, options, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(dataset, 4, **options)


def test_a_sample_of_another_rig_is_refused(six) -> None:
    sample = SampleReader(open_dataset(six)).sample(0)
    assert (
        sample.of_cameras([5, 1], 6).geometry.cam_timestamp_ns.tolist()
        == sample.geometry.cam_timestamp_ns[[5, 1]].tolist()
    )
    with pytest.raises(SchemaError, match="it is of 6 cameras, the manifest has 7"):
        sample.of_cameras([6], 7)
