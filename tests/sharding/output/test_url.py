"""Datasets written to an object store: a real S3 server on loopback, runs that die, runs that meet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, DatasetError, DatasetExistsError, DatasetNotReadyError, SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.format.rules import Rig
from fuelrail.sharding.append import append
from fuelrail.sharding.engines.ray import forget_inputs, inputs_here, share_inputs
from fuelrail.sharding.output import lock as object_lock
from fuelrail.sharding.output import url as url_output
from fuelrail.sharding.output.folder import open_output
from fuelrail.sharding.output.workspace import Workspace
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.shard_writer import WriteJob
from support.nuscenes_tables import build_nuscenes
from support.s3_server import s3_server
from support.sharding import Interrupt, digests, shard_nuscenes

pytestmark = pytest.mark.network

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'fuelrail[s3]'")

CLIPS = {"a": 4, "b": 5, "c": 3, "d": 4}
OPTIONS = {"shard_size_bytes": 50_000, "splits": {"train": 0.75, "val": 0.25}}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with s3_server(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir("drives")
        yield fs


@pytest.fixture
def url(bucket, request):
    return f"s3://drives/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_nuscenes(tmp_path_factory.mktemp("source"), CLIPS)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    shard_nuscenes(source.root, out, **OPTIONS)
    return digests(out)


def fetched(fs, url, folder):
    """Digests of what lies at the URL."""
    fs.invalidate_cache()
    shutil.rmtree(folder, ignore_errors=True)
    fs.get(url.removeprefix("s3://"), str(folder), recursive=True)
    return digests(folder)


def uploads(fs):
    return fs.call_s3("list_multipart_uploads", Bucket="drives").get("Uploads", [])


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_url_gets_the_same_bytes_as_a_folder(source, expected, bucket, url, tmp_path, num_workers):
    outcome = shard_nuscenes(source.root, url, num_workers=num_workers, **OPTIONS)
    assert fetched(bucket, url, tmp_path / "got") == expected
    assert open_dataset(url, cache_dir=tmp_path / "cache").manifest == outcome.manifest
    assert uploads(bucket) == []
    again = shard_nuscenes(source.root, url, **OPTIONS)
    assert again.num_written == 0
    name = "train-000001.tar"
    bucket.pipe_file(f"{url}/{name}", b"damaged")
    assert shard_nuscenes(source.root, url, **OPTIONS).num_written == 1
    assert fetched(bucket, url, tmp_path / "got") == expected


def test_verify_at_a_url(source, bucket, url, capsys, tmp_path):
    manifest = shard_nuscenes(source.root, url, **OPTIONS).manifest
    assert main(["verify", url, "--deep"]) == 0
    assert f"{url}: 16 samples in {manifest.num_shards} shards" in capsys.readouterr().out
    first, second, third = (shard.name for shard in open_dataset(url, cache_dir=tmp_path / "cache").shards[:3])
    data = bytearray(bucket.cat_file(f"{url}/{first}"))
    data[700] ^= 1
    bucket.pipe_file(f"{url}/{first}", bytes(data))
    bucket.rm_file(f"{url}/{second}")
    bucket.pipe_file(f"{url}/{third.removesuffix('.tar')}.idx", b"damaged")
    assert main(["verify", url]) == 1
    said = capsys.readouterr().out
    assert f"{first}, offset 0, sample {open_dataset(url).index.row(0).key}: checksum mismatch" in said
    assert f"{second}: cannot be read: No such file or directory" in said
    assert f"{third.removesuffix('.tar')}.idx: has 7 bytes" in said
    assert main(["verify", url, "--repair", f"nuscenes:{source.root}"]) == 2
    assert "it rebuilds what is damaged" in capsys.readouterr().err
    assert shard_nuscenes(source.root, url, **OPTIONS).num_written == 3
    assert main(["verify", url]) == 0
    assert main(["verify", f"{url}-nowhere"]) == 2
    assert "has no dataset.json" in capsys.readouterr().err


def command(source, url, *more):
    return [
        sys.executable, "-m", "fuelrail", "shard", f"nuscenes:{source.root}", url, "--seed", "7", "--shard-size",
        "50000", "--splits", "train=0.75,val=0.25", *more,
    ]  # fmt: skip


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.process
def test_killed_in_the_middle_the_same_command_finishes(source, expected, bucket, url, tmp_path):
    run = subprocess.Popen(command(source, url, "--workers", "2"), env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    prefix = url.removeprefix("s3://")
    while time.monotonic() < deadline and run.poll() is None:
        run.send_signal(signal.SIGSTOP)  # while it is looked at: on a busy machine it would finish meanwhile
        bucket.invalidate_cache()
        if len(bucket.glob(f"{prefix}/{WORK_FOLDER}/records/*.tag")) >= 2:
            break
        run.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/dataset.json")
    assert bucket.exists(f"{url}/{WORK_FOLDER}/lock.json")  # of a dead process, on this machine: no waiting
    with pytest.raises(DatasetNotReadyError):
        open_dataset(url, cache_dir=tmp_path / "cache")
    # An upload that the dead run was in the middle of, and one that is none of its business.
    bucket.call_s3("create_multipart_upload", Bucket="drives", Key=f"{prefix.partition('/')[2]}/train-000001.tar")
    foreign = bucket.call_s3("create_multipart_upload", Bucket="drives", Key="other/thing")
    sealed = {
        path: bucket.info(path)["LastModified"]
        for path in bucket.glob(f"{prefix}/*.tar")
        if bucket.exists(f"{prefix}/{WORK_FOLDER}/records/{path.rpartition('/')[2].removesuffix('.tar')}.tag")
    }
    assert sealed
    time.sleep(1.1)  # times of modification are in seconds
    outcome = shard_nuscenes(source.root, url, num_workers=2, **OPTIONS)
    assert outcome.num_kept >= len(sealed)
    bucket.invalidate_cache()
    assert all(bucket.info(path)["LastModified"] == written for path, written in sealed.items())
    assert fetched(bucket, url, tmp_path / "got") == expected
    assert [upload["Key"] for upload in uploads(bucket)] == ["other/thing"]
    bucket.call_s3("abort_multipart_upload", Bucket="drives", Key="other/thing", UploadId=foreign["UploadId"])


def test_finished_shards_are_believed_by_their_seal_or_read(source, expected, bucket, url, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(source.root, url, progress=Interrupt(3), **OPTIONS)
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/{WORK_FOLDER}/lock.json")
    shards = sorted(bucket.glob(f"{url.removeprefix('s3://')}/*.tar"))
    assert len(shards) == 3
    records = f"{url}/{WORK_FOLDER}/records"
    bucket.pipe_file(shards[0], bytes(bucket.info(shards[0])["size"]))  # another object of the same size
    bucket.rm_file(f"{records}/{shards[1].rpartition('/')[2].removesuffix('.tar')}.tag")
    read = []
    holds = url_output.UrlOutput.holds

    def holding(self, name, *wanted):
        read.append(name)
        return holds(self, name, *wanted)

    monkeypatch.setattr(url_output.UrlOutput, "holds", holding)
    outcome = shard_nuscenes(source.root, url, **OPTIONS)
    assert outcome.num_kept == 2
    # The third has a seal that fits: its bytes are not read.
    assert {name for name in read if name.endswith(".tar")} == {path.rpartition("/")[2] for path in shards[:2]}
    assert fetched(bucket, url, tmp_path / "got") == expected


def test_nothing_half_is_seen_where_writing_fails(bucket, url):
    out = open_output(url)
    with out.publish("big.bin") as file:
        file.write(b"1" * (url_output.PART_BYTES + 5))
        file.write(b"2")
    assert bucket.info(f"{url}/big.bin")["size"] == url_output.PART_BYTES + 6
    assert bucket.info(f"{url}/big.bin")["ETag"].endswith('-2"')
    with pytest.raises(RuntimeError), out.publish("bad.bin") as file:
        file.write(b"1" * (url_output.PART_BYTES + 5))
        raise RuntimeError
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/bad.bin")
    assert uploads(bucket) == []


def test_two_runs_at_once_are_refused_also_from_another_machine(bucket, url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_lock, "BEAT_S", 0.2)
    monkeypatch.setattr(object_lock, "STALE_S", 1.5)
    monkeypatch.setattr(object_lock, "_LOOK_S", 0.1)
    with Workspace(open_output(url)) as held:
        with pytest.raises(DatasetError, match=r"another run \(process .* is writing to"):
            Workspace(open_output(url))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
        with pytest.raises(DatasetError, match=r"another run \(process .* on .* is writing to"):
            Workspace(open_output(url))
        # The holder falls asleep; the other one waits, takes over, and the holder notices.
        held._remote_lock._ended.set()
        held._remote_lock._beating.join()
        with Workspace(open_output(url)) as second:
            second.check()
            held._remote_lock._ended.clear()
            held._remote_lock._beat()
            with pytest.raises(DatasetError, match="has taken over"):
                held.check()
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/{WORK_FOLDER}/lock.json")


def test_another_seed_and_foreign_objects_are_refused(source, bucket, url):
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(source.root, url, progress=Interrupt(2), **OPTIONS)
    with pytest.raises(DatasetExistsError, match="seed is 7 there and 8 here"):
        shard_nuscenes(source.root, url, seed=8, **OPTIONS)
    bucket.pipe_file(f"{url}-2/thesis.tex", b"")
    with pytest.raises(DatasetExistsError, match=r"thesis\.tex"):
        shard_nuscenes(source.root, f"{url}-2", **OPTIONS)


def test_a_bucket_that_is_not_there(source, bucket):
    with pytest.raises(DatasetError, match=r"output 's3://nowhere/x' cannot be written: the bucket is not there"):
        shard_nuscenes(source.root, "s3://nowhere/x", **OPTIONS)


def test_a_source_at_a_url_gives_the_same_bytes(source, expected, bucket, url, tmp_path):
    bucket.put(str(source.root), url.removeprefix("s3://"), recursive=True)
    shard_nuscenes(f"{url}", tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == expected
    bucket.rm_file(f"{url}/v1.0-mini/scene.json")
    with pytest.raises(SourceError, match=rf"nuScenes tables in '{url}/v1\.0-mini': scene\.json missing"):
        shard_nuscenes(url, tmp_path / "out2", **OPTIONS)
    with pytest.raises(ConfigError, match=r"needs the option version to choose the tables; there are: none"):
        shard_nuscenes(f"{url}/samples", tmp_path / "out2", **OPTIONS)


def test_datasets_at_urls_are_merged_and_appended(source, bucket, url, tmp_path):
    shard_nuscenes(source.root, f"{url}/v1", shard_size_bytes=200_000)
    more = build_nuscenes(tmp_path / "more", {"e": 2})
    shard_nuscenes(more.root, tmp_path / "more-out")
    append([f"{url}/v1", str(tmp_path / "more-out")], f"{url}/v2")
    shard(SourceSpec("fuelrail", f"{url}/v2", {}), tmp_path / "local", make_recipe(), 1, Quiet())
    assert verify(tmp_path / "local", deep=True, num_threads=1).faults == []
    assert open_dataset(tmp_path / "local").manifest.num_samples == 18


def test_a_node_with_another_file_system_fetches_the_inputs_of_its_tasks(source, bucket, url, tmp_path, monkeypatch):
    work = tmp_path / "driver"
    work.mkdir()
    for name in ("scan.arrow", "plan.npy", "selection.npy"):
        (work / name).write_bytes(name.encode())
    job = WriteJob(
        out=url, scan_table=work / "scan.arrow", plan_rows=work / "plan.npy", selection=work / "selection.npy",
        shards=(), stamps=(), source=SourceSpec("nuscenes", str(source.root), {}), recipe=make_recipe(), dataset="d",
        rig=Rig.make((), (), (), ()),
        license=None, lidars=(), clip_ids=(), dictionary=None,
    )  # fmt: skip
    share_inputs(job, "run1")
    assert inputs_here(job, "run1", "node") is job
    (work / "run").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))
    for run in ("run1", "run1", "run2"):
        here = inputs_here(job, run, "node")
        assert here.scan_table.read_bytes() == b"scan.arrow"
        assert here.plan_rows.read_bytes() == b"plan.npy"
        assert here.scan_table.is_relative_to(tmp_path / "node")
        assert here.scan_table.parent.name == run
    assert [path.name for path in here.scan_table.parent.parent.iterdir() if path.is_dir()] == ["run2"]
    forget_inputs(url)
    assert not here.scan_table.exists()
