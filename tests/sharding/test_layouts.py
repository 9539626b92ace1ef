"""Layouts and the dictionary from the source to shards and from shards to shards: the same members, the same bytes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess

import pytest

from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    SourceError,
)
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.shards import write_shards
from fuelrail.sharding.append import append
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import repair
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample
from support.nuscenes_tables import build_nuscenes
from support.plain_tables import rows_of
from support.sharding import (
    Interrupt,
    digests,
    flip,
    members_of,
    reshard,
    shard_nuscenes,
)

LAYOUTS = {
    "member": {"layout": "member"},
    "frame": {"layout": "frame"},
    "none": {"layout": "none"},
    "dictionary": {"layout": "member", "dictionary_bytes": 1024},
}
SHARD_BYTES = 40_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts") / "source"
    build_nuscenes(root, {"a": 14, "b": 12, "c": 10}, num_points=61)
    return root


@pytest.fixture(scope="module")
def outs(source, tmp_path_factory):
    base = tmp_path_factory.mktemp("layouts-out")
    for name, options in LAYOUTS.items():
        shard_nuscenes(source, base / name, shard_size_bytes=SHARD_BYTES, **options)
    return base


@pytest.mark.costly
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_holds_the_same_and_is_whole(outs, tmp_path, name):
    report = verify(outs / name, deep=True, num_threads=2)
    assert report.faults == []
    assert report.num_images == 36 * 6
    assert members_of(outs / name) == members_of(outs / "member")
    suffix = ".tar.zst" if name == "frame" else ".tar"
    dataset = open_dataset(outs / name)
    manifest = dataset.manifest
    assert manifest.num_shards == len(dataset.shards) > 3
    assert all(entry.name.endswith(suffix) for entry in dataset.shards)
    assert manifest.compression["layout"] == LAYOUTS[name]["layout"]
    listed = {entry.name for entry in manifest.files}
    assert (DICTIONARY_FILE in listed) is (name == "dictionary")
    idx = {entry.idx_name for entry in dataset.shards if entry.idx_bytes}
    listings = [row["idx_sha256"] for row in rows_of(outs / name / "shards.arrow")]
    assert listings == [
        hashlib.sha256((outs / name / entry.idx_name).read_bytes()).digest()
        if entry.idx_bytes
        else bytes(32)
        for entry in dataset.shards
    ]
    write_shards(
        tmp_path / "again", dataset.shards
    )  # as `reshard --append` does, from the entries that it read
    assert (tmp_path / "again").read_bytes() == (outs / name / "shards.arrow").read_bytes()
    assert len(idx) == (0 if name == "frame" else len(dataset.shards))
    assert {path.name for path in (outs / name).iterdir()} == {
        "dataset.json",
        *listed,
        *idx,
        *(entry.name for entry in dataset.shards),
    }


@pytest.mark.costly
@pytest.mark.parametrize("name", ["frame", "dictionary"])
def test_the_same_bytes_from_any_number_of_workers_and_after_a_stop(source, outs, tmp_path, name):
    options = {"shard_size_bytes": SHARD_BYTES, **LAYOUTS[name]}
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(
            source,
            tmp_path / "out",
            num_workers=2,
            progress=Interrupt(2),
            **options,
        )
    assert not (tmp_path / "out" / "dataset.json").exists()
    if name == "dictionary":
        shutil.copytree(tmp_path / "out", tmp_path / "spoiled")
        (tmp_path / "spoiled" / DICTIONARY_FILE).write_bytes(b"damaged")
        shard_nuscenes(source, tmp_path / "spoiled", **options)
        assert digests(tmp_path / "spoiled") == digests(outs / name)
    assert shard_nuscenes(source, tmp_path / "out", num_workers=2, **options).num_kept >= 2
    assert digests(tmp_path / "out") == digests(outs / name)


@pytest.mark.costly
@pytest.mark.parametrize("source_layout", list(LAYOUTS))
@pytest.mark.parametrize("target_layout", ["member", "frame"])
def test_shards_to_shards(outs, tmp_path, source_layout, target_layout):
    reshard(
        outs / source_layout,
        tmp_path / "again",
        seed=7,
        shard_size_bytes=SHARD_BYTES,
        **LAYOUTS[target_layout],
    )
    assert members_of(tmp_path / "again") == members_of(outs / "member")
    assert verify(tmp_path / "again", deep=False, num_threads=2).faults == []


@pytest.mark.costly
def test_repair_of_a_frame_shard(source, outs, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(outs / "frame", out)
    path = out / "train-000001.tar.zst"
    flip(path)
    assert {fault.file for fault in verify(out, deep=False, num_threads=1).faults} == {path.name}
    outcome = repair(out, f"nuscenes:{source}", 1, Quiet())
    assert outcome.num_written == 1
    assert digests(out) == digests(outs / "frame")


def test_repair_of_the_dictionary_costs_no_shard(source, outs, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(outs / "dictionary", out)
    (out / DICTIONARY_FILE).write_bytes(b"not a dictionary")
    outcome = repair(out, f"nuscenes:{source}", 1, Quiet())
    assert outcome.num_written == 0
    assert digests(out) == digests(outs / "dictionary")


def test_a_dictionary_that_cannot_be_made_again_is_said(source, outs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(outs / "dictionary", out)
    (out / DICTIONARY_FILE).unlink()
    monkeypatch.setattr("fuelrail.sharding.write.dictionary._TIMES_ITS_SIZE", 30)
    with pytest.raises(
        DatasetExistsError,
        match=r"zstd\.dict of .* is damaged and cannot be made again",
    ):
        repair(out, f"nuscenes:{source}", 1, Quiet())


def test_a_run_killed_before_it_was_noted_leaves_no_dictionary_to_another(
    source, outs, tmp_path, monkeypatch
):
    # Begun work is known by its recipe; until that stands in OUT, a run with another one may take over.
    options = {"shard_size_bytes": SHARD_BYTES, **LAYOUTS["dictionary"]}

    def killed(*_, **__):
        raise KeyboardInterrupt

    for name in (
        "fuelrail.sharding.output.workspace.Workspace.start",
        "fuelrail.sharding.run.train_or_load_dictionary",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, killed)
            with pytest.raises(KeyboardInterrupt):
                shard_nuscenes(source, tmp_path / name, seed=1, **options)
        assert not (tmp_path / name / DICTIONARY_FILE).exists()
    out = tmp_path / "fuelrail.sharding.output.workspace.Workspace.start"
    shard_nuscenes(source, out, **options)
    assert digests(out) == digests(outs / "dictionary")


def test_options_that_do_not_go_together(source, tmp_path):
    for layout in ("frame", "none"):
        with pytest.raises(
            ConfigError,
            match=f"a dictionary needs layout member, got layout {layout}",
        ):
            make_recipe(layout=layout, dictionary_bytes=4096)
    with pytest.raises(ConfigError, match="dictionary_bytes"):
        make_recipe(dictionary_bytes=2 << 20)
    with pytest.raises(
        ConfigError,
        match="are too little to train a dictionary of 1048576 bytes on",
    ):
        shard_nuscenes(source, tmp_path / "out", limit=1, dictionary_bytes=1 << 20)


def test_uncompressed_shards_have_the_size_that_was_asked_for(tmp_path):
    # Most of a sample is points, which planning takes to shrink to half where they are compressed.
    build_nuscenes(tmp_path / "source", {"a": 30}, cameras=("CAM_FRONT",), num_points=4000)
    manifest = shard_nuscenes(
        tmp_path / "source",
        tmp_path / "out",
        shard_size_bytes=400_000,
        layout="none",
    ).manifest
    shards = open_dataset(tmp_path / "out").shards
    assert manifest.num_shards == len(shards) > 4
    assert all(300_000 < entry.bytes < 450_000 for entry in shards[:-1])


@pytest.mark.costly
@pytest.mark.parametrize("name", ["frame", "dictionary"])
def test_a_new_version_of_such_datasets(outs, source, tmp_path, name):
    build_nuscenes(tmp_path / "source", {"d": 8}, num_points=61)
    options = {"shard_size_bytes": SHARD_BYTES, **LAYOUTS[name]}
    shard_nuscenes(tmp_path / "source", tmp_path / "other", **options)
    datasets = [str(outs / name), str(tmp_path / "other")]
    if name == "dictionary":  # each has its own
        with pytest.raises(SourceError, match="zstd dictionary"):
            append(datasets, tmp_path / "out")
        return
    append(datasets, tmp_path / "out")
    assert verify(tmp_path / "out", deep=True, num_threads=2).faults == []
    assert (
        members_of(tmp_path / "out").keys()
        == members_of(outs / name).keys() | members_of(tmp_path / "other").keys()
    )
    # The table says of each shard what the one that `shard` wrote says, on any path to the same version.
    said = {
        place: {
            (row["sha256"], row["idx_bytes"], row["idx_sha256"])
            for row in rows_of(f"{place}/shards.arrow")
        }
        for place in (*datasets, str(tmp_path / "out"))
    }
    assert said[str(tmp_path / "out")] == said[datasets[0]] | said[datasets[1]]
    assert {entry[1:] for entry in said[str(tmp_path / "out")]} == {(0, bytes(32))}
    build_nuscenes(tmp_path / "last", {"e": 3}, num_points=61)
    shard_nuscenes(tmp_path / "last", tmp_path / "third", **options)
    at_once = append([*datasets, str(tmp_path / "third")], tmp_path / "at-once")
    assert (
        append([str(tmp_path / "out"), str(tmp_path / "third")], tmp_path / "later").fingerprint
        == at_once.fingerprint
    )


def test_inspect_says_how_samples_are_stored(outs):
    assert "frame, one zstd frame a sample, zstd level 3" in describe_dataset(outs / "frame").text
    assert "layout       none\n" in describe_dataset(outs / "none").text
    text = describe_dataset(outs / "dictionary").text
    dataset = open_dataset(outs / "dictionary")
    assert f"member, zstd level 3, dictionary {dataset.dictionary.id} of " in text
    assert "meta.json             zstd-dict" in text
    row = open_dataset(outs / "frame").index.row(3)
    sample = describe_sample(outs / "frame", row.key).text
    assert f"frame         {row.length:,} bytes of " in sample
    assert "meta.json             raw    512" in sample
    assert '"frame_bytes": null' in describe_sample(outs / "none", row.key).as_json()


@pytest.mark.process
def test_gnu_tar_and_a_seekable_reader_by_others_read_frame_shards(outs):
    """pyzstd's SeekableZstdFile goes by the seek table alone: any sample without those before it; `zstd -t` agrees."""
    pyzstd = pytest.importorskip("pyzstd", reason="pip install -e '.[test]'")
    dataset = open_dataset(outs / "frame")
    said = subprocess.run(
        ["tar", "--zstd", "-tf", outs / "frame" / "train-000000.tar.zst"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [dataset.index.row(position) for position in range(dataset.shards[0].num_samples)]
    assert said.split() == [f"{row.key}.{member.name}" for row in rows for member in row.members]
    for shard_entry in dataset.shards:
        path = outs / "frame" / shard_entry.name
        plain = subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
        with pyzstd.SeekableZstdFile(path, "r") as file:
            assert pyzstd.SeekableZstdFile.is_seekable_format_file(path)
            for first in range(len(plain) - 600, -1, -4096):
                file.seek(first)
                assert file.read(600) == plain[first : first + 600]
            file.seek(0)
            assert file.read() == plain
