"""Whole runs whose source and output are at other stores than S3: Google's, Azure's, and any that fsspec knows."""

from __future__ import annotations

import contextlib

import fsspec
import pytest

from fuelrail.loaders import DataLoader
from fuelrail.pipeline.format.manifest import MANIFEST_FILE
from fuelrail.sharding.verify.dataset import verify
from support.cloud_emulators import emulated
from support.loaders import make_loader
from support.nuscenes_tables import build_nuscenes
from support.sharding import Interrupt, digests, shard_nuscenes

pytestmark = pytest.mark.network

OPTIONS = {"shard_size_bytes": 30_000, "splits": {"train": 0.75, "val": 0.25}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_nuscenes(
        tmp_path_factory.mktemp("source") / "root", dict.fromkeys("abcd", 4), cameras=("CAM_FRONT", "CAM_BACK")
    )


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    shard_nuscenes(source.root, out, **OPTIONS)
    return out


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


def local_copy(url, folder):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    folder.mkdir()
    for path in fs.ls(root, detail=False):
        fs.get_file(path, str(folder / path.rpartition("/")[2]))
    return folder


def test_a_whole_run(source, expected, store, tmp_path):
    """Sources and output at the store, interrupted and gone on with: the bytes of a run in folders."""
    fs, root = fsspec.core.url_to_fs(f"{store}/source")
    for path in source.root.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{root}/{path.relative_to(source.root)}", path.read_bytes())
    out = f"{store}/out"
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(f"{store}/source", out, progress=Interrupt(2), **OPTIONS)
    fs.invalidate_cache()
    names = {path.rpartition("/")[2] for path in fs.ls(f"{root[:-6]}out", detail=False)}
    assert len([name for name in names if name.endswith(".tar")]) == 2
    assert MANIFEST_FILE not in names
    assert shard_nuscenes(f"{store}/source", out, **OPTIONS).num_kept == 2
    copy = local_copy(out, tmp_path / "copy")
    assert digests(copy) == digests(expected)
    assert verify(copy, deep=True, num_threads=1).faults == []
    with make_loader(out, 2, cache_dir=tmp_path / "loader", seed=1, num_workers=1) as loader:
        keys = [key for batch in loader for key in batch["sample_key"]]
    with DataLoader(expected, 2, seed=1, num_workers=1) as loader:
        assert keys == [key for batch in loader for key in batch["sample_key"]]


@pytest.mark.parametrize("store", ["gs", "az"], indirect=True)  # memory:// shows a file from when it is opened
def test_what_fails_leaves_no_object(store):
    """A file that is half-written when something fails never gets its name."""
    from fuelrail.sharding.output.folder import open_output

    out = open_output(f"{store}/out")
    with pytest.raises(RuntimeError, match="something fails"), out.publish("half.tar") as file:
        file.write(b"x" * 100_000)
        raise RuntimeError("something fails")
    assert out.size("half.tar") is None
    with out.publish("whole.tar") as file:
        file.write(b"x" * 100_000)
    assert out.size("whole.tar") == 100_000
    out.remove("whole.tar")
    assert out.names() == []
