"""Files of a source at a URL: what listings say of them, whatever the store and however long the listing."""

from __future__ import annotations

import os
import threading

import fsspec
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared import files as module
from fuelrail.sharding.sources.shared.files import FileFacts, looks, source_files
from support.listing_server import OBJECT_BYTES, listing_server, object_name


@pytest.mark.network
def test_a_listing_of_several_pages():
    pytest.importorskip("s3fs")
    with listing_server(2500) as url:
        files = source_files(url)
        with files.fetched("tables", ()):
            for number in (2499, 0, 1000, 999, 1234):
                assert files.facts(object_name(number)) == FileFacts(OBJECT_BYTES, f'"{number:032x}"')
            assert files.facts(object_name(2500)) is None
            assert files.facts("samples/CAM_FRONT") is None


def test_folders_of_a_store_that_is_not_s3():
    fs = fsspec.filesystem("memory")
    url = "memory://test_files/made"
    try:
        sizes = {"samples/a/b/x.jpg": 3, "samples/a/y.jpg": 2, "samples/z.jpg": 1, "tables/t.json": 5}
        for name, size in sizes.items():
            fs.pipe_file(f"/test_files/made/{name}", b"x" * size)
        files = source_files(url)
        with files.fetched("tables", ("t.json", "other.json")) as folder:
            assert [path.name for path in folder.iterdir()] == ["t.json"]
            found = [files.facts(name) for name in ("samples/a/b/x.jpg", "samples/a/y.jpg", "samples/z.jpg")]
            assert [facts.num_bytes for facts in found] == [3, 2, 1]
            assert files.facts("samples/a") is None
            assert files.facts("nowhere/x.jpg") is None
    finally:
        fs.rm("/test_files", recursive=True)


def test_a_listing_that_is_refused(monkeypatch):
    files = source_files("memory://test_files_refused/made")

    def refuse(*_, **__):
        raise PermissionError("no")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    with files.fetched("tables", ()), pytest.raises(SourceError, match="samples' may not be read: check credentials"):
        files.facts("samples/x.jpg")


def test_many_looks_at_a_slow_file_system_are_made_at_once(monkeypatch):
    """Each of the first 50 in threads waits until all of them are under way; a fast disk needs no threads."""
    lock, together, names = threading.Lock(), threading.Event(), []

    def look(number):
        name = threading.current_thread().name
        if name.startswith("look"):
            with lock:
                names.append(name)
            if len(names) >= 50:
                together.set()
            assert together.wait(60)
        return number

    monkeypatch.setattr(module, "_SLOW_LOOK_S", 0.0)
    assert looks(look, range(200)) == list(range(200))
    assert len(set(names)) >= 50
    monkeypatch.setattr(module, "_SLOW_LOOK_S", 1000.0)
    names.clear()
    assert looks(look, range(200)) == list(range(200))
    assert not names


def test_ranges_and_listings(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    files = source_files(str(tmp_path))
    assert files.listed() == ["a.bin", "b"]
    assert files.read("a.bin", 10, 5) == bytes(range(10, 15))
    assert files.read("a.bin", 90) == bytes(range(90, 100))
    with pytest.raises(SourceError, match="nowhere"):
        files.listed("nowhere")
    with pytest.raises(SourceError, match=r"a\.bin' is not a folder"):
        files.listed("a.bin")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match=r"pipe' is a FIFO"):
        files.facts("pipe")
