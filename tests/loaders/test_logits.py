"""A teacher's logits in batches: stacked or in a row, with windows, packs, transforms, static buffers and processes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fuelrail import Cost, FrameWindow, OrderSpec, Pack
from fuelrail.loaders.viewer.batch import describe_batch
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.errors import ConfigError
from fuelrail.sharding.verify.inspect import describe_dataset
from support.batches import TINY, batches, load
from support.channels import fixed, tokens
from support.datasets import build_dataset

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel

TOKENS = tokens()
FORM: dict[str, Any] = {
    "axes": ("position", "token"),
    "vocabulary": TOKENS.vocabulary,
    "optional": True,
}
TOP = fixed("top", "logits_topk", "lgt", dtype="uint8", shape=(3, 4), **FORM)
DRAWN = fixed("drawn", "logits_sampled", "lgt", shape=(None, 5), **FORM)
NAMES = ["words", "top", "drawn"]
LACKING = (2, 7)


def length(row: int) -> int:
    return 2 * (row % 4) + 1


def make_value(name: str, row: int) -> Any:
    """What the dataset stores of a row."""
    rng = np.random.default_rng((NAMES.index(name), row))
    if name == "words":
        return rng.integers(0, 1000, length(row))
    if row in LACKING:
        return None
    if name == "drawn":
        return Logits(
            rng.integers(0, 1000, (length(row), 5)),
            mask=rng.random(length(row)) < 0.7,
        )
    weights = rng.dirichlet(np.ones(5), 3)[:, :4]
    return Logits(
        np.stack([rng.choice(1000, 4, replace=False) for _ in range(3)]),
        weights,
    )


def stored(channel: Channel, row: int) -> Logits | None:
    value = make_value(channel.name, row)
    return (
        None
        if value is None
        else KINDS[channel.kind].decode(KINDS[channel.kind].encode(value, channel), channel)
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits") / "d"
    extra = [
        (channel, lambda row, channel=channel: make_value(channel.name, row))
        for channel in (TOKENS, TOP, DRAWN)
    ]
    build_dataset(folder, {"train": (7, 5)}, extra=extra, size=(16, 16))
    return folder


def options(**more: Any) -> dict[str, Any]:
    return {"image": TINY, "select": NAMES, "decoder": "pillow", **more}


def same(actual: Logits, expected: Logits | None, form: Logits) -> None:
    """A sample's logits, of a batch with this form, are those that were stored."""
    if expected is None:
        assert not actual.mask.any() and not actual.weights.any()
        return
    assert (actual.tail is None) == (expected.tail is None) == (form.tail is None)
    for name, part in expected.parts.items():
        np.testing.assert_array_equal(getattr(actual, name), part)


def check(batch: dict[str, Any]) -> int:
    rows = batch["global_index"].tolist()
    top = batch["top"]
    drawn = batch["drawn"]
    assert (
        top.offsets is None
        and top.indices.dtype == torch.int32
        and top.indices.shape == (len(rows), 3, 4)
    )
    assert drawn.offsets.dtype == torch.int64
    ends = list(pairwise(drawn.offsets.tolist()))
    for index, row in enumerate(rows):
        same(
            top.map(lambda part, index=index: part[index]),
            stored(TOP, row),
            top,
        )
        same(
            drawn.map(lambda part, end=ends[index]: part[slice(*end)]),
            stored(DRAWN, row),
            drawn,
        )
        assert (
            batch["top_valid"][index].item()
            is batch["drawn_valid"][index].item()
            is (row not in LACKING)
        )
    return len(rows)


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"where": "process"}, marks=pytest.mark.process),
        {"transform": lambda sample: sample},
    ],
)
def test_each_sample_has_its_own(root, more) -> None:
    assert sum(check(batch) for batch in batches(root, 4, **options(**more))) == 12


def test_windows_and_transforms_keep_frames_apart(root) -> None:
    def identity(sample):
        assert sample["top"].indices.shape == (2, 3, 4) and len(sample["drawn"]) == 2
        return sample

    window = FrameWindow(frames=(-1, 0), pad="repeat_edge")
    plain = batches(root, 4, **options(window=window))
    for batch, transformed in zip(
        plain,
        batches(root, 4, **options(window=window, transform=identity)),
        strict=True,
    ):
        rows = batch["frame_global_index"]
        assert batch["top"].weights.shape == (4, 2, 3, 4)
        for number, row in enumerate(rows.flatten().tolist()):
            same(
                batch["top"].map(lambda part, index=number: part.flatten(0, 1)[index]),
                stored(TOP, row),
                batch["top"],
            )
            tokens = slice(*batch["drawn"].offsets[number : number + 2].tolist())
            same(
                batch["drawn"].map(lambda part, tokens=tokens: part[tokens]),
                stored(DRAWN, row),
                batch["drawn"],
            )
        for name in ("top", "drawn"):
            for part, values in batch[name].parts.items():
                assert torch.equal(values, getattr(transformed[name], part)), (
                    name,
                    part,
                )


@pytest.mark.parametrize("truncate", [False, True])
def test_packs_have_the_logits_of_their_tokens(root, truncate) -> None:
    cost = "frame" if truncate else Cost(linear={"frame": 2}, constant=1)
    order = OrderSpec(
        pack=Pack(budget=2 if truncate else 15, cost=cost, truncate=truncate),
        filter="frame > 0",
    )
    for batch in batches(root, 2, **options(order=order, shuffle=False, drop_last=False)):
        lengths = batch["words"].offsets.diff()
        assert lengths.max() <= 2 or not truncate
        assert (
            batch["drawn"].offsets.diff()[batch["drawn_valid"]].tolist()
            == lengths[batch["drawn_valid"]].tolist()
        )
        if not truncate:
            check(batch)


def test_static_batches_hold_them_at_fixed_addresses(root) -> None:
    settings = options(select=["top"], static={"buffers": 2}, shuffle=False)
    with load(root, 4, **settings) as loader:
        records = [
            (
                batch["top"].weights.data_ptr(),
                batch["top"].weights.clone(),
                batch,
            )
            for batch in loader
        ]
    assert records[0][0] == records[2][0] != records[1][0]
    for (_, weights, _), batch in zip(
        records, batches(root, 4, **options(shuffle=False)), strict=True
    ):
        assert torch.equal(weights, batch["top"].weights)
    with pytest.raises(ConfigError, match="'drawn' is a Logits of tensors"):
        batches(root, 4, **options(select=["drawn"], static=True))


def test_pages_show_them(root) -> None:
    (batch, *_) = batches(root, 4, **options())
    text = str(describe_batch(batch, (TOP, DRAWN), "ego"))
    assert (
        "Logits of indices: int32 [4, 3, 4], weights: float32 [4, 3, 4], tail: float32 [4, 3]"
        in text
    )
    assert "uint8[3, 4] of 1000 in words" in describe_dataset(root).text
