"""The span cache: shared, bounded, crash-safe; full disks, damaged files and folders of others."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.cache.folder import CacheFolder
from fuelrail.loaders.storage.cache.future_uses import FutureUses
from fuelrail.loaders.storage.cache.span_cache import SpanCache, parse_size
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from support.cache_policies import Hindsight, farthest_first_hits, lru_hits
from support.forked import fork, join
from support.storage_suite import rows_of, spans_of

BYTES = 1000
LARGE = 300_000


def cache_at(
    path,
    *,
    samples=100,
    max_bytes=10 * BYTES,
    fingerprint="f" * 64,
    length_of=lambda index: BYTES,
):
    folder = CacheFolder(
        path=path,
        fingerprint=fingerprint,
        num_samples=samples,
        length_of=length_of,
        max_bytes=max_bytes,
    )
    return SpanCache(folder)


def large_cache(path):
    return cache_at(path, max_bytes=10**9, length_of=lambda index: LARGE)


def span(index):
    return memoryview(bytes([index]) * BYTES)


def read(cache, index):
    entry = cache.open(index, BYTES)
    return None if entry is None else bytes(entry.read())


def future_uses_of(sequence):
    rows = np.array(sequence)
    return FutureUses(lambda first, count: rows[first : first + count], 2 * len(rows))


def files(folder):
    return sorted(int(path.name, 16) for path in folder.glob("data/*/*") if path.name != "stranger")


class TestContent:
    def test_what_was_put_is_found_by_others_too(self, tmp_path):
        cache = cache_at(tmp_path)
        second = cache_at(tmp_path)
        assert read(cache, 7) is None
        assert cache.put(7, span(7))
        assert read(second, 7) == bytes(span(7))
        assert cache.folder.used_bytes == second.folder.used_bytes == BYTES
        assert not second.put(7, memoryview(b"")) or second.folder.used_bytes == BYTES
        cache.close()
        second.close()
        reopened = cache_at(tmp_path)
        assert read(reopened, 7) == bytes(span(7))
        assert reopened.folder.used_bytes == BYTES

    def test_without_future_uses_it_fills_up_and_evicts_nothing(self, tmp_path):
        cache = cache_at(tmp_path)
        assert [cache.put(index, span(index)) for index in range(12)] == [True] * 10 + [False] * 2
        assert files(tmp_path) == list(range(10))
        assert not cache.put(20, memoryview(bytes(20 * BYTES))), "larger than the cache"

    @pytest.mark.parametrize(("later", "remaining"), [([1, 2, 0], [1, 2]), ([0, 1, 2], [0, 1])])
    def test_it_evicts_or_does_not_admit_what_is_needed_last(self, tmp_path, later, remaining):
        cache = cache_at(tmp_path, max_bytes=2 * BYTES)
        cache.evict_by(future_uses_of([0, 1, 2, *later]))
        assert [cache.put(index, span(index), index) for index in range(3)] == [
            True,
            True,
            2 in remaining,
        ]
        assert files(tmp_path) == remaining

    def test_small_ones_stay_unless_all_that_must_go_are_needed_later(self, tmp_path):
        cache = cache_at(tmp_path, max_bytes=2 * BYTES)
        cache.evict_by(future_uses_of([0, 1, 2, 0, 2, 1]))
        cache.put(0, span(0), 0)
        cache.put(1, span(1), 1)
        assert not cache.put(
            2, memoryview(bytes(2 * BYTES)), 2
        )  # 1 could go, but 0 comes sooner than 2
        assert files(tmp_path) == [0, 1]
        assert cache.put(2, span(2), 2)
        assert files(tmp_path) == [0, 2]

    def test_an_open_span_survives_its_eviction(self, tmp_path):
        cache = cache_at(tmp_path, max_bytes=BYTES)
        cache.evict_by(future_uses_of([0, 1, 1, 0]))
        cache.put(0, span(0), 0)
        held = cache.open(0, BYTES)
        assert cache.put(1, span(1), 1)
        assert files(tmp_path) == [1]
        assert bytes(held.read()) == bytes(span(0))

    def test_many_held_open_take_no_descriptors(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fuelrail.loaders.storage.cache.span_cache._OPEN_FILES", 2)
        cache = cache_at(tmp_path)
        for index in range(5):
            cache.put(index, span(index))
        held = [cache.open(index, BYTES) for index in range(5)]
        assert cache.num_open == 2
        assert [bytes(entry.read()) for entry in held] == [bytes(span(index)) for index in range(5)]
        del held
        assert cache.num_open == 0


@pytest.mark.parametrize("uses_per_step", [0, 1, 5])
def test_samples_of_different_lengths_hit_as_simulated_and_never_exceed_the_size(
    tmp_path, uses_per_step
):
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 1000, 60)
    sequence = np.concatenate([rng.permutation(60) for _ in range(6)])
    capacity = int(lengths.sum()) // 4
    later = lengths[sequence[60:]]
    for name, future_uses, expected in (
        (
            "ours",
            future_uses_of(sequence),
            farthest_first_hits(sequence, lengths, capacity),
        ),
        ("lru", Hindsight(sequence), lru_hits(sequence, lengths, capacity)),
    ):
        cache = cache_at(
            tmp_path / name,
            samples=60,
            max_bytes=capacity,
            length_of=lambda index: int(lengths[index]),
        )
        cache.evict_by(future_uses, uses_per_step)
        hits = []
        for now, index in enumerate(sequence.tolist()):
            length = int(lengths[index])
            hits.append(cache.open(index, length) is not None)
            if not hits[-1]:
                cache.put(index, memoryview(bytes(length)), now)
            on_disk = sum(path.stat().st_size for path in (tmp_path / name).glob("data/*/*"))
            assert on_disk == cache.folder.used_bytes <= capacity
        by_bytes = later[hits[60:]].sum() / later.sum()
        if name == "ours":
            assert 0.22 < by_bytes <= 0.25
        else:
            assert by_bytes < 0.15
        assert abs(sum(hits) - expected.sum()) <= uses_per_step


@contextmanager
def files_of_at_most(num_bytes):
    """A limit of this process, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


class TestTrouble:
    def test_a_missing_or_cut_file_is_a_miss_and_forgotten(self, tmp_path):
        cache = cache_at(tmp_path)
        for index in range(3):
            cache.put(index, span(index))
        cache.folder.files.path_of(0).unlink()
        assert cache.open(0, BYTES) is None
        os.truncate(cache.folder.files.path_of(1), 10)
        assert cache.open(1, BYTES).read() is None
        assert cache.folder.used_bytes == BYTES
        assert cache.open(1, BYTES) is None
        assert files(tmp_path) == [2]
        assert cache.put(1, span(1))

    def test_a_folder_of_another_dataset_is_named(self, tmp_path):
        cache_at(tmp_path).close()
        with pytest.raises(ConfigError, match=r"is the cache of dataset f{64}.*not of e{64}"):
            cache_at(tmp_path, fingerprint="e" * 64)
        with pytest.raises(ConfigError, match=r"100 samples.*not of.*101 samples"):
            cache_at(tmp_path, samples=101)
        (tmp_path / "cache.json").write_text("{}")
        with pytest.raises(ConfigError, match="is damaged"):
            cache_at(tmp_path)

    @pytest.mark.parametrize("damaged", [b"", bytes(150), b'{"format":"fuelrail-sp', b"\xff" * 150])
    def test_a_damaged_marker_is_written_again_where_the_folder_is_a_caches(
        self, tmp_path, caplog, damaged
    ):
        cache = cache_at(tmp_path)
        cache.put(3, span(3))
        cache.close()
        marker = (tmp_path / "cache.json").read_bytes()
        (tmp_path / "cache.json").write_bytes(damaged)
        assert read(cache_at(tmp_path), 3) == bytes(span(3))
        assert (tmp_path / "cache.json").read_bytes() == marker
        assert f"'{tmp_path / 'cache.json'}' is damaged" in caplog.text
        (tmp_path / "cache.json").write_bytes(damaged)
        (tmp_path / "users.lock").unlink()
        with pytest.raises(ConfigError, match=f"is damaged .*; remove '{tmp_path}'"):
            cache_at(tmp_path)
        assert (tmp_path / "data" / "0" / "3").read_bytes() == bytes(span(3))

    def test_a_place_that_cannot_be_used_is_named(self, tmp_path, pristine):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigError, match="cannot be used as a cache"):
            open_storage(open_dataset(pristine), cache_dir=tmp_path / "file")

    def test_leftovers_are_cleared_by_the_first_who_comes(self, tmp_path):
        cache = cache_at(tmp_path)
        cache.put(3, span(3))
        cache.close()
        (tmp_path / "tmp" / "12345-0").write_bytes(b"half")
        (tmp_path / "data" / "0" / "stranger").write_bytes(b"x")
        (tmp_path / "data" / "0" / "fff").write_bytes(b"beyond the dataset")
        (tmp_path / "data" / "0" / "5").write_bytes(
            bytes(BYTES)
        )  # whole, but its process died before it was counted
        reopened = cache_at(tmp_path)
        assert reopened.folder.used_bytes == 2 * BYTES
        assert not list((tmp_path / "tmp").iterdir())
        assert files(tmp_path) == [
            3,
            5,
            0xFFF,
        ]  # what the loader did not make stays
        assert (tmp_path / "data" / "0" / "stranger").read_bytes() == b"x"

    def test_a_smaller_cache_than_before_drops_what_is_too_much(self, tmp_path):
        cache = cache_at(tmp_path)
        for index in range(10):
            cache.put(index, span(index))
        cache.close()
        assert len(files(tmp_path)) == 10
        assert cache_at(tmp_path, max_bytes=4 * BYTES).folder.used_bytes == 4 * BYTES
        assert len(files(tmp_path)) == 4

    def test_a_full_disk_ends_admission_with_one_warning(self, tmp_path, caplog):
        cache = cache_at(tmp_path)
        assert cache.put(0, span(0))
        with files_of_at_most(BYTES // 2):
            assert not cache.put(1, span(1))
            assert not cache.put(2, span(2))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "disabled for new samples" in caplog.text
        assert read(cache, 0) == bytes(span(0))
        assert cache.folder.used_bytes == BYTES
        assert not list((tmp_path / "tmp").iterdir())

    def test_too_many_open_files_do_not_end_admission(self, tmp_path):
        cache = cache_at(tmp_path)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            assert not cache.put(0, span(0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert cache.put(0, span(0))
        assert cache.folder.used_bytes == BYTES

    def test_a_disk_that_is_full_at_the_start_is_done_without(self, pristine, tmp_path, caplog):
        dataset = open_dataset(pristine)
        with files_of_at_most(0):
            storage = open_storage(dataset, cache_dir=tmp_path, cache_size="1GB")
        assert "continuing without a cache" in caplog.text
        assert bytes(storage.span(*rows_of(dataset)[0])) == spans_of(pristine)[0]
        assert storage.stats().cache_bytes == 0

    def test_the_default_size_is_a_part_of_the_free_space_and_counts_what_is_here(
        self, pristine, tmp_path
    ):
        dataset = open_dataset(pristine)
        for _ in range(2):
            cache = SpanCache.open_for(dataset, tmp_path, None)
            assert 0 < cache.folder.max_bytes < 0.9 * (shutil.disk_usage(tmp_path).free + 10**9)
            assert cache.put(0, memoryview(bytes(dataset.index.row(0).length))) or cache.open(0, 1)
            cache.close()

    @pytest.mark.process
    def test_killed_while_writing_nothing_half_is_ever_seen(self, tmp_path):
        def write_for_ever():
            cache = large_cache(tmp_path)
            for number in itertools.count():
                cache.put(number % 100, memoryview(bytes([number % 100]) * LARGE))
                if number >= 50:
                    cache.forget((number + 50) % 100)

        for turn in range(6):
            child = fork(write_for_ever)
            time.sleep(0.02 + 0.01 * turn)
            os.kill(child, signal.SIGKILL)
            assert join(child) == -signal.SIGKILL
            cache = large_cache(tmp_path)
            stored = files(tmp_path)
            assert cache.folder.used_bytes == len(stored) * LARGE
            for index in stored:
                assert bytes(cache.open(index, LARGE).read()) == bytes([index]) * LARGE
            cache.close()
        assert stored

    @pytest.mark.process
    def test_processes_share_one_cache_within_its_size(self, tmp_path):
        rows = np.concatenate([np.random.default_rng(epoch).permutation(100) for epoch in range(4)])

        def use(rank):
            cache = cache_at(tmp_path, max_bytes=20 * BYTES)
            cache.evict_by(future_uses_of(rows), 2)
            for now in range(rank, len(rows), 2):
                index = int(rows[now])
                data = read(cache, index)
                if data is None:
                    cache.put(index, span(index), now)
                else:
                    assert data == bytes(span(index))

        watch = cache_at(tmp_path, max_bytes=20 * BYTES)
        children = [fork(partial(use, rank)) for rank in range(2)]
        assert [join(child) for child in children] == [0, 0]
        assert watch.folder.used_bytes == len(files(tmp_path)) * BYTES == 20 * BYTES


@pytest.fixture
def thesis(tmp_path):
    """A folder of the user's with what must not be lost."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    yield home
    assert {path.name: path.read_text() for path in home.iterdir()} == {"thesis.tex": "years"}


class TestH2:
    """Another user who may write in ``cache_dir`` can neither delete nor overwrite nor read a file."""

    def test_all_is_made_for_this_user_only(self, pristine, tmp_path):
        umask = os.umask(0o002)
        try:
            cache = SpanCache.open_for(open_dataset(pristine), tmp_path / "new" / "cache", "1MB")
            cache.put(3, memoryview(bytes(cache.folder.length_of(3))))
        finally:
            os.umask(umask)
        paths = [
            tmp_path / "new" / "cache",
            *(tmp_path / "new" / "cache").rglob("*"),
        ]
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in paths}
        names = {cache.folder.path.name, "cache", "spans", "data", "tmp", "0"}
        files_made = ("cache.json", "lock", "users.lock", "table", "3")
        assert modes == dict.fromkeys(names, "0o700") | dict.fromkeys(files_made, "0o600")

    def test_the_rights_of_others_in_an_older_cache_are_taken_away(self, tmp_path):
        cache_at(tmp_path).close()
        (tmp_path / "data").chmod(0o777)
        tmp_path.chmod(0o775)
        cache_at(tmp_path)
        assert [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "data")] == [
            0o700,
            0o700,
        ]

    @pytest.mark.parametrize(
        "linked",
        ["", "spans", "spans/FINGERPRINT", "*/data", "*/tmp", "*/data/0"],
    )
    def test_links_to_folders_are_refused(self, pristine, tmp_path, thesis, linked):
        dataset = open_dataset(pristine)
        shared = tmp_path / "shared"
        place = shared / linked.replace("*", "spans/FINGERPRINT").replace(
            "FINGERPRINT", dataset.manifest.fingerprint
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        marker = {
            "format": "fuelrail-span-cache",
            "version": 1,
            "fingerprint": dataset.manifest.fingerprint,
        }
        if linked.endswith("data/0"):
            (place.parent.parent / "cache.json").write_text(
                json.dumps({**marker, "num_samples": 25})
            )
        place.symlink_to(thesis, target_is_directory=True)
        with pytest.raises(
            ConfigError,
            match=r"is a symbolic link.*choose a cache folder of your own",
        ):
            SpanCache.open_for(dataset, shared, "1MB")

    @pytest.mark.parametrize("name", ["cache.json", "lock", "users.lock", "table"])
    @pytest.mark.parametrize("how", ["symbolic link", "other name"])
    def test_links_to_files_are_refused(self, tmp_path, thesis, name, how):
        cache = tmp_path / "cache"
        cache_at(cache).close()
        (cache / name).unlink()
        if how == "symbolic link":
            (cache / name).symlink_to(thesis / "thesis.tex")
        else:
            (cache / name).hardlink_to(thesis / "thesis.tex")
        with pytest.raises(
            ConfigError,
            match=f"{name}' is (a symbolic link|another name of some other file)",
        ):
            cache_at(cache)
        (cache / name).unlink()

    def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(self, pristine, tmp_path):
        dataset = open_dataset(pristine)
        SpanCache.open_for(dataset, tmp_path, None).close()
        for name in ("table", "lock", "cache.json"):
            file = tmp_path / "spans" / dataset.manifest.fingerprint / name
            file.unlink()
            os.mkfifo(file)
            with pytest.raises(ConfigError, match=f"{name}' is not a regular file"):
                SpanCache.open_for(dataset, tmp_path, None)
            file.unlink()

    def test_links_planted_as_samples_are_neither_read_nor_written_through(self, tmp_path, thesis):
        cache = cache_at(tmp_path / "cache")
        assert cache.put(3, span(3))
        for index in (3, 4):
            cache.folder.files.path_of(index).unlink(missing_ok=True)
            cache.folder.files.path_of(index).symlink_to(thesis / "thesis.tex")
        assert cache.open(3, BYTES) is None
        assert cache.put(4, span(4))
        assert read(cache, 4) == bytes(span(4))
        cache.close()

    def test_a_temporary_file_is_new_or_nothing(self, tmp_path, thesis, monkeypatch):
        cache = cache_at(tmp_path / "cache")
        cache.folder.files._token = "planted"
        cache.folder.files._numbers = itertools.count()
        (tmp_path / "cache" / "tmp" / f"{os.getpid()}-planted-0").symlink_to(thesis / "thesis.tex")
        assert not cache.put(3, span(3))

    def test_a_folder_that_fuelrail_did_not_make_is_refused(self, tmp_path, thesis):
        (thesis / "data" / "0").mkdir(parents=True)
        (thesis / "data" / "0" / "5").write_bytes(b"mine")
        with pytest.raises(
            ConfigError,
            match=r"files in 'data' but no cache\.json, so fuelrail did not make it",
        ):
            cache_at(thesis)
        assert (thesis / "data" / "0" / "5").read_bytes() == b"mine"
        shutil.rmtree(thesis / "data")
        shutil.rmtree(thesis / "tmp")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
    def test_folders_and_files_of_another_user_are_refused(self, pristine, tmp_path):
        dataset = open_dataset(pristine)
        cache = SpanCache.open_for(dataset, tmp_path, None)
        cache.put(3, memoryview(bytes(dataset.index.row(3).length)))
        cache.close()
        path = cache.folder.path
        owned = [
            tmp_path,
            tmp_path / "spans",
            path,
            path / "data",
            path / "data" / "0",
            path / "tmp",
        ]
        for place in (
            *owned,
            *(path / name for name in ("cache.json", "lock", "users.lock", "table")),
        ):
            os.chown(place, 4242, 4242)
            with pytest.raises(
                ConfigError,
                match=f"'{place}' belongs to user 4242, and this process runs as user 0",
            ):
                SpanCache.open_for(dataset, tmp_path, None)
            os.chown(place, 0, 0)
        assert SpanCache.open_for(dataset, tmp_path, None).folder.holds(3)


def test_sizes():
    sizes = {
        5: 5,
        "5": 5,
        "5B": 5,
        "2kb": 2000,
        "1.5 GiB": 3 << 29,
        "500GB": 500 * 10**9,
        "1TiB": 1 << 40,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "5 bananas", "-5", 0, -1, "0", "5i"):
        with pytest.raises(ConfigError, match="cache_size"):
            parse_size(text)
