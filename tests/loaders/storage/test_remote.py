"""Remote storage against a server on loopback that fails in every way there is."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import tracemalloc
from typing import ClassVar

import msgspec
import pytest

from fuelrail.loaders.records import Scheduled
from fuelrail.loaders.schedule.prefetch import RequestStream, prefetch
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.loaders.storage.ranges import MAX_RANGE_BYTES
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    DatasetError,
    DatasetNotReadyError,
    ManifestError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format import fetch
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import encode_manifest
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.fault_server import FaultServer, Misbehaviour, faulty
from support.forked import fork, join
from support.sized_datasets import make_dataset
from support.storage_suite import StorageSuite, rows_of, spans_of

pytestmark = pytest.mark.network

pytest.importorskip("aiohttp")

QUICK = RetryPolicy(deadline_s=1.5, attempt_timeout_s=0.5, first_delay_s=0.01, max_delay_s=0.05)
PATIENT = RetryPolicy(deadline_s=20.0, attempt_timeout_s=1.0, first_delay_s=0.01, max_delay_s=0.1)


@pytest.fixture
def serve():
    """``serve(root, misbehave)``: a running server."""
    servers = []

    def serve(root, *misbehave):
        server = FaultServer(root, *misbehave)
        servers.append(server)
        return server.__enter__()

    yield serve
    for server in servers:
        server.__exit__(None, None, None)


@pytest.fixture
def served(serve, pristine, tmp_path):
    """A running server of the pristine dataset, and the dataset opened from it."""
    server = serve(pristine)
    return server, open_dataset(server.url, cache_dir=tmp_path)


def shard_requests(server):
    return [request for request in server.requests if request.name.endswith(".tar")]


def only_shards(how, *, first=None):
    """Misbehave with this number of first requests for shards (None: all)."""
    count = iter(range(1 << 30))

    def misbehave(request):
        if not request.name.endswith(".tar") or (first is not None and next(count) >= first):
            return Misbehaviour()
        return how

    return misbehave


class TestHttp(StorageSuite):
    @pytest.fixture
    def opened(self, serve, tmp_path):
        def open_over_http(root, **options):
            dataset = open_dataset(serve(root).url, cache_dir=tmp_path / "cache")
            return dataset, open_storage(dataset, retry=QUICK, **options)

        return open_over_http

    def test_neighbours_come_in_one_request(self, served, pristine):
        server, dataset = served
        storage = open_storage(dataset)
        takes = storage.session().request(rows_of(dataset))
        assert [bytes(take()) for take in takes] == spans_of(pristine)
        assert [request.name for request in sorted(shard_requests(server))] == [
            "train-000000.tar",
            "train-000001.tar",
            "train-000002.tar",
            "val-000000.tar",
        ]
        stats = storage.stats()
        assert (stats.requests, stats.spans, stats.request_bytes) == (
            4,
            25,
            stats.span_bytes,
        )
        assert stats.request_bytes < MAX_RANGE_BYTES

    def test_requests_go_out_together(self, served, pristine):
        server, dataset = served
        server.misbehave = only_shards(Misbehaviour(latency_s=0.1))
        session = open_storage(dataset).session()
        takes = [take for row in rows_of(dataset) for take in session.request([row])]
        assert [bytes(take()) for take in takes] == spans_of(pristine)
        assert server.most_at_once >= 20  # of 25 samples


class TestFileUrl(StorageSuite):
    how: ClassVar = {"backend": "remote", "retry": QUICK}


FAULTS = {
    "503": Misbehaviour(status=503),
    "500": Misbehaviour(status=500),
    "429": Misbehaviour(status=429),
    "hang-up": Misbehaviour(hang_up=True),
    "cut": Misbehaviour(cut=True),
    "short": Misbehaviour(short=True),
    "flip": Misbehaviour(flip=True),
    "stall": Misbehaviour(stall_s=30.0),
}


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_one_fault_is_ridden_out(self, served, pristine, fault):
        server, dataset = served
        server.misbehave = only_shards(FAULTS[fault], first=1)
        storage = open_storage(dataset, retry=PATIENT)
        assert [bytes(take()) for take in storage.session().request(rows_of(dataset))] == spans_of(
            pristine
        )
        assert len(shard_requests(server)) > 4

    def test_a_server_that_fails_all_the_time_now_and_then(self, served, pristine):
        server, dataset = served
        server.misbehave = faulty(0.002, 0.3, seed=3, stall_s=5.0)
        storage = open_storage(dataset, retry=PATIENT)
        expected = spans_of(pristine)
        for _ in range(4):
            session = storage.session()
            takes = [take for row in rows_of(dataset) for take in session.request([row])]
            assert [bytes(take()) for take in takes] == expected
        assert storage.stats().retries > 5

    def test_gone_for_good_is_reported_after_the_deadline_with_the_address(self, served):
        server, dataset = served
        storage = open_storage(dataset, retry=QUICK)
        server.go_down()
        index, row = rows_of(dataset)[8]
        with pytest.raises(StorageError, match=r"no answer after \d+ attempts in [12] s") as caught:
            storage.span(index, row)
        assert (caught.value.shard, caught.value.offset, caught.value.key) == (
            "train-000001.tar",
            row.offset,
            row.key,
        )

    @pytest.mark.parametrize(
        ("status", "words"),
        [(403, "access is refused"), (404, "the shard is not there")],
    )
    def test_what_no_retry_can_help_is_reported_at_once(self, served, status, words):
        server, dataset = served
        server.misbehave = only_shards(Misbehaviour(status=status))
        with pytest.raises(StorageError, match=words):
            open_storage(dataset).span(*rows_of(dataset)[0])
        assert len(shard_requests(server)) == 1

    def test_a_shard_that_is_gone_says_whether_the_dataset_was_replaced(
        self, serve, tiny_copy, pristine, tmp_path
    ):
        dataset = open_dataset(serve(tiny_copy).url, cache_dir=tmp_path)
        fingerprint = dataset.manifest.fingerprint
        (tiny_copy / "train-000000.tar").unlink()
        with pytest.raises(StorageError, match="the shard is not there") as caught:
            open_storage(dataset).span(*rows_of(dataset)[0])
        assert "replaced while in use" not in str(caught.value)
        manifest = msgspec.structs.replace(dataset.manifest, classes=("another",))
        (tiny_copy / "dataset.json").write_bytes(encode_manifest(manifest))
        with pytest.raises(
            StorageError,
            match=f"the shard is not there.*replaced while in use.*was {fingerprint}",
        ):
            open_storage(dataset).span(*rows_of(dataset)[0])

    def test_bytes_that_stay_wrong_are_fetched_twice_and_reported(self, served):
        server, dataset = served
        server.misbehave = only_shards(Misbehaviour(flip=True))
        storage = open_storage(dataset)
        index, row = rows_of(dataset)[8]
        with pytest.raises(ChecksumError, match="twice") as caught:
            storage.span(index, row)
        assert (caught.value.shard, caught.value.key) == (
            "train-000001.tar",
            row.key,
        )
        assert len(shard_requests(server)) == 2
        assert storage.stats().refetched == 1

    def test_a_cut_shard_spares_the_samples_before_the_cut(self, serve, tiny_copy, tmp_path):
        dataset = open_dataset(serve(tiny_copy).url, cache_dir=tmp_path)
        expected = spans_of(tiny_copy)
        rows = rows_of(dataset)
        with (tiny_copy / "train-000002.tar").open("r+b") as file:
            file.truncate(rows[15][1].offset + 10)
        takes = open_storage(dataset, retry=QUICK).session().request(rows[12:18])
        assert [bytes(take()) for take in takes[:3]] == expected[12:15]
        for take in takes[3:]:
            with pytest.raises(TruncatedShardError, match=r"train-000002\.tar"):
                take()

    def test_a_server_without_ranges_is_named(self, served):
        server, dataset = served
        server.misbehave = only_shards(Misbehaviour(ignore_range=True))
        with pytest.raises(StorageError, match="it does not serve byte ranges"):
            open_storage(dataset).span(*rows_of(dataset)[0])

    def test_closing_a_session_lets_go_of_who_waits(self, served):
        server, dataset = served
        server.misbehave = only_shards(Misbehaviour(stall_s=60.0))
        session = open_storage(dataset).session()
        (take,) = session.request(rows_of(dataset)[:1])
        closer = threading.Timer(0.2, session.close)
        closer.start()
        with pytest.raises(StorageError, match="the loader was closed"):
            take()
        closer.join()
        with pytest.raises(StorageError, match="the loader was closed"):
            session.request(rows_of(dataset)[:1])[0]()

    @pytest.mark.process
    def test_a_forked_process_begins_again(self, served, pristine):
        _, dataset = served
        storage = open_storage(dataset)
        expected = spans_of(pristine)
        rows = rows_of(dataset)
        assert bytes(storage.span(*rows[0])) == expected[0]

        def read_on():
            assert bytes(storage.span(*rows[1])) == expected[1]

        assert join(fork(read_on)) == 0
        assert bytes(storage.span(*rows[2])) == expected[2]


class TestOpening:
    def test_manifest_and_index_are_fetched_once_into_a_folder_named_by_the_manifest(
        self, serve, pristine, tmp_path
    ):
        server = serve(pristine)
        local = open_dataset(pristine)
        name = hashlib.sha256((pristine / "dataset.json").read_bytes()).hexdigest()
        for _ in range(2):
            dataset = open_dataset(server.url + "/", cache_dir=tmp_path)
            assert dataset.manifest == local.manifest
            assert dataset.root == tmp_path / "datasets" / name
            assert [dataset.index.row(i) for i in range(25)] == [
                local.index.row(i) for i in range(25)
            ]
            assert dataset.location == server.url + "/"
        first, *tables, last = [request.name for request in server.requests]
        assert (first, last) == ("dataset.json", "dataset.json")
        assert sorted(tables) == [
            "blocks.sha256",
            "index.arrow",
            "keys.arrow",
            "shards.arrow",
        ]
        assert not [path for path in dataset.root.iterdir() if path.name.startswith(".")]

    def test_a_damaged_local_index_is_fetched_again(self, serve, pristine, tmp_path):
        server = serve(pristine)
        index = open_dataset(server.url, cache_dir=tmp_path).root / "index.arrow"
        data = index.read_bytes()
        for damaged in (data[:-100], data[:2000] + b"x" + data[2001:]):
            index.write_bytes(damaged)
            open_dataset(server.url, cache_dir=tmp_path)
            assert index.read_bytes() == data

    def test_the_users_cache_folder_is_the_default(self, serve, pristine, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert (
            open_dataset(serve(pristine).url).root.parent
            == tmp_path / "xdg" / "fuelrail" / "datasets"
        )

    def test_faults_while_opening_are_ridden_out(self, serve, pristine, tmp_path):
        faults = iter(
            [
                Misbehaviour(status=503),
                Misbehaviour(cut=True),
                Misbehaviour(),
                Misbehaviour(hang_up=True),
            ]
        )
        server = serve(pristine, lambda request: next(faults, Misbehaviour()))
        assert len(open_dataset(server.url, cache_dir=tmp_path).index) == 25

    def test_bytes_changed_on_the_way_are_read_again(self, serve, pristine, tmp_path):
        flips_remaining = dict.fromkeys(
            (
                "dataset.json",
                "shards.arrow",
                "index.arrow",
                "keys.arrow",
                "blocks.sha256",
            ),
            4,
        )

        def change(request):
            flips_remaining[request.name] -= 1
            return Misbehaviour(flip=flips_remaining[request.name] >= 0)

        server = serve(pristine, change)
        assert len(open_dataset(server.url, cache_dir=tmp_path).index) == 25

    def test_what_is_not_a_dataset(self, serve, tiny_copy, tmp_path):
        server = serve(tiny_copy)
        with pytest.raises(DatasetNotReadyError, match=r"has no dataset\.json"):
            open_dataset(server.url + "/nothing", cache_dir=tmp_path)
        server.misbehave = lambda request: Misbehaviour(status=403)
        with pytest.raises(DatasetError, match="may not be read: check credentials"):
            open_dataset(server.url, cache_dir=tmp_path)
        server.misbehave = lambda request: Misbehaviour()
        (tiny_copy / "index.arrow").write_bytes(b"other")
        with pytest.raises(ManifestError, match="was the dataset replaced in part"):
            open_dataset(server.url, cache_dir=tmp_path)
        with pytest.raises(ConfigError, match="cannot be opened: Protocol not known"):
            open_dataset("nonsense://x/y", cache_dir=tmp_path)

    def test_a_place_that_cannot_be_written_is_named(self, serve, pristine, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(DatasetError, match="choose another folder with cache_dir"):
            open_dataset(serve(pristine).url, cache_dir=tmp_path / "file")

    def test_a_folder_for_the_index_that_others_made_is_refused(self, serve, pristine, tmp_path):
        server = serve(pristine)
        home = tmp_path / "home"
        home.mkdir(mode=0o755)
        root = open_dataset(server.url, cache_dir=tmp_path / "good").root
        assert [
            root.stat().st_mode & 0o777,
            root.parent.stat().st_mode & 0o777,
        ] == [0o700, 0o700]
        for number, linked in enumerate(("", "datasets", f"datasets/{root.name}")):
            cache = tmp_path / f"cache-{number}"
            place = cache / linked
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(home, target_is_directory=True)
            with pytest.raises(
                ConfigError,
                match=r"is a symbolic link.*choose a cache folder of your own",
            ):
                open_dataset(server.url, cache_dir=cache)
        assert not list(home.iterdir())
        index = root / "index.arrow"
        index.rename(home / "index.arrow")
        index.symlink_to(home / "index.arrow")
        with pytest.raises(ConfigError, match=r"index\.arrow' is a symbolic link"):
            open_dataset(server.url, cache_dir=tmp_path / "good")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
    def test_a_folder_for_the_index_of_another_user_is_refused(self, serve, pristine, tmp_path):
        server = serve(pristine)
        root = open_dataset(server.url, cache_dir=tmp_path / "cache").root
        for path in (
            root / "dataset.json",
            root,
            root.parent,
            root.parent.parent,
        ):
            os.chown(path, 4242, 4242)
            with pytest.raises(
                ConfigError,
                match=f"'{path}' belongs to user 4242, and this process runs as user 0",
            ):
                open_dataset(server.url, cache_dir=tmp_path / "cache")
            os.chown(path, 0, 0)
        assert len(open_dataset(server.url, cache_dir=tmp_path / "cache").index) == 25

    def test_a_full_disk_there_is_reported_and_the_users_cache_folder_taken(
        self, serve, pristine, tmp_path, monkeypatch, caplog
    ):
        def on_a_full_disk(file, data):
            if "full" in file.parts:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            publish(file, data)

        publish = fetch._publish
        monkeypatch.setattr(fetch, "_publish", on_a_full_disk)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        dataset = open_dataset(serve(pristine).url, cache_dir=tmp_path / "full")
        assert dataset.root.parent == tmp_path / "xdg" / "fuelrail" / "datasets"
        assert "is full (No space left on device)" in caplog.text
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full" / "too"))
        with pytest.raises(DatasetError, match="No space left on device"):
            open_dataset(serve(pristine).url, cache_dir=tmp_path / "full")

    def test_it_is_tried_as_long_as_is_asked_for(self, pristine, tmp_path):
        with FaultServer(pristine) as server:
            url = server.url
        with pytest.raises(DatasetError, match=r"could not be read for 0\.2 s"):
            open_dataset(
                url,
                cache_dir=tmp_path,
                retry=RetryPolicy(deadline_s=0.2, first_delay_s=0.01),
            )

    def test_a_server_that_does_not_answer_is_asked_again(self, serve, pristine, tmp_path, caplog):
        server = serve(
            pristine,
            lambda request: Misbehaviour(latency_s=3600.0 if request.number == 0 else 0.0),
        )
        dataset = open_dataset(
            server.url,
            cache_dir=tmp_path,
            retry=RetryPolicy(attempt_timeout_s=0.5),
        )
        assert len(dataset.index) == 25
        assert "dataset.json: FSTimeoutError; trying again" in caplog.text

    def test_addresses_without_a_host_and_hosts_that_refuse_are_reported_at_once(
        self, tmp_path, caplog
    ):
        with pytest.raises(DatasetError, match="cannot be read"):
            open_dataset("http://", cache_dir=tmp_path)
        assert "trying again" not in caplog.text
        with pytest.raises(
            ConfigError,
            match=r"'ftp://127\.0\.0\.1:1/dataset' cannot be opened: .*refused",
        ):
            open_dataset("ftp://127.0.0.1:1/dataset", cache_dir=tmp_path)

    def test_secrets_stay_out_of_messages_and_logs(self, serve, pristine, tmp_path, caplog):
        server = serve(pristine)
        secret = "s3cr3t-value"
        options = {"headers": {"Authorization": f"Bearer {secret}"}}
        with caplog.at_level(logging.DEBUG, logger="fuelrail"):
            dataset = open_dataset(server.url, storage_options=options, cache_dir=tmp_path)
            assert server.requests[0].headers["authorization"] == f"Bearer {secret}"
            storage = open_storage(dataset, retry=QUICK)
            server.misbehave = only_shards(Misbehaviour(status=500), first=2)
            storage.span(*rows_of(dataset)[0])
            server.misbehave = only_shards(Misbehaviour(status=403))
            with pytest.raises(StorageError) as caught:
                storage.span(*rows_of(dataset)[0])
        assert shard_requests(server)[-1].headers["authorization"] == f"Bearer {secret}"
        assert "trying again" in caplog.text
        for text in (
            caplog.text,
            str(caught.value),
            repr(dataset),
            repr(storage),
        ):
            assert secret not in text
        url = server.url.replace("http://", "http://user:" + secret + "@") + "?sig=" + secret
        with pytest.raises(ConfigError, match="with a query") as caught_opening:
            open_dataset(url, cache_dir=tmp_path)
        assert secret not in str(caught_opening.value)


def test_memory_is_bounded_by_the_look_ahead_whatever_the_datasets_size(
    tmp_path,
):
    limit = 2 << 20
    for number, samples in enumerate((40, 120)):
        dataset = make_dataset(tmp_path / str(number), samples, 20, scale=0.3)
        longest = max(dataset.index.column("length"))
        storage = LayeredStorage(open_storage(dataset, "remote"))
        coming = (
            Scheduled(
                epoch=0,
                step=step,
                batch_row=0,
                position=step,
                rows=(step * 7 % samples,),
                valid=True,
            )
            for step in range(samples)
        )
        prefetched = prefetch(
            coming,
            [RequestStream(SampleReader(dataset, storage=storage), storage.session())],
            limit,
        )
        tracemalloc.start()
        try:
            for ahead in prefetched:
                ahead.pending_reads[0]()
                del ahead
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(dataset.index.column("length")) > 4 * limit
        # What is outstanding, the ranges of which a part was taken, and one sample more.
        assert peak < 2 * limit + 3 * longest
