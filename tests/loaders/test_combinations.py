"""Features together, against float64 arithmetic written out here: windows, mixes, augmentation, lenses, splicing."""

from __future__ import annotations

import json
import random

import cv2
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fuelrail import BevAugment, ImageAugment, Undistort
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.native import load as load_native
from fuelrail.sharding.write.images import with_restart_rows
from support.backends import BACKENDS
from support.batches import batches, keys
from support.datasets import CAMERAS, build_dataset
from support.decode_fuzz import mutate
from support.pictures import open_with_pillow, psnr_db

WH = (192, 160)
DIST = [-0.3, 0.08, 0.001, -0.0005, 0.01]
LENS = ("opencv_radtan", DIST)
TRAIN = ImageAugment(
    height=72,
    width=144,
    train=True,
    resize_range=(0.8, 0.98),
    flip_prob=0.5,
    rotate_deg=(-5.4, 5.4),
)
BEV = BevAugment(
    train=True,
    rotate_deg=(-22.5, 22.5),
    scale=(0.9, 1.1),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
    translate_std_m=0.5,
)


def bent(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plumb-bob model of Brown and Conrady, as OpenCV's calib3d states it, on coordinates of rays."""
    k1, k2, p1, p2, k3 = DIST
    r2 = x * x + y * y
    radial = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
    return x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x), y * radial + p1 * (
        r2 + 2 * y * y
    ) + 2 * p2 * x * y


def sampled(
    encoded: bytes, ida_mat: np.ndarray, camera: np.ndarray, *, has_lens: bool
) -> tuple[np.ndarray, ...]:
    """What the output must show, by float64: planes (3, h, w), and the pixels that lie well within the stored image."""
    picture = open_with_pillow(encoded).astype(np.float64)
    height = TRAIN.height
    width = TRAIN.width
    v, u = np.mgrid[:height, :width].astype(np.float64)
    rays = np.linalg.inv(ida_mat[:3, :3]) @ np.stack((u.ravel(), v.ravel(), np.ones(u.size)))
    x, y = rays[:2]
    inside = (x > 4) & (x < WH[0] - 5) & (y > 4) & (y < WH[1] - 5)
    if has_lens:
        x, y = bent((x - camera[0, 2]) / camera[0, 0], (y - camera[1, 2]) / camera[1, 1])
        x = x * camera[0, 0] + camera[0, 2]
        y = y * camera[1, 1] + camera[1, 2]
        inside &= (x > 4) & (x < WH[0] - 5) & (y > 4) & (y < WH[1] - 5)
    x0 = np.clip(np.floor(x).astype(int), 0, WH[0] - 2)
    y0 = np.clip(np.floor(y).astype(int), 0, WH[1] - 2)
    fx = (x - x0)[:, None]
    fy = (y - y0)[:, None]
    upper = picture[y0, x0] * (1 - fx) + picture[y0, x0 + 1] * fx
    lower = picture[y0 + 1, x0] * (1 - fx) + picture[y0 + 1, x0 + 1] * fx
    values = np.clip(np.rint(upper * (1 - fy) + lower * fy), 0, 255).astype(np.uint8)
    return values.T.reshape(3, height, width), inside.reshape(height, width)


def check_frame(
    batch: dict,
    index: tuple[int, ...],
    sample,
    key2global: np.ndarray,
    lenses: tuple[bool, ...],
) -> float:
    """Matrices and pixels of one frame, ``index`` its place in the batch; the lowest PSNR of its cameras in dB."""
    geometry = sample.geometry
    bda = batch["bda_mat"][index[0]].double().numpy()
    lowest = 99.0
    for camera, channel in enumerate(CAMERAS):
        camera_index = (*index, camera)
        ida_mat = batch["ida_mat"][camera_index].double().numpy()
        k = geometry.intrinsics[camera]
        assert_allclose(
            batch["intrinsics"][camera_index].numpy(),
            ida_mat[:3, :3] @ k,
            rtol=1e-5,
            atol=1e-4,
        )
        cam2global = geometry.cam_ego2global[camera] @ geometry.cam2ego[camera]
        cam2ego = np.linalg.solve(geometry.ego2global, cam2global)
        k4 = np.eye(4)
        k4[:3, :3] = k
        ego2img = ida_mat @ k4 @ np.linalg.inv(cam2ego) @ np.linalg.inv(bda)
        assert_allclose(
            batch["ego2img"][camera_index].numpy(),
            ego2img,
            rtol=1e-4,
            atol=2e-2,
        )
        cam2keyego = bda @ np.linalg.solve(key2global, cam2global)
        assert_allclose(
            batch["cam2keyego"][camera_index].numpy(),
            cam2keyego,
            rtol=1e-4,
            atol=2e-3,
        )
        expected, inside = sampled(sample.images[channel], ida_mat, k, has_lens=lenses[camera])
        planes = batch["img"][camera_index].numpy()
        # A crop before a rotation leaves black corners.
        inside &= cv2.erode((planes.max(axis=0) > 0).astype(np.uint8), np.ones((5, 5))) > 0
        assert inside.mean() > 0.4
        lowest = min(lowest, psnr_db(planes, expected, inside))
    assert_allclose(batch["ego2global"][index].numpy() @ bda, geometry.ego2global, atol=1e-4)
    return lowest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("bent") / "dataset"
    build_dataset(root, {"train": (8,)}, size=WH, lens=LENS)
    return root


@pytest.mark.costly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("undistort", [None, Undistort()])
def test_windows_with_lenses_and_augmentations_of_image_and_ego_frame(
    root, undistort, backend: str
) -> None:
    reader = SampleReader(open_dataset(root))
    options = {
        "frames": [-1, 0, 1],
        "undistort": undistort,
        "ego": BEV,
        "image": TRAIN,
        "decoder": backend,
    }
    lowest = []
    for batch in batches(root, 2, seed=3, **options):
        for b, rows in enumerate(batch["frame_global_index"].tolist()):
            key2global = reader.sample(int(batch["global_index"][b])).geometry.ego2global
            for t, row in enumerate(rows):
                sample = reader.sample(row)
                lenses = (undistort is not None, False)
                lowest.append(
                    check_frame(
                        batch,
                        index=(b, t),
                        sample=sample,
                        key2global=key2global,
                        lenses=lenses,
                    )
                )
                bda = batch["bda_mat"][b].double().numpy()
                ego2key = (
                    bda
                    @ np.linalg.solve(key2global, sample.geometry.ego2global)
                    @ np.linalg.inv(bda)
                )
                assert_allclose(batch["ego2key"][b, t].numpy(), ego2key, atol=2e-3)
    assert len(lowest) == 24
    # These textures are noise at the scale of pixels; turbo's bilinear is the same, the others' reaches farther.
    assert min(lowest) > (36.0 if backend == "turbo" else 27.0)


@pytest.mark.costly
def test_windows_in_a_mix_are_augmented_by_their_number_over_all_datasets(
    tmp_path,
) -> None:
    roots = {name: tmp_path / name for name in ("city", "highway")}
    build_dataset(roots["city"], {"train": (8,)}, size=WH)
    build_dataset(roots["highway"], {"val": (4,), "train": (8,)}, size=WH, seed=5)
    readers = {name: SampleReader(open_dataset(folder)) for name, folder in roots.items()}
    base = {"city": 0, "highway": 8}
    options = {"frames": [-2, 0], "ego": BEV, "image": TRAIN, "seed": 7}
    entries = set()
    for batch in batches(roots, 4, mix={"city": 1, "highway": 1}, **options):
        for b, (name, rows) in enumerate(
            zip(
                batch["dataset"],
                batch["frame_global_index"].tolist(),
                strict=True,
            )
        ):
            number = base[name] + rows[1]
            drawn = TRAIN.draw([WH] * 2, seed=7, epoch=0, sample=number)
            bda = BEV.draw(seed=7, epoch=0, sample=number).matrix
            assert_allclose(batch["bda_mat"][b].numpy(), bda, atol=1e-6)
            key2global = readers[name].sample(rows[1]).geometry.ego2global
            for t, row in enumerate(rows):
                for camera, image_map in enumerate(drawn):
                    assert_allclose(
                        batch["ida_mat"][b, t, camera].numpy(),
                        image_map.ida_mat(),
                        atol=1e-4,
                    )
                sample = readers[name].sample(row)
                assert (
                    check_frame(
                        batch,
                        index=(b, t),
                        sample=sample,
                        key2global=key2global,
                        lenses=(False, False),
                    )
                    > 36.0
                )
            entries.add((name, rows[1]))
    assert {name for name, _ in entries} == {"city", "highway"}
    assert len(entries) == 16


@pytest.mark.costly
@pytest.mark.skipif(isinstance(load_native(), str), reason="the native decoder is not built")
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_with_restart_rows_are_undistorted_as_plain_ones(
    root, tmp_path, backend: str
) -> None:
    prepared = tmp_path / "prepared"
    build_dataset(
        prepared,
        {"train": (8,)},
        size=WH,
        lens=LENS,
        rewrite=lambda row, channel, data: with_restart_rows(data),
    )
    options = {
        "undistort": Undistort(),
        "image": TRAIN,
        "seed": 3,
        "frames": [-1, 0],
        "decoder": backend,
    }
    reader = SampleReader(open_dataset(prepared))
    for plain_batch, prepared_batch in zip(
        batches(root, 2, **options),
        batches(prepared, 2, **options),
        strict=True,
    ):
        assert plain_batch["sample_key"] == prepared_batch["sample_key"]
        for name in ("ida_mat", "intrinsics", "ego2img"):
            assert (plain_batch[name] == prepared_batch[name]).all()
        assert (
            psnr_db(
                plain_batch["img"].flatten(0, 2).numpy(),
                prepared_batch["img"].flatten(0, 2).numpy(),
            )
            > 40.0
        )
        for b, rows in enumerate(prepared_batch["frame_global_index"].tolist()):
            sample = reader.sample(rows[1])
            least_db = 36.0 if backend == "turbo" else 27.0
            assert (
                check_frame(
                    prepared_batch,
                    index=(b, 1),
                    sample=sample,
                    key2global=sample.geometry.ego2global,
                    lenses=(True, False),
                )
                > least_db
            )


@pytest.mark.costly
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_damaged_image_is_reported_with_its_key(tmp_path, backend: str) -> None:
    rng = random.Random(2)
    raw = build_dataset(
        tmp_path / "d",
        {"train": (80,)},
        rewrite=lambda row, channel, data: (
            mutate(data, rng) if row % 2 and channel == "cam_back" else data
        ),
    )
    image = ImageAugment(height=32, width=48, resize=0.5)
    (image_map,) = image.draw([(96, 64)], seed=0, epoch=0, sample=0)
    decoder = make_decoder(backend)
    refused = {}
    for key, members in raw.items():
        for channel in CAMERAS:
            try:
                decoder.decode_into(
                    members[f"{channel}.jpg"],
                    image_map,
                    np.empty((3, 32, 48), np.uint8),
                )
            except ImageError as error:
                refused[key] = (channel, error.message)
    assert 5 < len(refused) < 40
    assert {int(key[-6:]) % 2 for key in refused} == {1}
    notes = tmp_path / "bad.jsonl"
    options = {
        "verify": False,
        "on_error": "substitute",
        "max_bad": 80,
        "file": notes,
        "decoder": backend,
    }
    loaded_keys = keys(batches(tmp_path / "d", 4, image=image, shuffle=False, **options))
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {line["key"]: line["member"] for line in lines} == {
        key: channel for key, (channel, _) in refused.items()
    }
    assert all(refused[line["key"]][1] in line["message"] for line in lines)
    assert len(loaded_keys) == 80
    assert set(loaded_keys) == set(raw) - set(refused)
