"""``batch_transform``: which random numbers a batch gets, what it may return, and the page's examples on pixels."""

from __future__ import annotations

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from fuelrail import ImageAugment, Normalize
from fuelrail.pipeline.errors import ConfigError, StageError
from support.batches import FULL, load, unlike
from support.datasets import build_dataset
from support.pages import ROOT, blocks_of
from support.pictures import encode

PAGE = ROOT / "docs" / "loader.md"
HEADING = "Transforms of a batch, on its device"
TRAIN = ImageAugment(
    height=48,
    width=80,
    train=True,
    resize_range=(0.9, 1.1),
    rotate_deg=(-5.4, 5.4),
    flip_prob=0.5,
)


def noted(batch, generator):
    """Put into the batch what its generator draws, and where the batch is in the order."""
    return {
        **batch,
        "drawn": torch.rand(2, generator=generator),
        "device": str(generator.device),
    }


def draws(loader):
    with loader:
        return {
            (batch["epoch"], batch["sample_key"][0]): batch["drawn"].tolist() for batch in loader
        }


@pytest.mark.costly
def test_a_batch_has_the_numbers_of_its_place_in_the_order(tiny):
    options = {
        "batch_transform": noted,
        "drop_last": False,
        "shuffle": False,
        "seed": 4,
    }
    alone = draws(load(tiny, 3, **options))
    assert len({tuple(numbers) for numbers in alone.values()}) == len(alone) == 7
    rank_draws = [
        draws(
            load(
                tiny,
                3,
                rank=rank,
                size=2,
                prefetch_factor=4,
                num_workers=1,
                **options,
            )
        )
        for rank in (0, 1)
    ]
    for numbers in rank_draws:
        assert all(alone[place] == drawn for place, drawn in numbers.items())
    assert len(rank_draws[0]) == len(rank_draws[1]) == 4
    reseeded = draws(load(tiny, 3, **{**options, "seed": 5}))
    assert all(alone[place] != drawn for place, drawn in reseeded.items())
    with load(tiny, 3, **options) as loader:
        assert next(islice(loader, 2, None))["drawn"].tolist() == [*alone.values()][2]
        resumed = load(tiny, 3, **options)
        resumed.load_state_dict(loader.state_dict())
        assert draws(resumed) == dict([*alone.items()][3:])
        assert next(iter(loader))["drawn"].tolist() not in alone.values(), "another epoch"


@pytest.mark.costly
def test_it_is_the_last_step_and_gets_what_the_loop_would_get(tiny):
    options = {
        "normalize": Normalize(dtype="float16"),
        "static": True,
        "two_views": True,
        "image": TRAIN,
    }
    received = []

    def look(batch, generator):
        received.append(
            {
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in batch.items()
            }
        )
        return batch

    for ours, theirs in zip(
        load(tiny, batch_transform=look, **options),
        load(tiny, **options),
        strict=True,
    ):
        assert unlike(ours, theirs) == []
        assert unlike(received.pop(0), theirs) == []


def test_static_batches_take_any_views_of_a_batch(tiny):
    def rolled(batch, generator):
        batch["intrinsics"] = (
            batch["ida_mat"][..., :3, :3].clone() if batch["step"] % 2 else batch["intrinsics"]
        )
        batch["row"] = batch["intrinsics"][batch["step"] % 3]
        return batch

    options = {"shuffle": False, "static": True}
    for ours, theirs in zip(
        load(tiny, batch_transform=rolled, **options),
        load(tiny, **options),
        strict=True,
    ):
        view = theirs["ida_mat"][..., :3, :3] if theirs["step"] % 2 else theirs["intrinsics"]
        assert torch.equal(ours["intrinsics"], view)
        assert torch.equal(ours["row"], view[theirs["step"] % 3])


def test_an_error_names_the_batch_and_its_samples(tiny):
    def broken(batch, generator):
        raise RuntimeError("no kernel")

    with load(tiny, 2, shuffle=False, batch_transform=broken, transform=dict) as loader:
        loader.load_state_dict({**loader.state_dict(), "samples_consumed": 4})
        where = (
            r"epoch 0, step 2, from position 4 \(samples 'clip-0001-000000', 'clip-0001-000001'\)"
        )
        said = rf"batch_transform failed on the batch of {where}: RuntimeError: no kernel \(.*test_batch_transform.py:\d+"  # noqa: E501
        with pytest.raises(StageError, match=said) as caught:
            next(iter(loader))
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize(
    ("static", "result", "said"),
    [
        (
            False,
            None,
            "batch_transform returned NoneType for the batch of epoch 0, .*: return the batch",
        ),
        (
            True,
            [1],
            "batch_transform returned list .*: return a dict of tensors, as static batches need",
        ),
    ],
)
def test_what_it_returns_must_be_a_batch(tiny, static, result, said):
    with (
        load(tiny, static=static, batch_transform=lambda *_: result) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        next(iter(loader))


def test_it_may_return_anything_and_is_left_out_with_transforms(tiny):
    with load(
        tiny,
        2,
        collate_fn=list,
        batch_transform=lambda batch, _: (len(batch), "x"),
    ) as loader:
        assert next(iter(loader)) == (2, "x")
    loader = load(
        tiny,
        2,
        collate_fn=list,
        batch_transform=lambda batch, _: (len(batch), "x"),
    )
    loader.leave_out(["transform"])
    assert isinstance(next(iter(loader)), list)
    loader.close()


SIZE = (96, 64)


def ramp(row, channel, data):
    """Return a picture whose colours are the place of each pixel: red 2 u + 40, green 3 v + 40; blue is 128."""
    picture = np.full((SIZE[1], SIZE[0], 3), 128, np.uint8)
    picture[..., 0] = 2 * np.arange(SIZE[0]) + 40
    picture[..., 1] = 3 * np.arange(SIZE[1])[:, None] + 40
    return encode(picture)


@pytest.fixture(scope="module")
def ramps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramps")
    build_dataset(folder / "dataset", {"train": (6,)}, rewrite=ramp)
    return folder


@pytest.fixture
def example(ramps, monkeypatch) -> dict:
    """The functions of the page."""
    monkeypatch.chdir(ramps)
    names: dict = {"__name__": "page"}
    for block in blocks_of(PAGE):
        if block.heading == HEADING:
            exec(compile(block.code, str(PAGE), "exec"), names)
    return names


def flip(example, batch, generator):
    return example["flip_samples"](batch, generator)


def flip_and_crop(example, batch, generator):
    """Flip half of the samples, then cut seven eighths of height and width out of all images."""
    from torchvision.transforms.v2 import functional

    batch = example["flip_samples"](batch, generator)
    img = batch["img"]
    height, width = (size * 7 // 8 for size in img.shape[-2:])
    drawn = torch.rand(2, generator=generator).tolist()
    top = int(drawn[0] * (img.shape[-2] - height + 1))
    left = int(drawn[1] * (img.shape[-1] - width + 1))
    batch["img"] = functional.crop(img, top, left, height, width)
    maps = torch.eye(3).repeat(*img.shape[:-3], 1, 1)
    maps[..., :2, 2] = -torch.tensor([left, top])
    example["move_pixels"](batch, maps)
    return batch


def rotate_and_scale(example, batch, generator):
    """Rotate and scale all images of a sample about their centres."""
    from kornia import geometry

    img = batch["img"]
    *lead, _, height, width = img.shape
    drawn = torch.rand(2, len(img), generator=generator) * 2 - 1
    angle = 0.1 * drawn[0]
    scale = 1 + 0.1 * drawn[1]
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    turn = rotation.view(-1, 2, 2) * scale[:, None, None]
    centre = torch.tensor([(width - 1) / 2, (height - 1) / 2])
    maps = torch.eye(3).repeat(len(img), 1, 1)
    maps[:, :2, :2] = turn
    maps[:, :2, 2] = centre - turn @ centre
    maps = maps.view(-1, *[1] * (len(lead) - 1), 3, 3).expand(*lead, 3, 3)
    moved = geometry.warp_affine(
        img.flatten(0, -4).float(),
        maps.flatten(0, -3)[:, :2],
        (height, width),
        align_corners=True,
    )
    batch["img"] = moved.view(img.shape).to(img.dtype)
    example["move_pixels"](batch, maps)
    return batch


@pytest.mark.parametrize(
    ("change", "package"),
    [(flip, "torch"), (flip_and_crop, "torchvision"), (rotate_and_scale, "kornia")],
    ids=["flip", "crop", "rotate"],
)
@pytest.mark.parametrize(
    "options",
    [{"image": FULL}, {"image": TRAIN, "frames": [-1, 0]}],
    ids=["plain", "windows"],
)
def test_the_example_keeps_pixels_and_matrices_together(ramps, change, package, example, options):
    pytest.importorskip(package)
    arguments = {
        "root": ramps / "dataset",
        "batch_size": 4,
        "shuffle": False,
        "seed": 2,
        **options,
    }
    (plain, *_), (moved, *_) = (
        list(load(**arguments, **more))
        for more in ({}, {"batch_transform": partial(change, example)})
    )
    assert unlike(plain["img"], moved["img"]) != []
    check_pixels(moved["img"], moved["ida_mat"])
    # What a matrix says of a place in the world, in pixels of the stored image, is as before.
    world = torch.tensor(
        [[12.0, 1.5, 0.5, 1], [8.0, -2, 1, 1], [20.0, 0, 2, 1]],
        dtype=torch.float64,
    )
    for matrix in ("ego2img", "lidar2img"):
        stored = [
            torch.linalg.inv(b["ida_mat"].double()) @ b[matrix].double() @ world.T
            for b in (plain, moved)
        ]
        torch.testing.assert_close(*stored, atol=1e-3, rtol=1e-4)
    k = [
        torch.linalg.inv(b["ida_mat"].double())[..., :3, :3] @ b["intrinsics"].double()
        for b in (plain, moved)
    ]
    torch.testing.assert_close(*k, atol=1e-3, rtol=1e-4)


def check_pixels(img: torch.Tensor, ida: torch.Tensor) -> None:
    """Compare the place that each pixel's colour says with the place that its matrix says, within 2 stored pixels.

    Pixels within two of what is mixed with black are left out: there a crop or a rotation ends.
    """
    height, width = img.shape[-2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([x, y, torch.ones_like(x)]).flatten(1).double()
    stored = torch.linalg.inv(ida.double())[..., :3, :3] @ pixels
    colours = img.double().flatten(-2)
    u = (colours[..., 0, :] - 40) / 2
    v = (colours[..., 1, :] - 40) / 3
    black = ((img[..., 2:, :, :].int() - 128).abs() > 1).float().flatten(0, -4)
    inside = torch.nn.functional.max_pool2d(black, 5, 1, 2).view(u.shape) == 0
    assert inside.double().mean() > 0.7
    assert ((stored[..., 0, :] - u).abs()[inside] < 2).all()
    assert ((stored[..., 1, :] - v).abs()[inside] < 2).all()
