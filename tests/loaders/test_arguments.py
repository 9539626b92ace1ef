"""Wrong arguments of the loader, tried as a user would: one clear error with the name, the value, what is allowed."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from fuelrail.loaders import DataLoader, ImageAugment, World
from fuelrail.loaders.config import _RULES, check_arguments
from fuelrail.pipeline.errors import ConfigError
from support.datasets import build_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments") / "OUT"
    build_dataset(folder, {"train": (8,)})
    return folder


WRONG = [
    ("batch_size", "4", "a whole number of 1 or more"),
    ("batch_size", 2.5, "a whole number of 1 or more"),
    ("batch_size", True, "a whole number of 1 or more"),
    ("batch_size", 0, "a whole number of 1 or more"),
    ("mix", 3, "a dict of whole numbers"),
    ("mix", [3, 1], "a dict of whole numbers"),
    ("split", 3, "a split's name"),
    ("split", None, "a split's name"),
    ("frames", 3, r"a list of whole numbers, such as \[-2, -1, 0\], or None"),
    ("frames", "-2,-1,0", "a list of whole numbers"),
    ("frames", [-0.5, 0], "a list of whole numbers"),
    ("frames", [], "a list of whole numbers"),
    ("stride", "2", "a whole number of 1 or more"),
    ("stride", 0, "a whole number of 1 or more"),
    ("padding", "zeros", "one of repeat_edge, repeat_current, mask, drop"),
    ("image", "x.yaml", r"an ImageAugment; `fuelrail.pipeline.settings.load_yaml\(file, ImageAugment\)` reads one"),
    ("image", None, "an ImageAugment"),
    ("pixels", {"brightness": 3}, "a PixelAugment"),
    ("bev", 3, "a BevAugment"),
    ("undistort", True, "an Undistort or None"),
    ("shuffle", "no", "True or False"),
    ("seed", "7", "a whole number of 0 or more"),
    ("seed", -1, "a whole number of 0 or more"),
    ("seed", None, "a whole number of 0 or more"),
    ("order", "lanes", "an OrderSpec or None"),
    ("order", {"kind": "lanes"}, "an OrderSpec or None"),
    ("drop_last", 1, "True or False"),
    ("num_workers", "many", "a whole number of 1 or more, 'auto' or None"),
    ("num_workers", 0, "a whole number of 1 or more, 'auto' or None"),
    ("budget", 4, "a Budget"),
    ("prefetch_factor", None, "a whole number of 1 or more"),
    ("pin_memory", "yes", "True, False or None"),
    ("points", "lidar_top", "True, False or a PointSweeps"),
    ("decoder", 3, "a decoder's name"),
    ("normalize", True, "a Normalize or None"),
    ("verify", "yes", "True or False"),
    ("storage", 3, "one of auto, mapped"),
    ("storage_options", "key=1", "a dict or None"),
    ("cache_dir", 3, "a path or None"),
    ("cache_size", 1.5, "a number of bytes, a text such as '500GB', or None"),
    ("look_ahead_bytes", "1MB", "a whole number of 1 or more or None"),
    ("retry", 120, "a RetryPolicy or None"),
    ("on_error", None, "one of raise, substitute"),
    ("max_bad", "10", "a whole number of 0 or more"),
    ("quarantine", 3, "a path or None"),
    ("transform", 3, "a function or None"),
    ("collate_fn", "stack", "a function or None"),
    ("check_ranks", "yes", "True or False"),
    ("trace", "trace.json", "a function or None"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_allowed(root, name, value, allowed):
    arguments = {"batch_size": 2, name: value}
    with pytest.raises(ConfigError, match=allowed) as caught:
        DataLoader(root, world=World(), **arguments)
    assert str(caught.value).startswith(f"{name}={value!r} must be ")


@pytest.mark.parametrize("dataset", [None, 3, ["a", "b"], b"OUT", {}, {"a": 3}, {3: "OUT"}])
def test_what_is_no_dataset_is_refused(dataset):
    with pytest.raises(ConfigError, match="dataset="):
        DataLoader(dataset, 2, mix=None, world=World())


def test_device_and_world_are_checked_where_they_are_used(root):
    with pytest.raises(ValueError, match="world='all' is neither a World"):
        DataLoader(root, 2, world="all")
    for device in ("gpu", [], 3.5):
        with pytest.raises(ConfigError, match="device="):
            DataLoader(root, 2, device=device, world=World())


def test_every_argument_is_checked():
    elsewhere = {"dataset", "device", "world"}
    assert set(inspect.signature(DataLoader).parameters) - elsewhere == set(_RULES)


def test_numpys_integers_are_integers_and_defaults_are_allowed(root):
    image = ImageAugment(height=32, width=48)
    options = {"seed": np.int64(3), "num_workers": np.int32(1), "frames": (np.int64(-1), 0)}
    with DataLoader(root, np.int64(2), image=image, world=World(), **options) as loader:
        assert next(iter(loader))["img"].shape == (2, 2, 2, 3, 32, 48)
        loader.state_dict()
    signature = inspect.signature(DataLoader).parameters.values()
    check_arguments({p.name: p.default for p in signature if p.default is not p.empty})
