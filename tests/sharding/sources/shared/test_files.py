"""Files of a source at a URL: what listings say of them, whatever the store and however long the listing."""

from __future__ import annotations

import os
import threading

import fsspec
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared import files as module
from fuelrail.sharding.sources.shared.files import (
    LINKED,
    FileFacts,
    looks,
    source_files,
)
from fuelrail.sharding.sources.shared.windows import open_file, opened
from support.listing_server import OBJECT_BYTES, listing_server, object_name


@pytest.mark.network
def test_a_listing_of_several_pages():
    pytest.importorskip("s3fs")
    with listing_server(2500) as url:
        files = source_files(url)
        with files.scanning():
            for number in (2499, 0, 1000, 999, 1234):
                assert files.facts(object_name(number)) == FileFacts(
                    OBJECT_BYTES, f'"{number:032x}"'
                )
            assert files.facts(object_name(2500)) is None
            assert files.facts("samples/CAM_FRONT") is None


def test_folders_of_a_store_that_is_not_s3():
    fs = fsspec.filesystem("memory")
    url = "memory://test_files/made"
    try:
        sizes = {
            "samples/a/b/x.jpg": 3,
            "samples/a/y.jpg": 2,
            "samples/z.jpg": 1,
            "tables/t.json": 5,
        }
        for name, size in sizes.items():
            fs.pipe_file(f"/test_files/made/{name}", b"x" * size)
        files = source_files(url)
        with files.scanning():
            folder_facts = [
                files.facts(name)
                for name in (
                    "samples/a/b/x.jpg",
                    "samples/a/y.jpg",
                    "samples/z.jpg",
                )
            ]
            assert [facts.num_bytes for facts in folder_facts] == [3, 2, 1]
            assert files.facts("samples/a") is None
            assert files.facts("nowhere/x.jpg") is None
    finally:
        fs.rm("/test_files", recursive=True)


def test_a_listing_that_is_refused(monkeypatch):
    files = source_files("memory://test_files_refused/made")

    def refuse(*_, **__):
        raise PermissionError("no")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    with (
        files.scanning(),
        pytest.raises(SourceError, match="samples' may not be read: check credentials"),
    ):
        files.facts("samples/x.jpg")


def test_many_looks_at_a_slow_file_system_are_made_at_once(monkeypatch):
    """Each of the first 50 in threads waits until all of them are under way; a fast disk needs no threads."""
    lock = threading.Lock()
    together = threading.Event()
    names = []

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


def look_at(context):
    with context:
        pass


WAYS = {
    "facts": lambda files, name: files.facts(name),
    "facts_of": lambda files, name: files.facts_of([name]),
    "path": lambda files, name: files.path(name),
    "read": lambda files, name: files.read(name),
    "read a range": lambda files, name: files.read(name, 0, 4),
    "open_file": lambda files, name: open_file(files, name).close(),
    "opened": lambda files, name: look_at(opened(files, name)),
    "listed": lambda files, name: files.listed(name),
}
READS = [way for way in WAYS if way != "listed"]


@pytest.fixture
def place(tmp_path):
    """A folder with what may be read, and links out of it."""
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_bytes(b"mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"another's")
    os.mkfifo(root / "a" / "fifo")
    links = {
        "a/inside": root / "a" / "file",
        "a/b/inside": "../file",
        "folder-inside": "a",
        "a/device": "/dev/zero",
        "a/out": tmp_path / "other" / "file",
        "a/b/out": "../../../other/file",
        "folder-out": tmp_path / "other",
        "a/loop": "loop",
        "a/through": "../folder-out/file",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    return root


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a/fifo", "not a regular file|is a FIFO"),
        ("a/device", "'/dev/zero', which is outside of the source"),
        ("a/out", "outside of the source: bring it"),
        ("a/b/out", "outside of the source"),
        ("a/through", "outside of the source"),
        ("folder-out/file", "outside of the source"),
        ("../other/file", "outside of the source"),
        ("a/../../other/file", "outside of the source"),
        ("a/loop", "loop"),
        ("a/nul\0", "null"),
        ("a/\ud800", "surrogates"),
        ("a/" + "n" * 300, "too long"),
    ],
)
def test_no_way_to_a_file_leads_out_of_the_source_or_waits(place, way, name, says):
    with pytest.raises(SourceError, match=says):
        WAYS[way](source_files(str(place)), name)


def test_folders_are_not_listed_outside_of_the_source(place):
    for name in ("folder-out", "..", "a/../.."):
        with pytest.raises(SourceError, match="outside of the source"):
            source_files(str(place)).listed(name)
    assert source_files(str(place)).listed("folder-inside") == source_files(str(place)).listed("a")


@pytest.mark.parametrize("way", READS)
def test_links_inside_of_a_source_are_followed_and_those_to_folders_that_were_named(
    place, way, monkeypatch
):
    for name in ("a/inside", "a/b/inside", "folder-inside/file"):
        WAYS[way](source_files(str(place)), name)
    assert source_files(str(place)).read("a/b/inside") == b"mine"
    monkeypatch.setenv(LINKED, f"/nowhere{os.pathsep}{place.parent / 'other'}")
    for name in ("a/out", "a/through", "folder-out/file"):
        WAYS[way](source_files(str(place)), name)
        assert source_files(str(place)).read(name) == b"another's"


def test_a_source_that_is_a_link_itself_is_read(place):
    (place.parent / "link").symlink_to(place)
    assert source_files(str(place.parent / "link")).read("a/inside") == b"mine"
    assert source_files(str(place / "a"), "out").read("out") == b"another's"
    with pytest.raises(SourceError, match="outside of the source"):
        source_files(str(place / "a"), "file").read("out")


def test_not_more_is_read_at_once_than_the_limit(place):
    with (place / "a" / "file").open("wb") as file:
        file.truncate(1 << 40)
    files = source_files(str(place))
    for read in (
        lambda: files.read("a/file"),
        lambda: files.read("a/file", 9, 1 << 39),
    ):
        with pytest.raises(
            SourceError,
            match=r"file' has [0-9]+ bytes, of which at most 268435456 are read at once",
        ):
            read()
    with (
        opened(files, "a/file") as window,
        pytest.raises(SourceError, match="part at byte 5 has 1073741824 bytes"),
    ):
        window.read(5, 1 << 30)
    assert files.read("a/file", (1 << 40) - 3) == bytes(3)
