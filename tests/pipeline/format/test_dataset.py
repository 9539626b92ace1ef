"""A dataset on disk: whole, it gives back every byte; damaged anywhere, an error of ours that says where."""

from __future__ import annotations

import random
import shutil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from fuelrail.pipeline.errors import (
    ChecksumError,
    CodecError,
    ConfigError,
    DatasetError,
    DatasetNotReadyError,
    FuelrailError,
    IndexFileError,
    ManifestError,
    MemberTooLargeError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.dataset import (
    Dataset,
    check_span,
    open_dataset,
    read_members,
)
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    encode_manifest,
    load_manifest,
)
from fuelrail.pipeline.format.tar import iter_members
from fuelrail.pipeline.sample.schema import META, decode_sample
from support.fault_server import FaultServer

SPLITS = {"train": (3, 2), "val": (2,)}
OPTIONS = {"size": (32, 24), "missing": frozenset({(1, "cam_back")})}


@pytest.fixture(scope="module")
def built(tiny_dataset):
    return tiny_dataset(SPLITS, **OPTIONS)


@pytest.fixture
def copy(tiny_dataset, tmp_path):
    return tiny_dataset(SPLITS, **OPTIONS, copy_to=tmp_path / "copy").root


def read_row(dataset: Dataset, number: int) -> dict[str, bytes]:
    """One sample's members through the plainest reader there is: open, seek, read, check, decode."""
    row = dataset.index.row(number)
    path = dataset.shard_path(row)
    with path.open("rb") as file:
        file.seek(row.offset)
        span = file.read(row.length)
    check_span(row, span, path.name)
    members = {name: bytes(data) for name, data in read_members(row, span, path.name).items()}
    decode_sample(row.key, members)
    return members


def read_all(root) -> dict[str, dict[str, bytes]]:
    dataset = open_dataset(root)
    return {dataset.index.row(i).key: read_row(dataset, i) for i in range(len(dataset.index))}


def test_every_member_comes_back(built) -> None:
    root, raw = built
    assert read_all(root) == raw


def test_index_and_tars_tell_the_same(built) -> None:
    root, _ = built
    dataset = open_dataset(root)
    for number, shard in enumerate(dataset.shards):
        rows = [
            dataset.index.row(i)
            for i in range(shard.first_sample, shard.first_sample + shard.num_samples)
        ]
        tar_members = [
            (*base_plus_ext(f.name), f.offset, f.length)
            for f in iter_members((root / shard.name).read_bytes(), shard=shard.name)
        ]
        indexed = [
            (row.key, row.offset + m.offset, m.stored_bytes) for row in rows for m in row.members
        ]
        assert [(key, offset, length) for key, _, offset, length in tar_members] == indexed
        assert {row.shard for row in rows} == {number}
        assert [row.offset for row in rows] == [
            0,
            *(row.offset + row.length for row in rows[:-1]),
        ]
        assert rows[-1].offset + rows[-1].length + 1024 == shard.bytes


def test_splits_are_runs_of_rows(built) -> None:
    dataset = open_dataset(built[0])
    assert {
        name: (s.first_sample, s.num_samples) for name, s in dataset.manifest.splits.items()
    } == {
        "train": (0, 5),
        "val": (5, 2),
    }
    assert dataset.split("val") == dataset.manifest.splits["val"]
    with pytest.raises(ConfigError, match="has no split 'test'; it has: train, val"):
        dataset.split("test")


def test_some_members_can_be_read_alone(built) -> None:
    root, raw = built
    dataset = open_dataset(root)
    row = dataset.index.row(0)
    span = dataset.shard_path(row).read_bytes()[: row.length]
    members = read_members(row, span, "train-000000.tar", {META, "cam_back.jpg", "no such.member"})
    assert {k: bytes(v) for k, v in members.items()} == {
        k: raw[row.key][k] for k in (META, "cam_back.jpg")
    }


def test_raw_members_are_views_of_the_span(built) -> None:
    dataset = open_dataset(built[0])
    row = dataset.index.row(0)
    span = memoryview(dataset.shard_path(row).read_bytes())[: row.length]
    assert read_members(row, span, "shard", {"cam_front.jpg"})["cam_front.jpg"].obj is span.obj


class TestDamage:
    def test_any_flip_in_a_shard_is_found_with_its_address(self, copy) -> None:
        dataset = open_dataset(copy)
        rng = random.Random(3)
        for number in range(len(dataset.index)):
            row = dataset.index.row(number)
            path = dataset.shard_path(row)
            good = path.read_bytes()
            for position in rng.sample(range(row.length), 40):
                damaged = bytearray(good)
                damaged[row.offset + position] ^= rng.randrange(1, 256)
                path.write_bytes(damaged)
                with pytest.raises(ChecksumError) as caught:
                    read_row(dataset, number)
                error = caught.value
                assert (error.shard, error.offset, error.key) == (
                    path.name,
                    row.offset,
                    row.key,
                )
                assert all(word in str(error) for word in (path.name, str(row.offset), row.key))
            path.write_bytes(good)

    def test_a_cut_shard_is_found_with_its_address(self, copy) -> None:
        dataset = open_dataset(copy)
        row = dataset.index.row(1)
        path = dataset.shard_path(row)
        good = path.read_bytes()
        for num_bytes in (0, 1, row.length // 2, row.length - 1):
            path.write_bytes(good[: row.offset + num_bytes])
            with pytest.raises(
                TruncatedShardError,
                match=f"got {num_bytes} of {row.length} bytes",
            ) as caught:
                read_row(dataset, 1)
            assert (
                caught.value.shard,
                caught.value.offset,
                caught.value.key,
            ) == (
                path.name,
                row.offset,
                row.key,
            )

    @pytest.mark.costly
    def test_any_flip_in_the_index_is_an_error_of_ours_or_the_same_members(
        self, built, copy
    ) -> None:
        good = (copy / INDEX_FILE).read_bytes()
        rng = random.Random(5)
        for position in rng.sample(range(len(good)), 250):
            damaged = bytearray(good)
            damaged[position] ^= rng.randrange(1, 256)
            (copy / INDEX_FILE).write_bytes(damaged)
            try:
                members = read_all(copy)
            except FuelrailError as error:
                assert str(error)
                continue
            assert members.keys() == built.raw.keys()
            assert all(members[key].items() <= built.raw[key].items() for key in members)

    @pytest.mark.parametrize("name", [MANIFEST_FILE, INDEX_FILE, "shards.arrow", "blocks.sha256"])
    def test_cut_files_are_found_when_opened(self, copy, name) -> None:
        good = (copy / name).read_bytes()
        for length in (0, 1, len(good) // 2, len(good) - 2):
            (copy / name).write_bytes(good[:length])
            with pytest.raises(DatasetError, match=str(copy)):
                open_dataset(copy)

    def test_missing_files(self, copy) -> None:
        (copy / INDEX_FILE).rename(copy / "elsewhere")
        with pytest.raises(
            IndexFileError,
            match=r"no index\.arrow; `fuelrail verify .* --repair KIND:PATH`",
        ):
            open_dataset(copy)
        (copy / MANIFEST_FILE).unlink()
        with pytest.raises(DatasetNotReadyError):
            open_dataset(copy)

    def test_an_index_of_another_dataset_is_found(self, tiny_dataset, copy) -> None:
        shutil.copy(tiny_dataset({"train": (3,)}, size=(32, 24)).root / INDEX_FILE, copy)
        with pytest.raises(IndexFileError, match="bytes, the manifest says"):
            open_dataset(copy)
        # Of the same size, but for another number of samples.
        manifest = load_manifest(copy)
        size = (copy / INDEX_FILE).stat().st_size
        files = tuple(
            msgspec.structs.replace(f, bytes=size) if f.name == INDEX_FILE else f
            for f in manifest.files
        )
        (copy / MANIFEST_FILE).write_bytes(
            encode_manifest(msgspec.structs.replace(manifest, files=files))
        )
        with pytest.raises(IndexFileError, match="has 3 rows, the manifest 7"):
            open_dataset(copy)
        (copy / MANIFEST_FILE).write_bytes(
            encode_manifest(msgspec.structs.replace(manifest, files=()))
        )
        with pytest.raises(
            ManifestError,
            match=r"does not name shards\.arrow, which every dataset has",
        ):
            open_dataset(copy)


class TestEntries:
    """Index entries that do not fit the span: checked before anything is read or memory taken."""

    @pytest.fixture(scope="module")
    @staticmethod
    def opened(built):
        dataset = open_dataset(built[0])
        row = dataset.index.row(0)
        return dataset, row, dataset.shard_path(row).read_bytes()[: row.length]

    @pytest.mark.parametrize("shard", [-1, 3, 2**31 - 1])
    def test_a_shard_that_is_not_there(self, opened, shard) -> None:
        dataset, row, _ = opened
        with pytest.raises(
            IndexFileError,
            match=f"{row.key} into shard number {shard}, but the manifest has 3",
        ):
            dataset.shard_path(row._replace(shard=shard))

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(-1, 10), (0, -1), (0, 2**62), (2**62, 2**62), (512, -512)],
    )
    def test_a_span_outside_its_shard(self, opened, offset, length) -> None:
        dataset, row, _ = opened
        with pytest.raises(
            IndexFileError,
            match=f"{row.key} at bytes {offset} to {offset + length} of shard train-0",
        ):
            dataset.shard_path(row._replace(offset=offset, length=length))

    @given(
        offset=st.integers(-(2**63), 2**63 - 1),
        stored=st.integers(-(2**63), 2**63 - 1),
    )
    def test_ranges_outside_the_span(self, opened, offset, stored) -> None:
        _, row, span = opened
        if 512 <= offset <= offset + stored <= len(span):  # in front of data lies a header
            return
        entry = row.members[0]._replace(offset=offset, stored_bytes=stored)
        with pytest.raises(
            IndexFileError,
            match=f"{row.key}.{entry.name} in shard S covers bytes {offset} to",
        ):
            read_members(row._replace(members=(entry,)), span, "S")

    @given(st.data())
    def test_any_entry_is_an_error_of_ours_or_the_member(self, built, opened, data) -> None:
        _, row, span = opened
        entry = row.members[data.draw(st.integers(0, len(row.members) - 1))]
        entry = entry._replace(
            offset=data.draw(st.integers(-10, len(span) + 10)),
            stored_bytes=data.draw(st.integers(-10, 600)),
            raw_bytes=data.draw(st.integers(-10, 2**40)),
            codec=data.draw(st.sampled_from(["raw", "zstd", "zstd-p20"])),
        )
        try:
            members = read_members(row._replace(members=(entry,)), span, "S")
        except FuelrailError as error:
            assert f"{row.key}.{entry.name}" in str(error)
        else:
            assert members[entry.name] == built[1][row.key][entry.name]

    def test_entries_of_two_members_mixed_up(self, opened) -> None:
        _, row, span = opened
        front, back = (
            next(m for m in row.members if m.name == f"cam_{side}.jpg")
            for side in ("front", "back")
        )
        for wrong in (
            front._replace(name=back.name),
            front._replace(offset=back.offset),
            front._replace(offset=front.offset + 1),
            front._replace(
                stored_bytes=front.stored_bytes - 1,
                raw_bytes=front.raw_bytes - 1,
            ),
            front._replace(codec="zstd"),
        ):
            with pytest.raises(
                IndexFileError,
                match=f"entry of {row.key}.cam_.*: no member '{row.key}.cam_.* lies at",
            ):
                read_members(row._replace(members=(wrong,)), span, "S")
        with pytest.raises(IndexFileError, match="no member 'clip-9"):
            read_members(row._replace(key="clip-9"), span, "S")

    def test_codec_errors_carry_the_whole_address(self, opened) -> None:
        _, row, span = opened
        entry = row.members[0]
        wrong = row._replace(members=(entry._replace(raw_bytes=entry.raw_bytes + 1),))
        with pytest.raises(CodecError) as caught:
            read_members(wrong, span, "S")
        assert (caught.value.key, caught.value.member) == (row.key, entry.name)
        assert f"(shard S, offset {row.offset + entry.offset})" in str(caught.value)
        assert str(caught.value).count(entry.name) == 1

    def test_sizes_over_the_cap_are_refused(self, opened, monkeypatch) -> None:
        _, row, span = opened
        monkeypatch.setattr("fuelrail.pipeline.format.codecs.MAX_MEMBER_BYTES", 100)
        with pytest.raises(MemberTooLargeError, match="over the cap of 100"):
            read_members(row, span, "S")


class TestSequence:
    """What torch's users try first: ``len(dataset)``, ``dataset[0]``, ``for sample in dataset``."""

    def test_samples_by_number(self, built):
        dataset = open_dataset(built.root)
        assert len(dataset) == 7
        assert (
            [sample.key for sample in dataset]
            == [dataset.index.row(number).key for number in range(7)]
            == list(built.raw)
        )
        assert dataset[-1].key == dataset[6].key
        assert set(dataset[0].images) == {camera.channel for camera in dataset.manifest.cameras}
        assert {name: entry.num_samples for name, entry in dataset.splits.items()} == {
            "train": 5,
            "val": 2,
        }
        for number in (7, -8):
            with pytest.raises(
                IndexError,
                match=rf"sample {number} is not in the dataset: it has samples 0 to 6",
            ):
                dataset[number]

    @pytest.mark.network
    def test_at_a_url(self, built, tmp_path):
        with FaultServer(built.root) as server:
            dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
            assert dataset[1].key == open_dataset(built.root)[1].key

    def test_damage_has_its_address(self, copy):
        dataset = open_dataset(copy)
        row = dataset.index.row(1)
        shard = dataset.shard_path(row)
        with shard.open("r+b") as file:
            file.seek(row.offset + 600)
            file.write(b"damage")
        assert dataset[0].key != dataset[2].key
        with pytest.raises(
            ChecksumError,
            match=rf"shard {shard.name}, offset {row.offset}, sample {row.key}",
        ):
            dataset[1]
        shard.unlink()
        with pytest.raises(StorageError, match=r"cannot be read: .*No such file"):
            dataset[1]

    def test_it_prints_in_a_line(self, built):
        text = repr(open_dataset(built.root))
        assert text == f"Dataset(tiny at '{built.root}': 7 samples in 3 shards; train 5, val 2)"
