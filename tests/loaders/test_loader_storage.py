"""The DataLoader over every storage: the same batches, in bounded memory, with bad samples replaced, in any trouble."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from fuelrail import ImageAugment
from fuelrail.loaders.records import Scheduled
from fuelrail.loaders.schedule.prefetch import (
    EARLY_BUNDLE,
    FIRST_BUNDLE,
    MAX_SAMPLES,
    RequestStream,
    prefetch,
)
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import (
    BadSamplesError,
    ChecksumError,
    ImageError,
    OrderError,
    StorageError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor, Walk, WorkerShard
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.batches import load
from support.cache_policies import farthest_first_hits, lru_hits
from support.fault_server import FaultServer, Misbehaviour, faulty
from support.storage_suite import spoil

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def tiny(build_once):
    return build_once({"train": (5, 7, 9)})[0]


def epochs(loader, count=2):
    """Key and pixels of every sample of some epochs."""
    samples = []
    for _ in range(count):
        for batch in loader:
            pixels = [image.numpy().tobytes() for image in batch["img"]]
            samples += zip(batch["sample_key"], pixels, strict=True)
    return samples


def keys(loader, count=1):
    return [key for key, _ in epochs(loader, count)]


class TestSameBatches:
    @pytest.mark.network
    def test_whatever_the_storage_is(self, tiny, tmp_path):
        expected = epochs(load(tiny, seed=4))
        assert len(expected) == 42
        with FaultServer(tiny) as server:
            for options in (
                {"backend": "pread"},
                {"backend": "remote"},
                {"cache_dir": tmp_path / "a"},
                {"cache_dir": tmp_path / "b", "cache_size": "150kB"},
                {"look_ahead_bytes": 1},
                {"look_ahead_bytes": 40_000, "backend": "remote"},
                {"verify": False},
            ):
                with load(tiny, seed=4, **options) as loader:
                    assert epochs(loader) == expected, options
            server.misbehave = faulty(0.001, 0.1, seed=1, stall_s=3.0)
            for cache in ({}, {"cache_size": "150kB"}):
                with load(
                    server.url,
                    seed=4,
                    cache_dir=tmp_path / f"c{len(cache)}",
                    **cache,
                ) as loader:
                    assert epochs(loader) == expected

    @pytest.mark.network
    def test_after_a_server_was_gone_for_some_time(self, tiny, tmp_path):
        expected = keys(load(tiny))
        policy = RetryPolicy(first_delay_s=0.05, max_delay_s=0.2)
        with (
            FaultServer(tiny) as server,
            load(server.url, retry=policy, look_ahead_bytes=1) as loader,
        ):
            batches = iter(loader)
            loaded_keys = list(next(batches)["sample_key"])
            server.go_down()

            def come_back():
                while loader.stats().storage.retries == 0:
                    time.sleep(0.01)
                server.come_up()

            back = threading.Thread(target=come_back)
            back.start()
            loaded_keys += [key for batch in batches for key in batch["sample_key"]]
            back.join()
            assert loaded_keys == expected

    @pytest.mark.network
    def test_two_ranks_share_a_cache(self, tiny, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with FaultServer(tiny) as server:
            loaders = []
            for rank in range(2):
                monkeypatch.setenv("LOCAL_RANK", str(rank))
                options = {
                    "cache_dir": tmp_path,
                    "cache_size": "1MB",
                    "look_ahead_bytes": 30_000,
                }
                loaders.append(load(server.url, 1, rank=rank, size=2, **options))
            for _ in range(3):
                loaded_keys = [key for loader in loaders for key in keys(loader)]
                assert len(set(loaded_keys)) == len(loaded_keys) == 20
            stats = [loader.stats().storage for loader in loaders]
            # 21 misses, but for what one rank asks for while the other is fetching it; 37 with a cache for each.
            assert sum(rank_stats.cache_misses for rank_stats in stats) <= 30
            assert sum(rank_stats.cache_hits for rank_stats in stats) >= 30
            for loader in loaders:
                loader.close()

    @pytest.mark.network
    def test_the_second_epoch_of_what_fits_reads_nothing_remote(self, tiny, tmp_path):
        with FaultServer(tiny) as server:
            loader = load(server.url, cache_dir=tmp_path)
            assert len(keys(loader)) == 21
            loader.close()
            num_requests = len(server.requests)
            server.go_down()
            assert len(keys(loader, 3)) == 63
            assert len(server.requests) == num_requests
            assert loader.stats().storage.cache_misses == 21
            loader.close()

    @pytest.mark.parametrize("num_turns", [1, 2])
    def test_a_small_cache_hits_as_often_as_can_be_also_for_processes_that_take_turns(
        self, tiny, tmp_path, num_turns
    ):
        """Samples are requested and read by this thread alone, in turns: the number of hits is not a matter of luck."""
        lengths = open_dataset(tiny).index.column("length")
        budget = int(lengths.sum()) // 3
        workers = [
            load(
                tiny,
                1,
                cache_dir=tmp_path,
                cache_size=budget,
                look_ahead_bytes=30_000,
            )
            for _ in range(num_turns)
        ]
        coming = []
        for number, worker in enumerate(workers):
            walk = Walk(Cursor(), worker._batching, WorkerShard(number, num_turns))
            where = worker._schedule.where
            coming.append(
                prefetch(
                    where.scheduled(walk),
                    worker._schedule.streams(walk),
                    worker._look_ahead_bytes,
                )
            )
        read = []
        for step in range(6 * 21):
            scheduled, _, (take,) = next(coming[step % 21 % num_turns])
            read.append(scheduled.rows[0])
            assert len(take().base) == lengths[read[-1]]
        for worker in workers:
            worker.close()
        stats = [worker.stats().storage for worker in workers]
        assert all(worker_stats.cache_bytes <= budget for worker_stats in stats)
        hits = sum(worker_stats.cache_hits for worker_stats in stats)
        best, lru = (
            policy(np.array(read), lengths, budget).sum()
            for policy in (farthest_first_hits, lru_hits)
        )
        assert lru < hits <= best
        assert hits >= 0.85 * best  # the look-ahead asks before the samples in front of it are kept

    @pytest.mark.process
    def test_a_disk_that_fills_up_stops_the_cache_and_not_the_run(self, tiny, tmp_path):
        """The cache is on a real small file system, which takes a user namespace to mount."""
        code = """
import logging, sys
from fuelrail import DataLoader
logging.basicConfig(format="%(levelname)s %(message)s")
options = {"transforms": {"image": {"height": 32, "width": 48, "resize": 0.5}}, "num_workers": 2, "shuffle": True}
alone = [key for batch in DataLoader(sys.argv[1], 3, **options) for key in batch["sample_key"]]
with DataLoader(sys.argv[1], 3, storage={"cache_dir": sys.argv[2], "cache_size": "1GB"}, **options) as loader:
    for epoch in range(3):
        loader.set_epoch(0)
        assert [key for batch in loader for key in batch["sample_key"]] == alone
    print("hits", loader.stats().storage.cache_hits, "bytes", loader.stats().storage.cache_bytes)
"""
        small = 'mount -t tmpfs -o size=160k none "$1" && shift && exec "$@"'
        inside = [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            small,
            "sh",
            str(tmp_path),
        ]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*inside, "true"], capture_output=True).returncode
        ):
            pytest.skip("no mount in a user namespace here")
        done = subprocess.run(
            [*inside, sys.executable, "-c", code, str(tiny), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        assert (
            done.stderr.count(
                "disabled for new samples: [Errno 28] No space left on device; continuing without"
            )
            == 1
        )
        _, hits, _, used = done.stdout.split()
        assert int(hits) > 0
        assert 0 < int(used) < 160 * 1024


def scheduled(count):
    return (
        Scheduled(
            epoch=0,
            step=number,
            batch_row=0,
            position=number,
            rows=(number % 21,),
            valid=True,
        )
        for number in range(count)
    )


class TestBounds:
    def test_no_more_is_asked_for_than_the_look_ahead(self, tiny):
        dataset = open_dataset(tiny)
        lengths = dataset.index.column("length").tolist()
        held = {"bytes": 0, "most": 0}

        class Session:
            closed = False

            def look_up(self, index, row):
                return 0

            def request(self, rows):
                for _, row in rows:
                    assert held["bytes"] < limit
                    held["bytes"] += row.length
                    held["most"] = max(held["most"], held["bytes"])
                return [lambda row=row: row for _, row in rows]

            def close(self):
                self.closed = True

        for limit in (1, 30_000, 100_000, 10**9):
            held.update(bytes=0, most=0)
            session = Session()
            steps = []
            for ahead in prefetch(
                scheduled(200),
                [RequestStream(SampleReader(dataset), session)],
                limit,
            ):
                held["bytes"] -= ahead.entries[0].length
                steps.append(ahead.scheduled.step)
            assert steps == list(range(200))
            assert held["most"] < limit + max(lengths)
            assert session.closed

    def test_small_samples_are_bounded_by_number(self, tiny):
        dataset = open_dataset(tiny)
        bundle_sizes = []
        session = LayeredStorage(open_storage(dataset)).session()
        real = session.request
        session.request = lambda rows: bundle_sizes.append(len(rows)) or real(rows)
        ahead = prefetch(
            scheduled(5000),
            [RequestStream(SampleReader(dataset), session)],
            10**12,
        )
        outstanding = []
        for num_taken in range(400):
            next(ahead)
            outstanding.append(sum(bundle_sizes) - num_taken)
        assert bundle_sizes[:2] == [FIRST_BUNDLE, EARLY_BUNDLE], (
            "the first batch does not wait for the whole window"
        )
        assert max(outstanding) == MAX_SAMPLES
        assert max(bundle_sizes[-1:]) > FIRST_BUNDLE, (
            "later ones are large, to be fetched as few ranges"
        )

    def test_a_row_outside_the_index_is_reported_in_its_turn(self, tiny):
        dataset = open_dataset(tiny)
        coming = (
            Scheduled(
                epoch=0,
                step=n,
                batch_row=0,
                position=n,
                rows=(row,),
                valid=True,
            )
            for n, row in enumerate((3, 4, 99, 5))
        )
        stream = prefetch(
            coming,
            [
                RequestStream(
                    SampleReader(dataset),
                    LayeredStorage(open_storage(dataset)).session(),
                )
            ],
            10**9,
        )
        assert [next(stream).scheduled.rows[0] for _ in range(2)] == [3, 4]
        third = next(stream)
        with pytest.raises(OrderError, match="99"):
            third.pending_reads[0]()
        assert list(stream) == []

    @pytest.mark.network
    def test_closing_does_not_wait_for_storage_that_stalls(self, tiny, tmp_path):
        def stall(request):
            return Misbehaviour(stall_s=60.0 if request.name.endswith(".tar") else 0.0)

        with FaultServer(tiny, stall) as server:
            loader = load(server.url, cache_dir=tmp_path)
            waiting = threading.Thread(target=lambda: next(iter(loader), None), daemon=True)
            before = threading.excepthook
            threading.excepthook = lambda args: None
            try:
                waiting.start()
                while not any(request.name.endswith(".tar") for request in server.requests):
                    time.sleep(0.01)
                loader.close()
                waiting.join(20)  # the answer stalls for 60 s
                assert not waiting.is_alive()
            finally:
                threading.excepthook = before


def spoil_rows(root, rows):
    index = open_dataset(root).index
    for number in rows:
        spoil(root, index.row(number))


class TestBadSamples:
    @pytest.fixture
    def tiny_copy(self, tiny, tmp_path):
        return shutil.copytree(tiny, tmp_path / "own")

    def test_raised_by_default(self, tiny_copy):
        spoil_rows(tiny_copy, [8])
        with pytest.raises(ChecksumError) as caught:
            keys(load(tiny_copy))
        assert caught.value.key == open_dataset(tiny_copy).index.row(8).key

    def test_replaced_by_the_next_of_the_order(self, tiny_copy, tiny, tmp_path):
        bad = [8, 3, 15]
        spoil_rows(tiny_copy, bad)
        index = open_dataset(tiny).index
        names = {index.row(number).key for number in bad}
        good = keys(load(tiny, seed=2))
        expected = []
        for position in range(len(good)):
            while good[position % 21] in names:
                position += 1
            expected.append(good[position % 21])
        options = {
            "on_error": "substitute",
            "file": tmp_path / "bad.jsonl",
            "seed": 2,
        }
        for batch_size in (3, 7):
            loader = load(tiny_copy, batch_size, **options)
            assert keys(loader) == expected
            assert loader.stats().bad_samples == 3

    def test_the_quarantine_file_lists_each_once_with_its_address(
        self, tiny_copy, tmp_path, caplog
    ):
        spoil_rows(tiny_copy, [8, 3])
        file = tmp_path / "bad.jsonl"
        loader = load(tiny_copy, seed=2, on_error="substitute", file=file)
        with caplog.at_level(logging.WARNING):
            first = keys(loader)
            second = keys(loader)
        assert len(first) == len(second) == 21
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == 2
        index = open_dataset(tiny_copy).index
        for line in lines:
            row = index.row(line["row"])
            assert (line["key"], line["offset"], line["error"]) == (
                row.key,
                row.offset,
                "ChecksumError",
            )
            assert line["shard"] == f"train-00000{row.shard}.tar"
            assert line["replaced_by"] in first
            assert row.key in caplog.text
        assert {line["row"] for line in lines} == {8, 3}

    def test_more_than_allowed_is_an_error(self, tiny_copy):
        spoil_rows(tiny_copy, [8, 3, 15])
        assert len(keys(load(tiny_copy, on_error="substitute", max_bad=3, file=None))) == 21
        with pytest.raises(
            BadSamplesError,
            match="3 bad samples, max_bad=2 are allowed; the last",
        ):
            keys(load(tiny_copy, on_error="substitute", max_bad=2, file=None))

    def test_where_nothing_is_good_it_ends(self, tiny_copy):
        spoil_rows(tiny_copy, range(21))
        with pytest.raises(BadSamplesError, match="no sample of the epoch is good"):
            keys(load(tiny_copy, on_error="substitute", file=None))

    def test_images_that_do_not_decode_are_replaced_too(self, tiny_copy, tiny, tmp_path):
        dataset = open_dataset(tiny_copy)
        row = dataset.index.row(6)
        member = next(entry for entry in row.members if entry.name == "cam_front.jpg")
        with dataset.shard_path(row).open("r+b") as file:
            file.seek(row.offset + member.offset)
            file.write(bytes(member.stored_bytes))
        with pytest.raises(ImageError):
            keys(load(tiny_copy, verify=False))
        file = tmp_path / "bad.jsonl"
        loaded_keys = keys(load(tiny_copy, verify=False, on_error="substitute", file=file))
        assert len(loaded_keys) == 21
        assert row.key not in loaded_keys
        assert json.loads(file.read_text())["member"] == "cam_front"

    def test_augmentation_of_the_substitute_is_its_own(self, tiny_copy, tiny):
        spoil_rows(tiny_copy, [8])
        image = ImageAugment(height=32, width=48, resize=0.5, flip_prob=0.5, train=True)

        def pixels(loader):
            return {
                key: batch["img"][index]
                for batch in loader
                for index, key in enumerate(batch["sample_key"])
            }

        good = pixels(load(tiny, image=image))
        replaced = pixels(load(tiny_copy, image=image, on_error="substitute", file=None))
        assert len(replaced) == 20
        assert all(torch.equal(good[key], picture) for key, picture in replaced.items())

    def test_storage_that_refuses_is_never_replaced(self, tiny_copy, tmp_path):
        (tiny_copy / "train-000001.tar").unlink()
        with pytest.raises(StorageError, match=r"train-000001\.tar"):
            keys(
                load(
                    tiny_copy,
                    on_error="substitute",
                    file=tmp_path / "bad.jsonl",
                )
            )
        assert not (tmp_path / "bad.jsonl").exists()

    def test_a_quarantine_file_that_cannot_be_written_stops_nothing(
        self, tiny_copy, tmp_path, caplog
    ):
        spoil_rows(tiny_copy, [8])
        assert len(keys(load(tiny_copy, on_error="substitute", file=tmp_path))) == 21
        assert "quarantine file" in caplog.text
