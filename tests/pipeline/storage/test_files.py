"""Files of a dataset: regular ones, of a limited size, and no link out of the folder."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import resource
import shutil
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import pytest
import torch

from fuelrail import ImageAugment, OrderSpec
from fuelrail.__main__ import main
from fuelrail.loaders.integrations.map_style import MapView
from fuelrail.pipeline.errors import FuelrailError, ManifestError
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import META
from fuelrail.pipeline.storage.files import open_file, read_file
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.forked import fork, join
from support.hostile import edited, small_dataset
from support.layers import TABLE, values_of, write_layer
from support.loaders import make_loader
from support.sharding import reshard

if TYPE_CHECKING:
    from collections.abc import Callable


def test_regular_files_and_links_within_the_folder(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    (tmp_path / "folder").symlink_to(tmp_path)
    for place in (
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c",
        tmp_path / "folder" / "b",
    ):
        assert read_file(place, 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, at most 4 are read"):
        open_file(tmp_path / "a", 4)


def test_too_many_open_files_says_the_limit_and_the_cure(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(
            OSError,
            match=r"as many open files as it may, 1: allow 1024 or more \(`ulimit -n",
        ):
            open_file(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kinds(place: Path) -> dict[str, Path]:
    paths = {name: place / name for name in ("fifo", "folder", "device", "socket", "out", "loop")}
    os.mkfifo(paths["fifo"])
    paths["folder"].mkdir()
    paths["device"].symlink_to("/dev/zero")
    paths["out"].symlink_to("/etc/hostname")
    paths["loop"].symlink_to("loop")
    with (
        contextlib.chdir(place),
        socket.socket(socket.AF_UNIX) as bound,
    ):  # its path has 107 bytes at most
        bound.bind("socket")
    return paths


def test_other_kinds_of_files_are_refused_at_once(tmp_path) -> None:
    for name, place in kinds(tmp_path).items():
        says = {
            "folder": "is a folder, not a file",
            **dict.fromkeys(("device", "out", "loop"), "leads out of"),
        }
        with pytest.raises(
            PermissionError, match=says.get(name, "is not a regular file")
        ):  # is not tried again
            open_file(place)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nothing")


KEY = "clip-0000-000001"
COMMANDS = (
    "verify DS",
    "verify --deep DS",
    "inspect DS",
    f"inspect DS {KEY}",
    "log DS",
    "diff DS GOOD",
    "diff GOOD DS",
    f"view DS {KEY} --output out/a.png",
    "view DS --layers teacher=LAYER --output out/b.png",
    f"view GOOD {KEY} --layers teacher=LAYER --output out/c.png",
    "reshard DS out/whole",
    "reshard --append OTHER DS out/appended",
    "order describe DS --global-batch=1",
    "tag DS",
    "verify LAYER",
    "verify --deep LAYER",
    "inspect LAYER",
    f"inspect LAYER {KEY}",
    "diff LAYER LAYER",
    "log LAYER",
    "layer rebase LAYER DS out/rebased",
    "layer rebase LAYER GOOD out/again",
)
DATASET_FILES = (
    "dataset.json",
    "shards.arrow",
    "index.arrow",
    "keys.arrow",
    "blocks.sha256",
    "attributes.parquet",
    "train-000000.tar",
    "train-000000.idx",
    "tags.json",
)
LAYER_FILES = (
    "dataset.json",
    "shards.arrow",
    "index.arrow",
    "keys.arrow",
    "blocks.sha256",
    "attributes.parquet",
    "rows.npy",
    "layer-000000.tar",
    "layer-000000.idx",
)


def epoch(place: Path, **options: Any) -> None:
    with contextlib.closing(
        make_loader(str(place), 1, image=ImageAugment(height=32, width=64), **options)
    ) as loader:
        for _ in loader:
            pass


READERS: dict[str, Callable[[], object]] = {
    **{words: partial(main, words.split()) for words in COMMANDS},
    "by number": lambda: open_dataset("DS")[1],
    "by key": lambda: open_dataset("DS")[KEY],
    "no such key": lambda: "other" in open_dataset("DS"),
    "a part": lambda: open_dataset("DS").read(KEY, ["cam_front"]),
    "the table": lambda: open_dataset("DS").table,
    "the attributes": lambda: Attributes(open_dataset("DS"), "train").read(["night"]),
    "map style": lambda: MapView(pickle.loads(pickle.dumps(open_dataset("DS"))))[KEY],
    **{
        f"loader, {name}": partial(epoch, "DS", storage=options)
        for name, options in {
            "pread": {"backend": "pread"},
            "cached": {"backend": "remote", "cache_dir": "out/cache"},
        }.items()
    },
    "loader, filtered": partial(epoch, "DS", order=OrderSpec(filter="night")),
    **{
        f"loader, {name}": partial(
            epoch,
            place,
            layers={"teacher": {"path": "LAYER", "missing": "mask"}},
            order=order,
        )
        for name, place, order in (
            ("LAYER of DS", "DS", None),
            ("LAYER of GOOD", "GOOD", None),
            ("filtered by LAYER", "GOOD", OrderSpec(filter="teacher.loss > 0")),
        )
    },
    "annotate DS": lambda: LayerWriter("DS", "out/layer", channels=TABLE).write(KEY, values_of(1)),
}


class Opened:
    """Whether any process opened a file since then, as the kernel reports it."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK)
        in_open = 0x20
        assert libc.inotify_add_watch(self._handle, os.fsencode(path), in_open) > 0

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._handle, 4096))
        return False


def go_through(readers: dict[str, Callable[[], object]], outside: Path) -> None:
    """Run all readers in the current folder, and write a line for each into ``done.txt``: its name, and its fault."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    is_opened = Opened(outside)
    with Path("done.txt").open("w", buffering=1) as done:
        for name, read in readers.items():
            done.write(f"{name}: ")
            done.flush()
            error = ""
            said = io.StringIO()
            with (
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(said),
            ):
                try:
                    read()
                except (FuelrailError, SystemExit):
                    pass
                except BaseException as raised:  # noqa: BLE001 - reported
                    error = repr(raised)
            if "Traceback" in said.getvalue():
                error = said.getvalue()[-300:]
            done.write(f"{error.replace(chr(10), ' ') or ('opened it' if is_opened else 'fine')}\n")


def run_readers(place: Path, readers: dict[str, Callable[[], object]], outside: Path) -> list[str]:
    """What :func:`go_through` wrote, in a process that ends when no reader has come to its end for ten seconds."""
    with contextlib.chdir(place):
        pid = fork(partial(go_through, readers, outside))
    done = place / "done.txt"
    before = ""
    since_s = time.monotonic()
    while not os.waitpid(pid, os.WNOHANG)[0]:
        now = done.read_text() if done.exists() else ""
        if now != before:
            before = now
            since_s = time.monotonic()
        elif time.monotonic() - since_s > 10:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    return done.read_text().splitlines()


@pytest.fixture(scope="module")
def datasets_folder(tmp_path_factory) -> Path:
    """A folder with a dataset that has all files there can be, a partial layer of it, and another to append it to."""
    place: Path = tmp_path_factory.mktemp("whole")

    def make() -> None:
        small_dataset(place / "small")
        with edited(place / "small", place / "another") as parts:
            for sample in parts.samples:
                sample.key = sample.row.key.replace("clip", "other")
                sample.members[META].raw = sample.members[META].raw.replace(b"clip-00", b"other-00")
            parts.edit_rows = lambda rows: [
                row._replace(clip_id=row.clip_id.replace("clip", "other")) for row in rows
            ]
        for source, name, size in (
            ("small", "GOOD", None),
            ("another", "OTHER", None),
            ("small", "PACKED", 4096),
        ):
            reshard(place / source, place / name, dictionary_bytes=size)
        shutil.copytree(place / "GOOD", place / "DS")
        (place / "DS" / "tags.json").write_text('["v1"]')
        write_layer(place / "GOOD", place / "LAYER", [5, 1, 2])

    assert join(fork(make)) == 0
    assert {path.name for path in (place / "DS").iterdir()} == {*DATASET_FILES}
    assert (place / "PACKED" / "zstd.dict").is_file()
    assert {path.name for path in (place / "LAYER").iterdir()} == {*LAYER_FILES}
    return place


FILES = [
    *(("DS", name) for name in DATASET_FILES),
    ("DS", "zstd.dict"),
    *(("LAYER", name) for name in LAYER_FILES),
]
CASES = [(folder, name, kind) for kind in ("fifo", "folder", "link out") for folder, name in FILES]
EVERY = (
    1 if os.environ.get("FUELRAIL_ATTACK") == "all" else 8
)  # of the cases: each takes five seconds


@pytest.mark.process
@pytest.mark.parametrize(
    ("folder", "name", "kind"),
    CASES[::EVERY],
    ids=["-".join(one) for one in CASES[::EVERY]],
)
def test_no_command_or_reader_waits_for_or_follows_a_file_that_is_none(
    datasets_folder, tmp_path, folder, name, kind
) -> None:
    """A link leads to a good copy outside of the folder, and the kernel says whether anybody opened that."""
    place = tmp_path / "place"
    outside = tmp_path / "outside"
    shutil.copytree(datasets_folder, place)
    (place / "out").mkdir()
    if name == "zstd.dict":
        (place / "DS").rename(place / "plain")
        (place / "PACKED").rename(place / "DS")
    (place / folder / name).rename(outside)
    if kind == "fifo":
        os.mkfifo(place / folder / name)
    elif kind == "folder":
        (place / folder / name).mkdir()
    else:
        (place / folder / name).symlink_to(outside)
    readers = {words: read for words, read in READERS.items() if folder in words or folder == "DS"}
    lines = run_readers(place, readers, outside)
    assert [line for line in lines if not line.endswith(": fine")] == []
    assert len(lines) == len(readers)
    if name == "dataset.json":
        with pytest.raises(ManifestError, match=r"dataset\.json' cannot be read: it is "):
            verify(place / folder, deep=False, num_threads=1)
    elif name != "tags.json":
        assert name in {
            fault.file for fault in verify(place / folder, deep=False, num_threads=1).faults
        }
