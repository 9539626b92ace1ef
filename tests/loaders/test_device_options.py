"""Every option of the loader with a device, under the checker of streams: no race, and what the host would get."""

from __future__ import annotations

import inspect
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from fuelrail import BevAugment, DataLoader, ImageAugment, Normalize, Undistort
from fuelrail.loaders.batch.transfer import CudaTransfer, map_tensors
from fuelrail.loaders.config import Transforms, _column
from fuelrail.pipeline.order.batching import World
from fuelrail.sharding.write.layers.writer import LayerWriter
from support import batched_turbo
from support.backends import HAS_DALI, dali_on_host, needs_dali
from support.batches import unlike
from support.channels import fixed, points
from support.datasets import build_dataset
from support.fake_cuda import FakeCuda
from support.fake_streams import FakeEvent, FakeStream
from support.pictures import encode, natural

BATCH = 3
IMAGE = ImageAugment(height=32, width=48, resize=0.5)
TRAIN = ImageAugment(
    height=32,
    width=48,
    train=True,
    resize_range=(0.6, 0.9),
    rotate_deg=(-5.4, 5.4),
    flip_prob=0.5,
    crop_y="top",
)
GROUPS = {
    "back": {
        "cameras": ["cam_back"],
        "image": ImageAugment(height=24, width=40),
    },
    "front": {"cameras": ["cam_front"], "image": TRAIN},
}
EGO = BevAugment(train=True, scale=(0.9, 1.1))
BGR = Normalize(channel_order="bgr", dtype="bfloat16", channels_last=True)
LENS = ("opencv_radtan", [-0.3, 0.08, 0.001, -0.0005, 0.01])


def drawn(row: int, channel: str, data: bytes) -> bytes:
    """Return another picture a sample: smooth, so that decoders agree on it."""
    return encode(np.roll(natural(96, 64), 7 * row, axis=1), quality=90, subsampling=2)


def brightened(sample: dict[str, Any]) -> dict[str, Any]:
    """A user's transform that makes new tensors, on whatever device the image is."""
    return {
        **sample,
        "img": (sample["img"].float() * 0.5).to(torch.uint8),
        "mean": sample["img"].float().mean(),
    }


def changed_in_place(sample: dict[str, Any]) -> dict[str, Any]:
    sample["img"] //= 2
    return sample


def flipped(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """A user's transform of a batch: kernels that read what was copied, make tensors, and change some in place."""
    flips = (
        torch.rand(
            len(batch["valid"]),
            generator=generator,
            device=batch["valid"].device,
        )
        < 0.5
    )
    groups = batch["img"] if isinstance(batch["img"], dict) else {"": batch["img"]}
    flipped_images = {
        name: torch.where(flips[:, None, None, None, None], img.flip(-1), img)
        for name, img in groups.items()
    }
    batch["intrinsics"].mul_(2)
    return {
        **batch,
        "img": flipped_images if isinstance(batch["img"], dict) else flipped_images[""],
        "flips": flips,
    }


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "img": torch.stack([sample["img"] for sample in samples]),
        "keys": [sample["sample_key"] for sample in samples],
    }


CHANNELS = [
    (
        fixed("score", "array", "npy", dtype="float32", optional=True),
        lambda row: None if row == 2 else np.float32(row),
    ),
    (
        points("radar", moves=False),
        lambda row: np.full((row + 1, 3), row, np.float32),
    ),
]

POINTS = {"transforms": {"image": IMAGE, "points": True}}
# Name of the option: what it is set to, each a case. `DATASET` and `FRAMES` stand for what is made in the test.
CASES: dict[str, list[dict[str, Any]]] = {
    "shuffle": [{"shuffle": True}],
    "seed": [{"seed": 9}],
    "drop_last": [{"drop_last": True}],
    "ledger": [{"ledger": {"digest_every": 1}}],
    "num_workers": [
        {"num_workers": 1},
        {"num_workers": "auto"},
        {"num_workers": {"cpus": 2}},
    ],
    "prefetch_factor": [{"prefetch_factor": 1}, {"prefetch_factor": 4}],
    "pin_memory": [{"pin_memory": False}, {"pin_memory": True}],
    "collate_fn": [
        {"collate_fn": stacked},
        {"collate_fn": stacked, "transform": brightened},
    ],
    "order": [{"order": {"kind": "lanes", "seed": 1}}],
    "split": [{"split": "train"}],
    "mix": [{"mix": {"a": 2, "b": 1}}],
    "window": [
        {"window": {"frames": [-1, 0]}},
        {"window": {"frames": [-2, 0]}, "transform": brightened},
    ],
    "layers": [
        {"layers": {"teacher": {}}},
        {"layers": {"teacher": {}}, "transform": brightened},
        *({"layers": {"partial": {"missing": missing}}} for missing in ("mask", "drop")),
    ],
    "transform": [{"transform": brightened}, {"transform": changed_in_place}],
    "where": [
        {
            "where": "process",
            "batch_transform": flipped,
            "transforms": {"image": TRAIN, "normalize": BGR},
        },
        {
            "where": "process",
            "transform": brightened,
            "transforms": {"image": TRAIN, "static": True},
        },
    ],
    "transform_in": [{"transform_in": "thread", "transform": brightened}],
    "batch_transform": [
        {"batch_transform": flipped, "drop_last": False},
        {
            "batch_transform": flipped,
            "transforms": {"image": IMAGE, "normalize": BGR},
            "transform": brightened,
        },
        {
            "batch_transform": flipped,
            "transforms": {"image": TRAIN, "two_views": True, "static": True},
        },
        {
            "batch_transform": flipped,
            "transforms": {"camera_groups": GROUPS, "normalize": Normalize()},
        },
    ],
    "storage": [{"storage": "pread"}, {"storage": {"verify": False}}],
    "bad_samples": [{"bad_samples": {"on_error": "substitute", "max_bad": 20}}],
    "device": [
        {"device": "cuda"},
        {"device": "cuda:1"},
        {"device": torch.device("cuda", 1)},
    ],
    "world": [{"world": World(rank=1, size=2)}],
    "trace": [{"trace": lambda *_: None}],
    "check_ranks": [{"check_ranks": True}],
    "transforms.image": [{"transforms": {"image": TRAIN}}],
    "transforms.camera_groups": [
        {
            "transforms": {"camera_groups": GROUPS},
            "window": {"frames": [-1, 0]},
        },
        {"transforms": {"camera_groups": GROUPS, "normalize": Normalize()}},
        {
            "transforms": {
                "camera_groups": GROUPS,
                "static": True,
                "two_views": True,
            }
        },
    ],
    "transforms.cameras": [
        {
            "transforms": {"image": TRAIN, "cameras": ["cam_back"]},
            "window": {"frames": [-1, 0]},
        }
    ],
    "transforms.pixels": [
        {
            "transforms": {
                "image": IMAGE,
                "pixels": {"train": True, "brightness": 32},
            }
        }
    ],
    "transforms.ego": [{"transforms": {"image": IMAGE, "ego": EGO, "points": True}}],
    "transforms.points": [
        POINTS,
        {"transforms": {"image": IMAGE, "points": {"num_sweeps": 1}}},
    ],
    "transforms.select": [
        {"transforms": {"image": IMAGE, "select": ["score", "radar"]}},
        {
            "transforms": {"image": IMAGE, "select": ["score"]},
            "transform": brightened,
        },
        {
            "transforms": {"image": IMAGE, "select": ["teacher.score"]},
            "layers": {"teacher": {}},
        },
    ],
    "transforms.channels": [{"transforms": {"image": IMAGE, "channels": ["radar"]}}],
    "transforms.attributes": [{"transforms": {"image": IMAGE, "attributes": ["score"]}}],
    "transforms.undistort": [{"transforms": {"image": IMAGE, "undistort": Undistort()}}],
    "transforms.normalize": [
        {"transforms": {"image": IMAGE, "normalize": Normalize()}},
        {"transforms": {"image": IMAGE, "normalize": BGR}},
        {
            "transforms": {"image": IMAGE, "normalize": Normalize()},
            "transform": brightened,
        },
    ],
    "transforms.dali": [{"transforms": {"image": IMAGE, "dali": {"check_every": 1}}}],
    "transforms.static": [
        {"transforms": {"image": IMAGE, "static": True}},
        {
            "transforms": {
                "image": IMAGE,
                "points": True,
                "static": {"max_boxes": 8, "max_points": 100, "buffers": 3},
            }
        },
        {
            "transforms": {
                "image": IMAGE,
                "static": {"buffers": 1},
                "normalize": BGR,
            },
            "transform": brightened,
        },
    ],
    "transforms.two_views": [
        {
            "transforms": {
                "image": TRAIN,
                "ego": EGO,
                "points": True,
                "two_views": True,
            },
            "window": {"frames": [-1, 0]},
        },
        {
            "transforms": {"image": TRAIN, "two_views": True, "static": True},
            "transform": brightened,
        },
        {
            "transforms": {"image": TRAIN, "two_views": True},
            "collate_fn": stacked,
            "order": {"kind": "lanes"},
        },
    ],
    "transforms.box_frame": [{"transforms": {"image": IMAGE, "box_frame": "lidar"}}],
}
ELSEWHERE = {
    "dataset",
    "batch_size",
    "transforms",
    "unknown",
    "self",
    "transforms.decoder",
}

DALI = pytest.param("dali", marks=[needs_dali, pytest.mark.slow])
# Decoders of the device get images, maps and memory; these options change none of them.
BEFORE_DECODING = {
    "shuffle",
    "seed",
    "drop_last",
    "prefetch_factor",
    "order",
    "split",
    "mix",
    "layers",
    "storage",
    "trace",
    "check_ranks",
}


def each_case() -> list[Any]:
    """The cases of each option, with each decoder that the option can be used with."""
    parameters = []
    for name, cases in CASES.items():
        decoders = [pytest.param("turbo")]
        if name not in BEFORE_DECODING:
            decoders.append(DALI)
        for number, case in enumerate(cases):
            for decoder in decoders:
                (backend,) = decoder.values
                case_id = f"{name}-{number}-{backend}"
                parameters.append(pytest.param(case, backend, id=case_id, marks=decoder.marks))
    return parameters


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    for name, seed in (("a", 0), ("b", 1)):
        build_dataset(
            folder / name,
            {"train": (5, 4)},
            missing=frozenset({(5, "cam_back")}),
            lens=LENS,
            seed=seed,
            rewrite=drawn,
        )
    build_dataset(folder / "channels", {"train": (5, 4)}, extra=CHANNELS)
    score = fixed("score", "array", "npy", dtype="float32")
    for name, rows in (("teacher", range(9)), ("partial", range(2, 9))):
        with LayerWriter(folder / "a", folder / name, channels=[score]) as writer:
            for row in rows:
                writer.write(row, {"score": np.float32(row)})
        writer.finish(partial=len(rows) < 9)
    build_dataset(
        folder / "bad",
        {"train": (5, 4)},
        rewrite=lambda row, channel, data: (
            data[: len(data) // 2] if row == 3 else drawn(row, channel, data)
        ),
    )
    return folder


@pytest.fixture
def cuda(monkeypatch):
    """Fake devices, on which DALI runs the GPU's graph in host memory; findings fail the test at its end."""
    if HAS_DALI:
        dali_on_host(monkeypatch)
    batched_turbo.install(monkeypatch)
    _column.cache_clear()
    with FakeCuda(monkeypatch) as fake:
        yield fake
    _column.cache_clear()


def arguments(roots, case: dict[str, Any], decoder: str, device: Any) -> dict[str, Any]:
    """The loader's arguments of a case."""
    loader_arguments = {
        "device": device,
        "transforms": {"image": IMAGE},
        "seed": 3,
        "num_workers": 2,
        **case,
    }
    loader_arguments["transforms"] = Transforms(
        **{**loader_arguments["transforms"], "decoder": decoder}
    )
    root: Any = {name: roots / name for name in case["mix"]} if "mix" in case else roots / "a"
    if "layers" in case:
        loader_arguments["layers"] = {
            name: {"path": roots / name, **options} for name, options in case["layers"].items()
        }
    if loader_arguments["transforms"].select and "layers" not in case:
        root = roots / "channels"
    if "ledger" in case:
        loader_arguments["ledger"] = {
            "path": roots / f"{uuid4()}.ledger",
            **case["ledger"],
        }
    if case.get("bad_samples"):
        root = roots / "bad"
        loader_arguments["storage"] = {"verify": False}
        loader_arguments["bad_samples"] = {
            **case["bad_samples"],
            "file": roots / "bad.jsonl",
        }
    return {"dataset": root, "batch_size": BATCH, **loader_arguments}


def consume(loader: DataLoader, epochs: int = 2) -> list[Any]:
    """Read each batch by kernels of the current stream, as a trainer does, and drop it; never wait for the device."""
    read = []
    with loader:
        for _ in range(epochs):
            for batch in loader:
                read.append(map_tensors(batch, torch.clone))
                del batch
    return read


def test_every_option_is_in_the_table():
    options = set(inspect.signature(DataLoader.__init__).parameters)
    options |= {f"transforms.{name}" for name in Transforms.__struct_fields__}
    assert options - ELSEWHERE == set(CASES)
    assert set(CASES) >= BEFORE_DECODING


@pytest.mark.costly
@pytest.mark.parametrize(("case", "decoder"), each_case())
def test_no_option_races_and_batches_are_those_of_the_host(case, decoder, roots, cuda):
    if decoder != "turbo" and "pixels" in case.get("transforms", {}):
        pytest.skip("pixel values are changed in host memory only")
    on_host = {name: value for name, value in case.items() if name not in ("device", "pin_memory")}
    expected = consume(DataLoader(**arguments(roots, on_host, decoder, None)))
    on_device = arguments(roots, case, decoder, "cuda")
    device_batches = consume(DataLoader(**on_device))
    assert cuda.finish() == []
    assert len(device_batches) == len(expected) > 0
    home = cuda.device(on_device["device"])
    for want, have in zip(expected, device_batches, strict=True):
        assert have.keys() == want.keys()
        for name, value in want.items():
            _compare(name, want=value, have=have[name], home=home, decoder=decoder)


def _compare(name: str, want: Any, have: Any, home: torch.device, decoder: str) -> None:
    assert {tensor.device for tensor in tensors_of(have)} <= {home}, name
    if decoder == "turbo" or name not in ("img", "mean"):
        assert unlike(want, have) == [], name
        return
    for expected, actual in zip(tensors_of(want), tensors_of(have), strict=True):
        assert (expected.dtype, expected.shape) == (
            actual.dtype,
            actual.shape,
        ), name
        levels = [
            tensor.cpu().flatten().float() for tensor in (expected, actual)
        ]  # another graph: equal in meaning
        assert (levels[0] - levels[1]).abs().mean() < 0.02 * (
            levels[0].max() - levels[0].min() + 1
        ), name


def tensors_of(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    return tensors


@pytest.mark.costly
@pytest.mark.parametrize("decoder", ["turbo", DALI])
def test_a_consumer_on_a_stream_of_its_own_is_served(decoder, roots, cuda):
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        assert consume(DataLoader(**arguments(roots, POINTS, decoder, "cuda")))


def broken(monkeypatch, edge: str) -> None:
    """Take one edge out of the product."""
    if edge == "hand_over":
        monkeypatch.setattr(CudaTransfer, "hand_over", lambda self, moved: moved.batch)
    else:
        for waits in (FakeStream, FakeEvent):
            monkeypatch.setattr(waits, "synchronize", lambda self: None)


@pytest.mark.parametrize(
    ("edge", "finding"),
    [("hand_over", "was freed while"), ("synchronize", "without waiting for")],
)
@pytest.mark.parametrize("decoder", ["turbo", DALI])
def test_an_edge_that_is_missing_is_found(edge, finding, decoder, roots, monkeypatch):
    if decoder == "dali":
        dali_on_host(monkeypatch)
    cuda = FakeCuda(monkeypatch)
    broken(monkeypatch, edge)
    consume(DataLoader(**arguments(roots, {}, decoder, "cuda")))
    assert any(finding in text for text in cuda.finish())


COPIES_A_BATCH = 3
"""Copies to the device for each batch, of any size: each costs the interpreter about 10 us, and a copy aside."""
CHANNELS_CASE, *_ = CASES["transforms.select"]
NORMALIZED = {"transforms": {"image": IMAGE, "normalize": Normalize(mean=(1.5, 2.5, 3.5))}}


@pytest.mark.parametrize("decoder", ["turbo", "batched", DALI])
@pytest.mark.parametrize(
    "case",
    [{}, {"window": {"frames": [-1, 0]}, **POINTS}, CHANNELS_CASE, NORMALIZED],
)
def test_a_batch_takes_few_copies_to_the_device(case, decoder, roots, cuda):
    read = consume(DataLoader(**arguments(roots, case, decoder, "cuda")))
    ahead = 8  # batches that the loader has made for the epoch that nobody asked for
    assert len(cuda.copies) <= COPIES_A_BATCH * (len(read) + ahead)


@pytest.mark.costly
@pytest.mark.parametrize("decoder", ["batched", DALI])
def test_the_host_pins_no_images_where_the_device_decodes(decoder, roots, cuda):
    consume(DataLoader(**arguments(roots, POINTS, "turbo", "cuda")))
    with_images = cuda.pinned_bytes
    consume(DataLoader(**arguments(roots, POINTS, decoder, "cuda")))
    image_bytes = BATCH * 2 * 3 * IMAGE.height * IMAGE.width
    assert with_images >= image_bytes
    assert cuda.pinned_bytes - with_images < image_bytes
