"""Every kind of loader is one sequence of samples: on any ranks, in any threads, from any step, to the byte."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail import (
    AttributeWeights,
    BevAugment,
    ImageAugment,
    Mix,
    Normalize,
    OrderSpec,
    PixelAugment,
)
from fuelrail.pipeline.channels.table import ArraySpec
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import (
    TINY,
    batches,
    check_one_sequence,
    keys,
    load,
    unlike,
)
from support.channels import fixed, points, tokens
from support.datasets import build_dataset
from support.layers import write_layer
from support.storage_suite import spoil

TRAIN = ImageAugment(
    height=24,
    width=32,
    train=True,
    resize_range=(0.4, 0.6),
    flip_prob=0.5,
    rotate_deg=(-5, 5),
)
AUGMENTED = {
    "image": TRAIN,
    "ego": BevAugment(train=True, rotate_deg=(-30, 30), scale=(0.9, 1.1), flip_y_prob=0.5),
    "pixels": PixelAugment(train=True, brightness=32, hue_deg=18, grid_mask_prob=0.5),
    "points": True,
    "seed": 9,
}
GROUPS = {
    "back": {"cameras": ["cam_back"], "image": TINY},
    "front": {"cameras": ["cam_front"], "image": TRAIN},
}
CHANNELS = [
    (
        points("radar", optional=True),
        lambda row: None if row % 5 == 2 else np.full((row, 3), row, np.float32),
    ),
    (
        tokens(words=99),
        lambda row: np.arange(row % 4),
    ),
    (
        fixed("agents", "ragged", "safetensors", arrays=(ArraySpec("speed", "float32"),)),
        lambda row: {"speed": np.arange(row, dtype=np.float32)},
    ),
    (
        fixed("caption", "text", "txt"),
        str,
    ),
]
NAMES = [channel.name for channel, _ in CHANNELS]


def drawn_by_the_samples_seed(sample):
    noise = torch.rand(3, generator=torch.Generator().manual_seed(sample["seed"]))
    return {
        **{name: sample[name] for name in ("sample_key", "global_index", "valid")},
        "noise": noise,
    }


# `DATASET`: which of the datasets below; the others are options of the loader.
CASES = {
    "shuffled": {},
    "sequential, padded": {"shuffle": False, "drop_last": False},
    "windowed": {"order": OrderSpec(kind="windowed", seed=3, window=4)},
    "filter and weights": {
        "order": OrderSpec(
            filter="frame > 0",
            weights=(AttributeWeights(attribute="frame"),),
            epoch_length=16,
        )
    },
    "mixed by an attribute": {
        "order": OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1, "3": 1}))
    },
    "lanes": {"order": OrderSpec(kind="lanes", seed=1)},
    "lanes of windows": {
        "order": OrderSpec(kind="lanes", seed=1, pieces_per_clip=2),
        "frames": [-2, 0],
    },
    "windows": {"frames": [-1, 0, 1], "pad": "mask", "drop_last": False},
    "windows that are complete": {"frames": [-1, 0], "pad": "drop"},
    "augmented": AUGMENTED,
    "augmented windows": {**AUGMENTED, "frames": [0, -1], "stride": 2},
    "camera groups, normalised": {
        **AUGMENTED,
        "camera_groups": GROUPS,
        "normalize": Normalize(),
    },
    "two views": {**AUGMENTED, "two_views": True},
    "two views of windows": {**AUGMENTED, "two_views": True, "frames": [-1, 0]},
    "pillow": {**AUGMENTED, "decoder": "pillow"},
    "static": {"static": {"max_points": 200, "buffers": 16}, "points": True},
    "a transform with the samples' seeds": {"transform": drawn_by_the_samples_seed},
    "num_workers='auto'": {"num_workers": "auto"},
    "channels": {**AUGMENTED, "select": NAMES},
    "channels of windows": {**AUGMENTED, "select": NAMES, "frames": [-2, 0]},
    "channels in lanes": {
        **AUGMENTED,
        "select": NAMES,
        "order": OrderSpec(kind="lanes", seed=3),
    },
    "layers": {"layers": "whole", "select": None},
    "layers, some missing": {
        "layers": "part",
        "missing": "drop",
        "select": None,
    },
    "two datasets": {"mix": {"a": 3, "b": 1}, "drop_last": False},
    "two datasets, filtered windows": {
        "mix": {"a": 1, "b": 1},
        "frames": [-1, 0],
        "order": OrderSpec(filter="frame > 0", seed=3),
        **AUGMENTED,
    },
    "bad samples": {
        "DATASET": "spoilt",
        "on_error": "substitute",
        "file": None,
        "drop_last": False,
    },
    "a small cache": {
        "backend": "remote",
        "cache_size": "60kB",
        "look_ahead_bytes": 30_000,
    },
    "pread without digests": {"backend": "pread", "verify": False},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences")
    build_dataset(
        folder / "a",
        {"val": (3,), "train": (5, 8)},
        missing=frozenset({(9, "cam_back")}),
        extra=CHANNELS,
    )
    build_dataset(folder / "b", {"train": (7,), "val": (2,)}, seed=5)
    build_dataset(folder / "spoilt", {"train": (13,)})
    for row in (4, 8, 9):
        spoil(folder / "spoilt", open_dataset(folder / "spoilt").index.row(row))
    write_layer(folder / "a", folder / "whole")
    write_layer(folder / "a", folder / "part", (3, 4, 5, 6, 8, 9, 10, 12, 13))
    return folder


def arguments(roots, case, tmp_path):
    """The dataset of a case, and the options of its loader."""
    options = {"image": TINY, **case}
    root = roots / options.pop("DATASET", "a")
    root = {name: roots / name for name in case["mix"]} if "mix" in case else root
    if "layers" in case:
        options["layers"] = {
            "t": {
                "path": roots / case["layers"],
                "missing": options.pop("missing", "error"),
            }
        }
    if "cache_size" in case:
        options["cache_dir"] = tmp_path
    return root, options


QUICK = ("shuffled", "windows", "two datasets")
EACH_CASE = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
]


@pytest.mark.costly
@pytest.mark.parametrize("case", EACH_CASE)
def test_ranks_threads_and_restarts_change_nothing(roots, case, tmp_path):
    root, options = arguments(roots, case, tmp_path)
    # What ranks share differs where the order does; elsewhere more ranks only repeat what two show.
    sizes = (
        (1, 2, 4)
        if {"order", "mix"} & case.keys() or case in [CASES[name] for name in QUICK]
        else (1, 2)
    )
    check_one_sequence(
        lambda batch_size, **where: load(root, batch_size, **{**where, **options}),
        sizes=sizes,
    )


@pytest.mark.costly
@pytest.mark.parametrize("case", [case for case in EACH_CASE if "transform" not in case.values[0]])
def test_a_transform_that_changes_nothing_changes_nothing(roots, case, tmp_path):
    """Single samples, joined, are the batch that is made at once: windows, lanes, views, groups and channels too."""
    root, options = arguments(roots, case, tmp_path)
    plain, joined = (
        batches(root, 4, **options, **more) for more in ({}, {"transform": lambda sample: sample})
    )
    for batch in joined:
        names = [
            list(map(str, batch[name]))
            for name in ("dataset", "sample_key", "view")
            if name in batch
        ]
        assert len(set(batch.pop("seed").tolist())) == len(set(zip(*names, strict=True))), (
            "a seed for each sample"
        )
    assert unlike(joined, plain) == []


@pytest.mark.slow
@settings(max_examples=12)
@given(
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_on_other_ranks_with_another_batch_each_remaining_sample_comes_once(
    tiny, before, after, sizes, data
):
    options = {"drop_last": False, "image": TINY}
    loaders = [load(tiny, sizes[0], rank=rank, size=before, **options) for rank in range(before)]
    stop = data.draw(st.integers(0, len(loaders[0])))
    received = [batch for loader in loaders for batch in islice(loader, stop)]
    state, *rank_states = [loader.state_dict() for loader in loaders]
    assert all(rank_state == state for rank_state in rank_states)
    for loader in loaders:
        loader.close()
    for rank in range(after):
        with load(tiny, sizes[1], rank=rank, size=after, **options) as restored:
            restored.load_state_dict(state)
            restored.set_epoch(0)
            received += list(restored)
    seen_keys = []
    for batch in received:
        samples = zip(batch["sample_key"], batch["valid"], strict=True)
        seen_keys += [key for key, valid in samples if valid]
    assert len(seen_keys) == len(set(seen_keys)) == 21


def test_padding_is_the_epochs_beginning_and_flagged(tiny):
    padded_batches = batches(tiny, 6, drop_last=False)
    assert [batch["valid"].tolist() for batch in padded_batches] == [[True] * 6] * 3 + [
        [True] * 3 + [False] * 3
    ]
    assert len(set(keys(padded_batches)[:21])) == 21
    assert keys(padded_batches)[21:] == keys(padded_batches)[:3]
