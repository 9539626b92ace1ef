"""Files of a dataset: regular ones, of a limited size, and no link out of the folder."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING

import pytest

from fuelrail.loaders.storage.mapped import MappedShards
from fuelrail.loaders.storage.pread import PreadShards
from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage.files import open_file, read_file
from fuelrail.sharding.verify.dataset import verify

if TYPE_CHECKING:
    from pathlib import Path


def test_regular_files_and_links_within_the_folder(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    (tmp_path / "folder").symlink_to(tmp_path)
    for place in (tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "folder" / "b"):
        assert read_file(place, 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, at most 4 are read"):
        open_file(tmp_path / "a", 4)


def test_too_many_open_files_says_the_limit_and_the_cure(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(OSError, match=r"as many open files as it may, 1: allow 1024 or more \(`ulimit -n"):
            open_file(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kinds(place: Path) -> dict[str, Path]:
    made = {name: place / name for name in ("fifo", "folder", "device", "socket", "out")}
    os.mkfifo(made["fifo"])
    made["folder"].mkdir()
    made["device"].symlink_to("/dev/zero")
    made["out"].symlink_to("/etc/hostname")
    with contextlib.chdir(place), socket.socket(socket.AF_UNIX) as bound:  # its path has 107 bytes at most
        bound.bind("socket")
    return made


def test_other_kinds_of_files_are_refused_at_once(tmp_path) -> None:
    for name, place in kinds(tmp_path).items():
        says = {"folder": "is a folder, not a file", **dict.fromkeys(("device", "out"), "leads out of the dataset's")}
        with pytest.raises(OSError, match=says.get(name, "is not a regular file")):
            open_file(place)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["dataset.json", "index.arrow", "train-000000.tar"])
def test_a_fifo_in_a_dataset_hangs_nobody(tiny_dataset, tmp_path, name) -> None:
    root = tiny_dataset({"train": (2,)}, copy_to=tmp_path / "DS").root
    whole = open_dataset(root)
    (root / name).unlink()
    os.mkfifo(root / name)
    if name == "train-000000.tar":
        assert "is not a regular file" in verify(root, deep=False, num_threads=1).as_text()
        for storage in (MappedShards, PreadShards):
            with pytest.raises(FuelrailError, match="is not a regular file"):
                storage(whole).span(0, whole.index.row(0))
    else:
        with pytest.raises(FuelrailError, match="is not a regular file"):
            open_dataset(root)
