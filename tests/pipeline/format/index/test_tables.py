"""The tables of a dataset: shards, keys, blocks; here and at a URL, where blocks are fetched when they are needed."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import (
    DatasetError,
    FuelrailError,
    IndexFileError,
    ManifestError,
)
from fuelrail.pipeline.format import fetch
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index import blocks, keys, samples
from fuelrail.pipeline.format.index.blocks import BlockFile, split_digests
from fuelrail.pipeline.format.index.keys import KeyTable
from fuelrail.pipeline.format.index.shards import ShardTable, shard_name
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.edits import reseal
from support.fault_server import FaultServer, Misbehaviour, Request
from support.sized_datasets import write_synthetic_index


@pytest.fixture(scope="module")
def tiny(tiny_dataset):
    return tiny_dataset({"train": (4, 3), "val": (2,)}, size=(32, 24)).root


class TestShards:
    def test_entries(self, tiny) -> None:
        shards = open_dataset(tiny).shards
        assert [(s.name, s.split, s.first_sample, s.num_samples) for s in shards] == [
            ("train-000000.tar", "train", 0, 4),
            ("train-000001.tar", "train", 4, 3),
            ("val-000000.tar", "val", 7, 2),
        ]
        assert [s.bytes for s in shards] == [(tiny / s.name).stat().st_size for s in shards]
        assert shards[-1] == shards[2] == shards[1:][1]
        assert shards.lengths(0, 3).tolist() == [4, 3, 2]
        assert shards.lengths(1, 2).tolist() == [3]
        assert (shards.num_bytes, shards.num_framed) == (
            open_dataset(tiny).manifest.num_bytes,
            0,
        )
        for number in (3, -4):
            with pytest.raises(
                IndexError,
                match=f"shard {number} is not in the dataset: it has shards 0 to 2",
            ):
                shards[number]

    @pytest.mark.parametrize(
        ("column", "row", "value", "words"),
        [
            ("bytes", 1, -1, "bytes of shard 1 is -1"),
            ("idx_bytes", 0, -5, "idx_bytes of shard 0 is -5"),
            ("first_sample", 1, 0, "shard 0 holds 0 samples"),
            ("first_sample", 1, 9, "shard 1 holds -2 samples"),
            (
                "first_sample",
                0,
                1,
                "split 'train' begins at sample 0, but its first shard, number 0, at 1",
            ),
            ("first_sample", 2, 2**62, "split 'val' begins at sample 7"),
        ],
    )
    def test_what_does_not_add_up_is_refused(
        self, tiny, tmp_path, column, row, value, words
    ) -> None:
        with pa.ipc.open_file((tiny / "shards.arrow").read_bytes()) as file:
            table = file.read_all()
        values = table[column].to_pylist()
        values[row] = value
        index = table.column_names.index(column)
        table = table.set_column(
            index,
            table.schema.field(index),
            pa.array(values, table.schema.types[index]),
        )
        with pa.ipc.new_file(tmp_path / "shards.arrow", table.schema) as writer:
            writer.write_batch(table.to_batches()[0])
        manifest = open_dataset(tiny).manifest
        with pytest.raises(ManifestError, match=words):
            ShardTable(BlockFile(tmp_path / "shards.arrow"), manifest).check(manifest.num_bytes)
        with pytest.raises(ManifestError, match=words):
            list(ShardTable(BlockFile(tmp_path / "shards.arrow"), manifest))

    def test_other_columns_are_refused(self, tiny, tmp_path) -> None:
        manifest = open_dataset(tiny).manifest
        for name in ("index.arrow", "keys.arrow"):
            with pytest.raises(IndexFileError, match="does not have the columns"):
                ShardTable(BlockFile(tiny / name), manifest)

    def test_a_flipped_byte_is_found_by_its_block(self, tiny_dataset, tmp_path) -> None:
        tiny_dataset(
            {"train": (4, 3), "val": (2,)},
            size=(32, 24),
            copy_to=tmp_path / "d",
        )
        good = (tmp_path / "d" / "shards.arrow").read_bytes()
        for position in range(0, len(good), 97):
            (tmp_path / "d" / "shards.arrow").write_bytes(
                good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
            )
            with pytest.raises(
                IndexFileError,
                match=r"shards\.arrow.*do not match their SHA-256",
            ):
                open_dataset(tmp_path / "d")

    def test_a_missing_file_of_digests_is_named(self, tiny_dataset, tmp_path) -> None:
        tiny_dataset({"train": (1,)}, size=(32, 24), copy_to=tmp_path / "d")
        (tmp_path / "d" / "blocks.sha256").unlink()
        with pytest.raises(IndexFileError, match=r"blocks\.sha256' cannot be read"):
            open_dataset(tmp_path / "d")

    def test_names_follow_from_numbers(self) -> None:
        assert shard_name("train", 7) == "train-000007.tar"
        assert shard_name("val", 4_000_000, framed=True) == "val-4000000.tar.zst"


@pytest.fixture(scope="module")
def large_dataset(tmp_path_factory):
    """20,000 samples: three batches of the index."""
    root = tmp_path_factory.mktemp("tables") / "many"
    write_synthetic_index(root, [40] * 500, shuffle_seed=3)
    return root


class TestKeys:
    @pytest.mark.slow
    def test_every_key_is_found(self, large_dataset) -> None:
        dataset = open_dataset(large_dataset)
        all_keys = dataset.index.strings("key")
        assert [dataset.find(key) for key in all_keys] == list(range(20_000))
        assert [dataset.find(key) for key in ("", "clip-0000000-000040", "x" * 1000)] == [None] * 3

    def test_buckets_sort_as_memory_does(self, large_dataset, tmp_path, monkeypatch) -> None:
        index = open_dataset(large_dataset).index
        sorted_in_memory = keys.sorted_entries(index, tmp_path).copy()
        monkeypatch.setattr(keys, "_BUCKET_ROWS", 512)
        monkeypatch.setattr(keys, "_ROWS_AT_ONCE", 1000)
        np.testing.assert_array_equal(keys.sorted_entries(index, tmp_path), sorted_in_memory)
        assert (np.diff(sorted_in_memory["xxh3"].astype(object)) >= 0).all()

    def test_unevenly_spread_hashes_are_found_too(
        self, large_dataset, tmp_path, monkeypatch
    ) -> None:
        """Three keys a hash, and all hashes at one end."""
        index = open_dataset(large_dataset).index
        all_keys = index.strings("key")
        hashes = {key: number // 3 for number, key in enumerate(all_keys)}
        monkeypatch.setattr(keys.xxhash, "xxh3_64_intdigest", lambda key: hashes[key.decode()])
        keys.write_keys(tmp_path / "keys.arrow", index)
        table = KeyTable(lambda: BlockFile(tmp_path / "keys.arrow"), len(index))
        for number in (0, 1, 9_999, 19_998, 19_999):
            first = number // 3 * 3
            rows = range(first, min(first + 3, 20_000))
            places = [index.row(row) for row in rows]
            assert table.find(all_keys[number]) == [
                (row, place.offset, place.length, place.shard)
                for row, place in zip(rows, places, strict=True)
            ]

    def test_the_parts_of_a_first_look_up_are_fetched_together(
        self, large_dataset, tmp_path, monkeypatch
    ) -> None:
        index = open_dataset(large_dataset).index
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
        path = large_dataset / "keys.arrow"
        data = path.read_bytes()
        together = threading.Barrier(3, timeout=60)

        def read(first: int, end: int) -> bytes:
            together.wait()
            return data[first:end]

        monkeypatch.setattr(keys, "_BACKGROUND_BYTES", 0)
        opened = blocks.open_sparse(
            tmp_path / "keys.arrow", len(data), blocks.block_digests(path), read
        )
        middle = int(keys.sorted_entries(index, tmp_path)["row"][10_000])
        table = KeyTable(lambda: opened, len(index))
        assert [entry.row for entry in table.find(index.row(middle).key)] == [middle]

    def test_tables_do_not_wait_for_each_other(self, large_dataset) -> None:
        """A first look-up waits for a server; one in another table, on another thread, does not wait for it."""
        index = open_dataset(large_dataset).index
        waits = threading.Event()
        release = threading.Event()

        def slow() -> BlockFile:
            waits.set()
            assert release.wait(60)
            return BlockFile(large_dataset / "keys.arrow")

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(KeyTable(slow, len(index)).find, index.row(3).key)
            assert waits.wait(60)
            second_pool = ThreadPoolExecutor(1)
            second = second_pool.submit(
                KeyTable(lambda: BlockFile(large_dataset / "keys.arrow"), len(index)).find,
                index.row(4).key,
            )
            try:
                assert [entry.row for entry in second.result(60)] == [4]
            finally:
                release.set()
                second_pool.shutdown()
            assert [entry.row for entry in first.result(60)] == [3]

    @pytest.mark.parametrize("is_gone", [False, True])
    def test_the_first_look_up_fetches_the_table_in_the_background(
        self, large_dataset, tmp_path, monkeypatch, is_gone
    ) -> None:
        index = open_dataset(large_dataset).index
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
        path = large_dataset / "keys.arrow"
        data = path.read_bytes()
        has_looked_up = threading.Event()
        requests = list[int]()
        askers = list[threading.Thread]()

        def read(first: int, end: int) -> bytes:
            askers.append(threading.current_thread())
            if threading.current_thread() in opened._in_background:
                assert has_looked_up.wait(60), "the first look-up must not wait for the rest"
                if is_gone:
                    raise DatasetError("gone")
            requests.append(first)
            return data[first:end]

        opened = blocks.open_sparse(
            tmp_path / "keys.arrow", len(data), blocks.block_digests(path), read
        )
        table = KeyTable(lambda: opened, len(index))
        in_a_run = int(keys.sorted_entries(index, tmp_path)["row"][2048])
        assert [entry.row for entry in table.find(index.row(in_a_run).key)] == [in_a_run]
        threads = opened._in_background
        has_looked_up.set()
        for thread in threads:
            thread.join(60)
        assert all(thread.daemon for thread in threads), (
            "the interpreter must not wait for them when it ends"
        )
        assert sum(asker not in threads for asker in askers) == 3, (
            "the parts of the look-up; the rest is theirs"
        )
        before = len(requests)
        assert [table.find(index.row(row).key)[0].row for row in range(0, 20_000, 99)] == [
            *range(0, 20_000, 99)
        ]
        assert opened._in_background is threads
        assert (len(requests) > before) == is_gone

    def test_threads_that_look_up_at_once_start_one_fetch(
        self, large_dataset, tmp_path, monkeypatch
    ) -> None:
        path = large_dataset / "keys.arrow"
        done = threading.Event()
        at_once = threading.Barrier(2)

        def random_after_both() -> random.Random:
            with contextlib.suppress(
                threading.BrokenBarrierError
            ):  # one of them does not come here
                at_once.wait(0.5)
            return random.Random(0)

        monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
        monkeypatch.setattr(blocks, "random", SimpleNamespace(Random=random_after_both))
        opened = blocks.open_sparse(
            tmp_path / "keys.arrow",
            path.stat().st_size,
            blocks.block_digests(path),
            lambda *_, **__: done.wait(60) and b"",
        )
        before = set(threading.enumerate())
        with ThreadPoolExecutor(2) as pool:
            for started in [pool.submit(opened.fetch_in_background) for _ in range(2)]:
                started.result()
        try:
            assert len(set(threading.enumerate()) - before) == 4
        finally:
            done.set()
            for thread in opened._in_background:
                thread.join(60)

    def test_what_is_missing_is_found_without_taking_memory_of_a_tmpfs(self, large_dataset) -> None:
        """A look at a hole through the map takes memory there, and is SIGBUS where the tmpfs is full."""
        path = large_dataset / "keys.arrow"
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            sparse = Path(folder) / "keys.arrow"
            opened = blocks.open_sparse(
                sparse,
                path.stat().st_size,
                blocks.block_digests(path),
                lambda *_, **__: pytest.fail("nothing is fetched"),
            )
            assert opened._missing([0])
            assert sparse.stat().st_blocks == 0

    def test_rows_outside_the_index_are_refused(self, tiny_dataset, tmp_path) -> None:
        tiny_dataset({"train": (3,)}, size=(32, 24), copy_to=tmp_path / "d")
        path = tmp_path / "d" / "keys.arrow"
        data = bytearray(path.read_bytes())
        dataset = open_dataset(tmp_path / "d")
        entries = keys.sorted_entries(dataset.index, tmp_path)
        start = data.index(entries.tobytes())
        entries["row"] = 3
        data[start : start + entries.nbytes] = entries.tobytes()
        path.write_bytes(data)
        with pytest.raises(
            IndexFileError,
            match=r"keys\.arrow puts key 'clip-0000-000001' at row 3, the index has 3",
        ):
            open_dataset(tmp_path / "d").find("clip-0000-000001")

    def test_a_table_of_another_dataset(self, large_dataset, tmp_path) -> None:
        table = KeyTable(lambda: BlockFile(large_dataset / "keys.arrow"), 7)
        with pytest.raises(IndexFileError, match="has 20000 keys, the index 7 samples"):
            table.find("a")

    def test_flipped_bytes_are_an_error_or_no_harm(self, tiny_dataset, tmp_path) -> None:
        """A look-up among damaged entries never gives another sample's row, never misses a key, and never crashes."""
        path = (
            tiny_dataset({"train": (5,)}, size=(32, 24), copy_to=tmp_path / "d").root / "keys.arrow"
        )
        good = path.read_bytes()
        for seed in range(30):
            rng = np.random.default_rng(seed)
            data = bytearray(good)
            for position in rng.integers(0, len(data), 3):
                data[position] = rng.integers(256)
            path.write_bytes(data)
            dataset = open_dataset(tmp_path / "d")
            for number in range(5):
                try:
                    assert dataset.find(f"clip-{number // 4:04d}-{number % 4:06d}") == number
                except FuelrailError as error:
                    assert "keys.arrow" in str(error)


def test_digests_of_another_length_are_refused() -> None:
    assert split_digests(bytes(96), [("a", 1), ("b", 0), ("c", 2**20 + 1)]) == {
        "a": bytes(32),
        "b": b"",
        "c": bytes(64),
    }
    for size in (64, 95, 128):
        with pytest.raises(
            IndexFileError,
            match=f"has {size} bytes; the tables of the dataset make 96",
        ):
            split_digests(bytes(size), [("a", 1), ("b", 0), ("c", 2**20 + 1)])


@pytest.mark.network
class TestBlocksAtAUrl:
    """Set blocks of 4 KiB and batches of 64 rows, so that a small dataset has many."""

    @pytest.fixture
    def served(self, tmp_path, monkeypatch):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
        monkeypatch.setattr(samples, "ROWS_PER_BATCH", 64)
        monkeypatch.setattr(fetch, "WHOLE_BYTES", 0)
        write_synthetic_index(tmp_path / "d", [40] * 50, shuffle_seed=1)
        with FaultServer(tmp_path / "d") as server:
            yield server, open_dataset(tmp_path / "d"), tmp_path / "cache"

    def test_what_is_needed_is_fetched_once(self, served) -> None:
        server, local, cache = served
        dataset = open_dataset(server.url, cache_dir=cache)
        assert dataset.shards[:] == local.shards[:]
        opened = len(server.requests)
        assert opened == 5, "manifest, digests, shards, the footer of the index and its last batch"
        assert dataset.index.row(1000) == local.index.row(1000)
        assert len(server.requests) == opened + 1
        assert dataset.index.row(1001) == local.index.row(1001)
        assert len(server.requests) == opened + 1
        before = len(server.requests)
        assert dataset.find(local.index.row(1002).key) == 1002
        for thread in dataset.keys._file._in_background:
            thread.join(60)
        assert {request.name for request in server.requests[before:]} == {"keys.arrow"}
        before = len(server.requests)
        assert dataset.find(local.index.row(1003).key) == 1003
        assert len(server.requests) == before
        assert [dataset.find(local.index.row(row).key) for row in range(2000)] == list(range(2000))
        assert {request.name for request in server.requests[before:]} == {"index.arrow"}
        assert [dataset.index.row(row) for row in range(2000)] == [
            local.index.row(row) for row in range(2000)
        ]
        before = len(server.requests)
        reopened = open_dataset(server.url, cache_dir=cache)
        assert [reopened.index.row(row) for row in range(2000)] == [
            local.index.row(row) for row in range(2000)
        ]
        assert [request.name for request in server.requests[before:]] == ["dataset.json"]

    def test_a_filter_reads_its_columns_of_the_split_alone(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
        monkeypatch.setattr(fetch, "WHOLE_BYTES", 0)
        noise = {
            f"score{n}": scores
            for n, scores in enumerate(np.random.default_rng(0).random((12, 9000)))
        }
        table = {**noise, "night": np.arange(9000) % 10 == 0}
        monkeypatch.setattr(pq, "write_table", partial(pq.write_table, row_group_size=2000))
        write_synthetic_index(tmp_path / "d", [40] * 225, attributes=table)
        file = tmp_path / "d" / "attributes.parquet"
        with FaultServer(tmp_path / "d") as server:
            dataset = open_dataset(server.url, cache_dir=tmp_path / "cache")
            before = len(server.requests)
            columns = Attributes(dataset, "train").read(["night"])
            assert columns["night"].to_pylist() == table["night"].tolist()
            (requests,) = {request.name for request in server.requests[before:]}
            assert requests == "attributes.parquet"
            assert (
                sum(request.end - request.start for request in server.requests[before:])
                < file.stat().st_size / 3
            )
            for rows in (
                range(9000),
                range(1999, 4001),
                range(4000, 6000),
                range(8999, 9000),
                range(0),
            ):
                parts = list(dataset.attributes_file().batches(["score3"], rows))
                values = np.concatenate(
                    [
                        np.empty(0),
                        *(part.column(0).to_numpy() for part in parts),
                    ]
                )
                np.testing.assert_array_equal(values, table["score3"][rows.start : rows.stop])

    def test_damaged_blocks_in_the_cache_are_fetched_again(self, served) -> None:
        server, local, cache = served
        first = open_dataset(server.url, cache_dir=cache)
        first.index.row(1000)
        path = first.root / "index.arrow"
        data = path.read_bytes()
        path.write_bytes(data[:-5000] + bytes(5000))
        dataset = open_dataset(server.url, cache_dir=cache)
        assert [dataset.index.row(row).key for row in range(2000)] == local.index.strings("key")

    def test_bytes_changed_on_the_way_are_read_again(self, served) -> None:
        server, local, cache = served
        dataset = open_dataset(server.url, cache_dir=cache)
        changed = list[int]()

        def change(request: Request) -> Misbehaviour:
            changed.append(request.number)
            return Misbehaviour(flip=len(changed) <= 4)

        server.misbehave = change
        assert dataset.index.row(1000) == local.index.row(1000)
        assert len(changed) == 5

    def test_other_bytes_at_the_url_are_named(self, served) -> None:
        server, _, cache = served
        dataset = open_dataset(server.url, cache_dir=cache)
        path = server.folder / "index.arrow"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            IndexFileError,
            match=r"'index\.arrow' at the dataset's URL are not those that",
        ):
            [dataset.index.row(row) for row in range(2000)]

    def test_a_server_that_fails_is_named(self, served) -> None:
        server, _, cache = served
        dataset = open_dataset(server.url, cache_dir=cache)
        server.misbehave = lambda request: Misbehaviour(status=403)
        with pytest.raises(DatasetError, match=r"index\.arrow' may not be read"):
            dataset.index.row(1000)

    def test_a_server_that_does_not_answer_is_asked_again(self, served) -> None:
        server, local, cache = served
        dataset = open_dataset(
            server.url,
            cache_dir=cache,
            retry=RetryPolicy(attempt_timeout_s=0.5),
        )
        silent = len(server.requests)
        server.misbehave = lambda request: Misbehaviour(
            latency_s=3600.0 if request.number == silent else 0.0
        )
        assert dataset.index.row(1000) == local.index.row(1000)
        assert len(server.requests) == silent + 2

    def test_many_threads(self, served) -> None:
        server, local, cache = served
        dataset = open_dataset(server.url, cache_dir=cache)
        rows = np.random.default_rng(0).permutation(2000).tolist()
        start = threading.Barrier(8)

        def read(worker: int) -> list[str]:
            start.wait()
            return [dataset.index.row(row).key for row in rows[worker::8]]

        with ThreadPoolExecutor(8) as pool:
            keys_by_worker = list(pool.map(read, range(8)))
        expected = local.index.strings("key")
        assert keys_by_worker == [[expected[row] for row in rows[worker::8]] for worker in range(8)]


def test_every_edit_of_a_sealed_dataset_opens(tiny_dataset, tmp_path) -> None:
    """The helper that other tests seal datasets with keeps all rules of the tables."""
    tiny_dataset({"train": (4, 3)}, size=(32, 24), copy_to=tmp_path / "d")
    before = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    reseal(tmp_path / "d")
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before
