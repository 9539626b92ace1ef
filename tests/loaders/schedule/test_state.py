"""Loader state: plain JSON, exact both ways, refused with both sides shown where it is of something else."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.loaders.config import Normalize
from fuelrail.loaders.schedule.state import (
    STATE_VERSION,
    Identity,
    LoaderState,
    decode_state,
    encode_state,
    sample_settings,
)
from fuelrail.pipeline.errors import StateMismatchError
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from fuelrail.pipeline.transforms.points import PointSweeps

IDENTITY = Identity(
    dataset="f" * 64,
    split="train",
    order={"version": 1, "kind": "shuffled", "seed": 7, "window": None},
    drop_last=True,
)
ENTRIES = ("identity", "epoch", "samples_consumed", "global_batch_size")


def state(**changes) -> LoaderState:
    fields = dict(zip(ENTRIES, (IDENTITY, 3, 160, 16), strict=True))
    return LoaderState(**({"version": STATE_VERSION, **fields} | changes))


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.integers(1, 2**20))
def test_round_trip_through_json_and_pickle(epoch, consumed, batch) -> None:
    saved = state(epoch=epoch, samples_consumed=consumed, global_batch_size=batch)
    encoded = encode_state(saved)
    assert decode_state(json.loads(json.dumps(encoded)), IDENTITY) == saved
    assert decode_state(pickle.loads(pickle.dumps(encoded)), IDENTITY) == saved


def test_state_is_small_and_plain_whatever_the_position() -> None:
    encoded = encode_state(state(epoch=10**6, samples_consumed=10**12))
    assert len(json.dumps(encoded)) < 400
    assert json.loads(json.dumps(encoded)) == encoded


def test_the_identity_may_be_a_dict() -> None:
    encoded = encode_state(state())
    assert (
        decode_state({**encoded, "identity": json.loads(encoded["identity"])}, IDENTITY) == state()
    )


def test_another_batch_size_is_not_a_mismatch() -> None:
    assert (
        decode_state(encode_state(state(global_batch_size=999)), IDENTITY).global_batch_size == 999
    )


@pytest.mark.parametrize(
    ("change", "sides"),
    [
        (
            {"dataset": "0" * 64},
            [f"dataset: state has '{'0' * 64}', loader has '{'f' * 64}'"],
        ),
        ({"split": "val"}, ["split: state has 'val', loader has 'train'"]),
        ({"drop_last": False}, ["drop_last: state has False, loader has True"]),
        (
            {"order": {**IDENTITY.order, "seed": 8}},
            ["order: state has", "'seed': 8", "loader has", "'seed': 7"],
        ),
        (
            {"split": "val", "drop_last": False},
            ["split: state has 'val'", "drop_last: state has False"],
        ),
    ],
)
def test_state_of_another_sequence_shows_both_sides(change, sides) -> None:
    encoded = encode_state(state())
    encoded["identity"] = json.dumps({**json.loads(encoded["identity"]), **change})
    with pytest.raises(StateMismatchError, match="belongs to another training sequence") as caught:
        decode_state(encoded, IDENTITY)
    assert all(words in str(caught.value) for words in sides)
    same = set(Identity.__struct_fields__) - set(change)
    assert not [name for name in same if f"{name}: state has" in str(caught.value)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "has version 2; this Fuelrail reads 1"),
        ({"version": None}, "has version None"),
        ({"epoch": -1}, "is at epoch -1, sample 160; both must be 0 or more"),
        ({"samples_consumed": -1}, "is at epoch 3, sample -1"),
        (
            {"epoch": "3"},
            "at 'epoch': must be a whole number; got the text '3'",
        ),
        ({"epoch": 3.0}, "at 'epoch': must be a whole number; got 3.0"),
        ({"more": 1}, "the field 'more' is unknown; allowed here: version, "),
        ({"identity": {}}, "at 'identity': the field 'dataset' is missing"),
        ({"identity": "{}"}, "at 'identity': the field 'dataset' is missing"),
        ({"identity": "{"}, "not a Fuelrail loader state"),
        ({"identity": "\ud800"}, "not a Fuelrail loader state"),
        ({"identity": "[" * 100_000}, "not a Fuelrail loader state"),
        ({"identity": 3}, "at 'identity': must be a mapping; got 3"),
        (
            {"global_batch_size": -1},
            "global_batch_size -1; it must be 1 or more",
        ),
        ({"global_batch_size": 0}, "global_batch_size 0; it must be 1 or more"),
        (
            {"global_batch_size": 10**30},
            f"global_batch_size {10**30}; it must be 1 or more, and below 2**62",
        ),
        ({"epoch": 10**30}, "both must be 0 or more, and below 2**62"),
        (
            {"samples_consumed": 2**62},
            "both must be 0 or more, and below 2**62",
        ),
    ],
)
def test_what_is_not_a_state_is_refused(change, words) -> None:
    with pytest.raises(StateMismatchError) as caught:
        decode_state({**encode_state(state()), **change}, IDENTITY)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (None, "a dict is needed, got NoneType"),
        ({}, "has version None"),
        (
            {"_snapshot": {"_snapshot_step": 3}, "_steps_since_snapshot": 0},
            "has version None",
        ),
        *(({name: None}, f"the field '{name}' is missing") for name in ENTRIES),
    ],
)
def test_a_foreign_state_or_one_without_an_entry_is_refused(foreign, words) -> None:
    if foreign and foreign.keys() <= set(ENTRIES):
        foreign = {
            name: value for name, value in encode_state(state()).items() if name not in foreign
        }
    with pytest.raises(StateMismatchError, match=words):
        decode_state(foreign, IDENTITY)


IMAGE = ImageAugment(height=256, width=704)


def settled(seed=7, **settings) -> Identity:
    return msgspec.structs.replace(
        IDENTITY, settings=sample_settings(seed, **{"image": IMAGE, **settings})
    )


class TestN1Settings:
    """Number 1: a state names the augmentation's seed and settings."""

    @pytest.mark.parametrize(
        ("theirs", "ours", "sides"),
        [
            (settled(7), settled(8), "seed: state has 7, loader has 8;"),
            (
                settled(image=ImageAugment(height=256, width=704, train=True)),
                settled(),
                "image.train: state has True, loader has False;",
            ),
            (
                settled(),
                settled(normalize=Normalize()),
                "normalize.mean: state has none, loader has [123.675,",
            ),
            (
                settled(points=True),
                settled(),
                "points: state has True, loader has none;",
            ),
            (
                settled(points=PointSweeps(num_sweeps=2)),
                settled(points=PointSweeps(num_sweeps=5)),
                "content; points.num_sweeps: state has 2, loader has 5; make",
            ),
            (IDENTITY, settled(), "settings: state names none;"),
        ],
    )
    def test_other_settings_are_refused_with_both_sides_or_accepted_explicitly(
        self, theirs, ours, sides
    ) -> None:
        encoded = json.loads(json.dumps(encode_state(state(identity=theirs))))
        with pytest.raises(StateMismatchError) as caught:
            decode_state(encoded, ours)
        assert sides in str(caught.value)
        assert "load_state_dict(state, strict=False)" in str(caught.value)
        assert decode_state(encoded, ours, strict=False).samples_consumed == 160

    def test_no_other_difference_is_accepted(self) -> None:
        encoded = encode_state(state())
        for change in (
            {"dataset": "0" * 64},
            {"split": "val"},
            {"drop_last": False},
            {"frames": {}},
            {"order": {}},
        ):
            changed = {
                **encoded,
                "identity": json.dumps({**json.loads(encoded["identity"]), **change}),
            }
            with pytest.raises(StateMismatchError, match="another training sequence"):
                decode_state(changed, IDENTITY, strict=False)

    def test_equal_settings_have_one_digest_however_they_are_written(
        self,
    ) -> None:
        first = sample_settings(
            7,
            image=ImageAugment(height=64, width=96, resize=1),
            pixels=None,
            points=False,
        )
        second = sample_settings(
            7,
            image=ImageAugment(height=64, width=96, resize=1.0),
            undistort=None,
        )
        assert first == second
        different = [
            sample_settings(8, image=IMAGE),
            sample_settings(7, image=IMAGE),
            sample_settings(7, image=IMAGE, pixels=PixelAugment(train=True)),
        ]
        assert len({settings["digest"] for settings in (first, *different)}) == 4

    def test_with_all_settings_the_state_is_still_small_and_plain(self) -> None:
        identity = settled(
            pixels=PixelAugment(train=True),
            normalize=Normalize(),
            points=PointSweeps(num_sweeps=10),
        )
        encoded = encode_state(state(identity=identity))
        assert len(json.dumps(encoded)) < 2000
        assert decode_state(json.loads(json.dumps(encoded)), identity) == state(identity=identity)
