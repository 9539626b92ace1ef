"""Hostile files in sources of every kind: one sentence or a dataset, never more.

The source of each :class:`support.source_suite.SourceSuite` is sharded with one of its files spoiled: no traceback, no
signal, no wait or memory beyond the limits, nothing written beside OUT, and nothing read that a link outside of the
source leads to. Some cases run by default::

    FUELRAIL_ATTACK=all pytest tests/attack/test_hostile_sources.py      600 cases
    python tests/attack/test_hostile_sources.py [-v] [NUMBER]             the same without pytest
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import os
import random
import re
import shutil
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import simplejpeg

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hostile_runs import Outcome, footprint, in_fork, run
from support.neutral_source import install_plugin
from support.source_suite import SourceSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.process

MEMORY_BYTES = 1536 << 20
ALL = 600
NUM_QUICK_CASES = 14
JPEG = simplejpeg.encode_jpeg(np.zeros((24, 32, 3), np.uint8))
FILES_PER_NAME = 2  # files of a source whose names are alike


class ClassFolders(SourceSuite):
    kind = "imagefolder"

    def write(self, world, root):
        for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(JPEG)
        return str(root)


class LabelledTars(SourceSuite):
    """Images with a class, a text, numbers, an array and bytes."""

    kind = "webdataset"

    def write(self, world, root):
        array = io.BytesIO()
        np.save(array, np.arange(6, dtype=np.float32).reshape(2, 3))
        numbers = json.dumps(
            {"action": [0.5, 2], "night": True, "path": [[1, 2.5]], "note": "a"}
        ).encode()
        members = {
            "jpg": JPEG,
            "cls": b"3",
            "txt": b"a car",
            "json": numbers,
            "npy": array.getvalue(),
            "bin": b"\1\2",
        }
        with tarfile.open(root / "shard.tar", "w") as tar:
            for number in range(3):
                for extension, data in members.items():
                    info = tarfile.TarInfo(f"{number:04d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return str(root)


def suites() -> dict[str, type[SourceSuite]]:
    """The suites of all test modules of sources, by name, and the two here; those of plug-ins are left out."""
    suites_by_name: dict[str, type[SourceSuite]] = {
        "class-folders": ClassFolders,
        "labelled-tars": LabelledTars,
    }
    for path in sorted((Path(__file__).parents[1] / "sharding" / "sources").rglob("test_*.py")):
        if "(SourceSuite)" in (text := path.read_text()) or "SourceSuite):" in text:
            spec = importlib.util.spec_from_file_location(
                f"of_{path.parent.name}_{path.stem}", path
            )
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            for name, suite in inspect.getmembers(module, inspect.isclass):
                if (
                    issubclass(suite, SourceSuite)
                    and suite.__module__ == spec.name
                    and suite.kind not in ("pandaset", "neutral")
                ):
                    suites_by_name[f"{path.stem.removeprefix('test_')}-{name}"] = suite
    return suites_by_name


def replace_with(
    make: Callable[[Path], object],
) -> Callable[[Path, random.Random], None]:
    """Put something else in place of the file."""

    def spoil(path: Path, _: random.Random) -> None:
        path.unlink()
        make(path)

    return spoil


def spoil_bytes(
    change: Callable[[bytearray, random.Random], bytes | bytearray],
) -> Callable[[Path, random.Random], None]:
    """Change the file's bytes."""

    def spoil(path: Path, rng: random.Random) -> None:
        path.write_bytes(change(bytearray(path.read_bytes()), rng))

    return spoil


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def grown(path: Path, _: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


def moved_out(path: Path, _: random.Random) -> None:
    """Leave a link to the file as it was, which is outside of the source."""
    outside = path.parents[len(path.parents) - 1 - path.parts.index("SRC")].parent / "outside.bin"
    shutil.move(path, outside)
    path.symlink_to(outside)


def flip_bits(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(8):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def overwrite_numbers(data: bytearray, rng: random.Random) -> bytearray:
    """Lengths and offsets of eight bytes that say more than there is."""
    for _ in range(3):
        start = rng.randrange(max(len(data) - 8, 1))
        data[start : start + 8] = rng.choice(
            [
                b"\xff" * 8,
                b"\xff\xff\xff\x7f\0\0\0\0",
                (1 << 40).to_bytes(8, "little"),
            ]
        )
    return data


def number(text: bytes) -> Callable[[bytearray, random.Random], bytes]:
    def change(data: bytearray, rng: random.Random) -> bytes:
        numbers = list(re.finditer(rb"-?[0-9]+(\.[0-9]+)?", data))
        if not numbers:
            return bytes(data) + text
        start, end = rng.choice(numbers).span()
        return bytes(data[:start] + text + data[end:])

    return change


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "gone": lambda path, _: path.unlink(),
    "fifo": replace_with(os.mkfifo),
    "folder": replace_with(Path.mkdir),
    "device": replace_with(lambda path: path.symlink_to("/dev/zero")),
    "loop": replace_with(lambda path: path.symlink_to(path.name)),
    "out": moved_out,
    "sparse": replace_with(sparse),
    "grown": grown,
    "empty": spoil_bytes(lambda _, __: b""),
    "zeros": spoil_bytes(lambda _, __: bytes(1 << 20)),
    "pointer": spoil_bytes(
        lambda _, __: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    "cut": spoil_bytes(lambda data, rng: data[: rng.randrange(len(data) or 1)]),
    "shorter": spoil_bytes(lambda data, _: data[:-1]),
    "twice": spoil_bytes(lambda data, _: data + data),
    "not-utf8": spoil_bytes(
        lambda data, rng: (
            data[: (start := rng.randrange(len(data) or 1))] + b"\xff\xfe\xe9" + data[start:]
        )
    ),
    "nested": spoil_bytes(lambda _, __: b"[" * 300_000),
    "nested-in": spoil_bytes(
        lambda data, _: re.sub(
            rb": *([0-9.]+|\"[^\"]*\")",
            b": " + b"[" * 50_000,
            bytes(data),
            count=1,
        )
    ),
    "nested-yaml": spoil_bytes(lambda _, __: b"a: " + b"{b: " * 50_000),
    "nested-xml": spoil_bytes(lambda data, _: bytes(data[:60]) + b"<a>" * 300_000),
    "flipped": spoil_bytes(flip_bits),
    "flipped-2": spoil_bytes(flip_bits),
    "lengths": spoil_bytes(overwrite_numbers),
    "lengths-2": spoil_bytes(overwrite_numbers),
    "digits": spoil_bytes(number(b"9" * 5000)),
    "infinite": spoil_bytes(number(b"1e999")),
    "negative": spoil_bytes(number(b"-99999999999999999")),
    "nan": spoil_bytes(number(b"NaN")),
    "one-line": spoil_bytes(lambda _, __: b"a" * (8 << 20)),
}


class Case(NamedTuple):
    suite: str
    mutation: str
    pick: int


def choose_files(root: Path) -> list[Path]:
    """Two files for each name of a folder without its numbers."""
    files_by_name: dict[str, list[Path]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        files_by_name.setdefault(
            re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", str(path.relative_to(root))), []
        ).append(path)
    return [path for alike in files_by_name.values() for path in alike[:FILES_PER_NAME]]


def cases() -> Iterator[Case]:
    """Mutate without end, always in the same order: every source and every mutation come early."""
    rng = random.Random(20)
    every = [(suite, mutation) for suite in suites() for mutation in MUTATIONS]
    while True:
        rng.shuffle(every)
        yield from (Case(suite, mutation, rng.randrange(1 << 20)) for suite, mutation in every)


@cache
def make_source(suite: str, folder: Path) -> tuple[Path, str]:
    """The source, sound, in ``folder``, and its location below that."""
    shutil.rmtree(folder / "site", ignore_errors=True)
    place = folder / suite
    place.mkdir(parents=True)

    def make() -> None:
        install_plugin(
            folder / "site", "neutral", "support.neutral_source:Neutral"
        )  # for the dataset of a dataset
        sys.path.insert(0, str(folder / "site"))
        spec = suites()[suite]().spec(place)
        (place / "location").write_text(os.path.relpath(spec.location, place / "source"))

    in_fork(make)
    return place / "source", (place / "location").read_text()


def attack(case: Case, folder: Path, place: Path) -> list[str]:
    """What is wrong with how one case ends."""
    source, location = make_source(case.suite, folder)
    suite = suites()[case.suite]
    options = [
        text
        for name, value in suite.options.items()
        for text in ("-o", f"{name}={json.dumps(value)}")
    ]
    options = [text.replace('="', "=").rstrip('"') if '="' in text else text for text in options]

    def outcome(mutation: str) -> Outcome:
        shutil.rmtree(place, ignore_errors=True)
        (place / "out").mkdir(parents=True)
        (place / "tmp").mkdir()
        shutil.copytree(source, place / "SRC", symlinks=True)
        files = choose_files(place / "SRC")
        MUTATIONS[mutation](files[case.pick % len(files)], random.Random(case.pick))
        before = footprint(place)
        where = f"{suite.kind}:{place / 'SRC' / location}"
        result = run(["shard", where, "out/made", "--workers", "1", *options], place)
        if "-v" in sys.argv:
            figures = f"{result.status} {result.seconds:.1f} s {result.memory_bytes >> 20} MiB"
            print(
                f"  {case} {mutation} {files[case.pick % len(files)]}: {figures} {result.text[-300:]!r}"
            )
        faults.extend(result.faults(MEMORY_BYTES))
        if footprint(place) != before:
            faults.append("something beside OUT was written")
        return result

    faults: list[str] = []
    result = outcome(case.mutation)
    if case.mutation == "out" and result.status == 0 and outcome("gone").status != 0:
        faults.append("a link out of the source was followed")
    return [f"{case}: {fault}" for fault in faults] + (
        [] if result.status in (0, 2) else [f"{case}: ended with {result}"]
    )


def preload() -> None:
    """Load what sharding loads, so that a fork has it."""
    import av  # noqa: F401
    import cv2
    import mcap.stream_reader  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import rosbags.typesys  # noqa: F401

    from fuelrail.sharding.sources.registry import sources

    sources()
    cv2.setNumThreads(1)


def chosen(count: int) -> list[Case]:
    all_cases = cases()
    return [next(all_cases) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    preload()
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize(
    "case",
    chosen(ALL if os.environ.get("FUELRAIL_ATTACK") == "all" else NUM_QUICK_CASES),
    ids=str,
)
def test_hostile_files_of_sources_end_in_a_sentence(case, folder, tmp_path) -> None:
    assert attack(case, folder, tmp_path / "place") == []


def main() -> int:
    """The first NUMBER cases; a line for each fault."""
    preload()
    arguments = [argument for argument in sys.argv[1:] if argument != "-v"]
    number_of = int(arguments[0]) if arguments else ALL
    num_faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen(number_of):
            for fault in attack(case, Path(folder) / "made", Path(folder) / "place"):
                num_faults += 1
                print(fault, flush=True)
    print(f"{number_of} sources, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
