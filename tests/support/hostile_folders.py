"""Working folders and caches that came from somebody else: what may lie at each name there, and
commands that meet it.

A *place* has ``outside``, which no command may change, beside the folders that commands are given.
:func:`plant` puts one object at one name, :func:`die` makes the state that a killed command leaves,
for one file in it to be edited.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from support.hostile import edited, small_dataset
from support.hostile_runs import footprint
from support.layers import TABLE, values_of, write_layer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

DEEP = b"[" * 200_000
HUGE = 10**40
CLIP = "clip-0000"

_IN_WORK = (
    "",
    "tmp",
    "tmp/index.arrow",
    "tmp/train-000000.tar",
    "lock",
    "run.json",
    "forget.json",
    "scan.arrow",
    "plan.npy",
    "selection.npy",
    "records",
    "records/train-000000.msgpack",
    "records/train-000000.tag",
    "staging",
    "staging.done",
    "before",
    "before/dataset.json",
    "before/index.arrow",
    "next",
    "next/dataset.json",
    "next/train-000000.tar",
    "noted.json",
    "layer.json",
    "segments",
    "segments/000000000000-0123.rows",
    "parts/0",
)
_BESIDE = (
    "statistics.json",
    "tags.json",
    "dataset.json",
    "index.arrow",
    "train-000000.tar",
)
_RECEIPTS = tuple(
    name.format(hashlib.sha256(CLIP.encode()).hexdigest()[:16])
    for name in ("DS-forgot-{}.json", ".DS-forgot-{}.json.part")
)
_IN_CACHE = (
    "spans",
    "spans/FINGERPRINT",
    "spans/FINGERPRINT/cache.json",
    "spans/FINGERPRINT/lock",
    "spans/FINGERPRINT/users.lock",
    "spans/FINGERPRINT/table",
    "spans/FINGERPRINT/data",
    "spans/FINGERPRINT/data/0",
    "spans/FINGERPRINT/data/0/0",
    "spans/FINGERPRINT/tmp",
    "datasets",
    "datasets/SHA256",
    "datasets/SHA256/dataset.json",
    "datasets/SHA256/index.arrow",
    "datasets/SHA256/keys.arrow",
)


def make_small(folder: Path) -> None:
    """The datasets that are copied to each place: SOURCE, DS made of it, FIRST with other clips, a
    LAYER of DS.
    """
    from fuelrail.sharding.api import reshard

    small_dataset(folder / "SOURCE")
    reshard(folder / "SOURCE", folder / "DS")
    with edited(folder / "DS", folder / "FIRST") as parts:
        for sample in parts.samples:
            sample.key = sample.row.key.replace("clip", "other")
        parts.edit_rows = lambda rows: [
            row._replace(clip_id=row.clip_id.replace("clip", "other")) for row in rows
        ]
    write_layer(folder / "DS", folder / "LAYER")
    for number in range(6):
        path = folder / "IMAGES" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((32, 48, 3), 40 * number, np.uint8))
    (folder / "clips.txt").write_text(f"{CLIP}\n")
    sha256 = hashlib.sha256((folder / "DS" / "dataset.json").read_bytes()).hexdigest()
    (folder / "names.txt").write_text(
        f"{open_dataset(folder / 'DS').manifest.fingerprint} {sha256}"
    )


def make_place(small: Path, place: Path) -> None:
    """A fresh place: copies of all, and a tree outside."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "tmp").mkdir()
    for name in ("SOURCE", "IMAGES", "DS", "FIRST", "LAYER"):
        shutil.copytree(small / name, place / name)
    for name in ("clips.txt", "names.txt"):
        shutil.copy(small / name, place / name)
    (place / "cache").mkdir(mode=0o700)
    outside = place / "outside"
    (outside / "folder" / "inner").mkdir(parents=True)
    (outside / "file.bin").write_bytes(b"mine" * 100)
    (outside / "folder" / "a.json").write_text("[]")
    (outside / "folder" / "inner" / "b.tar").write_bytes(bytes(4096))


def outside_now(place: Path) -> dict[str, str]:
    """All that commands must leave alone."""
    return {
        name: content
        for name, content in footprint(place).items()
        if name.partition("/")[0] in ("outside", "SOURCE", "IMAGES", "FIRST", "clips.txt")
    }


def write_layer_here() -> int:
    """Write and finish a layer as a program does."""
    from fuelrail.sharding.write.layers.writer import LayerWriter

    try:
        with LayerWriter("DS", "OUT", channels=TABLE) as writer:
            for position in range(8):
                writer.write(position, values_of(position))
        writer.finish()
    except FuelrailError as error:
        print(f"fuelrail: error: {error}")
        return 2
    return 0


def load_here() -> int:
    """Read an epoch of the dataset at a URL, by way of a cache."""
    from fuelrail import ImageAugment
    from support.loaders import make_loader

    try:
        url = f"local://{Path('DS').absolute()}"
        image = ImageAugment(height=32, width=64)
        with contextlib.closing(
            make_loader(url, 1, image=image, seed=1, storage={"cache_dir": "cache"})
        ) as loader:
            for _ in loader:
                pass
    except FuelrailError as error:
        print(f"fuelrail: error: {error}")
        return 2
    return 0


def repair_here() -> int:
    """Damage a shard, and have it repaired."""
    from fuelrail.__main__ import main

    path = Path("DS/train-000000.tar")
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            data = bytearray(path.read_bytes()).ljust(1000, b"x")
            data[700] ^= 1
            path.unlink()
            path.write_bytes(data)
    return main(["verify", "DS", "--repair", "fuelrail:SOURCE"])


def scores(batch: dict[str, Any]) -> dict[str, Any]:
    """A model for ``annotate``."""
    import torch

    return {"score": torch.arange(len(batch["sample_key"]), dtype=torch.float32)}


ANNOTATE = [
    "annotate",
    "DS",
    "OUT",
    "--model",
    f"{__name__}:scores",
    "--workers",
    "1",
]
FORGET = [
    "forget",
    "DS",
    "--clips",
    "clips.txt",
    "--layer",
    "LAYER",
    "--cache",
    "cache",
]
COMMANDS: dict[str, tuple[list[str] | Callable[[], int], str, tuple[str, ...]]] = {
    "shard": (
        ["shard", "imagefolder:IMAGES", "OUT", "--workers", "1"],
        "OUT",
        _IN_WORK,
    ),
    "reshard": (["reshard", "DS", "OUT", "--workers", "1"], "OUT", _IN_WORK),
    "append": (["reshard", "--append", "FIRST", "DS", "OUT"], "OUT", _IN_WORK),
    "forget": (FORGET, "DS", (*_IN_WORK, *_BESIDE, *_RECEIPTS)),
    "forget-layer": (FORGET, "LAYER", (*_IN_WORK, *_BESIDE)),
    "forget-cache": (FORGET, "cache", _IN_CACHE),
    "repair": (repair_here, "DS", (*_IN_WORK, *_BESIDE)),
    "rebase": (["layer", "rebase", "LAYER", "DS", "OUT"], "OUT", _IN_WORK),
    "layer": (write_layer_here, "OUT", _IN_WORK),
    "annotate": (ANNOTATE, "OUT", _IN_WORK),
    "tag": (["tag", "DS", "--add", "gold"], "DS", (*_IN_WORK, *_BESIDE)),
    "statistics": (
        ["inspect", "DS", "--statistics"],
        "DS",
        (*_IN_WORK, *_BESIDE),
    ),
    "loader": (load_here, "cache", _IN_CACHE),
}
"""The command, the folder that something is planted in, and the names there. A working folder is in
each but caches.
"""


def path_of(command: str, name: str, place: Path) -> Path:
    """Where an object of this name lies."""
    folder = COMMANDS[command][1]
    if folder == "cache":
        fingerprint, sha256 = (place / "names.txt").read_text().split()
        name = name.replace("FINGERPRINT", fingerprint)
        return place / folder / name.replace("SHA256", sha256)
    if name in _RECEIPTS:
        return place / name
    return place / folder / name if name in _BESIDE else place / folder / WORK_FOLDER / name


def plan_of_a_stranger(place: Path, *, has_parts: bool = False) -> bytes:
    """A plan of ``forget`` that deletes what is outside: caches, or parts of another dataset."""
    outside = str(place / "outside")
    folder_entry = {
        "folder": outside,
        "before": "0" * 64,
        "after": "",
        "num_samples": 1,
        "shards": {"../../outside/file.bin": "0" * 64},
        "linked": ["/etc/passwd"],
    }
    part = {
        "found": folder_entry,
        "rows": [0],
        "keys": ["x"],
        "files": ["../outside/file.bin", "../../outside/folder"],
        "stage": "../../outside/folder",
    }
    report = {
        "names": [CLIP],
        "samples": [],
        "folders": [folder_entry],
        "caches": [f"{outside}/folder", outside],
        "keeps_dictionary": False,
    }
    return json.dumps({"report": report, "parts": [part] if has_parts else []}).encode()


def run_of_a_stranger(place: Path) -> bytes:
    """A state of a run whose shards have names that lead out."""
    shards = [
        ["../../outside/x", 0, 0, 4],
        [str(place / "outside" / "y"), 1, HUGE, -4],
    ]
    recipe = {
        "source": "forget\x1b[31m",
        "source_options": {"names": "../" * 40, "a": [[[]]]},
    }
    state = {
        "recipe": recipe,
        "num_samples": 8,
        "num_clips": 2,
        "samples_sha256": "",
        "shards": shards,
    }
    return json.dumps(state).encode()


def _link(target: str) -> Callable[[Path, Path], object]:
    return lambda path, place: path.symlink_to(place / "outside" / target)


def _content(
    make: bytes | Callable[[Path], bytes],
) -> Callable[[Path, Path], object]:
    return lambda path, place: path.write_bytes(make(place) if callable(make) else make)


def _socket(path: Path, _: Path) -> None:
    handle = socket.socket(socket.AF_UNIX)
    previous_folder = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        handle.bind(path.name)
    finally:
        os.chdir(previous_folder)
        handle.close()


def _folder(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "inner").mkdir()
    (path / "inner" / "x").write_bytes(b"x")


def _manifest_of_another(path: Path, place: Path) -> None:
    shutil.copy(place / "FIRST" / "dataset.json", path)


SHAPES: dict[str, Callable[[Path, Path], object]] = {
    "link-to-file": _link("file.bin"),
    "link-to-folder": _link("folder"),
    "link-to-nowhere": _link("new"),
    "hard-link": lambda path, place: os.link(place / "outside" / "file.bin", path),
    "fifo": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "folder": _folder,
    "empty": _content(b""),
    "cut": _content(b'{"recipe": {"sour'),
    "not-json": _content(b"\xff\xfe\x00" * 50),
    "deep": _content(DEEP),
    "deep-inside": _content(b'{"recipe": {"source_options": {"a": ' + DEEP),
    "wrong-types": _content(b'{"recipe": 3, "shards": "x", "names": [1], "report": []}'),
    "huge-number": _content(f'{{"num_samples": {HUGE}, "shards": [["a", {HUGE}, 0, 0]]}}'.encode()),
    "digits": _content(b"9" * 5000),
    "plan": _content(plan_of_a_stranger),
    "plan-with-parts": _content(functools.partial(plan_of_a_stranger, has_parts=True)),
    "run": _content(run_of_a_stranger),
    "another-dataset": _manifest_of_another,
}


def plant(command: str, name: str, shape: str, place: Path) -> None:
    """Put an object at a name, in the place of what is there."""
    path = path_of(command, name, place)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    SHAPES[shape](path, place)


def die(work: Callable[[], object], number: int) -> None:
    """Do some work, to be called in a fork: the rename of this number ends the process, at its end
    at the latest.
    """
    rename = Path.replace
    count = 0

    def replace(self: Path, target: Path) -> Any:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    with contextlib.suppress(FuelrailError):
        work()
    os.kill(os.getpid(), signal.SIGKILL)


def edit(path: Path, chance: random.Random) -> None:
    """Change some bytes of a file, or cut it."""
    data = bytearray(path.read_bytes())
    path.unlink()  # it may have other names
    if data and chance.random() < 0.2:
        data = data[: chance.randrange(len(data))]
    for _ in range(chance.choice((1, 1, 3, 20))):
        if data:
            data[chance.randrange(len(data))] = chance.choice((0, 255, chance.randrange(256)))
    path.write_bytes(data)
