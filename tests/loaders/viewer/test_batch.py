"""The picture of a batch shows what the batch holds, whatever the batch's settings."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

import fuelrail
from fuelrail import DataLoader, World
from fuelrail.loaders.viewer import batch as batch_module
from fuelrail.loaders.viewer.drawing import stack
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.rigid import move_points

IMAGE = {
    "height": 48,
    "width": 64,
    "train": True,
    "resize_range": [0.7, 0.9],
    "flip_prob": 0.5,
    "rotate_deg": [-9, 9],
}
EGO = {
    "train": True,
    "rotate_deg": [-22, 22],
    "scale": [0.95, 1.05],
    "flip_x_prob": 0.5,
    "flip_y_prob": 0.5,
}
LIDAR = {"points": True, "ego": EGO, "box_frame": "lidar"}
TOKENS = {
    "kind": "tokens",
    "dtype": "int64",
    "axes": ["token"],
    "vocabulary": {"name": "words", "size": 9},
}
LAYER = [
    {
        "name": "loss",
        "kind": "array",
        "field": "loss.npy",
        "dtype": "float32",
        "law": {"name": "fixed"},
    },
    {
        "name": "caption",
        "kind": "text",
        "field": "caption.txt",
        "law": {"name": "fixed"},
    },
    {
        "name": "words",
        "field": "words.npy",
        "shape": [None],
        "law": {"name": "fixed"},
        **TOKENS,
    },
    {
        "name": "agents",
        "kind": "ragged",
        "field": "agents.safetensors",
        "law": {"name": "fixed"},
        "arrays": [{"name": "speed", "dtype": "float32"}],
    },
]


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (4, 4)})[0]


def loader_of(root, transforms=(), **options):
    transforms = {"image": IMAGE, "points": True, **dict(transforms)}
    return DataLoader(
        root,
        2,
        shuffle=True,
        drop_last=True,
        seed=3,
        num_workers=1,
        world=World(),
        transforms=transforms,
        **options,
    )


def picture(root, transforms=(), **options):
    with loader_of(root, transforms, **options) as loader:
        return loader.show().pixels


def test_a_batch_is_drawn_as_view_draws_its_samples(root):
    with loader_of(root) as loader:
        batch = next(iter(loader))
        pictures = [loader.show(batch, samples=samples).pixels for samples in (1, 4)]
    sheets = [
        fuelrail.view(root, key, image=IMAGE, train=True, seed=3).sheet
        for key in batch["sample_key"]
    ]
    np.testing.assert_array_equal(pictures[0][22:], sheets[0])
    titles = [f"{key}   epoch 0, step 0" for key in batch["sample_key"]]
    np.testing.assert_array_equal(pictures[1], stack(list(zip(titles, sheets, strict=True))))


@pytest.mark.parametrize(
    "normalize",
    [{"dtype": "float32"}, {"channel_order": "bgr", "channels_last": True}],
)
def test_normalisation_is_undone(root, normalize):
    np.testing.assert_array_equal(picture(root, {"normalize": normalize}), picture(root))


def test_half_precision_is_off_by_a_level_or_two(root):
    off = np.abs(
        picture(root, {"normalize": {"dtype": "float16"}}).astype(int) - picture(root).astype(int)
    )
    assert off.max() <= 2


@pytest.mark.parametrize(
    "changed",
    [{"box_frame": "ego"}, {"static": {"max_boxes": 9, "max_points": 500}}],
)
def test_frame_and_padding_of_boxes_and_points_do_not_show(root, changed):
    """Lines are rounded to pixels, so some of them differ by the rounding of float32."""
    off = (picture(root, LIDAR | changed) != picture(root, LIDAR)).any(-1)
    assert off.mean() < 2e-3


def test_windows_are_strips_whose_boxes_move_with_them(root):
    window = {"frames": [-1, 0, 1]}
    with loader_of(root, {"ego": EGO}, window=window) as loader:
        batch = next(iter(loader))
        sheet = loader.show(batch, samples=1).pixels
    for row in range(2):
        frames = batch_module._Frames(batch, row)
        assert frames.key == 1
        ego2global = batch["ego2global"][row].numpy()
        global_corners = [
            move_points(boxes.corners, pose)
            for boxes, pose in zip(frames.boxes("ego"), ego2global, strict=True)
        ]
        velocity = batch["gt_velocity"][row].numpy() @ ego2global[1][:3, :3].T
        for corners, since in zip(global_corners, frames.since_s(), strict=True):
            np.testing.assert_allclose(
                corners,
                global_corners[1] + since * np.nan_to_num(velocity)[:, None],
                atol=1e-3,
            )
    assert (
        sheet.shape[1] == 3 * (64 + 4) + 4 + 2 * 48 + 3 * 4
    )  # three frames, and the view from above
    with pytest.raises(OrderError, match="frames must be different offsets"):
        fuelrail.view(root, frames=(-1, 1))


def test_view_draws_windows_as_the_loader_shows_them(root):
    with loader_of(root, window={"frames": [-1, 0]}) as loader:
        batch = next(iter(loader))
        pixels = loader.show(batch, samples=1).pixels[22:]
    view = fuelrail.view(
        root,
        batch["sample_key"][0],
        frames=(-1, 0),
        image=IMAGE,
        train=True,
        seed=3,
    )
    np.testing.assert_array_equal(pixels, view.sheet)


def test_groups_of_cameras_keep_their_sizes(root):
    groups = {
        "front": {
            "cameras": ["cam_front"],
            "image": {"height": 64, "width": 96},
        },
        "rest": {"cameras": ["cam_back"], "image": {"height": 32, "width": 48}},
    }
    with DataLoader(
        root,
        1,
        shuffle=True,
        drop_last=True,
        seed=3,
        transforms={"camera_groups": groups},
        num_workers=1,
    ) as loader:
        batch = next(iter(loader))
        pixels = loader.show(batch).pixels
    bare = {name: value for name, value in batch.items() if not name.startswith("gt_")}
    plain = batch_module.draw_sample(bare, 0, loader)
    np.testing.assert_array_equal(
        plain[34:68, 4:100],
        batch["img"]["front"][0, 0].numpy().transpose(1, 2, 0)[30:],
    )
    np.testing.assert_array_equal(
        plain[34:36, 104:152],
        batch["img"]["rest"][0, 0].numpy().transpose(1, 2, 0)[30:],
    )
    assert pixels.shape[0] == 22 + plain.shape[0] + 26


def test_selected_channels_are_drawn_with_their_values(root, tmp_path):
    with fuelrail.LayerWriter(root, tmp_path / "seen", channels=LAYER) as writer:
        for row in range(0, 8, 2):
            speed = {"speed": np.arange(row, dtype=np.float32)}
            values = {
                "loss": np.float32(row),
                "caption": f"row {row}",
                "words": np.arange(row % 5),
                "agents": speed,
            }
            writer.write(row, values)
    writer.finish(partial=True)
    layers = {"seen": {"path": str(tmp_path / "seen"), "missing": "mask"}}
    for window in (None, {"frames": [0, 1]}):
        with loader_of(root, layers=layers, window=window) as loader:
            for batch in loader:
                for index, row in enumerate(batch["global_index"].tolist()):
                    values = {
                        channel.name: value
                        for channel, value in batch_module.values_of(batch, index, loader.selected)
                    }
                    if row % 2:
                        assert values == {}
                        continue
                    assert (values["seen.loss"], values["seen.caption"]) == (
                        row,
                        f"row {row}",
                    )
                    assert values["seen.words"].tolist() == list(range(row % 5))
                    assert values["seen.agents"]["speed"].tolist() == list(range(row))
            lines = sum(4 for row in next(iter(loader))["global_index"].tolist() if row % 2 == 0)
            sheet = loader.show().pixels
    assert sheet.shape[0] > lines * 22


def test_what_cannot_be_drawn_is_a_sentence(root):
    def without_images(sample):
        del sample["img"]
        return sample

    with loader_of(root) as loader:
        batch = next(iter(loader))
        for changed, words in (
            (
                {"img": batch["img"].float()},
                "'img' must be uint8 to be drawn, or normalised",
            ),
            ({"ida_mat": None}, "without 'ida_mat'"),
        ):
            entries = {
                name: value for name, value in (batch | changed).items() if value is not None
            }
            with pytest.raises(ConfigError, match=words):
                loader.show(entries)
        with pytest.raises(ConfigError, match="samples=0 must be 1 or more"):
            loader.show(batch, samples=0)
    with pytest.raises(ConfigError, match="without 'img' cannot be drawn: let transform"):
        picture(root, transform=without_images)
    with pytest.raises(ConfigError, match="must be a dict, and it is list"):
        picture(root, collate_fn=list)


def test_a_notebook_shows_a_picture_and_the_loader_stays_where_it_is(root, tmp_path):
    with loader_of(root) as loader:
        before = loader.state_dict()
        picture = loader.show()
        assert loader.state_dict() == before
        batch = next(iter(loader))
        images = batch["img"].clone()
        loader.show(batch)
        assert torch.equal(batch["img"], images)
    picture.save(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes() == picture._repr_png_()
    decoded = cv2.imdecode(np.frombuffer(picture._repr_png_(), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(decoded[..., ::-1], picture.pixels)
    assert (
        repr(picture)
        == f"Picture({decoded.shape[1]} x {decoded.shape[0]}; save(FILE) writes it as a PNG)"
    )
    report = fuelrail.view(root)
    assert report._repr_png_().startswith(b"\x89PNG")
