"""Storage over a long time: a server that goes away, and memory while far more is streamed than fits.

``python -m fuelrail.bench.micro.storage_endurance [--parts ...] [--outage S] [--samples N N] [--out FILE] [--quick]``.

*Outage*: the whole DataLoader over HTTP, whose server refuses all connections for ``--outage`` seconds in the middle of
an epoch; and one whose server stays away, under a deadline of that length.

*Memory*: the whole DataLoader over HTTP, samples of 1 MB, each case in a process of its own: datasets of two sizes, and
two look-aheads. What counts is the peak of anonymous memory over what there was before the loader was made.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.gpu.cameras import write_cameras, write_large
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.decode import made_image
from fuelrail.bench.micro.metadata import CHANNELS
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders import DataLoader, ImageAugment, Transforms
from fuelrail.pipeline.errors import StorageError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.fault_server import FaultServer, FaultServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuelrail.pipeline.format.dataset import Dataset

PARTS = ("outage", "memory")
OUTAGE_S = 30.0
NUM_SAMPLES = (1_000, 10_000)
SAMPLE_BYTES = 1_000_000
BATCH = 4
TRANSFORMS = Transforms(image=ImageAugment(height=64, width=176, resize=0.125))
LOOK_AHEAD_BYTES = (64 << 20, 256 << 20)


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's absence did. Times in seconds.

    ``waited_s`` is how long the trainer waited for the batch that was due, ``behind_s`` how much of that was after the
    server had come back. ``error`` is what ended a run whose server stayed away, ``ended_after_s`` when.
    """

    away_s: float
    retries: int
    waited_s: float
    behind_s: float
    same_samples: bool
    deadline_s: float
    ended_after_s: float
    error: str


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Memory [bytes] of one loader's epoch: anonymous before it was made, its peak, what it may ask for ahead."""

    num_samples: int
    read_bytes: int
    look_ahead_bytes: int
    before_bytes: int
    peak_anonymous_bytes: int
    seconds: float


class StorageEndurance(msgspec.Struct, frozen=True, kw_only=True):
    """The report."""

    benchmark: str
    machine: MachineFacts
    outage: Outage | None
    memory: list[Peak]


def make_source(folder: Path, num_samples: int) -> Dataset:
    """One camera, whose JPEG is followed by zeros up to :data:`SAMPLE_BYTES`: more to read than to decode."""
    picture = made_image(60)
    padded = picture + bytes(max(0, SAMPLE_BYTES - len(picture)))
    return write_cameras(folder, num_samples, num_shards=1, image=padded, channels=CHANNELS[:1])


def measure_outage(root: Path, index_dir: Path, away_s: float) -> Outage:
    """See the module's docstring."""
    with DataLoader(root, BATCH, transforms=TRANSFORMS, num_workers=1) as local:
        expected = [key for batch in local for key in batch["sample_key"]]
    with FaultServer(root) as server:
        remote = open_dataset(server.url, cache_dir=index_dir)
        with DataLoader(remote, BATCH, transforms=TRANSFORMS, num_workers=1, storage={"look_ahead_bytes": 1}) as loader:
            batches = iter(loader)
            found = list(next(batches)["sample_key"])
            server.go_down()
            gone = time.monotonic()
            back = threading.Timer(away_s, server.come_up)
            back.start()
            longest_s = behind_s = 0.0
            for waited_s, keys in _timed(batches):
                found += keys
                if waited_s > longest_s:
                    longest_s, behind_s = waited_s, time.monotonic() - gone - away_s
            back.join()
            retries = loader.stats().storage.retries
        retry = RetryPolicy(deadline_s=away_s)
        with DataLoader(
            remote, BATCH, transforms=TRANSFORMS, num_workers=1, storage={"look_ahead_bytes": 1, "retry": retry}
        ) as loader:
            batches = iter(loader)
            next(batches)
            server.go_down()
            gone, error = time.monotonic(), ""
            try:
                for _ in batches:
                    pass
            except StorageError as failure:
                error = str(failure)
            ended_after_s = time.monotonic() - gone
    return Outage(
        away_s=away_s, retries=retries, waited_s=longest_s, behind_s=behind_s, same_samples=found == expected,
        deadline_s=retry.deadline_s, ended_after_s=ended_after_s, error=error.replace(server.url, "http://SERVER"),
    )  # fmt: skip


def _timed(batches: Iterator[dict[str, object]]) -> Iterator[tuple[float, list[str]]]:
    asked = time.monotonic()
    for batch in batches:
        keys = batch["sample_key"]
        assert isinstance(keys, list)
        yield time.monotonic() - asked, keys
        asked = time.monotonic()


def measure_memory(source: Dataset, folder: Path, num_samples: int, look_ahead_bytes: int) -> Peak:
    """One epoch over a dataset of this number of samples, all of them those of ``source``, in a process of its own."""
    root = write_large(folder / "large", source, num_samples).root
    with FaultServerProcess(root) as server:
        command = [
            sys.executable, "-m", __spec__.name, "--child", server.url, str(folder / "index"), str(look_ahead_bytes)
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return msgspec.json.decode(output, type=Peak)


def _child(url: str, index_dir: str, look_ahead_bytes: int) -> Peak:
    before = _anonymous_bytes()
    peak, started = before, time.perf_counter()
    dataset = open_dataset(url, cache_dir=index_dir)
    with DataLoader(
        dataset, BATCH, transforms=TRANSFORMS, num_workers=1, storage={"look_ahead_bytes": look_ahead_bytes}
    ) as loader:
        for _ in loader:
            peak = max(peak, _anonymous_bytes())
        stats = loader.stats().storage
        num_samples = len(loader) * BATCH
    return Peak(
        num_samples=num_samples, read_bytes=stats.span_bytes, look_ahead_bytes=look_ahead_bytes, before_bytes=before,
        peak_anonymous_bytes=peak, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024  # the kernel counts in KiB


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.storage_endurance")
    parser.add_argument("--outage", type=float, default=OUTAGE_S, metavar="S", help="default: %(default)s")
    parser.add_argument("--samples", type=int, nargs=2, default=NUM_SAMPLES, help="of the two datasets")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--folder", type=Path, help="where to put the data, 0.3 GB (None: a temporary folder)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        url, index_dir, look_ahead_bytes = options.child
        print(json.dumps(msgspec.to_builtins(_child(url, index_dir, int(look_ahead_bytes)))))  # noqa: T201
        return 0
    away_s, samples = (0.5, (12, 24)) if options.quick else (options.outage, options.samples)
    look_aheads = (4 << 20,) if options.quick else LOOK_AHEAD_BYTES
    folder = Path(tempfile.mkdtemp(prefix="fuelrail-storage-", dir=options.folder))
    try:
        memory, outage = [], None
        source = make_source(folder / "source", 12 if options.quick else 250)
        if "memory" in options.parts:
            memory = [measure_memory(source, folder, count, size) for size in look_aheads for count in samples]
        if "outage" in options.parts:
            outage = measure_outage(source.root, folder / "index", away_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = StorageEndurance(benchmark="storage_endurance", machine=machine_facts(), outage=outage, memory=memory)
    for part in (*memory, *([outage] if outage else [])):
        print(msgspec.to_builtins(part))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    logging.getLogger("fuelrail").setLevel(logging.ERROR)
    sys.exit(main())
