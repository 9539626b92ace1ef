"""Windows in seconds: channels at times of their own against a plain reading by timestamps, and through the loader."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fuelrail as fr
from fuelrail import BevAugment, DataLoader, ImageAugment, Transforms, World
from fuelrail.loaders.batch.timed import timed_channels
from fuelrail.loaders.storage.reader import FetchedSpan, SampleReader
from fuelrail.pipeline.channels.series import (
    TIMES,
    VALUES,
    parts_of_series,
    series_channel,
)
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import ConfigError, OrderError, StateMismatchError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.windows import (
    ChannelWindow,
    TimeWindow,
    window_lookup,
)
from support.batches import check_one_sequence, unlike
from support.datasets import build_dataset

MS = 1_000_000
INTERPOLATIONS = ("nearest", "hold", "linear")
TEXT = Channel(name="text", kind="text", field="text.txt", law=Law("fixed"), optional=True)
POSITION = Channel(
    name="position",
    kind="array",
    field="position.npy",
    dtype="float64",
    axes=("xy",),
    shape=(2,),
    columns=("x", "y"),
    frame="ego",
    law=Law("ego_points", roles={"positions": (("x", "y"),)}),
)
SPEED = Channel(
    name="speed",
    kind="array",
    field="speed.npy",
    dtype="float64",
    law=Law("fixed"),
)
GEAR = Channel(name="gear", kind="array", field="gear.npy", dtype="int16", law=Law("fixed"))
CAN = series_channel("can", "float64", (2,), unit="m/s")


def read_by_time(times, values, target_ns, interpolation, max_staleness_ns):
    """A measurement at a time, found by looking at all of them; None where there is none."""
    measurements = sorted(zip(times, values, strict=True), key=lambda measurement: measurement[0])
    before = [measurement for measurement in measurements if measurement[0] <= target_ns]
    after = [measurement for measurement in measurements if measurement[0] >= target_ns]
    far = float("inf") if max_staleness_ns is None else max_staleness_ns
    if not measurements or (max_staleness_ns is None and not (before and after)):
        return None
    if interpolation == "nearest":
        time, value = min(
            measurements,
            key=lambda measurement: (
                abs(measurement[0] - target_ns),
                measurement[0],
            ),
        )
        return value if abs(time - target_ns) <= far else None
    if interpolation == "hold":
        return before[-1][1] if before and target_ns - before[-1][0] <= far else None
    if not (before and after) or target_ns - before[-1][0] > far or after[0][0] - target_ns > far:
        return None
    t0, low = before[-1]
    t1, high = after[0]
    return low if t0 == t1 else low + (high - low) * ((target_ns - t0) / (t1 - t0))


@st.composite
def multi_rate_clip(draw):
    """Times [ns] of the samples of a clip, and of the measurements of a sensor, at any rates; in whole ms."""
    sample_times = draw(st.sets(st.integers(0, 300), min_size=1, max_size=12))
    sensor_times = draw(st.sets(st.integers(-50, 350), max_size=40))
    return [
        np.array(sorted(times), np.int64) * MS + 10**12 for times in (sample_times, sensor_times)
    ]


@pytest.mark.costly
@given(
    multi_rate_clip(),
    st.lists(st.integers(-200, 200), min_size=1, max_size=6, unique=True),
    st.sampled_from(INTERPOLATIONS),
    st.sampled_from([None, 0, 10, 60]),
)
def test_values_at_times_are_those_read_by_timestamps(clip, offsets, interpolation, staleness):
    sample_times, sensor_times = clip
    rng = np.random.default_rng(len(sample_times))
    measured = rng.normal(size=(len(sensor_times), 2))
    stored = rng.normal(size=len(sample_times))
    window = {
        "seconds": [ms / 1e3 for ms in offsets],
        "interpolation": interpolation,
    }
    channel_window = ChannelWindow(
        **window, max_staleness_s=None if staleness is None else staleness / 1e3
    )
    time_window = TimeWindow({"can": channel_window, "speed": channel_window})
    timed = timed_channels(time_window, (CAN, SPEED))
    table = ClipTable.build(
        np.zeros(len(sample_times), int), np.arange(len(sample_times))
    ).at_times(sample_times)
    lookup = window_lookup(table, time_window)
    parts = list(parts_of_series(sensor_times, measured, sample_times))
    for sample, now in enumerate(sample_times.tolist()):
        rows = sorted(set(lookup([sample]).samples[0, timed.num_frames :].tolist()))
        measured_rows = [
            (int(sample_times[row]), {"can": parts[row], "speed": stored[row]}) for row in rows
        ]
        timed_values = timed.read(now, measured_rows)
        for name, times, values in (
            ("can", sensor_times, measured),
            ("speed", sample_times, stored),
        ):
            for offset, value in zip(channel_window.offsets_ns, timed_values[name], strict=True):
                expected = read_by_time(
                    times,
                    values=values,
                    target_ns=now + offset,
                    interpolation=interpolation,
                    max_staleness_ns=channel_window.reach_ns,
                )
                assert (value is None) == (expected is None), (name, offset)
                if expected is not None and interpolation == "linear":
                    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
                elif expected is not None:
                    assert np.array_equal(value, expected), (name, offset)


@given(multi_rate_clip())
def test_the_parts_of_a_series_hold_each_measurement_once_and_its_neighbours(
    clip,
):
    sample_times, sensor_times = clip
    parts = list(parts_of_series(sensor_times, np.arange(len(sensor_times)), sample_times))
    assert len(parts) == len(sample_times)
    bounds = [-np.inf, *sample_times.tolist()[:-1], np.inf]
    for (low, high), part in zip(pairwise(bounds), parts, strict=True):
        within = sensor_times[(sensor_times > low) & (sensor_times <= high)]
        before = sensor_times[sensor_times <= low][-1:]
        after = sensor_times[sensor_times > high][:1]
        after = after if not (sensor_times == high).any() else after[:0]
        assert part[TIMES].tolist() == [*before, *within, *after]
        assert np.array_equal(sensor_times[part[VALUES]], part[TIMES])


RATE_NS = 500 * MS
SENSOR_TIMES = (
    np.arange(0, 20 * 500, 10, dtype=np.int64) * MS + 3 * MS
)  # 100 Hz, beside the samples


def sensor(time_ns):
    return np.array([time_ns / 1e9, -2 * time_ns / 1e9])


def build(root, **options):
    """Clips of four samples at 2 Hz with a sensor at 100 Hz, and values of the samples themselves."""

    def part(row):
        clip = np.arange(row // 4 * 4, row // 4 * 4 + 4) * RATE_NS
        inside = SENSOR_TIMES[(clip[0] - RATE_NS <= SENSOR_TIMES) & (clip[-1] >= SENSOR_TIMES)]
        return list(parts_of_series(inside, np.stack([sensor(time) for time in inside]), clip))[
            row % 4
        ]

    extra = [
        (CAN, part),
        (SPEED, lambda row: np.float64(row)),
        (GEAR, lambda row: np.int16(row)),
        (TEXT, lambda row: None if row == 6 else f"row {row}"),
        (POSITION, lambda row: np.array([row, 0.0])),
    ]
    build_dataset(root, {"train": (8, 12)}, extra=extra, **options)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build(tmp_path_factory.mktemp("timed") / "d")


NAMES = ["can", "speed", "gear", "text", "position"]
WINDOW = {
    "img": [-0.5, 0],
    "can": {"from": -0.8, "to": 0.2, "hz": 10},
    "speed": [-0.75, 0, 0.25],
    "gear": [-0.25, 0],
    "text": {"seconds": [-0.5, 0], "interpolation": "nearest"},
}


def loader(root, size=4, window=WINDOW, channels=NAMES, **options):
    transforms = Transforms(
        image=ImageAugment(height=16, width=24, resize="stretch"),
        select=channels,
        **options.pop("transforms", {}),
    )
    return DataLoader(
        root,
        size,
        transforms=transforms,
        window=window,
        num_workers=2,
        **{"world": World(), **options},
    )


def test_each_channel_has_the_axis_of_its_own_times(root):
    with loader(root) as data_loader:
        batches = list(data_loader)
    for batch in batches:
        assert batch["img"].shape[:2] == (4, 2)
        for index, (clip, frame) in enumerate(
            zip(batch["clip_id"], batch["frame"].tolist(), strict=True)
        ):
            row = int(clip[-4:]) * 4 + frame
            first = row // 4 * 4
            last = row // 4 * 4 + 3
            now = row * RATE_NS
            assert batch["frame_valid"][index].tolist() == [frame > 0, True]
            measured = SENSOR_TIMES[
                (first * RATE_NS - RATE_NS <= SENSOR_TIMES)
                & ((first + 3) * RATE_NS >= SENSOR_TIMES)
            ]
            for number in range(11):
                time = now + round((number / 10 - 0.8) * 1e9)
                is_measured = measured[0] <= time <= measured[-1]
                assert batch["can_valid"][index, number] == is_measured, (
                    row,
                    number,
                )
                expected = sensor(time) if is_measured else np.zeros(2)
                np.testing.assert_allclose(batch["can"][index, number], expected, atol=1e-6)
            speeds = [(row + steps, first <= row + steps <= last) for steps in (-1.5, 0, 0.5)]
            assert batch["speed_valid"][index].tolist() == [
                is_measured for _, is_measured in speeds
            ]
            np.testing.assert_allclose(
                batch["speed"][index],
                [value if is_measured else 0 for value, is_measured in speeds],
            )
            assert batch["gear"][index].tolist() == [
                row - 1 if frame else 0,
                row,
            ]  # held, for it is a whole number
            assert batch["gear_valid"][index].tolist() == [frame > 0, True]
            texts = [
                None if text_row == 6 or text_row < first else f"row {text_row}"
                for text_row in (row - 1, row)
            ]
            assert batch["text"][index] == texts
            assert batch["text_valid"][index].tolist() == [text is not None for text in texts]
        assert batch["position"].shape == (
            4,
            2,
            2,
        )  # not named: it has the frames of the images


def test_seconds_and_steps_are_the_same_batches(root):
    steps = {"frames": [-2, 0, 1], "pad": "mask"}
    seconds = {"img": {"seconds": [-1, 0, 0.5], "pad": "mask"}}
    options = {
        "order": {"kind": "shuffled", "seed": 3},
        "transforms": {"points": True},
    }
    with (
        loader(root, window=steps, **options) as steps_loader,
        loader(root, window=seconds, **options) as seconds_loader,
    ):
        for in_steps, in_seconds in zip(steps_loader, seconds_loader, strict=True):
            assert unlike(in_steps, in_seconds) == []


def test_channels_without_images_have_no_axis_of_frames(root):
    with loader(root, window={"speed": [-0.5, 0]}) as data_loader:
        batch = next(iter(data_loader))
    assert batch["img"].shape[:2] == (4, 2)  # cameras
    assert batch["speed"].shape == (4, 2)
    assert batch["gear"].shape == (4,)
    assert "frame_valid" not in batch


@pytest.mark.costly
def test_a_channel_in_ego_moves_with_the_augmented_ego_frame(root):
    ego = BevAugment(train=True, rotate_deg=(-90, 90), scale=(0.9, 1.1), flip_x_prob=0.5)
    with loader(
        root,
        window={"position": [-0.5, 0]},
        transforms={"ego": ego, "two_views": True},
    ) as data_loader:
        batch = next(iter(data_loader))
    rows = [
        int(clip[-4:]) * 4 + frame
        for clip, frame in zip(batch["clip_id"], batch["frame"].tolist(), strict=True)
    ]
    for index, row in enumerate(rows):
        for number, valid in enumerate(batch["position_valid"][index].tolist()):
            stored = torch.tensor([row - 1 + number, 0, 0, 1.0])
            moved = batch["bda_mat"][index] @ stored if valid else torch.zeros(4)
            torch.testing.assert_close(
                batch["position"][index, number],
                moved[:2].double(),
                atol=1e-4,
                rtol=1e-5,
            )
    assert batch["view"].tolist() == [0] * 4 + [1] * 4


@pytest.mark.costly
def test_attributes_are_read_by_time_too(tmp_path):
    folder = build(tmp_path / "d")
    layer = tmp_path / "layer"
    score = Channel(
        name="score",
        kind="array",
        field="score.npy",
        dtype="float64",
        law=Law("fixed"),
    )
    with fr.LayerWriter(folder, layer, channels=(score,)) as writer:
        for row in range(20):
            writer.write(row, {"score": np.float64(row * 3)})
    writer.finish()
    window = {"teacher.score": [-0.25, 0]}
    layers = {"teacher": layer}
    with loader(folder, 4, window, ["teacher.score"], layers=layers) as data_loader:
        batch = next(iter(data_loader))
    assert batch["teacher.score_valid"].tolist() == [
        [False, True],
        *[[True, True]] * 3,
    ]
    assert batch["teacher.score"].tolist() == [
        [0, 0],
        [1.5, 3],
        [4.5, 6],
        [7.5, 9],
    ]


@pytest.mark.parametrize("layout", ["member", "frame"])
def test_only_the_channels_of_other_samples_are_read(tmp_path, layout):
    folder = build(tmp_path / "d", layout=layout)
    reader = SampleReader(open_dataset(folder), channels=(SPEED, CAN))
    reader.num_frames = 1
    reader.timed = (SPEED,)
    current, part, repeated = reader.rows([5, 6, 5])
    assert current == repeated == reader.row(5)
    if layout == "frame":
        assert part == reader._dataset.index.row(6)
    else:
        assert [member.name for member in part.members] == ["speed.npy"]
        assert part.length < 1024 < current.length
    fetched = FetchedSpan(part, reader.storage.span(6, part))
    assert reader.values(fetched)["speed"] == 6.0


@pytest.mark.parametrize("cached", [False, True])
def test_at_a_url_each_part_of_a_sample_is_fetched_once(root, tmp_path, cached):
    options = {"shuffle": True, "seed": 4}
    storage = {
        "backend": "remote",
        **({"cache_dir": str(tmp_path), "cache_size": "1GB"} if cached else {}),
    }
    with (
        loader(root, **options) as local,
        loader(f"file://{root}", storage=storage, **options) as remote,
    ):
        for _ in range(2):
            for local_batch, remote_batch in zip(local, remote, strict=True):
                assert unlike(local_batch, remote_batch) == []
        assert remote.stats().storage.refetched == 0
        assert (remote.stats().storage.cache_bytes > 0) == cached


@pytest.mark.costly
def test_windows_in_seconds_are_one_sequence_on_any_world(root):
    def make(batch_size, *, rank, size, num_workers):
        transforms = Transforms(
            image=ImageAugment(height=8, width=8, resize="stretch"),
            select=NAMES,
        )
        return DataLoader(
            root,
            batch_size,
            world=World(rank, size),
            num_workers=num_workers,
            window=WINDOW,
            transforms=transforms,
            shuffle=True,
            drop_last=True,
        )

    check_one_sequence(make)


@pytest.mark.costly
def test_a_bad_sample_about_another_time_is_replaced(tmp_path):
    folder = build(tmp_path / "d")
    dataset = open_dataset(folder)
    row = dataset.index.row(6)
    entry = next(member for member in row.members if member.name == "speed.npy")
    path = folder / dataset.shards.name(row.shard)
    data = bytearray(path.read_bytes())
    data[row.offset + entry.offset + entry.stored_bytes - 1] ^= 1
    path.write_bytes(data)
    policy = {"on_error": "substitute", "file": None}
    with loader(folder, 1, {"speed": [-0.5, 0]}, ["speed"], bad_samples=policy) as data_loader:
        loaded_rows = [int(batch["global_index"]) for batch in data_loader]
    # Row 6 is bad, and so is row 7, which reads it; each is replaced by the next good sample.
    assert loaded_rows == [*range(6), 8, 8, *range(8, 20)]


def test_a_state_says_which_window_it_was(root):
    with (
        loader(root) as saved,
        loader(root, window={**WINDOW, "speed": [0.0]}) as restored,
    ):
        with pytest.raises(StateMismatchError, match="speed"):
            restored.load_state_dict(saved.state_dict())
        saved.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (
            {"sped": [0]},
            "'sped' is not a selected channel or attribute; there are: can, speed",
        ),
        (
            {"gear": {"seconds": [0], "interpolation": "linear"}},
            "nothing between two values",
        ),
        (
            {"position": {"seconds": [0], "interpolation": "linear"}},
            "nothing between two values",
        ),
    ],
)
def test_what_has_no_times_of_its_own_is_refused(root, window, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        loader(root, window=window)


def test_times_that_do_not_ascend_are_refused(tmp_path):
    folder = build(tmp_path / "d", time_of=lambda row: -row)
    with pytest.raises(OrderError, match="times that ascend"):
        loader(folder)


def double(sample):
    return {**sample, "speed": sample["speed"] * 2}


@pytest.mark.process
def test_in_another_process_in_lanes_and_through_a_transform_they_are_the_same(
    root,
):
    lanes = {"kind": "lanes", "seed": 1}
    with loader(root, order=lanes, drop_last=True) as plain:
        expected = list(plain)
    with loader(root, order=lanes, drop_last=True, where="process") as in_process:
        assert [
            unlike(plain_batch, batch)
            for plain_batch, batch in zip(expected, in_process, strict=True)
        ] == [[]] * len(expected)
    with loader(root, order=lanes, drop_last=True, transform=double) as moved:
        for plain_batch, batch in zip(expected, moved, strict=True):
            assert torch.equal(plain_batch["speed"] * 2, batch["speed"])
            assert (plain_batch["text"], plain_batch["can"].tolist()) == (
                batch["text"],
                batch["can"].tolist(),
            )
