"""nuScenes' CAN bus: real files against nuscenes-devkit, and hostile files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import decode_meta
from fuelrail.sharding.api import shard, verify
from fuelrail.sharding.sources.nuscenes.extras.can import (
    MESSAGES,
    can_channel,
    parse_can,
)
from support.nuscenes_tables import build_nuscenes
from support.sharding import scanned
from support.shared_data import shared_data


def flat(record: dict[str, Any], message: str) -> list[float]:
    numbers: list[float] = []
    for field in MESSAGES[message]:
        numbers += record[field] if isinstance(record[field], list) else [record[field]]
    return numbers


@pytest.mark.real
def test_real_messages_are_those_of_nuscenes_devkit(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="nuscenes-devkit's CAN bus module plots")
    api = pytest.importorskip(
        "nuscenes.can_bus.can_bus_api",
        reason="nuscenes-devkit is not installed",
    )
    root = shared_data("nuscenes-mini")
    devkit = api.NuScenesCanBus(dataroot=str(root))
    source, info, table = scanned(
        "nuscenes", root, tmp_path, version="v1.0-derived", channels=["can"]
    )
    assert [channel.name for channel in info.channels] == ["can_pose"]
    num_rows = []
    for number in range(len(table)):
        row = table.row(number)
        meta = decode_meta(row.meta)
        (member,) = [member for member in row.members if member.name == "can_pose.npy"]
        values = KINDS["points"].decode(source.open(member.ref), info.channels[0])
        until = meta.timestamp_ns // 1000
        after = (
            until - 500_000 if meta.prev_key is None else table.row(number - 1).timestamp_ns // 1000
        )
        expected = [
            m for m in devkit.get_messages(meta.clip_name, "pose") if after < m["utime"] <= until
        ]
        np.testing.assert_array_equal(
            values[:, 1:],
            np.array([flat(m, "pose") for m in expected]).reshape(-1, 16),
        )
        np.testing.assert_allclose(
            values[:, 0],
            [(until - m["utime"]) * 1e-6 for m in expected],
            atol=1e-9,
        )
        num_rows.append(len(values))
    assert max(num_rows) in range(24, 27)  # 50 Hz over 0.5 s


@pytest.mark.real
def test_a_dataset_of_real_messages_is_sound(tmp_path) -> None:
    root = shared_data("nuscenes-mini")
    options = {"version": "v1.0-derived", "channels": ["can"], "points": False}
    shard(f"nuscenes:{root}", tmp_path / "out", workers=1, options=options)
    dataset = open_dataset(tmp_path / "out")
    assert verify(tmp_path / "out", deep=True, workers=1).faults == []
    (channel,) = dataset.manifest.extra_channels
    position = next(i for i in range(len(dataset)) if dataset[i].key == "scene-0103-000001")
    pose = decode_values(dataset[position].extra, (channel,), dataset[position].key)["can_pose"]
    columns = list(channel.columns)
    before, after = (dataset[i].geometry.ego2global for i in (position - 1, position))
    xyz = pose[-1, [columns.index(f"pos_{axis}") for axis in "xyz"]]
    assert np.linalg.norm(xyz[:2] - after[:2, 3]) < 0.5  # the latest message is at most 20 ms old
    speed = np.linalg.norm(after[:3, 3] - before[:3, 3]) / 0.5
    assert pose[:, columns.index("vel_x")].mean() == pytest.approx(speed, abs=0.5)


def test_every_message_of_a_scene_is_stored_once(tmp_path) -> None:
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"scene-0061": 4, "scene-0103": 2},
        cameras=("CAM_FRONT",),
    )
    (nuscenes.root / "can_bus").mkdir()
    rng = np.random.default_rng(0)
    times = [row["timestamp"] for row in nuscenes.tables["sample"]][:4]
    records = {}
    for message, fields in MESSAGES.items():
        records[message] = [
            {"utime": utime}
            | {
                name: rng.normal(size=n).tolist() if n > 1 else int(utime % 97)
                for name, (n, _) in fields.items()
            }
            for utime in range(times[0] - 400_000, times[-1] + 300_000, 37_000)
        ]
        (nuscenes.root / "can_bus" / f"scene-0061_{message}.json").write_text(
            json.dumps(records[message])
        )
    source, info, table = scanned("nuscenes", nuscenes.root, tmp_path, channels=["can", "map"])
    assert info.report.noted == {"samples without files of channels=[map]": 6}
    assert [channel.name for channel in info.channels] == [f"can_{message}" for message in MESSAGES]
    assert [len(table.row(number).members) - 2 for number in range(6)] == [
        6,
        6,
        6,
        6,
        0,
        0,
    ]
    for channel in info.channels:
        message = channel.source_name
        rows = [
            KINDS["points"].decode(source.open(member.ref), channel)
            for number in range(4)
            for member in table.row(number).members
            if member.name == channel.field
        ]
        inside = [flat(m, message) for m in records[message] if m["utime"] <= times[-1]]
        np.testing.assert_array_equal(np.concatenate(rows)[:, 1:], inside)


def test_series_are_read_by_time(tmp_path) -> None:
    """Against the messages of the files, at any time of the scene; frames that the rate leaves out lose none."""
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"scene-0061": 6, "scene-0553": 2},
        cameras=("CAM_FRONT",),
    )
    (nuscenes.root / "can_bus").mkdir()
    times = [row["timestamp"] for row in nuscenes.tables["sample"]][:6]
    rng = np.random.default_rng(0)
    low = times[0] - 500_000
    high = times[-1] + 500_000
    stamps = np.unique(rng.integers(times[0] - 900_000, times[-1] + 900_000, 200)).tolist()
    records = [{"utime": utime, "value": float(rng.normal())} for utime in stamps]
    records.insert(
        100, records[99] | {"value": 7.0}
    )  # of two messages of one time the first counts
    (nuscenes.root / "can_bus" / "scene-0061_steeranglefeedback.json").write_text(
        json.dumps(records)
    )
    options = {
        "channels": ["can"],
        "series": True,
        "rate": 0.7,
        "points": False,
    }
    shard(
        f"nuscenes:{nuscenes.root}",
        tmp_path / "out",
        workers=1,
        options=options,
    )
    dataset = open_dataset(tmp_path / "out")
    (channel,) = dataset.manifest.extra_channels
    assert (channel.name, channel.description) == (
        "can_steeranglefeedback",
        "columns: value [rad]",
    )
    assert verify(tmp_path / "out", deep=True, workers=1).faults == []
    window = {channel.name: {"from": -1.6, "to": 0.4, "hz": 10}}
    transforms = Transforms(
        image=ImageAugment(height=16, width=24, resize="stretch"),
        select=[channel.name],
    )
    truth = {
        record["utime"]: record["value"]
        for record in reversed(records)
        if low <= record["utime"] <= high
    }
    sorted_times = sorted(truth)
    clips = []
    with DataLoader(
        tmp_path / "out", 1, transforms=transforms, window=window, num_workers=1
    ) as loader:
        for batch in loader:
            clips += batch["clip_id"]
            moments = [
                int(batch["timestamp_ns"][0]) // 1000 - 1_600_000 + step * 100_000
                for step in range(21)
            ]
            is_known = [
                clips[-1] == "scene-0061" and sorted_times[0] <= time <= sorted_times[-1]
                for time in moments
            ]
            assert batch[f"{channel.name}_valid"][0].tolist() == is_known
            expected = np.interp(moments, sorted_times, [truth[time] for time in sorted_times])
            np.testing.assert_allclose(
                batch[channel.name][0, is_known, 0],
                expected[is_known],
                atol=1e-4,
            )
    assert sorted(clips) == ["scene-0061"] * 2 + ["scene-0553"]
    with pytest.raises(ConfigError, match=r"series=true needs signals: channels=\[can\]"):
        scanned("nuscenes", nuscenes.root, tmp_path, series=True)


def test_units_and_columns_belong_together() -> None:
    channel = can_channel("pose")
    assert channel.columns[:5] == (
        "dt_s",
        "accel_x",
        "accel_y",
        "accel_z",
        "orientation_w",
    )
    assert channel.units[-1] == "m/s"


GOOD = {"utime": 5, "value": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a list of messages"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        ("{}", "is not a list of messages"),
        ("[{}]", "is missing"),
        (json.dumps([{**GOOD, "value": "x"}]), "must be a number; got "),
        (json.dumps([{**GOOD, "value": None}]), "must be a number; got "),
        ('[{"utime": 5, "value": NaN}]', "is not a list of messages"),
        ('[{"utime": 5, "value": 1e999}]', "is not a list of messages"),
        (json.dumps([{**GOOD, "utime": 10**30}]), "is not a list of messages"),
        (json.dumps([{**GOOD, "utime": -1}]), "is not a list of messages"),
        (
            json.dumps([GOOD, {**GOOD, "utime": 4}]),
            "message 1 of 4 us is earlier",
        ),
        ("[" * 100_000, "is not a list of messages"),
    ],
)
def test_a_hostile_file_is_a_named_error(text, message) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        parse_can(text.encode(), "steeranglefeedback", "can_bus/x.json")
    assert "can_bus/x.json" in str(caught.value)


def test_a_hostile_scene_name_leads_nowhere(tmp_path) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"../../evil": 1}, cameras=("CAM_FRONT",))
    for series in (False, True):
        with pytest.raises(SourceError, match="is not inside the source"):
            scanned(
                "nuscenes",
                nuscenes.root,
                tmp_path,
                channels=["can"],
                series=series,
            )
