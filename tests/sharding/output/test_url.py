"""Datasets written to object stores, S3's, Google's and Azure's, on loopback: runs that die, runs that meet."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time

import fsspec
import pytest

from fuelrail import ImageAugment
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
    DatasetNotReadyError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, WORK_FOLDER
from fuelrail.sharding.append import append
from fuelrail.sharding.engines.ray import (
    forget_inputs,
    inputs_here,
    share_inputs,
)
from fuelrail.sharding.output import lock as object_lock
from fuelrail.sharding.output import url as url_output
from fuelrail.sharding.output.folder import open_output
from fuelrail.sharding.output.workspace import Workspace
from fuelrail.sharding.verify.dataset import verify
from support.cloud_emulators import emulated
from support.loaders import make_loader
from support.s3_server import s3_server
from support.sharding import (
    Interrupt,
    digests,
    environment,
    reshard,
    shard_command,
    shard_nuscenes,
    write_job,
)

pytestmark = pytest.mark.network

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[s3]'")

OPTIONS = {"shard_size_bytes": 50_000, "splits": {"train": 0.75, "val": 0.25}}


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot("a4 b5 c3 d4")


@pytest.fixture(scope="module")
def expected(source, sharded):
    return digests(sharded(source, **OPTIONS))


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


def download_digests(fs, url, folder):
    """Digests of what lies at the URL."""
    fs.invalidate_cache()
    shutil.rmtree(folder, ignore_errors=True)
    fs.get(url.removeprefix("s3://"), str(folder), recursive=True)
    return digests(folder)


def uploads(fs):
    return fs.call_s3("list_multipart_uploads", Bucket="drives").get("Uploads", [])


def test_a_url_gets_the_same_bytes_as_a_folder(source, expected, bucket, url, tmp_path):
    outcome = shard_nuscenes(source.root, url, num_workers=3, **OPTIONS)
    assert download_digests(bucket, url, tmp_path / "got") == expected
    assert open_dataset(url, cache_dir=tmp_path / "cache").manifest == outcome.manifest
    assert uploads(bucket) == []
    repeated = shard_nuscenes(source.root, url, **OPTIONS)
    assert repeated.num_written == 0
    name = "train-000001.tar"
    bucket.pipe_file(f"{url}/{name}", b"damaged")
    assert shard_nuscenes(source.root, url, **OPTIONS).num_written == 1
    assert download_digests(bucket, url, tmp_path / "got") == expected


def test_verify_at_a_url(source, bucket, url, capsys, tmp_path):
    manifest = shard_nuscenes(source.root, url, **OPTIONS).manifest
    assert main(["verify", url, "--deep"]) == 0
    assert f"{url}: 16 samples in {manifest.num_shards} shards" in capsys.readouterr().out
    first, second, third = (
        shard.name for shard in open_dataset(url, cache_dir=tmp_path / "cache").shards[:3]
    )
    data = bytearray(bucket.cat_file(f"{url}/{first}"))
    data[700] ^= 1
    bucket.pipe_file(f"{url}/{first}", bytes(data))
    bucket.rm_file(f"{url}/{second}")
    bucket.pipe_file(f"{url}/{third.removesuffix('.tar')}.idx", b"damaged")
    assert main(["verify", url]) == 1
    said = capsys.readouterr().out
    assert (
        f"{first}, offset 0, sample {open_dataset(url).index.row(0).key}: checksum mismatch" in said
    )
    assert f"{second}: cannot be read: No such file or directory" in said
    assert f"{third.removesuffix('.tar')}.idx: has 7 bytes" in said
    assert main(["verify", url, "--repair", f"nuscenes:{source.root}"]) == 2
    assert "it rebuilds what is damaged" in capsys.readouterr().err
    assert shard_nuscenes(source.root, url, **OPTIONS).num_written == 3
    assert main(["verify", url]) == 0
    assert main(["verify", f"{url}-nowhere"]) == 2
    assert "has no dataset.json" in capsys.readouterr().err


@pytest.mark.process
def test_killed_in_the_middle_the_same_command_finishes(source, expected, bucket, url, tmp_path):
    words = (
        "--seed",
        "7",
        "--shard-size",
        "50000",
        "--splits",
        "train=0.75,val=0.25",
        "--workers",
        "2",
    )
    command = shard_command(f"nuscenes:{source.root}", url, *words)
    run = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 280
    prefix = url.removeprefix("s3://")
    while time.monotonic() < deadline and run.poll() is None:
        run.send_signal(
            signal.SIGSTOP
        )  # while it is looked at: on a busy machine it would finish meanwhile
        bucket.invalidate_cache()
        if len(bucket.glob(f"{prefix}/{WORK_FOLDER}/records/*.tag")) >= 2:
            break
        run.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/dataset.json")
    assert bucket.exists(
        f"{url}/{WORK_FOLDER}/lock.json"
    )  # of a dead process, on this machine: no waiting
    with pytest.raises(DatasetNotReadyError):
        open_dataset(url, cache_dir=tmp_path / "cache")
    # An upload that the dead run was in the middle of, and one that is none of its business.
    bucket.call_s3(
        "create_multipart_upload",
        Bucket="drives",
        Key=f"{prefix.partition('/')[2]}/train-000001.tar",
    )
    foreign = bucket.call_s3("create_multipart_upload", Bucket="drives", Key="other/thing")
    sealed = {
        path: bucket.info(path)["LastModified"]
        for path in bucket.glob(f"{prefix}/*.tar")
        if bucket.exists(
            f"{prefix}/{WORK_FOLDER}/records/{path.rpartition('/')[2].removesuffix('.tar')}.tag"
        )
    }
    assert sealed
    time.sleep(1.1)  # times of modification are in seconds
    outcome = shard_nuscenes(source.root, url, num_workers=2, **OPTIONS)
    assert outcome.num_kept >= len(sealed)
    bucket.invalidate_cache()
    assert all(bucket.info(path)["LastModified"] == written for path, written in sealed.items())
    assert download_digests(bucket, url, tmp_path / "got") == expected
    assert [upload["Key"] for upload in uploads(bucket)] == ["other/thing"]
    bucket.call_s3(
        "abort_multipart_upload",
        Bucket="drives",
        Key="other/thing",
        UploadId=foreign["UploadId"],
    )


def test_finished_shards_are_believed_by_their_seal_or_read(
    source, expected, bucket, url, tmp_path, monkeypatch
):
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(source.root, url, progress=Interrupt(3), **OPTIONS)
    with pytest.raises(DatasetExistsError, match="seed: 7 there, 8 here"):
        shard_nuscenes(source.root, url, **{**OPTIONS, "seed": 8})
    bucket.invalidate_cache()
    assert not bucket.exists(f"{url}/{WORK_FOLDER}/lock.json")
    shards = sorted(bucket.glob(f"{url.removeprefix('s3://')}/*.tar"))
    assert len(shards) == 3
    records = f"{url}/{WORK_FOLDER}/records"
    bucket.pipe_file(
        shards[0], bytes(bucket.info(shards[0])["size"])
    )  # another object of the same size
    bucket.rm_file(f"{records}/{shards[1].rpartition('/')[2].removesuffix('.tar')}.tag")
    read = []
    holds = url_output.UrlOutput.holds

    def holding(self, name, *digests):
        read.append(name)
        return holds(self, name, *digests)

    monkeypatch.setattr(url_output.UrlOutput, "holds", holding)
    outcome = shard_nuscenes(source.root, url, **OPTIONS)
    assert outcome.num_kept == 2
    # The third has a seal that fits: its bytes are not read.
    assert {name for name in read if name.endswith(".tar")} == {
        path.rpartition("/")[2] for path in shards[:2]
    }
    assert download_digests(bucket, url, tmp_path / "got") == expected


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


def test_a_bucket_that_is_not_there_and_foreign_objects(source, bucket, url):
    bucket.pipe_file(f"{url}/thesis.tex", b"")
    with pytest.raises(DatasetExistsError, match=r"thesis\.tex"):
        shard_nuscenes(source.root, url, **OPTIONS)
    with pytest.raises(
        DatasetError,
        match=r"output 's3://nowhere/x' cannot be written: the bucket is not there",
    ):
        shard_nuscenes(source.root, "s3://nowhere/x", **OPTIONS)


def test_a_source_at_a_url_gives_the_same_bytes(source, expected, bucket, url, tmp_path):
    bucket.put(str(source.root), url.removeprefix("s3://"), recursive=True)
    shard_nuscenes(f"{url}", tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == expected
    bucket.rm_file(f"{url}/v1.0-mini/scene.json")
    with pytest.raises(
        SourceError,
        match=rf"nuScenes tables in '{url}/v1\.0-mini': scene\.json missing",
    ):
        shard_nuscenes(url, tmp_path / "out2", **OPTIONS)
    with pytest.raises(ConfigError, match=r"has no nuScenes tables: no folder such as v1"):
        shard_nuscenes(f"{url}/samples", tmp_path / "out2", **OPTIONS)


def test_datasets_at_urls_are_merged_and_appended(source, dataroot, sharded, bucket, url, tmp_path):
    shard_nuscenes(source.root, f"{url}/v1", shard_size_bytes=200_000)
    append([f"{url}/v1", str(sharded(dataroot("e2")))], f"{url}/v2")
    reshard(f"{url}/v2", tmp_path / "local")
    assert verify(tmp_path / "local", deep=True, num_threads=1).faults == []
    assert open_dataset(tmp_path / "local").manifest.num_samples == 18


def test_a_node_with_another_file_system_fetches_the_inputs_of_its_tasks(
    source, bucket, url, tmp_path, monkeypatch
):
    work = tmp_path / "driver"
    job = write_job(work, url, str(source.root))
    share_inputs(job, "run1")
    assert inputs_here(job, "run1", "node") is job
    (work / "run").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))
    for run in ("run1", "run1", "run2"):
        inputs = inputs_here(job, run, "node")
        assert inputs.scan_table.read_bytes() == b"scan.arrow"
        assert inputs.plan_rows.read_bytes() == b"plan.npy"
        assert inputs.scan_table.is_relative_to(tmp_path / "node")
        assert inputs.scan_table.parent.name == run
    assert [path.name for path in inputs.scan_table.parent.parent.iterdir() if path.is_dir()] == [
        "run2"
    ]
    forget_inputs(url)
    assert not inputs.scan_table.exists()


@pytest.fixture(params=["gs", "az", "memory"])
def store(request, tmp_path, monkeypatch):
    """URL of an empty bucket whose options fsspec knows by itself, as it does from the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind = request.param
    with contextlib.ExitStack() as stack:
        if kind != "memory":
            folder = tmp_path / "emulator"
            folder.mkdir()
            options, _ = stack.enter_context(emulated(kind, folder))
            monkeypatch.setitem(fsspec.config.conf, kind, options)
        else:
            fsspec.filesystem("memory").mkdir("/datasets")
        yield f"{kind}://datasets"
        if kind == "memory":
            fsspec.filesystem("memory").rm("/datasets", recursive=True)


def test_a_whole_run_at_any_store(source, expected, store, tmp_path):
    """Source and output at the store, interrupted and resumed: the bytes of a run in folders."""
    fs, root = fsspec.core.url_to_fs(f"{store}/source")
    fs.put(str(source.root), root, recursive=True)
    out = f"{store}/out"
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(f"{store}/source", out, progress=Interrupt(2), **OPTIONS)
    fs.invalidate_cache()
    names = {path.rpartition("/")[2] for path in fs.ls(f"{root[:-6]}out", detail=False)}
    assert len([name for name in names if name.endswith(".tar")]) == 2
    assert MANIFEST_FILE not in names
    assert shard_nuscenes(f"{store}/source", out, **OPTIONS).num_kept == 2
    fs.invalidate_cache()
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in fs.ls(f"{root[:-6]}out", detail=False):
        fs.get_file(path, str(copy / path.rpartition("/")[2]))
    assert digests(copy) == expected
    image = ImageAugment(height=32, width=48)
    options = {
        "split": "train",
        "cache_dir": tmp_path / "loader",
        "seed": 1,
        "num_workers": 1,
        "image": image,
    }
    with (
        make_loader(out, 2, **options) as remote,
        make_loader(copy, 2, **options) as local,
    ):
        assert [batch["sample_key"] for batch in remote] == [batch["sample_key"] for batch in local]


@pytest.mark.parametrize(
    "store", ["gs", "az"], indirect=True
)  # memory:// shows a file from when it is opened
def test_what_fails_leaves_no_object(store):
    """A file that is half-written when something fails never gets its name."""
    out = open_output(f"{store}/out")
    with (
        pytest.raises(RuntimeError, match="something fails"),
        out.publish("half.tar") as file,
    ):
        file.write(b"x" * 100_000)
        raise RuntimeError("something fails")
    assert out.size("half.tar") is None
    with out.publish("whole.tar") as file:
        file.write(b"x" * 100_000)
    assert out.size("whole.tar") == 100_000
    out.remove("whole.tar")
    assert out.names() == []
