"""Wrong arguments of the loader, tried as a user would: one clear error with the name, the value, what is allowed."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fuelrail import (
    BadSamplePolicy,
    BevAugment,
    Budget,
    DataLoader,
    FrameWindow,
    ImageAugment,
    OrderSpec,
    PointSweeps,
    StorageOptions,
    Transforms,
    World,
)
from fuelrail.loaders.config import Arguments
from fuelrail.loaders.integrations.iterable import IterableView
from fuelrail.pipeline.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (8,)})[0]


SETTINGS = "a dict of its fields, or the path of a YAML file"
PRESET = "a dict of its fields, a preset's name, or the path of a YAML file"
WRONG = [
    ("batch_size", "4", "an integer >= 1"),
    ("batch_size", 2.5, "an integer >= 1"),
    ("batch_size", True, "an integer >= 1"),
    ("batch_size", 0, "an integer >= 1"),
    ("prefetch_factor", 0, "an integer >= 1"),
    ("mix", 3, "a dict with an integer >= 1 for each dataset"),
    ("mix", [3, 1], "a dict with an integer >= 1 for each dataset"),
    ("mix", {"city": 0}, "a dict with an integer >= 1 for each dataset"),
    ("split", 3, "a split's name"),
    ("split", "", "a split's name"),
    ("split", None, "a split's name"),
    (
        "window",
        3,
        "a FrameWindow or a TimeWindow, a dict of the fields of one, the path of a YAML file, or None",
    ),
    ("order", np.float32(1.0), f"an OrderSpec, {PRESET}, or None"),
    ("num_workers", "a\ud800", "an integer from 1 to 4096"),
    (
        "window",
        [-1, 0],
        "a FrameWindow or a TimeWindow, a dict of the fields of one, the path of a YAML file, or None",
    ),
    ("shuffle", "no", "True, False or None"),
    ("seed", "7", "an integer >= 0"),
    ("seed", -1, "an integer >= 0"),
    ("seed", None, "an integer >= 0"),
    ("order", 3, f"an OrderSpec, {PRESET}, or None"),
    ("drop_last", 1, "True or False"),
    (
        "num_workers",
        "many",
        "an integer from 1 to 4096, 'auto', a Budget or None",
    ),
    ("num_workers", np.float32(4.0), "an integer from 1 to 4096"),
    ("num_workers", 10**30, "an integer from 1 to 4096"),
    (
        "num_workers",
        0,
        "it is the number of threads that decode in this process, not of worker processes",
    ),
    ("prefetch_factor", None, "an integer >= 1"),
    ("pin_memory", "yes", "True, False or None"),
    ("transforms", None, f"a Transforms, {SETTINGS}"),
    ("transforms", Budget(cpus=2), f"a Transforms, {SETTINGS}"),
    ("storage", 3, f"a StorageOptions, {SETTINGS}"),
    (
        "storage",
        "s3",
        "one of auto, pread, remote, fsspec, obstore, a StorageOptions",
    ),
    ("bad_samples", True, f"a BadSamplePolicy, {SETTINGS}"),
    ("transform", 3, "a function or None"),
    ("collate_fn", "stack", "a function or None"),
    ("check_ranks", "yes", "True or False"),
    ("trace", "trace.json", "a function or None"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_allowed(root, name, value, allowed):
    arguments = {"batch_size": 2, name: value}
    with pytest.raises(ConfigError) as caught:
        DataLoader(root, world=World(), **arguments)
    assert str(caught.value).startswith(f"{name}={value!r} must be ")
    assert allowed in str(caught.value)


FIELDS = [
    ("window", "frames", 3, "must be a list"),
    (
        "window",
        "frames",
        [-0.5, 0],
        "is not allowed: at entry 0: must be a whole number; got -0.5",
    ),
    ("window", "stride", "2", "must be a whole number"),
    ("window", "pad", "zeros", "must be one of"),
    ("transforms", "image", 3, f"must be an ImageAugment, {PRESET}, or None"),
    ("transforms", "ego", 3, f"must be a BevAugment, {PRESET}"),
    (
        "transforms",
        "undistort",
        True,
        f"must be an Undistort, {SETTINGS}, or None",
    ),
    (
        "transforms",
        "normalize",
        True,
        f"must be a Normalize, {SETTINGS}, or None",
    ),
    ("transforms", "decoder", 3, "must be a decoder's name"),
    ("transforms", "box_frame", "global", "must be one of ego, lidar"),
    ("transforms", "points", 3, "must be True, False, a PointSweeps"),
    ("transforms", "two_views", 2, "must be True or False"),
    (
        "transforms",
        "select",
        "radar",
        "must be a list of names of channels and attributes, or None",
    ),
    ("num_workers", "cpus", 0, "must be an integer >= 1, or None"),
    ("num_workers", "memory_bytes", "1GB", "must be a number of bytes"),
    ("storage", "verify", "yes", "must be True or False"),
    ("storage", "backend", 3, "must be one of auto, pread"),
    ("storage", "options", "key=1", "must be a dict or None"),
    ("storage", "cache_dir", 3, "must be a path or None"),
    (
        "storage",
        "cache_size",
        1.5,
        "must be a number of bytes, a text such as '500GB', or None",
    ),
    ("storage", "look_ahead_bytes", "1MB", "must be an integer >= 1, or None"),
    ("storage", "retry", 120, f"must be a RetryPolicy, {SETTINGS}, or None"),
    ("bad_samples", "on_error", None, "must be one of raise, substitute"),
    ("bad_samples", "max_bad", "10", "must be an integer >= 0"),
    ("bad_samples", "max_bad", -1, "must be an integer >= 0"),
    ("bad_samples", "file", 3, "must be a path or None"),
]
KINDS = {
    "transforms": Transforms,
    "num_workers": Budget,
    "storage": StorageOptions,
    "bad_samples": BadSamplePolicy,
}


@pytest.mark.parametrize(("name", "field", "value", "allowed"), FIELDS)
def test_a_wrong_field_is_named_in_a_dict_and_in_the_struct(root, name, field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        DataLoader(root, 2, world=World(), **{name: {field: value}})
    assert str(caught.value).startswith(f"{name}.{field}={value!r} {allowed}")
    if name in KINDS:
        with pytest.raises(ConfigError) as caught:
            KINDS[name](**{field: value})
        assert str(caught.value).startswith(f"{KINDS[name].__name__}: {field}={value!r} {allowed}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"transforms": {"image": {"height": 32, "width": 48, "flip": 0.5}}},
            "did you mean 'flip_prob'?",
        ),
        ({"storage": {"cache": "x"}}, "did you mean 'cache_dir'?"),
        ({"bad_samples": {"onerror": "raise"}}, "did you mean 'on_error'?"),
        ({"order": {"kinds": "lanes"}}, "did you mean 'kind'?"),
        ({"window": {"stride": 2}}, "the field 'frames' is missing"),
        ({"window": {"frames": [1, 2]}}, "0 among them"),
        (
            {"transforms": "nowhere.yaml"},
            "config file 'nowhere.yaml' cannot be read",
        ),
        (
            {"transforms": {"image": "nowhere.yaml"}},
            "transforms.image may be an ImageAugment, a dict",
        ),
        ({"order": "lanes"}, f"order may be an OrderSpec, {PRESET}"),
        (
            {"transforms": {"points": {"sweeps": 3}}},
            "did you mean 'num_sweeps'?",
        ),
    ],
)
def test_wrong_dicts_and_files_say_what_is_meant(root, arguments, words):
    with pytest.raises(ConfigError) as caught:
        DataLoader(root, 2, world=World(), **arguments)
    (name,) = arguments
    assert str(caught.value).startswith(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampler", "`order=OrderSpec(...)`"),
        ("batch_sampler", "`batch_size` samples of the order"),
        ("worker_init_fn", "no worker processes"),
        ("persistent_workers", "no worker processes"),
        ("multiprocessing_context", "no worker processes"),
        (
            "timeout",
            "`storage=StorageOptions(retry=RetryPolicy(deadline_s=...))`",
        ),
        ("generator", "`seed`"),
        ("pin_memory_device", "`device='cuda:N'`"),
        ("image", "use transforms=Transforms(image=...)"),
        ("cache_dir", "use storage=StorageOptions(cache_dir=...)"),
        ("max_bad", "use bad_samples=BadSamplePolicy(max_bad=...)"),
        ("frames", "use window=FrameWindow(frames=...)"),
        ("sede", "did you mean 'seed'?"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_one_to_use(root, name, words):
    with pytest.raises(TypeError, match=f"DataLoader has no argument '{name}'") as caught:
        DataLoader(root, 2, **{name: None})
    assert words in str(caught.value)


@pytest.mark.parametrize("dataset", [None, 3, ["a", "b"], b"OUT", {}, {"a": 3}, {3: "OUT"}])
def test_what_is_not_a_dataset_is_refused(dataset):
    with pytest.raises(ConfigError, match="dataset="):
        DataLoader(dataset, 2, mix=None, world=World())


def test_device_and_world_are_checked_where_they_are_used(root):
    with pytest.raises(ValueError, match="world='all' is neither a World"):
        DataLoader(root, 2, world="all")
    for device in ("gpu", [], 3.5):
        with pytest.raises(ConfigError, match="device="):
            DataLoader(root, 2, device=device, world=World())


def test_there_are_26_arguments_torchs_first_and_all_are_checked_and_described():
    names = [name for name in inspect.signature(DataLoader).parameters if name != "unknown"]
    assert names == list(Arguments.__struct_fields__)
    described = inspect.getdoc(DataLoader).partition("Args:")[2].partition("Raises:")[0]
    assert names == re.findall(r"^    (\w+): ", described, re.MULTILINE)
    assert len(names) == 26
    torchs = [
        "dataset",
        "batch_size",
        "shuffle",
        "seed",
        "drop_last",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
    ]
    assert names[: len(torchs) + 1] == [*torchs, "collate_fn"]


def test_settings_may_be_structs_dicts_or_files(root, tmp_path):
    image = CONFIGS / "images" / "bevdet-704x256.yaml"
    (tmp_path / "transforms.yaml").write_text(
        "image: {height: 32, width: 48, train: true}\nego: {train: true}\n"
    )
    (tmp_path / "storage.yaml").write_text("backend: pread\nverify: false\n")
    (tmp_path / "order.yaml").write_text("kind: sequential\n")

    def read_arguments(**arguments):
        loader = DataLoader(root, 2, world=World(), **arguments)
        return pickle.loads(pickle.dumps(loader))._arguments

    small = ImageAugment(height=32, width=48, train=True)
    as_struct = Transforms(image=small, ego=BevAugment(train=True))
    for transforms in (
        as_struct,
        {"image": small, "ego": {"train": True}},
        {
            "image": {"height": 32, "width": 48, "train": True},
            "ego": BevAugment(train=True),
        },
        tmp_path / "transforms.yaml",
        str(tmp_path / "transforms.yaml"),
    ):
        assert read_arguments(transforms=transforms).transforms == as_struct
    for transforms in (
        {"image": image},
        {"image": str(image)},
        Transforms(image=image),
    ):
        assert read_arguments(transforms=transforms).transforms.image.resize == "width"
    pread = StorageOptions(backend="pread")
    for storage in ("pread", {"backend": "pread"}, pread):
        assert read_arguments(storage=storage).storage == pread
    assert read_arguments(storage=tmp_path / "storage.yaml").storage == StorageOptions(
        backend="pread", verify=False
    )
    assert read_arguments(storage=str(tmp_path / "storage.yaml")).storage == StorageOptions(
        backend="pread", verify=False
    )
    for file in (tmp_path / "bad", str(tmp_path / "bad")):
        policy = BadSamplePolicy(on_error="substitute", file=str(tmp_path / "bad"))
        assert (
            read_arguments(bad_samples={"on_error": "substitute", "file": file}).bad_samples
            == policy
        )
        assert BadSamplePolicy(on_error="substitute", file=file) == policy
    assert (
        read_arguments(order=tmp_path / "order.yaml").order
        == read_arguments(order={"kind": "sequential"}).order
    )
    assert read_arguments(order=OrderSpec(kind="sequential")).order == OrderSpec(kind="sequential")
    assert read_arguments(window={"frames": [-1, 0]}).window == FrameWindow(frames=(-1, 0))
    assert read_arguments(
        transforms={"points": {"num_sweeps": 1}}
    ).transforms.points == PointSweeps(num_sweeps=1)
    assert read_arguments(num_workers={"cpus": 2}).budget == Budget(cpus=2)
    assert read_arguments(num_workers="auto").budget == Budget()
    assert read_arguments(num_workers=2).budget is None


def test_errors_say_what_to_use_to_code_that_takes_it_for_torchs_loader(root):
    loader = DataLoader(root, 2, world=World())
    torchs = torch.utils.data.DataLoader([1])
    for name in (
        "sampler",
        "batch_sampler",
        "generator",
        "timeout",
        "worker_init_fn",
        "persistent_workers",
    ):
        assert hasattr(torchs, name)
        assert not hasattr(loader, name)
        with pytest.raises(
            AttributeError,
            match=rf"no attribute '{name}', which torch's has: .+",
        ):
            getattr(loader, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nosuch'$"):
        loader.nosuch  # noqa: B018
    with pytest.raises(
        TypeError,
        match=r"none by number: iterate it; .* IterableView\(loader\), with batch_size=None",
    ):
        loader[0]
    with pytest.raises(TypeError, match="none by number"):
        next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))
    parts = torch.utils.data.random_split(loader, [1, len(loader) - 1])
    for subset in (*parts, torch.utils.data.Subset(IterableView(loader), [0])):
        with pytest.raises(
            TypeError,
            match=r"none by number: .*Subset, random_split .*MapView\(dataset\)",
        ):
            subset[0]
    for name, value in {
        "batch_size": 2,
        "drop_last": False,
        "collate_fn": None,
        "pin_memory": None,
    }.items():
        assert getattr(loader, name) is value, "what it was given"
        assert hasattr(torchs, name)


def test_the_defaults_are_torchs_where_the_names_are():
    ours, torchs = (
        inspect.signature(loader_class.__init__).parameters
        for loader_class in (DataLoader, torch.utils.data.DataLoader)
    )
    for name in ("shuffle", "drop_last", "collate_fn"):
        assert (ours[name].default or None) == (torchs[name].default or None), name


def test_credentials_are_not_printed():
    assert "hunter2" not in repr(StorageOptions(options={"secret": "hunter2"}))


def test_numpys_integers_are_integers(root):
    image = ImageAugment(height=32, width=48)
    options = {
        "seed": np.int64(3),
        "num_workers": np.int32(1),
        "window": {"frames": (-1, 0)},
    }
    with DataLoader(
        root, np.int64(2), transforms={"image": image}, world=World(), **options
    ) as loader:
        assert next(iter(loader))["img"].shape == (2, 2, 2, 3, 32, 48)
        loader.state_dict()


def test_a_loader_and_its_dataset_print_in_one_line(root):
    loader = DataLoader(root, 3, world=World(1, 2))
    assert repr(loader) == (
        "DataLoader(tiny, split train, 8 samples, 2 batches of 3, rank 1 of 2, decoder auto)"
    )
    assert repr(loader.dataset) == f"Dataset(tiny at '{root}': 8 samples in 1 shard; train 8)"
