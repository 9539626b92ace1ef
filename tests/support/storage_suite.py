"""What every storage backend must do; a test module inherits this and says how to open one."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.errors import (
    ChecksumError,
    ShardError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from support.datasets import build_dataset

LENGTHS = {"train": (5, 7, 9), "val": (4,)}


def rows_of(dataset: Dataset):
    return [(index, dataset.index.row(index)) for index in range(len(dataset.index))]


def spans_of(root):
    """Every span by plain file reading."""
    dataset = open_dataset(root)
    return [
        dataset.shard_path(row).read_bytes()[row.offset :][: row.length]
        for _, row in rows_of(dataset)
    ]


def spoil(root, row, at=None, *, keep_mtime=False):
    """Change one byte of a sample in place."""
    path = open_dataset(root).shard_path(row)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(row.offset + (row.length // 2 if at is None else at))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


class StorageSuite:
    """Inherit, and state how storage is opened, or define ``opened(root, **options) -> (dataset, storage)`` again."""

    how: ClassVar[dict[str, Any]] = {}
    """Arguments of `open_storage`."""

    @pytest.fixture
    def opened(self):
        def open_root(root, **options):
            dataset = open_dataset(root)
            return dataset, open_storage(dataset, **self.how, **options)

        return open_root

    def test_spans_one_by_one(self, opened, pristine):
        dataset, storage = opened(pristine)
        assert [bytes(storage.span(index, row)) for index, row in rows_of(dataset)] == spans_of(
            pristine
        )
        assert storage.stats().spans == 25

    def test_spans_asked_for_ahead_in_any_order_and_twice(self, opened, pristine):
        dataset, storage = opened(pristine)
        expected = spans_of(pristine)
        rows = rows_of(dataset)
        requests = rows[::-1] + rows[3:9] + [rows[0], rows[0]]
        session = storage.session()
        takes = session.request(requests)
        assert [bytes(take()) for take in takes] == [expected[index] for index, _ in requests]
        assert session.request([]) == []
        session.close()
        session.close()

    def test_views_are_read_only_and_outlive_the_storage(self, opened, pristine):
        dataset, storage = opened(pristine)
        index, row = rows_of(dataset)[2]
        span = storage.span(index, row)
        assert span.readonly
        storage.close()
        del storage
        gc.collect()
        assert bytes(span) == spans_of(pristine)[2]

    def test_many_threads(self, opened, pristine):
        dataset, storage = opened(pristine)
        expected = spans_of(pristine)
        rows = rows_of(dataset)
        start = threading.Barrier(6)

        def work(seed):
            start.wait()
            mine = rows[seed * 3 :] + rows[: seed * 3]
            session = storage.session()
            return all(
                bytes(take()) == expected[index]
                for _ in range(3)
                for (index, _), take in zip(mine, session.request(mine), strict=True)
            )

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(6)))

    def test_wrong_bytes_are_named(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        index, row = rows_of(dataset)[6]
        spoil(tiny_copy, row)
        with pytest.raises(ChecksumError) as caught:
            storage.span(index, row)
        assert (caught.value.shard, caught.value.offset, caught.value.key) == (
            "train-000001.tar",
            row.offset,
            row.key,
        )

    def test_unverified_wrong_bytes_are_handed_out(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy, verify=False)
        index, row = rows_of(dataset)[6]
        spoil(tiny_copy, row)
        assert bytes(storage.span(index, row)) != spans_of(tiny_copy)[5]
        assert bytes(storage.span(index, row)) == spans_of(tiny_copy)[6]

    def test_a_missing_shard_is_named(self, opened, tiny_copy, pristine):
        dataset, storage = opened(tiny_copy)
        (tiny_copy / "train-000002.tar").unlink()
        index, row = rows_of(dataset)[15]
        with pytest.raises(StorageError, match=r"train-000002\.tar.*clip"):
            storage.span(index, row)
        takes = storage.session().request([rows_of(dataset)[0], (index, row)])
        assert bytes(takes[0]()) == spans_of(pristine)[0]
        with pytest.raises(StorageError, match=r"train-000002\.tar"):
            takes[1]()

    def test_a_shard_cut_before_it_was_opened(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        index, row = rows_of(dataset)[11]
        with (tiny_copy / "train-000001.tar").open("r+b") as file:
            file.truncate(row.offset + 100)
        with pytest.raises((TruncatedShardError, ShardError), match=r"train-000001\.tar"):
            storage.span(index, row)

    def test_a_shard_cut_while_in_use(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        expected = spans_of(tiny_copy)
        rows = rows_of(dataset)
        assert bytes(storage.span(*rows[5])) == expected[5]
        with (tiny_copy / "train-000001.tar").open("r+b") as file:
            file.truncate(rows[9][1].offset + 100)
        for index, row in (rows[9], rows[11]):
            with pytest.raises(TruncatedShardError, match=row.key):
                storage.span(index, row)

    def test_a_dataset_replaced_while_in_use_names_both_fingerprints(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        rows = rows_of(dataset)
        storage.span(*rows[0])
        replacement = tiny_copy.parent / "other"
        build_dataset(replacement, LENGTHS, seed=9)
        for file in replacement.iterdir():
            data = file.read_bytes()
            with (tiny_copy / file.name).open(
                "r+b"
            ) as target:  # in place: the same file, other bytes
                target.truncate(0)
                target.write(data)
        with pytest.raises(ShardError) as caught:
            for index, row in rows:
                storage.span(index, row)
        assert dataset.manifest.fingerprint in str(caught.value)
        assert open_dataset(replacement).manifest.fingerprint in str(caught.value)
