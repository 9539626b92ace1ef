"""The recipe: what users may write, and how two recipes are distinguished."""

from __future__ import annotations

import pytest

from fuelrail.pipeline.channels.sensors import LidarEntry
from fuelrail.pipeline.errors import ConfigError
from fuelrail.sharding.planning.recipe import (
    codec_of,
    make_recipe,
    parse_size,
    parse_splits,
    recipe_differences,
    unit_frames,
)

LIDAR = LidarEntry(
    channel="lidar_top",
    source_name="LIDAR_TOP",
    columns=("x", "y", "z", "intensity", "ring"),
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MB", 256_000_000),
        ("256MiB", 256 << 20),
        ("1.5 GiB", 3 << 29),
        ("4096", 4096),
        ("2kB", 2000),
        ("1gb", 10**9),
    ],
)
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1,5GB", "inf", "100", "nan"])
def test_sizes_that_are_none_or_too_small_are_refused(text):
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_shares_of_splits():
    assert parse_splits("train=0.8,val=0.2") == {"train": 0.8, "val": 0.2}
    assert list(parse_splits("b=0.5,a=0.5")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train=0.8,val=0.3", "add up to 1"),
        ("train=1.2,val=-0.2", "over 0"),
        ("train=x", "not a number"),
        ("train=0.5,train=0.5", "duplicate split"),
        ("Train=1", "not allowed"),
        ("../x=1", "not allowed"),
        ("train=nan", "add up to 1"),
        ("no-such-file", "neither shares"),
    ],
)
def test_bad_splits_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_splits(text)


def test_lists_of_clips_come_from_a_file(tmp_path):
    (tmp_path / "s.json").write_text('{"train": ["a", "b"], "val": ["c"]}')
    (tmp_path / "s.yaml").write_text("train: [a, b]\nval:\n- c\n")
    expected = {"train": ["a", "b"], "val": ["c"]}
    assert (
        parse_splits(str(tmp_path / "s.json")) == parse_splits(str(tmp_path / "s.yaml")) == expected
    )
    (tmp_path / "bad.json").write_text('{"train": 3}')
    with pytest.raises(ConfigError, match=r"bad\.json"):
        parse_splits(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("order", "frames"),
    [("frame", 1), ("clip", 0), ("window:1", 1), ("window:40", 40)],
)
def test_order_units(order, frames):
    assert unit_frames(order) == frames
    assert make_recipe(order=order).order == order


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"order": "window:0"}, "window:0"),
        ({"order": "window:x"}, "known: frame, clip, window:N"),
        ({"order": "shuffle"}, "shuffle"),
        ({"seed": -1}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"compression_level": 20}, "compression_level"),
        ({"layout": "frames"}, "layout"),
        ({"shard_size_bytes": 5}, "shard_size_bytes"),
        ({"splits": {}}, "empty"),
        ({"colour": 1}, "'colour' is unknown"),
    ],
)
def test_values_out_of_range_are_named(values, says):
    with pytest.raises(ConfigError, match=says):
        make_recipe(**values)


def test_differences_show_both_sides():
    new_recipe = make_recipe(seed=7, splits={"train": 0.5, "val": 0.5})
    old_recipe = make_recipe(seed=8)
    text = recipe_differences(old_recipe, new_recipe)
    assert "seed: 8 there, 7 here" in text
    assert 'splits: none there, {"train":0.5,"val":0.5} here' in text
    assert "order" not in text
    assert recipe_differences(new_recipe, new_recipe) == ""


def test_codecs_of_fields():
    member = make_recipe()
    none = make_recipe(layout="none")
    fields = {
        "meta.json": "zstd",
        "geometry.safetensors": "zstd",
        "boxes.safetensors": "zstd",
        "cam_front.jpg": "raw",
        "cam_front.png": "raw",
        "lidar_top.npy": "zstd-p20",
        "x_other.npy": "zstd",
    }
    assert {field: codec_of(field, member, (LIDAR,)) for field in fields} == fields
    assert {codec_of(field, none, (LIDAR,)) for field in fields} == {"raw"}
