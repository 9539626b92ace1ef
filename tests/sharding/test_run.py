"""Whole runs: the same bytes whatever happens, and nothing that isn't whole under a final name."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
    ManifestError,
    OrderError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import check_span, open_dataset, read_members
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.sample.schema import decode_meta
from fuelrail.sharding.engines.local import MAX_THREADS
from fuelrail.sharding.output.folder import FolderOutput
from fuelrail.sharding.output.workspace import Workspace
from fuelrail.sharding.sources.nuscenes.source import NuScenesSource
from support.nuscenes_tables import build_nuscenes, encode_image
from support.sharding import Interrupt, digests, shard_nuscenes

WORKERS = [1, 2, MAX_THREADS + 1]  # this thread, threads, processes
CLIPS = {"a": 4, "b": 5, "c": 3, "d": 4}
OPTIONS = {"shard_size_bytes": 30_000, "splits": {"train": 0.75, "val": 0.25}}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_nuscenes(tmp_path_factory.mktemp("source"), CLIPS)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """The dataset as one undisturbed worker makes it."""
    out = tmp_path_factory.mktemp("expected") / "out"
    shard_nuscenes(source.root, out, **OPTIONS)
    return out


def keys_of(out):
    index = open_dataset(out).index
    return index.strings("key")


def test_n1_the_fingerprint_does_not_cover_the_version_of_the_tool(source, expected, tmp_path):
    """Another version is another recipe, and stands in the provenance; rows and bytes are the same."""
    again = shard_nuscenes(source.root, tmp_path / "out", tool="fuelrail 99.0", **OPTIONS).manifest
    ours = open_dataset(expected).manifest
    assert again.fingerprint == ours.fingerprint
    assert again.digest != ours.digest
    assert again.provenance["recipe"]["tool"] == "fuelrail 99.0" != ours.provenance["recipe"]["tool"]
    named = shard_nuscenes(source.root, tmp_path / "named", name="renamed", **OPTIONS).manifest
    assert named.fingerprint != ours.fingerprint  # each sample's meta.json repeats the name


def test_n1_the_fingerprint_covers_every_byte_and_every_row(source, expected, tmp_path):
    ours = open_dataset(expected).manifest.fingerprint
    fewer = shard_nuscenes(source.root, tmp_path / "fewer", limit=15, **OPTIONS).manifest
    changed = shutil.copytree(source.root, tmp_path / "source")
    image = next(path for path in sorted(changed.rglob("*.jpg")) if "sweeps" not in path.parts)
    data = bytearray(image.read_bytes())
    data[-10] ^= 1
    image.write_bytes(data)
    byte = shard_nuscenes(changed, tmp_path / "byte", **OPTIONS).manifest
    assert byte.num_samples == open_dataset(expected).manifest.num_samples
    assert len({ours, fewer.fingerprint, byte.fingerprint}) == 3


@pytest.mark.process
@pytest.mark.parametrize("num_workers", WORKERS[1:])
def test_any_number_of_workers_gives_the_same_bytes(source, expected, tmp_path, num_workers):
    outcome = shard_nuscenes(source.root, tmp_path / "out", num_workers=num_workers, **OPTIONS)
    assert digests(tmp_path / "out") == digests(expected)
    assert outcome.num_written == outcome.manifest.num_shards > 3


def test_a_moved_source_gives_the_same_bytes(source, expected, tmp_path):
    shutil.copytree(source.root, tmp_path / "elsewhere")
    shard_nuscenes(tmp_path / "elsewhere", tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == digests(expected)


def test_nothing_but_the_dataset_is_left(source, expected):
    names = set(digests(expected))
    dataset = open_dataset(expected)
    shards = {name for shard in dataset.shards for name in (shard.name, shard.idx_name)}
    assert names == {"dataset.json", *shards, *(entry.name for entry in dataset.manifest.files)}
    assert {
        "shards.arrow",
        "index.arrow",
        "keys.arrow",
        "blocks.sha256",
        "attributes.parquet",
        "train-000000.idx",
        "val-000000.tar",
    } <= names
    for path in expected.iterdir():
        for private in (str(expected).encode(), str(source.root).encode()):
            assert private not in path.read_bytes()


def test_another_seed_gives_another_order_of_the_same_samples(source, expected, tmp_path):
    shard_nuscenes(source.root, tmp_path / "out", **OPTIONS, seed=8)
    ours, theirs = keys_of(tmp_path / "out"), keys_of(expected)
    assert ours != theirs
    assert sorted(ours) == sorted(theirs)


def test_index_manifest_and_shards_fit(expected):
    dataset = open_dataset(expected)
    assert dataset.manifest.num_samples == sum(CLIPS.values())
    assert dataset.manifest.num_clips == len(CLIPS)
    clips = {name: set() for name in dataset.manifest.splits}
    for position in range(len(dataset.index)):
        row = dataset.index.row(position)
        shard = dataset.shards[row.shard]
        assert shard.first_sample <= position < shard.first_sample + shard.num_samples
        with dataset.shard_path(row).open("rb") as file:
            file.seek(row.offset)
            check_span(row, file.read(row.length), shard.name)
        clips[shard.split].add(row.clip_id)
    assert {name: len(found) for name, found in clips.items()} == {"train": 3, "val": 1}
    assert not clips["train"] & clips["val"]


def test_a_finished_dataset_is_checked_and_left(source, expected, tmp_path):
    shutil.copytree(expected, tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    outcome = shard_nuscenes(source.root, tmp_path / "out", **OPTIONS)
    assert (outcome.num_written, outcome.num_kept) == (0, outcome.manifest.num_shards)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("victim", ["train-000001.tar", "train-000000.idx", "index.arrow", "attributes.parquet"])
@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
def test_a_finished_dataset_that_was_damaged_is_made_whole(source, expected, tmp_path, victim, harm):
    out = tmp_path / "out"
    shutil.copytree(expected, out)
    data = bytearray((out / victim).read_bytes())
    data[len(data) // 2] ^= 1
    (out / victim).unlink()
    if harm != "gone":
        (out / victim).write_bytes(data if harm == "flipped" else data[: len(data) // 2])
    shard_nuscenes(source.root, out, **OPTIONS)
    assert digests(out) == digests(expected)


def test_a_damaged_manifest_is_named(source, expected, tmp_path):
    shutil.copytree(expected, tmp_path / "out")
    (tmp_path / "out" / "dataset.json").write_text("{}")
    with pytest.raises(ManifestError, match=r"dataset\.json"):
        shard_nuscenes(source.root, tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 8}, "seed is 7 there and 8 here"),
        ({"order": "clip"}, "order is 'frame' there and 'clip' here"),
        ({"shard_size_bytes": 40_000}, "shard size is 30000 there and 40000 here"),
        ({"splits": None}, r"splits is \{'train': 0.75, 'val': 0.25\} there and None here"),
        ({"layout": "none"}, "layout is 'member' there and 'none' here"),
        ({"points": False}, "source options is"),
        ({"name": "other"}, "name is None there and 'other' here"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_options_are_refused_with_both_sides(source, expected, tmp_path, change, says, finished):
    out = tmp_path / "out"
    if finished:
        shutil.copytree(expected, out)
    else:
        begin(source, out)
    before = digests(out)
    with pytest.raises(DatasetExistsError, match=says) as caught:
        shard_nuscenes(source.root, out, **{**OPTIONS, **change})
    assert "choose another folder" in str(caught.value)
    assert {name: digest for name, digest in digests(out).items() if not name.endswith("lock")} == {
        name: digest for name, digest in before.items() if not name.endswith("lock")
    }


def begin(source, out, after=2, num_workers=1):
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(source.root, out, num_workers=num_workers, progress=Interrupt(after), **OPTIONS)


@pytest.mark.process
@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_interrupted_run_continues(source, expected, tmp_path, num_workers):
    out = tmp_path / "out"
    begin(source, out, num_workers=num_workers)
    assert not (out / "dataset.json").exists()
    there = [path.name for path in out.glob("*.tar")]
    assert len(there) >= 2
    outcome = shard_nuscenes(source.root, out, num_workers=num_workers, **OPTIONS)
    assert outcome.num_kept == len(there)
    assert digests(out) == digests(expected)


def test_a_shard_that_was_damaged_in_between_is_written_again(source, expected, tmp_path):
    out = tmp_path / "out"
    begin(source, out, after=3)
    shards = sorted(out.glob("*.tar"))
    shards[0].write_bytes(shards[0].read_bytes()[:-700])
    data = bytearray(shards[1].read_bytes())
    data[3000] ^= 255
    shards[1].write_bytes(data)
    outcome = shard_nuscenes(source.root, out, **OPTIONS)
    assert outcome.num_kept == len(shards) - 2
    assert digests(out) == digests(expected)


def test_a_record_that_was_damaged_in_between_is_not_believed(source, expected, tmp_path):
    out = tmp_path / "out"
    begin(source, out)
    for record in (out / WORK_FOLDER / "records").iterdir():
        record.write_bytes(record.read_bytes()[:-3])
    assert shard_nuscenes(source.root, out, **OPTIONS).num_kept == 0
    assert digests(out) == digests(expected)


def test_a_source_file_that_was_repaired_costs_the_shards_concerned_only(source, expected, tmp_path):
    root, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source.root, root)
    victim = sorted((root / "samples" / "LIDAR_TOP").iterdir())[3]
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 40 * 20])
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(root, out, progress=Interrupt(4), **OPTIONS)
    there = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    victim.write_bytes(whole)
    outcome = shard_nuscenes(root, out, **OPTIONS)
    again = [name for name, inode in there.items() if (out / name).stat().st_ino != inode]
    assert len(again) <= 1
    assert outcome.num_kept == len(there) - len(again) >= 3
    dataset = open_dataset(out)
    for at in range(len(dataset.index)):
        row = dataset.index.row(at)
        span = dataset.shard_path(row).read_bytes()[row.offset : row.offset + row.length]
        members, twin = read_members(row, span, ""), open_dataset(expected)
        there = twin.index.row(twin.find(row.key))
        span = twin.shard_path(there).read_bytes()[there.offset : there.offset + there.length]
        assert members == read_members(there, span, "")
    # What is finished is checked as any dataset is, and made whole in the cut that it has.
    before = digests(out)
    (out / dataset.shards[0].name).unlink()
    assert shard_nuscenes(root, out, **OPTIONS).num_written == 1
    assert digests(out) == before


def test_a_source_file_with_another_content_and_the_same_size_is_noticed(source, tmp_path):
    root, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source.root, root)
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(root, out, progress=Interrupt(4), **OPTIONS)
    for number, victim in enumerate(sorted((root / "samples" / "LIDAR_TOP").iterdir())):
        data = bytearray(victim.read_bytes())
        data[:4] = np.float32(number).tobytes()
        victim.write_bytes(data)
    assert shard_nuscenes(root, out, **OPTIONS).num_kept == 0
    shard_nuscenes(root, tmp_path / "expected", **OPTIONS)
    assert digests(out) == digests(tmp_path / "expected")


def test_another_list_of_samples_is_refused_with_both_sides(source, tmp_path):
    begin(source, tmp_path / "out")
    more = build_nuscenes(tmp_path / "more", {**CLIPS, "e": 2})
    with pytest.raises(DatasetExistsError, match=r"16 samples of 4 clips .* there, 18 samples of 5 clips .* here"):
        shard_nuscenes(more.root, tmp_path / "out", **OPTIONS)


def test_a_finished_dataset_of_a_changed_source_is_refused(source, tmp_path):
    root, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source.root, root)
    shard_nuscenes(root, out, **OPTIONS)
    path = next((root / "samples" / "LIDAR_TOP").iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DatasetExistsError, match=r"the source's content \(SHA-256 of its scan\) is '.*' there and '.*' here"
    ):
        shard_nuscenes(root, out, **OPTIONS)


@pytest.mark.process
def test_every_rename_may_be_the_last_thing_a_run_does(source, tmp_path):
    small = build_nuscenes(tmp_path / "source", {"a": 2, "b": 2}, cameras=("CAM_FRONT", "CAM_BACK"), num_points=20)
    (tmp_path / "scratch").mkdir()
    program = [sys.executable, "-m", "support.crash_at_every_rename", str(small.root), str(tmp_path / "scratch")]
    done = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


@pytest.mark.process
@pytest.mark.parametrize("num_workers", WORKERS)
def test_killed_at_any_time_the_same_command_finishes(source, expected, tmp_path, num_workers):
    # Deaths at times that are random, from the start of Python to the last rename: as it happens.
    draw = random.Random(num_workers)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "fuelrail", "shard", f"nuscenes:{source.root}", str(out), "--seed", "7",
        "--shard-size", "30000", "--splits", "train=0.75,val=0.25", "--workers", str(num_workers),
    ]  # fmt: skip
    times = []
    for _ in range(4):
        begun = time.monotonic()
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        # The first is let run until work begins, so that its length is known and the others die in the middle.
        while not times and process.poll() is None and not list(out.glob("*.tar")):
            time.sleep(0.002)
        if not times:
            times.append(time.monotonic() - begun)
        else:
            time.sleep(times[0] * draw.uniform(0.8, 1.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        present = {name: digest for name, digest in digests(out).items() if not name.startswith(WORK_FOLDER)}
        assert present.items() <= digests(expected).items()
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert digests(out) == digests(expected)


def to_all(process, number):
    os.killpg(process.pid, number)  # as a terminal does


def to_the_first(process, number):
    process.send_signal(number)  # as Kubernetes does


@pytest.mark.process
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGINT, to_all), (signal.SIGTERM, to_all), (signal.SIGTERM, to_the_first)]
)
def test_ctrl_c_and_sigterm_end_cleanly(tmp_path, num_workers, number, send):
    image = encode_image(1, 48, 32)
    made = build_nuscenes(tmp_path / "source", {"a": 300}, images=[image], cameras=("CAM_FRONT",), num_tracks=0)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "fuelrail", "shard", f"nuscenes:{made.root}", str(out), "--shard-size", "5kB",
        "--workers", str(num_workers),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and not list(out.glob("*.tar")):
        time.sleep(0.002)
    send(process, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said == "fuelrail: finished shards are kept; run the same command to resume\nfuelrail: interrupted\n"
    assert not (out / "dataset.json").exists()
    assert list((out / WORK_FOLDER / "tmp").iterdir()) == []


def test_two_runs_at_once_are_refused(source, tmp_path):
    out = tmp_path / "out"
    with Workspace(FolderOutput(str(out))), pytest.raises(DatasetError, match=r"another run .* is writing"):
        shard_nuscenes(source.root, out, **OPTIONS)


def broken(source, tmp_path):
    shutil.copytree(source.root, tmp_path / "source")
    return sorted((tmp_path / "source" / "samples" / "CAM_BACK").iterdir())[5]


@pytest.mark.process
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_truncated_jpeg_is_named_and_nothing_half_written(source, expected, tmp_path, num_workers):
    victim = broken(source, tmp_path)
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-9])
    out = tmp_path / "out"
    with pytest.raises(SourceError, match=f"samples/CAM_BACK/{victim.name}.*truncated JPEG: {len(whole) - 9} bytes"):
        shard_nuscenes(tmp_path / "source", out, num_workers=num_workers, **OPTIONS)
    assert not (out / "dataset.json").exists()
    present = {name: digest for name, digest in digests(out).items() if name.endswith((".tar", ".idx"))}
    assert present.items() <= digests(expected).items()
    assert list((out / WORK_FOLDER / "tmp").iterdir()) == []


def test_an_image_of_another_size_than_the_tables_say(source, tmp_path):
    victim = broken(source, tmp_path)
    other = build_nuscenes(tmp_path / "other", {"x": 1}, size=(64, 64), cameras=("CAM_FRONT",))
    victim.write_bytes(other.files("CAM_FRONT")[0].read_bytes())
    with pytest.raises(SourceError, match="64 x 64 pixels, the source's tables say 48 x 32"):
        shard_nuscenes(tmp_path / "source", tmp_path / "out", **OPTIONS)


def test_a_file_that_changes_or_vanishes_during_the_run(source, tmp_path, monkeypatch):
    victim = broken(source, tmp_path)
    scan = NuScenesSource.scan

    def scan_then(harm):
        def scanning(self, out):
            info = scan(self, out)
            harm()
            return info

        monkeypatch.setattr(NuScenesSource, "scan", scanning)

    whole = victim.read_bytes()
    scan_then(lambda: victim.write_bytes(whole + b"\0"))
    with pytest.raises(SourceError, match=f"had {len(whole)} bytes when the run started and has {len(whole) + 1} now"):
        shard_nuscenes(tmp_path / "source", tmp_path / "one", **OPTIONS)
    victim.write_bytes(whole)
    scan_then(victim.unlink)
    with pytest.raises(SourceError, match=f"{victim.name}' cannot be read: No such file"):
        shard_nuscenes(tmp_path / "source", tmp_path / "two", **OPTIONS)


def test_an_output_that_cannot_be(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetExistsError, match="file' is a file"):
        shard_nuscenes(source.root, tmp_path / "file", **OPTIONS)
    with pytest.raises(DatasetExistsError, match=r"out' cannot be made: '.*file' is a file"):
        shard_nuscenes(source.root, tmp_path / "file" / "out", **OPTIONS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    with pytest.raises(DatasetExistsError, match=r"notes\.txt"):
        shard_nuscenes(source.root, tmp_path / "full", **OPTIONS)


def test_a_source_that_fails_leaves_nothing(source, tmp_path):
    with pytest.raises(SourceError):
        shard_nuscenes(source.root, tmp_path / "a" / "out", version="v9", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_clip_or_an_order_that_cannot_be_leaves_nothing(source, tmp_path):
    with pytest.raises(ConfigError, match="names clip 'z'"):
        shard_nuscenes(source.root, tmp_path / "out", splits={"train": ["z"]})
    with pytest.raises(ConfigError, match="workers must be >= 1, got 0"):
        shard_nuscenes(source.root, tmp_path / "out", num_workers=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", ["clip", "window:2"])
def test_units_stay_together_in_the_shards(source, tmp_path, order):
    shard_nuscenes(source.root, tmp_path / "out", order=order, shard_size_bytes=60_000)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest.order_unit == order
    clips, frames = dataset.index.strings("clip_id"), dataset.index.column("frame")
    length = 2 if order == "window:2" else 100
    starts = [at for at in range(len(clips)) if frames[at] % length == 0]
    for first, end in zip(starts, [*starts[1:], len(clips)], strict=True):
        assert len(set(clips[first:end])) == 1
        assert np.array_equal(frames[first:end], np.arange(frames[first], frames[first] + end - first))
        shards = {dataset.index.row(at).shard for at in range(first, end)}
        assert len(shards) == 1
    assert sorted(clips) == sorted(name for name, count in CLIPS.items() for _ in range(count))


def test_a_masked_camera_goes_through(source, tmp_path):
    victim = broken(source, tmp_path)
    victim.unlink()
    with pytest.raises(SourceError, match=victim.name):
        shard_nuscenes(tmp_path / "source", tmp_path / "out", **OPTIONS)
    outcome = shard_nuscenes(tmp_path / "source", tmp_path / "out", missing_camera="mask", **OPTIONS)
    assert outcome.manifest.provenance["facts"]["num_masked_cameras"] == 1


def metas_of(out):
    dataset = open_dataset(out)
    found = {}
    for position in range(len(dataset.index)):
        row = dataset.index.row(position)
        with dataset.shard_path(row).open("rb") as file:
            file.seek(row.offset)
            span = file.read(row.length)
        found[row.key] = decode_meta(read_members(row, span, "shard", ["meta.json"])["meta.json"])
    return found


def test_selected_samples_and_their_neighbours(source, tmp_path):
    chosen = {"select": "frame != 2 and clip_id in ('a', 'b') and num_car >= 1"}
    outcome = shard_nuscenes(source.root, tmp_path / "out", **chosen)
    metas = metas_of(tmp_path / "out")
    assert sorted(metas) == ["a-000000", "a-000001", "a-000003", "b-000000", "b-000001", "b-000003", "b-000004"]
    neighbours = {key: (meta.prev_key, meta.next_key) for key, meta in metas.items()}
    assert neighbours["a-000000"] == (None, "a-000001")
    assert neighbours["a-000001"] == ("a-000000", None)
    assert neighbours["a-000003"] == (None, None)
    assert neighbours["b-000003"] == (None, "b-000004")
    assert metas["b-000003"].frame_idx == 3
    assert outcome.manifest.provenance["recipe"]["select"] == chosen["select"]
    assert outcome.manifest.num_clips == 2


def test_a_limit_takes_the_first_samples_of_the_source(source, tmp_path):
    shard_nuscenes(source.root, tmp_path / "out", limit=6, splits={"train": 0.5, "val": 0.5})
    assert sorted(keys_of(tmp_path / "out")) == [*(f"a-{n:06d}" for n in range(4)), "b-000000", "b-000001"]
    shard_nuscenes(source.root, tmp_path / "both", select="clip_id != 'a'", limit=2)
    assert sorted(keys_of(tmp_path / "both")) == ["b-000000", "b-000001"]
    shard_nuscenes(source.root, tmp_path / "all", limit=1000)
    assert len(keys_of(tmp_path / "all")) == sum(CLIPS.values())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"select": "num_car > 99"}, "none of the source's 16 samples is selected by 'num_car > 99'"),
        ({"select": "colour == 'red'"}, "colour"),
        ({"select": "__import__('os')"}, "filter"),
        ({"limit": 0}, "limit"),
    ],
)
def test_selections_that_cannot_be(source, tmp_path, values, says):
    with pytest.raises((ConfigError, OrderError), match=says):
        shard_nuscenes(source.root, tmp_path / "out", **values)
    assert list(tmp_path.iterdir()) == []
