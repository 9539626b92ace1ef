"""Samples deleted from a dataset: nothing of them is left, all others are as they were, and kills change nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile

import msgspec
import pyarrow.parquet as pq
import pytest
import xxhash

import fuelrail as fr
from fuelrail.__main__ import main
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
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import repair
from fuelrail.sharding.verify.dataset import verify
from support.batches import TINY, load
from support.datasets import build_dataset
from support.layers import values_of, write_layer
from support.sharding import digests, environment, flip, members_of, shard_nuscenes

LAYOUTS = {
    "members": {},
    "frames": {"layout": "frame"},
    "none": {"layout": "none"},
    "clips": {"order": "clip", "splits": {"train": 0.5, "val": 0.5}},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def source(request, dataroot, sharded):
    return sharded(dataroot("a4 b5 c3 d4"), shard_size_bytes=40_000, **LAYOUTS[request.param])


@pytest.fixture
def dataset(source, tmp_path):
    shutil.copytree(source, tmp_path / "dataset")
    return tmp_path / "dataset"


def choose(dataset):
    """A clip, and one sample of another one; and the rows of both."""
    index = open_dataset(dataset).index
    clips, keys = index.strings("clip_id"), index.strings("key")
    clip = sorted(set(clips))[1]
    key = next(key for key, of in zip(keys, clips, strict=True) if of != clip)
    return clip, key, [at for at in range(len(keys)) if clips[at] == clip or keys[at] == key]


def span_of(opened, at):
    row = opened.index.row(at)
    return opened.shard_path(row).read_bytes()[row.offset :][: row.length]


def traces(dataset, rows):
    """What must not be found anywhere: keys, digests, and bytes of each span that the others do not have."""
    opened = open_dataset(dataset)
    found = {}
    kept = [at for at in range(len(opened)) if at not in rows]
    others = {row.xxh3 for at in kept for row in opened.index.row(at).members}
    rest = b"".join(span_of(opened, at) for at in kept)
    for at in rows:
        row, span = opened.index.row(at), span_of(opened, at)
        found[row.key.encode()] = "key"
        members = [one.xxh3 for one in row.members if one.xxh3 not in others]
        for number in (row.xxh3, xxhash.xxh3_64_intdigest(row.key.encode()), *members):
            found |= {
                number.to_bytes(8, "little"): f"digest of {row.key}",
                f"{number:016x}".encode(): "digest as text",
            }
        pieces = [span[first : first + 40] for first in range(0, len(span) - 40, 40)]
        own = [
            piece for piece in pieces if piece not in rest and piece.count(0) < 4
        ]  # else a header of the tar
        assert len(own) > 10
        found |= dict.fromkeys(own, f"bytes of {row.key}")
    return found


def search(folder, needles):
    """Look for them in every byte of every file below a folder, and in what is compressed there."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        texts = [path.read_bytes(), str(path).encode()]
        if path.name == "attributes.parquet":
            texts.append(json.dumps(pq.read_table(path).to_pydict(), default=str).encode())
        for needle, what in needles.items():
            assert not any(needle in text for text in texts), f"{path} has the {what}"


def check(dataset, before, names, rows, report):
    """Compare the dataset with what it was."""
    assert verify(dataset, deep=True, num_threads=2).faults == []
    opened = open_dataset(dataset)
    kept = [at for at in range(len(before["keys"])) if at not in rows]
    assert opened.index.strings("key") == [before["keys"][at] for at in kept]
    gone, expected = {before["keys"][at] for at in rows}, {}
    for key in opened.index.strings("key"):  # neighbours say nothing of them
        meta = before["members"][key][META]
        named = {name: None for name in ("prev_key", "next_key") if getattr(meta, name) in gone}
        expected[key] = {**before["members"][key], META: msgspec.structs.replace(meta, **named)}
    assert members_of(dataset) == expected
    assert not any(key.encode() in data for key in gone for data in metas(dataset))
    table = opened.table
    assert table.equals(before["table"].take(kept))
    assert opened.manifest.lineage.parents == (before["fingerprint"],)
    assert opened.manifest.lineage.ancestors[0].num_samples == len(before["keys"])
    assert {one.key for one in report.samples} == {before["keys"][at] for at in rows}
    assert report.names == sorted(names)
    first = report.folders[0]
    assert (first.before, first.after) == (before["fingerprint"], opened.manifest.fingerprint)
    assert {
        name: digest for name, digest in before["digests"].items() if name in first.shards
    } == first.shards
    for path in dataset.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [(one.name, one.size) for one in tar]
        listed = subprocess.run(
            ["tar", "-tf", path], capture_output=True, text=True, check=True
        ).stdout.split()
        assert [name for name, _ in members] == listed
        if path.with_suffix(".idx").exists():
            lines = path.with_suffix(".idx").read_text().splitlines()
            assert lines[0] == f"v1.2 {len({name.partition('.')[0] for name in listed})}"


def metas(dataset):
    opened = open_dataset(dataset)
    for at in range(len(opened)):
        row = opened.index.row(at)
        path = opened.shard_path(row)
        yield bytes(
            read_members(row, span_of(opened, at), path.name, dictionary=opened.dictionary)[META]
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
    before, needles = state(dataset), traces(dataset, rows)
    layer = write_layer(dataset, tmp_path / "layer")
    some = sorted({0, 3, 6, 9, 12, 15, *rows[1:3]})
    part = write_layer(dataset, tmp_path / "part", some)
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
        dataset, 2, image=TINY, layers={"layer": layer}, storage={"cache_dir": tmp_path / "cache"}
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
    check(dataset, before, [clip, key], rows, report)
    assert msgspec.json.decode(receipt.read_bytes(), type=fr.ForgetReport) == report
    receipt.unlink()
    search(tmp_path, needles)
    assert len(report.caches) == 2
    opened = open_dataset(dataset)
    for path, positions in ((layer, range(len(before["keys"]))), (part, some)):
        assert verify(path, deep=True, num_threads=1).faults == []
        bound = open_layer("layer", path, opened)
        for at, key in enumerate(opened.index.strings("key")):
            position = before["keys"].index(key)
            found = bound.find(at, key)
            assert (found is not None) == (position in positions)
            if path == layer:
                assert found[1].xxh3 == layer_values[position]
                assert bound.data.read(found[0], "loss")["loss"] == values_of(position)["loss"]
    # The rest of a step would be a second deletion.
    second = opened.index.strings("key")[0]
    again = fr.forget(dataset, [second], layers=[layer, part])
    assert [one.before for one in again.folders] == [one.after for one in report.folders]
    assert verify(dataset, deep=True, num_threads=1).faults == []
    assert len(open_dataset(dataset).manifest.lineage.ancestors) == 2


def test_shards_without_them_and_their_neighbours_are_not_written(dataset):
    for which in (-1, 0):  # the last shard goes; then the first, and the others move up
        opened = open_dataset(dataset)
        shards = list(opened.shards)
        inodes = {one.sha256: (dataset / one.name).stat().st_ino for one in shards}
        first = shards[which].first_sample
        report = fr.forget(
            dataset, opened.index.strings("key", first, first + shards[which].num_samples)
        )
        assert shards[which].name in report.folders[0].shards
        now = list(open_dataset(dataset).shards)
        assert len(now) == len(shards) - 1
        kept = inodes.keys() - set(report.folders[0].shards.values())
        assert {one.sha256: (dataset / one.name).stat().st_ino for one in now}.items() >= {
            digest: inodes[digest] for digest in kept
        }.items()
    assert verify(dataset, deep=True, num_threads=1).faults == []
    assert not (dataset / ".fuelrail").exists()


@pytest.fixture
def plain(dataroot, sharded, tmp_path):
    shutil.copytree(sharded(dataroot("a4 b5 c3 d4"), shard_size_bytes=40_000), tmp_path / "dataset")
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
    other = sharded(dataroot("e2 f3"))
    foreign = write_layer(other, tmp_path / "foreign")
    only = write_layer(plain, tmp_path / "only", choose(plain)[2][:2])
    before = digests(tmp_path)
    for error, names, options, what in (
        (OrderError, [clip, "nobody"], {}, "1 names are neither"),
        (OrderError, str(tmp_path / "none.txt"), {}, "cannot be read"),
        (ConfigError, everything, {}, "nothing would be left of"),
        (ManifestError, [clip], {"layers": [foreign]}, "belongs to dataset"),
        (ManifestError, [clip], {"layers": [plain]}, "not a Fuelrail manifest"),
        (ConfigError, [clip], {"layers": ["memory://layer"]}, "is at a URL"),
        (ConfigError, choose(plain)[:2], {"layers": [only]}, "nothing would be left of"),
    ):
        with pytest.raises(error, match=what):
            fr.forget(plain, names, **options)
        assert digests(tmp_path) == before
    with pytest.raises(ConfigError, match="is at a URL"):
        fr.forget("s3://bucket/dataset", [clip])
    with pytest.raises(fr.DatasetNotReadyError):
        fr.forget(tmp_path / "none", [clip])
    assert not (tmp_path / "none").exists()
    shard = next(
        one.name for one in open_dataset(plain).shards if clip in str(members_of(plain).keys())
    )
    flip(plain / shard)
    names = [open_dataset(plain).index.row(0).key]
    with pytest.raises((ChecksumError, fr.ShardError)):
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
@pytest.mark.parametrize("which", ["3", pytest.param("all", marks=pytest.mark.long)])
def test_kills_change_nothing(plain, tmp_path, which):
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
        which,
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
