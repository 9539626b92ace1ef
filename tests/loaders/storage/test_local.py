"""Storage at local paths: the suite, and what is its own."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.files import OpenShards, open_files_limit
from fuelrail.loaders.storage.pread import (
    PreadShards,
    Residency,
    page_cache_room_bytes,
)
from fuelrail.loaders.storage.remote import RemoteShards
from fuelrail.pipeline.errors import ChecksumError, ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset
from support.storage_suite import StorageSuite, rows_of, spans_of, spoil

PAGE = mmap.PAGESIZE


def resident_pages(path):
    """A byte for each page of a file of ours, odd where it is in the page cache; asking does not change it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        pages = ctypes.create_string_buffer(-(-len(mapped) // PAGE))
        view = np.frombuffer(mapped, np.uint8)
        assert libc.mincore(view.ctypes.data, len(mapped), pages) == 0
        del view
    return pages.raw


def drop_from_memory(root):
    """Have a dataset's shards read from disk again; skips the test where the file system keeps them (tmpfs)."""
    for path in root.glob("*.tar"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages would not go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if sum(page & 1 for page in resident_pages(path)) > path.stat().st_size // PAGE // 2:
            pytest.skip("this file system does not let go of pages (tmpfs?)")


class TestPread(StorageSuite):
    how: ClassVar = {"backend": "pread"}

    def test_a_folder_may_have_a_name_that_is_not_unicode(self, opened, tiny_copy):
        renamed = tiny_copy.with_name("name-\udce9")
        tiny_copy.rename(renamed)
        dataset, storage = opened(renamed)
        assert [bytes(storage.span(*row)) for row in rows_of(dataset)] == spans_of(renamed)

    def test_replaced_by_rename_continues_with_the_old_file(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        expected = spans_of(tiny_copy)
        rows = rows_of(dataset)
        storage.span(*rows[0])
        new = tiny_copy / "new"
        new.write_bytes(bytes((tiny_copy / "train-000000.tar").stat().st_size))
        new.rename(tiny_copy / "train-000000.tar")
        assert bytes(storage.span(*rows[1])) == expected[1]

    @pytest.mark.costly
    def test_pages_of_neighbours_do_not_pass_for_a_samples_own(self, tmp_path):
        root = tmp_path / "large"
        build_dataset(root, {"train": (60, 60)}, size=(320, 192))
        dataset = open_dataset(root)
        expected = spans_of(root)
        rows = rows_of(dataset)
        assert min(row.length for _, row in rows) > 3 * PAGE
        drop_from_memory(root)
        storage = PreadShards(dataset, memory_bytes=1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        for requested in (
            rows[1::2],
            rows[::2],
        ):  # the latter have their neighbours' pages at both ends
            for first in range(0, len(requested), 16):
                session = storage.session()
                took = [bytes(take()) for take in session.request(requested[first : first + 16])]
                assert took == [expected[index] for index, _ in requested[first : first + 16]]
                session.close()
        # Read page by page it was one for each page.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < len(rows)

    def test_more_shards_than_files_may_be_open(self, pristine, monkeypatch):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert 1 <= open_files_limit(2) <= soft // 4
        monkeypatch.setattr(OpenShards, "_all", weakref.WeakSet())
        monkeypatch.setattr(
            "fuelrail.loaders.storage.files.open_files_limit",
            lambda storages: 2 // storages,
        )
        dataset = open_dataset(pristine)
        gc.collect()  # closes what other tests left
        open_before = set(Path("/proc/self/fd").iterdir())
        storages = PreadShards(dataset), PreadShards(dataset)
        spans = [
            [storage.span(index, row) for index, row in rows_of(dataset)[::3]]
            for storage in storages
        ]
        assert list(map(bytes, spans[1])) == spans_of(pristine)[::3]
        open_files = [link.resolve() for link in set(Path("/proc/self/fd").iterdir()) - open_before]
        assert [file.parent for file in open_files if file.suffix == ".tar"] == [
            pristine.resolve()
        ] * 2

    @pytest.mark.costly
    def test_beyond_memory_used_pages_go_but_for_a_part_that_stays_the_same(self, tmp_path):
        root = tmp_path / "large"
        build_dataset(root, {"train": (60, 60)}, size=(320, 192))
        expected = spans_of(root)
        drop_from_memory(root)
        dataset = open_dataset(root)
        total = dataset.shards.num_bytes
        storage = PreadShards(dataset, memory_bytes=total * 2 // 3)
        rows = rows_of(dataset)

        def cached():
            resident = [resident_pages(root / shard.name) for shard in dataset.shards]
            # The page in the middle of a sample is its own.
            return {
                index
                for index, row in rows
                if resident[row.shard][(row.offset + row.length // 2) // PAGE] & 1
            }

        for _ in range(2):
            session = storage.session()
            assert [bytes(take()) for take in session.request(rows)] == expected
            kept_indices = {index for index, row in rows if row.xxh3 < 0.4 * 2**64}
            gone = [index for index, _ in rows if index not in kept_indices]
            assert kept_indices <= cached()
            assert len(gone) > 30
            assert (
                len(cached().intersection(gone)) < len(gone) / 4
            )  # the kernel holds a few pages in its batches

    def test_within_memory_nothing_goes(self, pristine):
        dataset = open_dataset(pristine)
        assert all(Residency(dataset).keeps(row) for _, row in rows_of(dataset))
        assert page_cache_room_bytes() > 0

    def test_buffers_serve_again_once_nobody_looks(self, opened, pristine):
        dataset, storage = opened(pristine)
        index, row = rows_of(dataset)[0]
        first = storage.span(index, row)
        second = storage.span(index, row)
        assert address(first) != address(second)
        first_address = address(first)
        del first
        assert address(storage.span(index, row)) == first_address

    def test_wrong_bytes_are_read_again_before_they_are_believed(
        self, opened, tiny_copy, monkeypatch
    ):
        dataset, storage = opened(tiny_copy)
        rows = rows_of(dataset)
        path = spoil(tiny_copy, rows[6][1])
        real = PreadShards._read
        calls = []

        def heals(self, row):
            if calls:
                spoil(tiny_copy, rows[6][1])  # flips it back
            calls.append(row)
            return real(self, row)

        monkeypatch.setattr(PreadShards, "_read", heals)
        assert (
            bytes(storage.span(*rows[6]))
            == path.read_bytes()[rows[6][1].offset :][: rows[6][1].length]
        )
        assert len(calls) == 2
        assert storage.stats().refetched == 1

    def test_errors_of_the_file_system_are_tried_again_on_a_new_file(
        self, opened, pristine, monkeypatch
    ):
        dataset, storage = opened(pristine)
        failures = [
            OSError(116, "Stale file handle"),
            OSError(5, "Input/output error"),
        ]
        real = os.preadv

        def fails(fd, buffers, offset, flags=0):
            if failures:
                raise failures.pop()
            return real(fd, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", fails)
        index, row = rows_of(dataset)[0]
        assert bytes(storage.span(index, row)) == spans_of(pristine)[0]
        assert storage.stats().retries == 2

    def test_reads_that_come_in_pieces(self, opened, pristine, monkeypatch):
        dataset, storage = opened(pristine)
        real = os.preadv
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset),
        )
        index, row = rows_of(dataset)[3]
        assert bytes(storage.span(index, row)) == spans_of(pristine)[3]


def address(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_the_backend_fits_the_place(pristine, tmp_path):
    dataset = open_dataset(pristine)
    assert (
        open_storage(dataset).stats().backend
        == open_storage(dataset, "pread").stats().backend
        == "pread"
    )
    assert isinstance(open_storage(dataset, cache_dir=tmp_path / "cache"), RemoteShards)
    with pytest.raises(
        ConfigError,
        match="backend='nfs' is not known; choose one of auto, pread",
    ):
        open_storage(dataset, "nfs")
    with pytest.raises(ConfigError, match="cache_size='1GB' needs cache_dir"):
        open_storage(dataset, cache_size="1GB")
    with pytest.raises(ConfigError, match="cache_dir needs backend 'remote'"):
        open_storage(dataset, "pread", cache_dir=tmp_path)


def test_wrong_bytes_are_wrong_for_every_reader(tiny_copy):
    dataset = open_dataset(tiny_copy)
    rows = rows_of(dataset)
    spoil(tiny_copy, rows[0][1], at=600, keep_mtime=True)
    with pytest.raises(ChecksumError) as caught:
        open_storage(dataset).span(*rows[0])
    assert "replaced" not in str(caught.value)
