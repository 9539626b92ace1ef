"""Who turns loose files into shards, each at what its guide says is best: the candidates of the
sharding benchmark.

Sweeps are compressed as Fuelrail does it by everybody who writes samples, so that all do the same
work; the tar programs take them as they are. The others are handed each frame's files; what only
Fuelrail does on top (tables read and joined, metadata and geometry written, images looked at,
digests of samples and shards, an index, durable files) stays in its time. *Floors* read and write
the files and take their digests, and nothing else; each thread has a part of the frames, and memory
that it uses again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from fuelrail.bench.micro.source import SWEEP_CODEC, packed
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.tar import BLOCK_BYTES
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.write.blocks import BlockWriter

if TYPE_CHECKING:
    from fuelrail.bench.micro.source import Files

SHARD_BYTES = 64 << 20
_BUFFER_BYTES = 16 << 20
COMMAND = "fuelrail shard, the whole command"
RESTART_COMMAND = "fuelrail shard --jpeg restart, the whole command"
FLOORS = {
    "floor: reading and writing alone": (),
    "floor: with SHA-256": ("sha256",),
    "floor: with SHA-256 and XXH3": ("sha256", "xxh3"),
}
"""The limit of any program that does this work, with as many threads as there are CPUs."""


@contextlib.contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """Yield an empty folder and remove it afterwards: removing counts for every candidate alike."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def with_fuelrail(root: Path, num_workers: int, out: Path) -> None:
    """Run all of `fuelrail shard`."""
    with _fresh(out) as folder:
        recipe = make_recipe(shard_size_bytes=SHARD_BYTES)
        shard(
            SourceSpec("nuscenes", str(root), {}),
            out=folder,
            recipe=recipe,
            num_workers=num_workers,
            progress=Quiet(),
        )


def with_command(root: Path, num_workers: int, out: Path, *options: str) -> None:
    """Run `fuelrail shard` as a user types it: start of the interpreter and imports count."""
    with _fresh(out) as folder:
        command = [
            sys.executable,
            "-m",
            "fuelrail",
            "shard",
            f"nuscenes:{root}",
            str(folder),
            "--workers",
            str(num_workers),
            "--shard-size",
            str(SHARD_BYTES),
            *options,
        ]
        # It finds what this process found.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, capture_output=True, env=environment)


def fuelrail_with(num_workers: int) -> str:
    """Return Fuelrail's name as a candidate."""
    return f"fuelrail, {num_workers} worker{'s' if num_workers > 1 else ''}"


def with_gnu_tar(files: Files, out: Path) -> None:
    """Write one tar of all files."""
    with _fresh(out) as folder:
        _gnu_tar(files, folder / "all.tar")


def with_gnu_tar_and_digest(files: Files, out: Path) -> None:
    """Write one tar of all files, and its SHA-256 after that (OpenSSL's, which is faster than
    coreutils').
    """
    with _fresh(out) as folder:
        path = folder / "all.tar"
        _gnu_tar(files, path)
        with path.open("rb") as tar:
            hashlib.file_digest(tar, "sha256")


def _gnu_tar(files: Files, tar: Path) -> None:
    names = b"\0".join(os.fsencode(path) for _, paths in files for path in paths)
    command = [
        "tar",
        "--create",
        "--absolute-names",
        # A file that is named again is to be copied again, as everybody does it, not linked.
        "--hard-dereference",
        "--null",
        "--files-from=-",
        f"--file={tar}",
    ]
    subprocess.run(command, input=names, check=True)


def with_tarfile(files: Files, out: Path) -> None:
    """Write one tar of all files, by Python's own module."""
    with _fresh(out) as folder, tarfile.open(folder / "all.tar", "w") as tar:
        for key, paths in files:
            for path in paths:
                name = f"{key}.{_channel(path)}.{path.suffix}"
                tar.add(path, name)


def _channel(path: Path) -> str:
    return path.parent.name.lower()


def _sample(paths: list[Path]) -> dict[str, bytes]:
    """Return the members of a frame by channel."""
    return {_channel(path): packed(path) for path in paths}


def write_webdataset(files: Files, folder: Path) -> None:
    """Write with ``webdataset.ShardWriter``."""
    import webdataset

    pattern = str(folder / "%06d.tar")
    with (
        contextlib.redirect_stdout(io.StringIO()),
        webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, verbose=0) as writer,
    ):
        for key, paths in files:
            sample: dict[str, Any] = {"__key__": key}
            for path in paths:
                extension = "bin.zst" if path.suffix == ".bin" else "jpg"
                sample[f"{_channel(path)}.{extension}"] = packed(path)
            writer.write(sample)


def write_mds(files: Files, folder: Path) -> None:
    """Write with ``streaming.MDSWriter`` and hashes, as its guide recommends."""
    writer_type = importlib.import_module("streaming").MDSWriter
    _, first_paths = files[0]
    columns = {"key": "str"}
    for path in first_paths:
        columns[_channel(path)] = "bytes"
    with writer_type(
        out=str(folder),
        columns=columns,
        hashes=["xxh3_64"],
        size_limit=SHARD_BYTES,
    ) as writer:
        for key, paths in files:
            writer.write({"key": key, **_sample(paths)})


def lit_sample(frame: tuple[str, list[Path]]) -> dict[str, Any]:
    """Return the sample that ``litdata.optimize`` asks for in its workers."""
    key, paths = frame
    return {"key": key, **_sample(paths)}


def with_litdata(files: Files, num_workers: int, out: Path) -> None:
    """Write with ``litdata.optimize`` and its own workers; its cache is beside the output, on
    the same file system.
    """
    lit = importlib.import_module("litdata")
    with _fresh(out) as folder:
        cache = {
            "DATA_OPTIMIZER_CACHE_FOLDER": str(folder / "cache"),
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": str(folder / "data"),
        }
        before = {name: os.environ.get(name) for name in cache}
        os.environ.update(cache)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                lit.optimize(
                    fn=lit_sample,
                    inputs=files,
                    output_dir=str(folder / "out"),
                    num_workers=num_workers,
                    chunk_bytes=SHARD_BYTES,
                    reorder_files=False,
                    verbose=False,
                    start_method="fork",
                )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def copy_part(files: Files, out: Path, digests: Collection[str]) -> None:
    """Write the files of these frames to ``out``; ``digests``: ``sha256`` of all, ``xxh3`` of
    each frame, or both.
    """
    memory = memoryview(bytearray(_BUFFER_BYTES))
    digest = hashlib.sha256()
    with out.open("wb") as file:
        writer = BlockWriter(file)
        for _, paths in files:
            end = 0
            for path in paths:
                start = end + BLOCK_BYTES
                handle = os.open(path, os.O_RDONLY)
                num_bytes = os.readv(handle, [memory[start:]])
                os.close(handle)
                if path.suffix == ".bin":
                    stored = codecs.encode(SWEEP_CODEC, memory[start : start + num_bytes])
                    num_bytes = len(stored)
                    memory[start : start + num_bytes] = stored
                padding = -num_bytes % BLOCK_BYTES
                end = start + num_bytes + padding
            span = memory[:end]
            if "xxh3" in digests:
                xxhash.xxh3_64_intdigest(span)
            if "sha256" in digests:
                digest.update(span)
            writer.write([span])
        writer.flush()
    digest.hexdigest()


def copy_files(
    files: Files,
    num_threads: int,
    digests: Collection[str],
    folder: Path,
) -> None:
    """Copy all frames, in this number of threads."""
    with ThreadPoolExecutor(num_threads) as pool:
        copies = []
        for number, part in enumerate(_parts(files, num_threads)):
            out = folder / f"{number}.bin"
            copies.append(pool.submit(copy_part, part, out, digests))
        for copy in copies:
            copy.result()


def _parts(files: Files, num_parts: int) -> list[Files]:
    """Return frames in parts of about equal size, one after another."""
    parts = []
    for number in range(num_parts):
        start = len(files) * number // num_parts
        end = len(files) * (number + 1) // num_parts
        parts.append(files[start:end])
    return parts


def with_floor(
    files: Files,
    num_threads: int,
    digests: Collection[str],
    out: Path,
) -> None:
    """Read, write and compute these digests, nothing else."""
    with _fresh(out) as folder:
        copy_files(files, num_threads, digests, folder)


def alone(write: Callable[[Files, Path], None], files: Files, out: Path) -> None:
    """Run one writer in this process."""
    with _fresh(out) as folder:
        write(files, folder)


def in_parts(
    write: Callable[[Files, Path], None],
    files: Files,
    num_writers: int,
    out: Path,
) -> None:
    """Run several writers, each in a forked process with its part of the frames and a folder of
    its own.
    """
    context = multiprocessing.get_context("fork")
    with _fresh(out) as folder:
        workers = []
        for number, part in enumerate(_parts(files, num_writers)):
            part_folder = folder / str(number)
            part_folder.mkdir()
            worker = context.Process(target=write, args=(part, part_folder))
            worker.start()
            workers.append(worker)
        for worker in workers:
            worker.join()
            if worker.exitcode:
                raise RuntimeError(f"a writer ended with {worker.exitcode}")


def candidates(
    root: Path,
    files: Files,
    work: Path,
    num_cpus: int,
) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Return all that are installed, GNU tar first; and the names of those that are not."""
    works: dict[str, Callable[[], object]] = {}
    missing: list[str] = []
    if shutil.which("tar"):
        works["GNU tar"] = partial(with_gnu_tar, files, work / "tar")
        works["GNU tar, then SHA-256"] = partial(with_gnu_tar_and_digest, files, work / "tar")
    else:
        missing.append("GNU tar")
    works["tarfile"] = partial(with_tarfile, files, work / "tarfile")
    for name, module, write in (
        ("webdataset.ShardWriter", "webdataset", write_webdataset),
        ("streaming.MDSWriter", "streaming", write_mds),
    ):
        if importlib.util.find_spec(module) is None:
            missing.append(name)
            continue
        out = work / module
        works[name] = partial(alone, write, files, out)
        if num_cpus > 1:
            title = f"{name}, {num_cpus} processes"
            works[title] = partial(in_parts, write, files, num_writers=num_cpus, out=out)
    if importlib.util.find_spec("litdata"):
        title = f"litdata.optimize, {num_cpus} workers"
        works[title] = partial(with_litdata, files, num_cpus, work / "litdata")
    else:
        missing.append("litdata.optimize")
    out = work / "fuelrail"
    for num_workers in sorted({1, num_cpus}):
        title = fuelrail_with(num_workers)
        works[title] = partial(with_fuelrail, root, num_workers, out)
    works[COMMAND] = partial(with_command, root, num_cpus, out)
    works[RESTART_COMMAND] = partial(with_command, root, num_cpus, out, "--jpeg", "restart")
    for title, digests in FLOORS.items():
        works[title] = partial(with_floor, files, num_cpus, digests=digests, out=work / "floor")
    return works, missing
