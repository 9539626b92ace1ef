"""A local dataset read through a span cache."""

from __future__ import annotations

import errno
import os

import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.errors import ChecksumError
from fuelrail.pipeline.format.dataset import open_dataset
from support.storage_suite import StorageSuite, rows_of, spans_of, spoil


class TestCachedStorage(StorageSuite):
    @pytest.fixture
    def opened(self, tmp_path):
        def open_with_cache(root, **options):
            dataset = open_dataset(root)
            return dataset, open_storage(
                dataset,
                cache_dir=tmp_path / "cache",
                cache_size="1MB",
                **options,
            )

        return open_with_cache

    def test_unverified_wrong_bytes_are_handed_out(self, opened, tiny_copy):
        """Not here: what goes into a cache is always verified, and what comes out of it."""
        dataset, storage = opened(tiny_copy, verify=False)
        index, row = rows_of(dataset)[6]
        spoil(tiny_copy, row)
        with pytest.raises(ChecksumError):
            storage.span(index, row)

    def test_the_second_time_nothing_is_fetched(self, opened, tiny_copy):
        dataset, storage = opened(tiny_copy)
        expected = spans_of(tiny_copy)
        rows = rows_of(dataset)
        for _ in range(2):
            assert [bytes(take()) for take in storage.session().request(rows)] == expected
        for path in tiny_copy.glob("*.tar"):
            path.unlink()
        assert [bytes(take()) for take in storage.session().request(rows)] == expected
        stats = storage.stats()
        assert (stats.requests, stats.cache_hits, stats.cache_misses) == (
            4,
            50,
            25,
        )
        assert stats.cache_bytes == stats.request_bytes == sum(map(len, expected))

    @pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
    def test_an_error_that_a_good_file_can_have_forgets_nothing(
        self, opened, pristine, monkeypatch, error
    ):
        dataset, storage = opened(pristine)
        rows = rows_of(dataset)
        expected = spans_of(pristine)

        def failing(*_, **__):
            raise OSError(error, os.strerror(error))

        assert [bytes(take()) for take in storage.session().request(rows)] == expected
        for owner, name in (
            (storage.cache.folder.files, "open"),
            (os, "preadv"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, failing)
                assert [bytes(take()) for take in storage.session().request(rows)] == expected
        assert [bytes(take()) for take in storage.session().request(rows)] == expected
        assert (storage.stats().cache_damaged, storage.stats().cache_hits) == (
            0,
            len(rows),
        )

    def test_damaged_cache_files_are_fetched_again(self, opened, pristine, tmp_path, caplog):
        dataset, storage = opened(pristine)
        expected = spans_of(pristine)
        rows = rows_of(dataset)
        assert [bytes(take()) for take in storage.session().request(rows)] == expected
        damaged = sorted((tmp_path / "cache").glob("spans/*/data/*/*"))
        for number, path in enumerate(damaged[:6]):
            path.write_bytes(path.read_bytes()[:-1] if number < 3 else bytes(path.stat().st_size))
        for path in damaged[6:9]:
            path.unlink()
        for _ in range(2):
            assert [bytes(take()) for take in storage.session().request(rows)] == expected
        assert storage.stats().cache_damaged == 9
        assert storage.stats().cache_hits == 16 + 25
