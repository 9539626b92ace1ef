"""Samples deleted from a dataset: nothing of them is left, all others are as they were, and kills change nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.channels.series import parts_of_series, series_channel
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    DatasetExistsError,
    ManifestError,
    OrderError,
)
from fuelrail.pipeline.format.dataset import open_dataset, read_members
from fuelrail.pipeline.format.layers import open_layer
from fuelrail.pipeline.sample.schema import META
from fuelrail.sharding import forget as forget_module
from fuelrail.sharding.forget import ForgetReport
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import repair
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.batches import TINY, load
from support.datasets import build_dataset
from support.layers import values_of, write_layer
from support.nuscenes_radar import add_radar_files
from support.nuscenes_sweeps import add_sweeps
from support.nuscenes_tables import build_nuscenes
from support.sharding import (
    digests,
    environment,
    flip,
    members_of,
    shard_nuscenes,
)

LAYOUTS = {
    "members": {},
    "frames": {"layout": "frame"},
    "none": {"layout": "none"},
    "clips": {"order": "clip", "splits": {"train": 0.5, "val": 0.5}},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def source(request, dataroot, sharded):
    return sharded(
        dataroot("a4 b5 c3 d4"),
        shard_size_bytes=40_000,
        **LAYOUTS[request.param],
    )


@pytest.fixture
def dataset(source, tmp_path):
    shutil.copytree(source, tmp_path / "dataset")
    return tmp_path / "dataset"


def choose(dataset):
    """A clip, and one sample of another one; and the rows of both."""
    index = open_dataset(dataset).index
    clips = index.strings("clip_id")
    keys = index.strings("key")
    clip = sorted(set(clips))[1]
    key = next(key for key, clip_of_key in zip(keys, clips, strict=True) if clip_of_key != clip)
    return (
        clip,
        key,
        [row for row in range(len(keys)) if clips[row] == clip or keys[row] == key],
    )


def span_of(opened, position):
    row = opened.index.row(position)
    return opened.shard_path(row).read_bytes()[row.offset :][: row.length]


def find_traces(dataset, rows):
    """What must not be found anywhere: keys, digests, and bytes of each span that the others do not have."""
    opened = open_dataset(dataset)
    needles = {}
    remaining = [position for position in range(len(opened)) if position not in rows]
    other_digests = {
        row.xxh3 for position in remaining for row in opened.index.row(position).members
    }
    rest = b"".join(span_of(opened, position) for position in remaining)
    for position in rows:
        row = opened.index.row(position)
        span = span_of(opened, position)
        needles[row.key.encode()] = "key"
        members = [member.xxh3 for member in row.members if member.xxh3 not in other_digests]
        for number in (
            row.xxh3,
            xxhash.xxh3_64_intdigest(row.key.encode()),
            *members,
        ):
            needles |= {
                number.to_bytes(8, "little"): f"digest of {row.key}",
                f"{number:016x}".encode(): "digest as text",
            }
        pieces = [span[first : first + 40] for first in range(0, len(span) - 40, 40)]
        unique_pieces = [
            piece for piece in pieces if piece not in rest and piece.count(0) < 4
        ]  # else a header of the tar
        assert len(unique_pieces) > 10
        needles |= dict.fromkeys(unique_pieces, f"bytes of {row.key}")
    return needles


def search(folder, needles):
    """Look for them in every byte of every file below a folder, and in what is compressed there."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        texts = [path.read_bytes(), str(path).encode()]
        if path.name == "attributes.parquet":
            texts.append(json.dumps(pq.read_table(path).to_pydict(), default=str).encode())
        for needle, label in needles.items():
            assert not any(needle in text for text in texts), f"{path} has the {label}"


def check(dataset, before, names, rows, report):
    """Compare the dataset with what it was."""
    assert verify(dataset, deep=True, num_threads=2).faults == []
    opened = open_dataset(dataset)
    remaining = [position for position in range(len(before["keys"])) if position not in rows]
    assert opened.index.strings("key") == [before["keys"][position] for position in remaining]
    gone = {before["keys"][position] for position in rows}
    expected = {}
    for key in opened.index.strings("key"):  # neighbours say nothing of them
        meta = before["members"][key][META]
        named = {name: None for name in ("prev_key", "next_key") if getattr(meta, name) in gone}
        expected[key] = {
            **before["members"][key],
            META: msgspec.structs.replace(meta, **named),
        }
    assert members_of(dataset) == expected
    assert not any(key.encode() in data for key in gone for data in read_metas(dataset))
    table = opened.table
    assert table.equals(before["table"].take(remaining))
    assert opened.manifest.lineage.parents == (before["fingerprint"],)
    assert opened.manifest.lineage.ancestors[0].num_samples == len(before["keys"])
    assert {sample.key for sample in report.samples} == {
        before["keys"][position] for position in rows
    }
    assert report.names == sorted(names)
    first = report.folders[0]
    assert (first.before, first.after) == (
        before["fingerprint"],
        opened.manifest.fingerprint,
    )
    assert {
        name: digest for name, digest in before["digests"].items() if name in first.shards
    } == first.shards
    for path in dataset.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [(member.name, member.size) for member in tar]
        listed = subprocess.run(
            ["tar", "-tf", path], capture_output=True, text=True, check=True
        ).stdout.split()
        assert [name for name, _ in members] == listed
        if path.with_suffix(".idx").exists():
            lines = path.with_suffix(".idx").read_text().splitlines()
            assert lines[0] == f"v1.2 {len({name.partition('.')[0] for name in listed})}"


def read_metas(dataset):
    opened = open_dataset(dataset)
    for position in range(len(opened)):
        row = opened.index.row(position)
        path = opened.shard_path(row)
        yield bytes(
            read_members(
                row,
                span_of(opened, position),
                path.name,
                dictionary=opened.dictionary,
            )[META]
        )


def state(dataset):
    opened = open_dataset(dataset)
    return {
        "keys": opened.index.strings("key"),
        "members": members_of(dataset),
        "table": opened.table,
        "fingerprint": opened.manifest.fingerprint,
        "digests": digests(dataset),
    }


def test_nothing_is_left_of_them_and_the_others_are_as_they_were(dataset, tmp_path):
    clip, key, rows = choose(dataset)
    before = state(dataset)
    needles = find_traces(dataset, rows)
    layer = write_layer(dataset, tmp_path / "layer")
    positions_of_part = sorted({0, 3, 6, 9, 12, 15, *rows[1:3]})
    part = write_layer(dataset, tmp_path / "part", positions_of_part)
    old = open_layer("layer", layer, open_dataset(dataset))
    layer_values = {
        row: old.find(row, before["keys"][row])[1].xxh3 for row in range(len(before["keys"]))
    }
    needles |= {
        layer_values[row].to_bytes(8, "little"): f"digest of the layer's row {row}" for row in rows
    }
    for folder in ("cache/spans", "cache/datasets"):
        (tmp_path / folder).mkdir(parents=True)
    with load(
        dataset,
        2,
        image=TINY,
        layers={"layer": layer},
        storage={"cache_dir": tmp_path / "cache"},
    ) as loader:
        list(loader)
    with pytest.raises(AssertionError, match="has the"):
        search(tmp_path / "cache", needles)
    receipt = tmp_path / "receipt.json"
    report = fr.forget(
        dataset,
        [clip, key],
        layers=[layer, str(part)],
        caches=[tmp_path / "cache"],
        receipt=receipt,
    )
    check(dataset, before=before, names=[clip, key], rows=rows, report=report)
    assert msgspec.json.decode(receipt.read_bytes(), type=ForgetReport) == report
    receipt.unlink()
    search(tmp_path, needles)
    assert len(report.caches) == 2
    opened = open_dataset(dataset)
    for path, positions in (
        (layer, range(len(before["keys"]))),
        (part, positions_of_part),
    ):
        assert verify(path, deep=True, num_threads=1).faults == []
        bound = open_layer("layer", path, opened)
        for new_row, key in enumerate(opened.index.strings("key")):
            position = before["keys"].index(key)
            record = bound.find(new_row, key)
            assert (record is not None) == (position in positions)
            if path == layer:
                assert record[1].xxh3 == layer_values[position]
                assert bound.data.read(record[0], "loss")["loss"] == values_of(position)["loss"]
    # The rest of a step would be a second deletion.
    second = opened.index.strings("key")[0]
    second_report = fr.forget(dataset, [second], layers=[layer, part])
    assert [folder.before for folder in second_report.folders] == [
        folder.after for folder in report.folders
    ]
    assert verify(dataset, deep=True, num_threads=1).faults == []
    assert len(open_dataset(dataset).manifest.lineage.ancestors) == 2


def test_shards_without_them_and_their_neighbours_are_not_written(dataset):
    for shard_index in (
        -1,
        0,
    ):  # the last shard goes; then the first, and the others move up
        opened = open_dataset(dataset)
        shards = list(opened.shards)
        inodes = {shard.sha256: (dataset / shard.name).stat().st_ino for shard in shards}
        first = shards[shard_index].first_sample
        report = fr.forget(
            dataset,
            opened.index.strings("key", first, first + shards[shard_index].num_samples),
        )
        assert shards[shard_index].name in report.folders[0].shards
        now = list(open_dataset(dataset).shards)
        assert len(now) == len(shards) - 1
        unchanged = inodes.keys() - set(report.folders[0].shards.values())
        assert {shard.sha256: (dataset / shard.name).stat().st_ino for shard in now}.items() >= {
            digest: inodes[digest] for digest in unchanged
        }.items()
    assert verify(dataset, deep=True, num_threads=1).faults == []
    assert not (dataset / ".fuelrail").exists()


@pytest.fixture
def plain(dataroot, sharded, tmp_path):
    shutil.copytree(
        sharded(dataroot("a4 b5 c3 d4"), shard_size_bytes=40_000),
        tmp_path / "dataset",
    )
    return tmp_path / "dataset"


def test_the_command(plain, tmp_path, capsys):
    clip, key, rows = choose(plain)
    file = tmp_path / "clips.txt"
    file.write_text(f"# to be deleted\n{clip}\n{key}\n")
    assert main(["forget", str(plain), "--clips", str(file), "--json"]) == 0
    printed = capsys.readouterr().out
    (receipt,) = tmp_path.glob("dataset-forgot-*.json")
    assert receipt.read_text() == printed
    assert len(json.loads(printed)["samples"]) == len(rows)
    before = digests(tmp_path)
    assert main(["forget", str(plain), "--clips", str(file)]) == 0, (
        "it was killed when all was done"
    )
    assert f"deleted {len(rows)} samples of 2 clips" in capsys.readouterr().out
    assert digests(tmp_path) == before
    assert main(["log", str(plain)]) == 0
    assert "forget" in capsys.readouterr().out
    assert main(["verify", str(plain), "--deep"]) == 0
    file.write_text("nobody\n")
    assert main(["forget", str(plain), "--clips", str(file)]) == 2
    assert "1 names are neither a key nor a clip" in capsys.readouterr().err


def test_what_cannot_be_deleted(plain, dataroot, sharded, tmp_path):
    clip, _, _ = choose(plain)
    everything = sorted(set(open_dataset(plain).index.strings("clip_id")))
    other_dataset = sharded(dataroot("e2 f3"))
    foreign = write_layer(other_dataset, tmp_path / "foreign")
    only = write_layer(plain, tmp_path / "only", choose(plain)[2][:2])
    before = digests(tmp_path)
    for error, names, options, message in (
        (OrderError, [clip, "nobody"], {}, "1 names are neither"),
        (OrderError, str(tmp_path / "none.txt"), {}, "cannot be read"),
        (ConfigError, everything, {}, "nothing would be left of"),
        (ManifestError, [clip], {"layers": [foreign]}, "belongs to dataset"),
        (ManifestError, [clip], {"layers": [plain]}, "not a Fuelrail manifest"),
        (ConfigError, [clip], {"layers": ["memory://layer"]}, "is at a URL"),
        (
            ConfigError,
            choose(plain)[:2],
            {"layers": [only]},
            "nothing would be left of",
        ),
    ):
        with pytest.raises(error, match=message):
            fr.forget(plain, names, **options)
        assert digests(tmp_path) == before
    with pytest.raises(ConfigError, match="is at a URL"):
        fr.forget("s3://bucket/dataset", [clip])
    with pytest.raises(fr.errors.DatasetNotReadyError):
        fr.forget(tmp_path / "none", [clip])
    assert not (tmp_path / "none").exists()
    shard = next(
        entry.name for entry in open_dataset(plain).shards if clip in str(members_of(plain).keys())
    )
    flip(plain / shard)
    names = [open_dataset(plain).index.row(0).key]
    with pytest.raises((ChecksumError, fr.errors.ShardError)):
        fr.forget(plain, names)
    assert (plain / "dataset.json").exists(), "damage is found before anything is removed"
    with pytest.raises(DatasetExistsError, match=r"source options.names: "):
        fr.forget(plain, [clip])
    flip(plain / shard)
    fr.forget(plain, names)
    assert verify(plain, deep=True, num_threads=1).faults == []
    with pytest.raises(ConfigError, match="clips were deleted from"):
        repair(plain, f"nuscenes:{plain}", 1, Quiet())
    with pytest.raises(DatasetExistsError, match="holds another dataset"):
        shard_nuscenes(dataroot("a4 b5 c3 d4").root, plain, shard_size_bytes=40_000)


def shard_with_neighbours(folder, per_keyframe):
    """A dataset whose samples hold sweeps of earlier ones, and steps of trajectories of others."""
    nuscenes = build_nuscenes(
        folder / "root", {"a": 7, "b": 4}, cameras=("CAM_FRONT",), num_points=4
    )
    add_sweeps(nuscenes, per_keyframe)
    nuscenes.write()
    options = {"sweeps": 7, "channels": ["trajectories"]}
    fr.shard(
        f"nuscenes:{folder / 'root'}",
        folder / "dataset",
        options=options,
        layout="none",
    )
    return folder / "dataset"


def sweeps_by_key(dataset):
    opened = open_dataset(dataset)
    points_by_key = {}
    for number, key in enumerate(opened.index.strings("key")):
        sweeps = opened.read(number, ["lidar_top_sweeps"]).get("lidar_top_sweeps")
        ends = [] if sweeps is None else np.cumsum(sweeps.num_points)
        points = [] if sweeps is None else np.split(sweeps.points, ends[:-1])
        times = [] if sweeps is None else sweeps.timestamp_ns.tolist()
        points_by_key[key] = {
            time: part.tobytes() for time, part in zip(times, points, strict=True)
        }
    return points_by_key


@pytest.mark.parametrize(("per_keyframe", "gone"), [(3, (2, 5, 6)), (0, (0, 2))])
def test_neighbours_hold_nothing_of_single_samples(per_keyframe, gone, tmp_path):
    dataset = shard_with_neighbours(tmp_path, per_keyframe)
    opened = open_dataset(dataset)
    keys = opened.index.strings("key")
    frames = opened.index.column("frame").tolist()
    clips = opened.index.strings("clip_id")
    times = opened.index.column("timestamp_ns").tolist()
    clip = max(clips, key=clips.count)
    by_frame = {frames[row]: row for row in range(len(keys)) if clips[row] == clip}
    deleted = [keys[by_frame[frame]] for frame in gone]
    ends = [-np.inf, *(times[by_frame[frame]] for frame in range(6)), np.inf]
    spans = [(ends[frame], ends[frame + 1]) for frame in gone]

    def is_gone(key, time):
        is_near = clips[keys.index(key)] == clip
        return is_near and any(begin < time <= end for begin, end in spans)

    before = sweeps_by_key(dataset)
    paths = {key: opened.read(key, ["ego_trajectory"])["ego_trajectory"] for key in keys}
    agents = {key: opened.read(key, ["agent_trajectories"]) for key in keys}
    report = fr.forget(dataset, deleted)
    after = sweeps_by_key(dataset)
    expected = {
        key: {time: points for time, points in before[key].items() if not is_gone(key, time)}
        for key in before.keys() - {*deleted}
    }
    assert after == expected
    assert any(len(after[key]) < len(before[key]) for key in after)
    assert any(before[key] and not after[key] for key in after) == (per_keyframe == 0)
    opened = open_dataset(dataset)
    num_cut = 0
    for row, key in enumerate(keys):
        if key in deleted:
            continue
        steps = [4 + frame - frames[row] for frame in gone if clips[row] == clip]
        steps = [step for step in steps if 0 <= step < 17]
        path = paths[key].copy()
        path[steps, :-1], path[steps, -1] = np.nan, 0
        stored = opened.read(key, ["ego_trajectory", "agent_trajectories"])
        assert np.array_equal(stored["ego_trajectory"], path, equal_nan=True)
        if agents[key]:
            valid = agents[key]["agent_trajectories"]["valid"].copy()
            valid[:, steps] = 0
            assert np.array_equal(stored["agent_trajectories"]["valid"], valid)
            assert np.isnan(stored["agent_trajectories"]["position"][:, steps]).all()
        num_cut += bool(len(steps))
    assert report.folders[0].num_cut == num_cut
    assert f"{num_cut} other samples held sweeps" in report.as_text()
    assert verify(dataset, deep=True, num_threads=1).faults == []


def test_series_and_statistics_hold_nothing_of_single_samples(tmp_path):
    can = series_channel("can", "float64")
    rate_ns = 500_000_000

    def part(row):
        clip = row // 4
        times = np.arange(-3, 25) * 90_000_000 + clip * 4 * rate_ns
        samples = (np.arange(4) + clip * 4) * rate_ns
        return list(parts_of_series(times, times * 1e-9, samples))[row % 4]

    build_dataset(tmp_path / "d", {"train": (8, 8), "val": (4,)}, extra=[(can, part)])
    opened = open_dataset(tmp_path / "d")
    keys = opened.index.strings("key")
    times = opened.index.column("timestamp_ns").tolist()
    stored = [opened.read(row, ["can"])["can"]["timestamp_ns"].tolist() for row in range(20)]
    fr.inspect(tmp_path / "d", statistics=True)
    assert (tmp_path / "d" / "statistics.json").exists()
    fr.forget(tmp_path / "d", [keys[1], keys[7]])
    assert not (tmp_path / "d" / "statistics.json").exists()
    opened = open_dataset(tmp_path / "d")
    spans = {0: (times[0], times[1]), 1: (times[6], np.inf)}
    for row, key in enumerate(keys):
        if row in (1, 7):
            continue
        begin, end = spans.get(row // 4, (0, -1))
        remaining = [time for time in stored[row] if not begin < time <= end]
        series = opened.read(key, ["can"])["can"]
        assert series["timestamp_ns"].tolist() == remaining
        assert np.array_equal(series["values"], np.array(remaining) * 1e-9)
        assert len(remaining) < len(stored[row]) or row != 2
    assert verify(tmp_path / "d", deep=True, num_threads=1).faults == []


def test_a_working_folder_of_another_run_is_not_continued(plain, tmp_path):
    clip, key, _ = choose(plain)
    shutil.copytree(plain, tmp_path / "other")
    (plain / ".fuelrail").mkdir()
    shutil.copytree(tmp_path / "other", plain / ".fuelrail" / "before")
    fr.forget(tmp_path / "other", [key])
    shutil.copytree(tmp_path / "other", plain / ".fuelrail" / "next")
    (plain / "dataset.json").unlink()
    before = digests(plain)
    with pytest.raises(fr.errors.DatasetNotReadyError):  # nobody has begun to delete there
        fr.forget(tmp_path / "none", [clip])
    with pytest.raises(fr.errors.DatasetError):
        fr.forget(plain, [clip])
    unchanged = digests(plain)
    assert {name: unchanged[name] for name in unchanged if "fuelrail" not in name} == {
        name: before[name] for name in before if "fuelrail" not in name
    }


def test_an_earlier_version_in_the_working_folder_is_not_taken_for_the_one_before(
    plain, tmp_path, monkeypatch
):
    """A call that is killed as it began, over a folder where the parent of the dataset lies."""
    clip, key, _ = choose(plain)
    shutil.copytree(plain, tmp_path / "parent")
    fr.forget(plain, [key])
    (plain / ".fuelrail").mkdir(mode=0o700)
    shutil.copytree(tmp_path / "parent", plain / ".fuelrail" / "before")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(forget_module, "_delete_all", die)
        fr.forget(plain, [clip])
    report = fr.forget(plain, [clip])
    assert clip not in open_dataset(plain).index.strings("clip_id")
    assert report.folders[0].after == open_dataset(plain).manifest.fingerprint
    assert verify(plain, deep=True, num_threads=1).faults == []


def test_other_versions_and_the_dictionary_are_named(dataroot, sharded, tmp_path):
    shutil.copytree(sharded(dataroot("a4 b5 c3 d4"), dictionary_bytes=1024), tmp_path / "v1")
    os.link(tmp_path / "v1" / "train-000000.tar", tmp_path / "other")
    report = fr.forget(tmp_path / "v1", [choose(tmp_path / "v1")[0]])
    assert report.folders[0].linked == ["train-000000.tar"]
    assert report.keeps_dictionary
    assert "train-000000.tar has other names, which still hold the samples" in report.as_text()
    assert "zstd.dict stays" in report.as_text()
    assert verify(tmp_path / "v1", deep=True, num_threads=1).faults == []


def test_a_split_may_go_and_attributes_may_lack(tmp_path):
    build_dataset(tmp_path / "own", {"val": (4,), "train": (9, 7)})
    assert not (tmp_path / "own" / "attributes.parquet").exists()
    clips = open_dataset(tmp_path / "own").index.strings("clip_id", 0, 4)
    fr.forget(tmp_path / "own", sorted(set(clips)))
    assert [*open_dataset(tmp_path / "own").splits] == ["train"]
    assert verify(tmp_path / "own", deep=True, num_threads=1).faults == []


@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kill_points", ["3", pytest.param("all", marks=pytest.mark.long)])
def test_kills_change_nothing(plain, tmp_path, kill_points):
    clip, key, _ = choose(plain)
    layer = write_layer(plain, tmp_path / "layer")
    file = tmp_path / "keys.txt"
    file.write_text(f"{clip}\n{key}\n")
    program = [
        sys.executable,
        "-m",
        "support.forget_kills",
        plain,
        layer,
        file,
        tmp_path / "scratch",
        kill_points,
    ]
    (tmp_path / "scratch").mkdir()
    fingerprint = open_dataset(plain).manifest.fingerprint
    done = subprocess.run(
        list(map(str, program)),
        capture_output=True,
        text=True,
        env={**environment(), "FINGERPRINT": fingerprint},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 80, done.stdout


def test_neighbours_hold_no_radar_points_of_single_samples(tmp_path):
    """Each point belongs to the first sample whose radar's keyframe is not before it."""
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"a": 6, "b": 4},
        cameras=("CAM_FRONT",),
        num_points=4,
    )
    add_radar_files(nuscenes)
    options = {"channels": ["radar"], "radar_sweeps": 3}
    radar = "radar_front"
    fr.shard(
        f"nuscenes:{tmp_path / 'root'}",
        tmp_path / "dataset",
        options=options,
        layout="none",
    )

    def read(dataset):
        opened = open_dataset(dataset)
        rows = zip(
            opened.index.strings("key"),
            opened.index.strings("clip_id"),
            opened.index.column("frame").tolist(),
            opened.index.column("timestamp_ns").tolist(),
            strict=True,
        )
        return {key: (*rest, opened.read(key, [radar])[radar]) for key, *rest in rows}

    before = read(tmp_path / "dataset")
    clips = [clip for clip, *_ in before.values()]
    clip = max(clips, key=clips.count)
    gone = (1, 4)
    deleted = [key for key, (name, frame, *_) in before.items() if name == clip and frame in gone]
    (channel,) = open_dataset(tmp_path / "dataset").manifest.extra_channels
    column = channel.columns.index("dt_s")

    def measured_ns(points, timestamp_ns):
        return timestamp_ns - np.round(points[:, column].astype(np.float64) * 1e9)

    newest_ns = {
        (name, frame): measured_ns(points, time_ns).max()
        for name, frame, time_ns, points in before.values()
    }
    fr.forget(tmp_path / "dataset", deleted)
    after = read(tmp_path / "dataset")
    assert after.keys() == before.keys() - {*deleted}
    num_cut = 0
    for key, (name, _, time_ns, points) in after.items():
        all_points = before[key][3]
        ends_ns = np.array([newest_ns[name, frame] for frame in range(clips.count(name))])
        owners = np.searchsorted(ends_ns + 1e6, measured_ns(all_points, time_ns))
        keep = np.full(len(owners), name != clip) | ~np.isin(owners, gone)
        np.testing.assert_array_equal(points, all_points[keep])
        num_cut += np.count_nonzero(~keep)
    assert num_cut
    assert verify(tmp_path / "dataset", deep=True, num_threads=1).faults == []


def test_series_of_layers_hold_nothing_of_single_samples(tmp_path):
    imu = series_channel("imu", "float64")
    build_dataset(tmp_path / "d", {"train": (4,)})
    opened = open_dataset(tmp_path / "d")
    keys = opened.index.strings("key")
    times_ns = opened.index.column("timestamp_ns")
    order = np.argsort(times_ns)
    measured_ns = np.arange(times_ns.min() - 300_000_000, times_ns.max() + 300_000_000, 70_000_000)
    parts = parts_of_series(measured_ns, measured_ns * 1e-9, times_ns[order])
    with LayerWriter(tmp_path / "d", tmp_path / "layer", channels=[imu]) as writer:
        for row, part in zip(order.tolist(), parts, strict=True):
            writer.write(row, {"imu": part})
    writer.finish()

    def read():
        bound = open_layer("layer", tmp_path / "layer", open_dataset(tmp_path / "d"))
        names = bound.data.index.strings("key")
        return {key: bound.data.read(key, ["imu"])["imu"]["timestamp_ns"] for key in names}

    before = read()
    deleted = keys[int(order[1])]
    fr.forget(tmp_path / "d", [deleted], layers=[tmp_path / "layer"])
    after = read()
    begin_ns, end_ns = times_ns[order[:2]].tolist()
    assert after.keys() == before.keys() - {deleted}
    for key, stored_ns in before.items():
        if key != deleted:
            keep = (stored_ns <= begin_ns) | (stored_ns > end_ns)
            np.testing.assert_array_equal(after[key], stored_ns[keep])
    assert any(len(after[key]) < len(before[key]) for key in after)
    assert verify(tmp_path / "layer", deep=True, num_threads=1).faults == []
