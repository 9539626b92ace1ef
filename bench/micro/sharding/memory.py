"""What sharding takes for very many samples: time and memory of a plan, and of whole runs of two lengths.

``python -m fuelrail.bench.micro.sharding.memory [--dir DIR] [--rows N] [--samples N,N] [--out FILE] [--quick]``.

*Plan*: from a scan table of ``--rows`` rows, selection and all, to the plan on disk. The table's small members are
empty here (they would make it 100 GB of 10 million rows); a plan never looks at them.

*Run*: whole runs of `fuelrail shard` over dataroots that differ in the number of samples alone, of `fuelrail reshard`
over the datasets that come of them, and with `--append`. *Listing*: sizes and ETags of a dataroot's images in a bucket.

Every measurement is made in a process of its own; memory is its peak resident size, the libraries' own included.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.sharding.source import CAMERAS, make_dataroot
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.sample.schema import SCHEMA, Meta
from fuelrail.sharding.append import append
from fuelrail.sharding.commands import ARROW_POOL
from fuelrail.sharding.planning.plan import assign_splits, make_plan, select_rows, selection
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.scan_table import (
    ROWS_PER_BATCH,
    ClipInfo,
    Reference,
    ScanTable,
    ScanWriter,
    frame_key,
    frame_keys,
)
from support.listing_server import OBJECT_BYTES, listing_server, object_name

FRAMES_PER_CLIP = 40
NUM_ROWS = 10_000_000
NUM_SAMPLES = (1_000, 100_000)
MORE_SAMPLES = 40
DATASET, MORE = ".dataset", "more.dataset"
IMAGE_WH = (32, 16)
SHARD_BYTES = 2 << 20  # so that the shorter run has several shards too, and both workers have work


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process: what it did, wall and CPU time [s], resident memory before [bytes] and its peak.

    ``peak_anonymous_bytes`` is the peak of what no file stands behind, looked at every 20 ms; the rest of the peak are
    pages of libraries and of mapped files, which the system takes back when it needs them.
    """

    what: str
    count: int
    seconds: float
    cpu_seconds: float
    rss_before_bytes: int
    peak_rss_bytes: int
    peak_anonymous_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements and the machine."""

    benchmark: str
    machine: MachineFacts
    measured: list[Measured]


def clip_id(number: int) -> str:
    """Id of a clip of the made table."""
    return f"clip-{number:07d}"


def write_table(path: Path, num_rows: int) -> None:
    """A scan table: one batch through its writer, the others are that one with other clips."""
    sample = path.with_suffix(".one")
    with ScanWriter(sample, {"night": bool, "location": str}) as out:
        for number in range(ROWS_PER_BATCH):
            clip, frame = divmod(number, FRAMES_PER_CLIP)
            if frame == 0:
                out.begin_clip(clip_id(clip), clip_id(clip), "")
            meta = Meta(
                schema=SCHEMA, dataset="", key=frame_key(clip_id(clip), frame), sample_token="", clip_id=clip_id(clip),
                clip_token="", clip_name="", log_id="", vehicle="", frame_idx=frame, num_frames=FRAMES_PER_CLIP,
                prev_key=None, next_key=None, timestamp_ns=frame, is_key_frame=True, split="", cameras={},
            )  # fmt: skip
            members = [Reference("cam.jpg", "f", 900_000, 1600, 900)]
            out.append(meta, b"", None, members, {"night": clip % 3 == 0, "location": "here"})
    with pa.memory_map(str(sample)) as mapped:
        reader = pa.ipc.open_file(mapped)
        batch = reader.get_batch(0)
        empty = pa.array([b""] * ROWS_PER_BATCH, pa.binary())
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, reader.schema) as writer:
            for first in range(0, num_rows, ROWS_PER_BATCH):
                rows = np.arange(first, first + ROWS_PER_BATCH)
                clips, frames = (part.astype(np.int32) for part in np.divmod(rows, FRAMES_PER_CLIP))
                ids = pa.array([clip_id(n) for n in clips.tolist()])
                own = {
                    "key": frame_keys(ids, pa.array(frames)), "clip": pa.array(clips), "frame": pa.array(frames),
                    "timestamp_ns": pa.array(rows), "sample": empty, "attribute.night": pa.array(clips % 3 == 0),
                }  # fmt: skip
                columns = [own.get(field.name, batch.column(field.name)) for field in reader.schema]
                made = pa.RecordBatch.from_arrays(columns, schema=reader.schema)
                writer.write_batch(made.slice(0, min(ROWS_PER_BATCH, num_rows - first)))
    sample.unlink()


def make_the_plan(path: Path, select: str | None) -> int:
    """What a run does between scan and first shard; returns the number of samples."""
    recipe = make_recipe(select=select, splits={"train": 0.9, "val": 0.1})
    table = ScanTable(path)
    num_clips = -(-len(table) // FRAMES_PER_CLIP)
    clips = [
        ClipInfo(
            clip_id=clip_id(n), clip_name=clip_id(n), clip_token="", first_row=n * FRAMES_PER_CLIP,
            num_samples=FRAMES_PER_CLIP,
        )
        for n in range(num_clips)
    ]  # fmt: skip
    rows = select_rows(table, clips, recipe)
    clip, frame, size_bytes = (table.numbers(name)[rows] for name in ("clip", "frame", "size_bytes"))
    clips_by_split = assign_splits(clips, recipe, None, np.unique(clip).tolist())
    plan = make_plan(rows, clip, frame, size_bytes, clips_by_split, recipe)
    np.save(path.with_name("plan.npy"), plan.rows)
    np.save(path.with_name("selection.npy"), selection(plan.rows, len(table)))
    return len(plan.rows)


def run_whole(root: Path) -> int:
    """`fuelrail shard` with two workers, to ``ROOT.dataset``; returns the number of samples."""
    recipe = make_recipe(shard_size_bytes=SHARD_BYTES)
    out = root.with_suffix(DATASET)
    return shard(SourceSpec("nuscenes", str(root), {}), out, recipe, 2, Quiet()).manifest.num_samples


def reshard_whole(dataset: Path) -> int:
    """`fuelrail reshard` of a dataset, another seed; returns the number of samples."""
    recipe = make_recipe(shard_size_bytes=SHARD_BYTES, seed=1)
    source = SourceSpec("fuelrail", str(dataset), {})
    with tempfile.TemporaryDirectory(dir=dataset.parent) as out:
        return shard(source, Path(out) / "out", recipe, 2, Quiet()).manifest.num_samples


def append_whole(dataset: Path) -> int:
    """`fuelrail reshard --append` of a dataset and :data:`MORE`; returns the number of samples."""
    with tempfile.TemporaryDirectory(dir=dataset.parent) as out:
        return append([str(dataset), str(dataset.with_name(MORE))], Path(out) / "out").num_samples


def list_bucket(url: str, num_samples: int) -> int:
    """Sizes and ETags of all images of a dataroot at a URL, by listing; returns the number of samples."""
    files = source_files(url)
    with files.fetched("tables", ()):
        for number in range(num_samples * len(CAMERAS)):
            facts = files.facts(object_name(number))
            assert facts is not None and facts.num_bytes == OBJECT_BYTES
    return num_samples


def _status(entry: str) -> int:
    # Not getrusage: its peak is that of the process which started this one, if that was larger.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith(f"{entry}:"))
    return int(line.split()[1]) * 1024  # the kernel counts in KiB


@contextlib.contextmanager
def _peak_anonymous() -> Iterator[list[int]]:
    """Anonymous memory while the block runs, every 20 ms."""
    seen, done = [_status("RssAnon")], threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            seen.append(_status("RssAnon"))
            seen[:] = [max(seen)]

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield seen
    finally:
        done.set()
        watch.join()


def _child(what: str, path: Path, url: str) -> Measured:
    works: dict[str, Callable[[], int]] = {
        "plan": lambda: make_the_plan(path, None),
        "plan with --select": lambda: make_the_plan(path, "not night"),
        "run": lambda: run_whole(path),
        "reshard": lambda: reshard_whole(path),
        "append": lambda: append_whole(path),
        "listing": lambda: list_bucket(url, int(path.name)),
    }
    before, started, cpu_started = _status("VmRSS"), time.perf_counter(), time.process_time()
    with _peak_anonymous() as anonymous:
        count = works[what]()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Measured(
        what=what, count=count, seconds=seconds, cpu_seconds=cpu_seconds, rss_before_bytes=before,
        peak_rss_bytes=_status("VmHWM"), peak_anonymous_bytes=max(anonymous),
    )  # fmt: skip


def _measure(what: str, path: Path, url: str = "") -> Measured:
    """In a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--child", what, str(path), url]
    # It finds what this process found, and has Arrow as the command has it.
    environment = {**os.environ, **ARROW_POOL, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    return msgspec.json.decode(output, type=Measured)


def _make_more(work: Path) -> None:
    """A dataset with clips of its own, to be appended."""
    root = (work / MORE).with_suffix("")
    make_dataroot(root, MORE_SAMPLES, lidar=False, size=IMAGE_WH, num_files=1, full_tables=False)
    scenes = next(root.glob("*/scene.json"))
    scenes.write_text(scenes.read_text().replace("bench-", "more-"))
    run_whole(root)


def _measure_length(root: Path, num_samples: int) -> Iterator[Measured]:
    """All whole runs of one length."""
    make_dataroot(root, num_samples, lidar=False, size=IMAGE_WH, num_files=1, full_tables=False)
    yield _measure("run", root)
    shutil.rmtree(root)
    dataset = root.with_suffix(DATASET)
    yield _measure("reshard", dataset)
    yield _measure("append", dataset)
    shutil.rmtree(dataset)
    with listing_server(num_samples * len(CAMERAS)) as url:
        yield _measure("listing", root, url)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each measurement and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.sharding.memory")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write (default: in memory)")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, metavar="N", help="rows to plan; 0: no plan")
    parser.add_argument("--samples", metavar="N,N", help="lengths of the whole runs (default: 1000,100000; 0: none)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="few rows and samples, to see that it runs")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "PATH", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        sys.stdout.buffer.write(msgspec.json.encode(_child(options.child[0], Path(options.child[1]), options.child[2])))
        return 0
    lengths = NUM_SAMPLES if options.samples is None else tuple(int(n) for n in options.samples.split(",") if int(n))
    num_rows, lengths = (5_000, (5, 50)) if options.quick else (options.rows, lengths)
    memory = Path("/dev/shm")
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=options.dir or (memory if os.access(memory, os.W_OK) else None)) as scratch:
        work = Path(scratch)
        if num_rows:
            write_table(work / "scan.arrow", num_rows)
            measured += [_measure(what, work / "scan.arrow") for what in ("plan", "plan with --select")]
            (work / "scan.arrow").unlink()
        if lengths:
            _make_more(work)
        for length in lengths:
            measured += _measure_length(work / str(length), length)
    for entry in measured:
        sys.stdout.write(
            f"{entry.what}, {entry.count:,} samples: {entry.seconds:.1f} s, {entry.cpu_seconds:.1f} s of CPU, peak "
            f"{entry.peak_rss_bytes / 1e6:,.0f} MB, of which {entry.rss_before_bytes / 1e6:,.0f} MB before it began; "
            f"{entry.peak_anonymous_bytes / 1e6:,.0f} MB of it anonymous\n"
        )
    if options.out is not None:
        report = MemoryReport(benchmark="sharding_memory", machine=machine_facts(), measured=measured)
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
