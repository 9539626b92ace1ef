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
    DatasetExistsError,
    ManifestError,
    OrderError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.sources.nuscenes.source import NuScenesSource
from support.nuscenes_tables import build_nuscenes, encode_image
from support.sharding import (
    Interrupt,
    digests,
    environment,
    flip,
    members_of,
    shard_command,
    shard_nuscenes,
)
from support.source_world import samples_of

CLIPS = "a4 b5 c3 d4"
OPTIONS = {"shard_size_bytes": 30_000, "splits": {"train": 0.75, "val": 0.25}}
AS_WORDS = (
    "--seed",
    "7",
    "--shard-size",
    "30000",
    "--splits",
    "train=0.75,val=0.25",
)
PROCESSES = ("--workers", "2", "--engine", "processes")


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot(CLIPS)


@pytest.fixture(scope="module")
def expected(sharded, source):
    """The dataset as one undisturbed worker makes it."""
    return sharded(source, **OPTIONS)


@pytest.fixture
def copy(source, tmp_path):
    """A dataroot to spoil."""
    return shutil.copytree(source.root, tmp_path / "source")


def begin(root, out, after=2, **options):
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(root, out, progress=Interrupt(after), **options, **OPTIONS)


def shards_in(out):
    return {
        name: digest for name, digest in digests(out).items() if name.endswith((".tar", ".idx"))
    }


@pytest.mark.costly
def test_the_fingerprint_covers_every_byte_and_row_but_not_the_version_of_the_tool(
    source, expected, copy, tmp_path
):
    """Another version is another recipe, and stands in the provenance; rows and bytes are the same."""
    ours = open_dataset(expected).manifest
    repeated = shard_nuscenes(
        source.root, tmp_path / "out", tool="fuelrail 99.0", **OPTIONS
    ).manifest
    assert repeated.fingerprint == ours.fingerprint
    assert repeated.digest != ours.digest
    assert (
        repeated.provenance["recipe"]["tool"]
        == "fuelrail 99.0"
        != ours.provenance["recipe"]["tool"]
    )
    named = shard_nuscenes(source.root, tmp_path / "named", name="renamed", **OPTIONS).manifest
    fewer = shard_nuscenes(source.root, tmp_path / "fewer", limit=15, **OPTIONS).manifest
    flip(
        next(path for path in sorted(copy.rglob("*.jpg")) if "sweeps" not in path.parts),
        -10,
    )
    byte = shard_nuscenes(copy, tmp_path / "byte", **OPTIONS).manifest
    assert byte.num_samples == ours.num_samples
    assert len({manifest.fingerprint for manifest in (ours, named, fewer, byte)}) == 4


def test_a_moved_source_gives_the_same_bytes(expected, copy, tmp_path):
    shard_nuscenes(copy, tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == digests(expected)


def test_nothing_but_the_dataset_is_left(source, expected):
    names = set(digests(expected))
    dataset = open_dataset(expected)
    shards = {name for shard in dataset.shards for name in (shard.name, shard.idx_name)}
    assert names == {
        "dataset.json",
        *shards,
        *(entry.name for entry in dataset.manifest.files),
    }
    tables = {
        "shards.arrow",
        "index.arrow",
        "keys.arrow",
        "blocks.sha256",
        "attributes.parquet",
    }
    assert {*tables, "train-000000.idx", "val-000000.tar"} <= names
    for path in expected.iterdir():
        for private in (str(expected).encode(), str(source.root).encode()):
            assert private not in path.read_bytes()


def test_a_finished_dataset_is_checked_and_left(source, expected, tmp_path):
    shutil.copytree(expected, tmp_path / "out")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    outcome = shard_nuscenes(source.root, tmp_path / "out", **OPTIONS)
    assert (outcome.num_written, outcome.num_kept) == (
        0,
        outcome.manifest.num_shards,
    )
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("victim", "harm"),
    [
        ("train-000001.tar", "gone"),
        ("train-000001.tar", "cut"),
        ("train-000001.tar", "flipped"),
        ("train-000000.idx", "gone"),
        ("index.arrow", "cut"),
        ("index.arrow", "flipped"),
        ("attributes.parquet", "cut"),
    ],
)
def test_a_finished_dataset_that_was_damaged_is_made_whole(
    source, expected, tmp_path, victim, harm
):
    out = shutil.copytree(expected, tmp_path / "out")
    if harm == "flipped":
        flip(out / victim)
    elif harm == "cut":
        os.truncate(out / victim, (out / victim).stat().st_size // 2)
    else:
        (out / victim).unlink()
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
        ({"seed": 8}, "seed: 7 there, 8 here"),
        ({"order": "clip"}, 'order: "frame" there, "clip" here'),
        ({"shard_size_bytes": 40_000}, "shard size: 30000 there, 40000 here"),
        (
            {"splits": None},
            r'splits: \{"train":0.75,"val":0.25\} there, none here',
        ),
        ({"layout": "none"}, 'layout: "member" there, "none" here'),
        ({"points": False}, "source options.points: true there, false here"),
        ({"name": "other"}, 'name: none there, "other" here'),
    ],
)
def test_other_options_are_refused_with_both_sides(source, expected, partial, change, says):
    for out in (expected, partial):
        before = digests(out)
        with pytest.raises(DatasetExistsError, match=says) as caught:
            shard_nuscenes(source.root, out, **{**OPTIONS, **change})
        assert "choose another folder" in str(caught.value)
        after = digests(out)
        assert {name for name in before if before[name] != after.pop(name, None)} <= {
            f"{WORK_FOLDER}/lock"
        }
        assert after.keys() <= {f"{WORK_FOLDER}/lock"}


@pytest.fixture(scope="module")
def partial(source, tmp_path_factory):
    """A run that was interrupted."""
    out = tmp_path_factory.mktemp("partial") / "out"
    begin(source.root, out)
    return out


@pytest.mark.process
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_interrupted_run_continues(source, expected, tmp_path, kind):
    out = tmp_path / "out"
    begin(source.root, out, engine=LocalEngine(2, kind))
    assert not (out / "dataset.json").exists()
    shards = [path.name for path in out.glob("*.tar")]
    assert len(shards) >= 2
    outcome = shard_nuscenes(source.root, out, engine=LocalEngine(2, kind), **OPTIONS)
    assert outcome.num_kept == len(shards)
    assert digests(out) == digests(expected)


def test_a_shard_that_was_damaged_in_between_is_written_again(source, expected, tmp_path):
    out = tmp_path / "out"
    begin(source.root, out, after=3)
    shards = sorted(out.glob("*.tar"))
    shards[0].write_bytes(shards[0].read_bytes()[:-700])
    flip(shards[1], 3000, 255)
    outcome = shard_nuscenes(source.root, out, **OPTIONS)
    assert outcome.num_kept == len(shards) - 2
    assert digests(out) == digests(expected)


def test_a_record_that_was_damaged_in_between_is_not_believed(source, expected, partial, tmp_path):
    out = shutil.copytree(partial, tmp_path / "out")
    for record in (out / WORK_FOLDER / "records").iterdir():
        record.write_bytes(record.read_bytes()[:-3])
    assert shard_nuscenes(source.root, out, **OPTIONS).num_kept == 0
    assert digests(out) == digests(expected)


@pytest.mark.costly
def test_a_source_file_that_was_repaired_costs_the_shards_concerned_only(expected, copy, tmp_path):
    out = tmp_path / "out"
    victim = sorted((copy / "samples" / "LIDAR_TOP").iterdir())[3]
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 40 * 20])
    begin(copy, out, after=4)
    inodes = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    victim.write_bytes(content)
    outcome = shard_nuscenes(copy, out, **OPTIONS)
    rewritten = [name for name, inode in inodes.items() if (out / name).stat().st_ino != inode]
    assert len(rewritten) <= 1
    assert outcome.num_kept == len(inodes) - len(rewritten) >= 3
    assert members_of(out) == members_of(expected)
    # What is finished is checked as any dataset is, and made whole in the cut that it has.
    before = digests(out)
    (out / open_dataset(out).shards[0].name).unlink()
    assert shard_nuscenes(copy, out, **OPTIONS).num_written == 1
    assert digests(out) == before


@pytest.mark.costly
def test_a_source_file_with_another_content_and_the_same_size_is_noticed(copy, tmp_path):
    out = tmp_path / "out"
    begin(copy, out, after=4)
    for victim in (copy / "samples" / "LIDAR_TOP").iterdir():
        flip(victim, 1)
    assert shard_nuscenes(copy, out, **OPTIONS).num_kept == 0
    shard_nuscenes(copy, tmp_path / "expected", **OPTIONS)
    assert digests(out) == digests(tmp_path / "expected")


@pytest.mark.costly
def test_another_list_of_samples_and_a_changed_source_are_refused_with_both_sides(
    partial, expected, copy, dataroot
):
    with pytest.raises(
        DatasetExistsError,
        match=r"16 samples of 4 clips .* there, 18 samples of 5 clips .* here",
    ):
        shard_nuscenes(dataroot(f"{CLIPS} e2").root, partial, **OPTIONS)
    path = next((copy / "samples" / "LIDAR_TOP").iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DatasetExistsError,
        match=r"the source's content \(SHA-256 of its scan\): .* there, .* here",
    ):
        shard_nuscenes(copy, expected, **OPTIONS)


@pytest.mark.process
def test_every_rename_may_be_the_last_thing_a_run_does(source, tmp_path):
    small = build_nuscenes(
        tmp_path / "source",
        {"a": 2, "b": 2},
        cameras=("CAM_FRONT", "CAM_BACK"),
        num_points=20,
    )
    (tmp_path / "scratch").mkdir()
    program = [
        sys.executable,
        "-m",
        "support.crash_at_every_rename",
        str(small.root),
        str(tmp_path / "scratch"),
    ]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10


@pytest.mark.process
@pytest.mark.parametrize("workers", [("--workers", "2"), PROCESSES], ids=["threads", "processes"])
def test_killed_at_any_time_the_same_command_finishes(source, expected, tmp_path, workers):
    # Deaths at times that are random, from the start of Python to the last rename: as it happens.
    draw = random.Random(len(workers))
    out = tmp_path / "out"
    command = shard_command(f"nuscenes:{source.root}", out, *AS_WORDS, *workers)
    times = []
    for _ in range(3):
        start_s = time.monotonic()
        process = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        # The first is let run until work begins, so that its length is known and the others die in the middle.
        while not times and process.poll() is None and not list(out.glob("*.tar")):
            time.sleep(0.002)
        if not times:
            times.append(time.monotonic() - start_s)
        else:
            time.sleep(times[0] * draw.uniform(0.8, 1.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        present = {
            name: digest
            for name, digest in digests(out).items()
            if not name.startswith(WORK_FOLDER)
        }
        assert present.items() <= digests(expected).items()
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert digests(out) == digests(expected)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "to_all", "workers"),
    [
        (signal.SIGINT, True, ("--workers", "2")),
        (signal.SIGINT, True, PROCESSES),
        (signal.SIGTERM, True, ("--workers", "1")),
        (signal.SIGTERM, True, PROCESSES),
        (signal.SIGTERM, False, PROCESSES),
    ],
)
def test_ctrl_c_and_sigterm_end_cleanly(dataroot, tmp_path, number, to_all, workers):
    """A terminal sends to all of the processes, Kubernetes to the first."""
    nuscenes = dataroot(
        "a300",
        images=[encode_image(1, 48, 32)],
        cameras=("CAM_FRONT",),
        num_tracks=0,
    )
    out = tmp_path / "out"
    command = shard_command(f"nuscenes:{nuscenes.root}", out, "--shard-size", "5kB", *workers)
    process = subprocess.Popen(
        command,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not list(out.glob("*.tar")):
        time.sleep(0.002)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=280)
    assert process.returncode == 130, said
    assert (
        said
        == "fuelrail: finished shards are kept; run the same command to resume\nfuelrail: interrupted\n"
    )
    assert not (out / "dataset.json").exists()
    assert list((out / WORK_FOLDER / "tmp").iterdir()) == []


def choose_back_image(root):
    return sorted((root / "samples" / "CAM_BACK").iterdir())[5]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_truncated_jpeg_is_named_and_nothing_half_written(expected, copy, tmp_path, kind):
    victim = choose_back_image(copy)
    content = victim.read_bytes()
    victim.write_bytes(content[:-9])
    out = tmp_path / "out"
    with pytest.raises(
        SourceError,
        match=f"samples/CAM_BACK/{victim.name}.*truncated JPEG: {len(content) - 9} bytes",
    ):
        shard_nuscenes(copy, out, engine=LocalEngine(2, kind), **OPTIONS)
    assert not (out / "dataset.json").exists()
    assert shards_in(out).items() <= digests(expected).items()
    assert list((out / WORK_FOLDER / "tmp").iterdir()) == []


def test_an_image_of_another_size_than_the_tables_say(copy, tmp_path):
    choose_back_image(copy).write_bytes(encode_image(1, 64, 64))
    with pytest.raises(SourceError, match="64 x 64 pixels, the source's tables say 48 x 32"):
        shard_nuscenes(copy, tmp_path / "out", **OPTIONS)


def test_a_file_that_changes_or_vanishes_during_the_run(copy, tmp_path, monkeypatch):
    victim = choose_back_image(copy)
    scan = NuScenesSource.scan

    def scan_then(harm):
        def scanning(self, out):
            info = scan(self, out)
            harm()
            return info

        monkeypatch.setattr(NuScenesSource, "scan", scanning)

    content = victim.read_bytes()
    scan_then(lambda: victim.write_bytes(content + b"\0"))
    with pytest.raises(
        SourceError,
        match=f"had {len(content)} bytes when the run started and has {len(content) + 1} now",
    ):
        shard_nuscenes(copy, tmp_path / "one", **OPTIONS)
    victim.write_bytes(content)
    scan_then(victim.unlink)
    with pytest.raises(SourceError, match=f"{victim.name}' cannot be read: No such file"):
        shard_nuscenes(copy, tmp_path / "two", **OPTIONS)


@pytest.mark.parametrize("order", ["clip", "window:2"])
def test_units_stay_together_in_the_shards(source, tmp_path, order):
    shard_nuscenes(source.root, tmp_path / "out", order=order, shard_size_bytes=60_000)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest.order_unit == order
    clips = dataset.index.strings("clip_id")
    frames = dataset.index.column("frame")
    length = 2 if order == "window:2" else 100
    starts = [position for position in range(len(clips)) if frames[position] % length == 0]
    for first, end in zip(starts, [*starts[1:], len(clips)], strict=True):
        assert len(set(clips[first:end])) == 1
        assert np.array_equal(
            frames[first:end],
            np.arange(frames[first], frames[first] + end - first),
        )
        shards = {dataset.index.row(position).shard for position in range(first, end)}
        assert len(shards) == 1
    assert sorted(clips) == list("aaaabbbbbcccdddd")


def test_selected_samples_and_their_neighbours(source, tmp_path):
    chosen = {"select": "frame != 2 and clip_id in ('a', 'b') and num_car >= 1"}
    outcome = shard_nuscenes(source.root, tmp_path / "out", **chosen)
    metas = {key: sample.meta for key, sample in samples_of(tmp_path / "out").items()}
    assert sorted(metas) == [
        "a-000000",
        "a-000001",
        "a-000003",
        "b-000000",
        "b-000001",
        "b-000003",
        "b-000004",
    ]
    neighbours = {key: (meta.prev_key, meta.next_key) for key, meta in metas.items()}
    assert neighbours["a-000000"] == (None, "a-000001")
    assert neighbours["a-000001"] == ("a-000000", None)
    assert neighbours["a-000003"] == (None, None)
    assert neighbours["b-000003"] == (None, "b-000004")
    assert metas["b-000003"].frame_idx == 3
    assert outcome.manifest.provenance["recipe"]["select"] == chosen["select"]
    assert outcome.manifest.num_clips == 2


@pytest.mark.costly
def test_a_limit_takes_the_first_samples_of_the_source(source, tmp_path):
    shard_nuscenes(
        source.root,
        tmp_path / "out",
        limit=6,
        splits={"train": 0.5, "val": 0.5},
    )
    keys = sorted(open_dataset(tmp_path / "out").index.strings("key"))
    assert keys == [*(f"a-{n:06d}" for n in range(4)), "b-000000", "b-000001"]
    shard_nuscenes(source.root, tmp_path / "both", select="clip_id != 'a'", limit=2)
    assert sorted(open_dataset(tmp_path / "both").index.strings("key")) == [
        "b-000000",
        "b-000001",
    ]
    assert shard_nuscenes(source.root, tmp_path / "all", limit=1000).manifest.num_samples == 16


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"select": "num_car > 99"},
            "none of the source's 16 samples is selected by 'num_car > 99'",
        ),
        ({"select": "colour == 'red'"}, "colour"),
        ({"select": "__import__('os')"}, "filter"),
        ({"limit": 0}, "limit"),
        ({"splits": {"train": ["z"]}}, "names clip 'z'"),
        ({"num_workers": 0}, "workers must be >= 1, got 0"),
        ({"version": "v9"}, "v9"),
    ],
)
def test_options_that_cannot_be_leave_nothing(source, tmp_path, values, says):
    with pytest.raises((ConfigError, OrderError, SourceError), match=says):
        shard_nuscenes(source.root, tmp_path / "out", **values)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_times_of_files_play_no_part(source, expected, partial, copy, tmp_path):
    # The machine's clock may have gone back, or the files may come from another one's future.
    out = shutil.copytree(partial, tmp_path / "out")
    num_shards = len(list(out.glob("*.tar")))
    shutil.copytree(out, tmp_path / "again", copy_function=shutil.copy)

    def turn_clocks(root):
        for path in root.rglob("*"):
            ahead = time.time() + (86_400 if path.name < "m" else -86_400)
            os.utime(path, (ahead, ahead))

    turn_clocks(out)
    assert shard_nuscenes(source.root, out, **OPTIONS).num_kept == num_shards
    assert digests(out) == digests(expected)
    # A source file of another time may have another content: its shard is written again, to the same bytes.
    turn_clocks(copy)
    assert shard_nuscenes(copy, tmp_path / "again", **OPTIONS).num_kept == 0
    assert digests(tmp_path / "again") == digests(expected)
