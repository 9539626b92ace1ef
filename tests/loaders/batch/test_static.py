"""Batches of fixed shapes at fixed addresses, on the CPU."""

from __future__ import annotations

import pytest
import torch

from fuelrail import StaticBatches, Transforms
from fuelrail.loaders.batch.static import FixedBuffers, pad
from fuelrail.loaders.batch.transfer import pack as pack_block
from fuelrail.loaders.storage.buffers import pageable
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.errors import ConfigError
from support.batches import batches, load

BOXES = (
    "gt_boxes_3d",
    "gt_labels_3d",
    "gt_velocity",
    "gt_valid",
    "instance_id",
)


@pytest.fixture(scope="module")
def dataset(build_once):
    return build_once({"train": (12,)})[0]


@pytest.mark.parametrize("frames", [None, [-1, 0]])
def test_batches_hold_the_same_in_fixed_shapes(dataset, frames) -> None:
    static = {"max_boxes": 40, "max_points": 5000}
    plain = batches(dataset, points=True, frames=frames)
    with load(dataset, points=True, frames=frames, static=static) as loader:
        for expected, got in zip(plain, loader, strict=True):
            assert got.keys() == {*expected, "gt_mask", "points_mask"}
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(got[name], value), name
                elif name in BOXES:
                    assert got[name].shape[:2] == (3, 40)
                    for row, mask, unpadded in zip(got[name], got["gt_mask"], value, strict=True):
                        assert torch.equal(row[mask].nan_to_num(), unpadded.nan_to_num()), name
                        assert not row[~mask].isnan().any()
                elif name == "points":
                    rows = got[name].flatten(0, -3)
                    clouds = (
                        value if frames is None else [cloud for sample in value for cloud in sample]
                    )
                    for row, mask, cloud in zip(
                        rows,
                        got["points_mask"].flatten(0, -2),
                        clouds,
                        strict=True,
                    ):
                        assert torch.equal(row[mask], cloud)
                else:
                    assert got[name] == value
            assert (got["gt_labels_3d"][~got["gt_mask"]] == -1).all()


def test_addresses_come_again_in_turn_and_over_epochs(dataset) -> None:
    with load(dataset, static=StaticBatches(buffers=3)) as loader:
        addresses = [
            {
                name: value.data_ptr()
                for name, value in batch.items()
                if isinstance(value, torch.Tensor)
            }
            for _ in range(3)
            for batch in loader
        ]
    assert len(addresses) == 12
    assert all(addresses[step] == addresses[step % 3] for step in range(12))
    assert len({tuple(batch_addresses.values()) for batch_addresses in addresses}) == 3


def test_a_batch_is_whole_until_its_buffers_turn_comes_again(dataset) -> None:
    with load(dataset, static=True, shuffle=False) as loader:
        iterator = iter(loader)
        first = next(iterator)
        first_images = first["img"].clone()
        second = next(iterator)
        assert torch.equal(first["img"], first_images)
        assert first["img"].data_ptr() != second["img"].data_ptr()
        third = next(iterator)
        assert third["img"] is first["img"]
        assert not torch.equal(first["img"], first_images)


def test_too_many_boxes_name_the_sample_and_what_to_do(dataset) -> None:
    says = (
        r"sample '.+' has \d+ rows of 'gt_boxes_3d', .* max_boxes=1: raise max_boxes, or drop rows"
    )
    with pytest.raises(ConfigError, match=says):
        batches(dataset, static={"max_boxes": 1})
    with pytest.raises(ConfigError, match="'points' is a list of tensors: set max_points"):
        batches(dataset, static=True, points=True)


def test_what_has_no_fixed_shape_is_refused() -> None:
    settings = StaticBatches()
    with pytest.raises(
        ConfigError,
        match="'mine' is a list of tensors: make it one tensor of one shape in transform",
    ):
        pad(settings, {"mine": [torch.ones(2), torch.ones(3)]})
    with pytest.raises(ConfigError, match="'mine' is a dict of tensors"):
        pad(settings, {"mine": {"a": torch.ones(2)}})
    with pytest.raises(
        ConfigError,
        match="static batches must be dicts, and collate_fn returned list",
    ):
        pad(settings, [torch.ones(2)])
    fixed = FixedBuffers(2)
    fixed({"a": torch.ones(2), "b": 1})
    with pytest.raises(
        ConfigError,
        match=r"'a' is torch.float32 \[3\] where it was torch.float32 \[2\]: pad it",
    ):
        fixed({"a": torch.ones(3), "b": 1})
    with pytest.raises(ConfigError, match="these come and go: a, c"):
        fixed({"c": torch.ones(2)})


def test_tokens_of_packs_come_at_fixed_places_from_an_arena_too() -> None:
    fixed = FixedBuffers(1)
    places = set()
    for number in range(2):
        packed = Packed._make((torch.arange(6) + number, torch.tensor([0, 2 + number, 6])))
        block = pack_block(list(packed), pageable)
        got = fixed({"words": Packed._make(block.cut(block.block))}, block.block)["words"]
        assert all(torch.equal(*pair) for pair in zip(got, packed, strict=True))
        places.add(tuple(tensor.data_ptr() for tensor in got))
    assert len(places) == 1


@pytest.mark.parametrize(
    "static",
    [{"max_boxes": 0}, {"buffers": 0}, {"max_points": 0}, {"max_tokens": 0}, 3],
)
def test_settings_out_of_range_are_refused(static) -> None:
    with pytest.raises(ConfigError):
        Transforms(static=static)
    assert Transforms(static={"max_boxes": 3}).static_batches == StaticBatches(max_boxes=3)
    assert Transforms(static=True).static_batches == StaticBatches()
    assert Transforms().static_batches is None
