"""Sharding loose files: Fuelrail, digests and index and all, beside GNU tar, ``tarfile`` and other
shard writers.

``python -m fuelrail.bench.micro.rate [--dir DIR] [--source DATAROOT] [--case CASE] [--cpus N]
[--out FILE] [--quick]``. All read the same files of a nuScenes dataroot out of the page cache,
write to DIR, by default a folder in memory, so that the writers are measured and not a disk, and
have the same CPUs. Without ``--source`` the dataroot is made: images as large as real ones, of
noise, and tables with as many rows for each frame as nuScenes' own.

GNU tar and ``tarfile`` just copy; the others make datasets that a trainer can shuffle, of files
that they are handed. Fuelrail's time is the whole run: scan of the
tables, plan, shards, index, attributes, manifest; SHA-256 of every file and XXH3 of every sample.
Everybody but GNU tar runs in this interpreter, which is there and has loaded its modules; what
start and imports take is in the time of the one candidate that is the command as a user types it.
Writers that are not installed are left out, and named. *Floors* are reading, writing and digests
alone, in threads: no program that takes digests can be faster here.

The cases of an earlier report in FILE, from the same machine, stay in it where they are not
measured again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.source import list_files, make_dataroot
from fuelrail.bench.micro.timing import (
    QUICK,
    Effort,
    LapClock,
    Quartiles,
    TimedContest,
    TimingReport,
    compare,
    render,
)
from fuelrail.bench.micro.writers import FLOORS, RESTART_COMMAND, candidates, fuelrail_with
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.native import load as load_native
from fuelrail.pipeline.runtime.workers import in_threads
from fuelrail.sharding.write.images import with_restart_rows

if TYPE_CHECKING:
    from fuelrail.bench.micro.source import Files

NUM_REWRITTEN = 200

_SLOW = (
    "GNU tar, then SHA-256",
    "tarfile",
    "streaming.MDSWriter",
    "streaming.MDSWriter, 2 processes",
    "litdata.optimize, 2 workers",
    "floor: reading and writing alone",
    "floor: with SHA-256",
)


class Case(NamedTuple):
    """What is sharded: frames, those with files of their own (the others name these again), rounds
    to measure.

    The number of frames gives an even number of nearly full shards: with few shards, one more would
    be waited for.
    """

    lidar: bool
    num_frames: int
    num_files: int
    num_rounds: int
    leave_out: tuple[str, ...] = ()
    full_tables: bool = True


CASES = {
    "cameras": Case(lidar=False, num_frames=480, num_files=480, num_rounds=9),
    "cameras and lidar, sweeps compressed": Case(
        lidar=True,
        num_frames=340,
        num_files=340,
        num_rounds=9,
    ),
    # Longer, so that start and end of a run count less; the fastest alone, for it takes its time.
    "cameras, 1,440 frames": Case(
        lidar=False,
        num_frames=1440,
        num_files=480,
        num_rounds=5,
        leave_out=(*_SLOW, RESTART_COMMAND),
    ),
    # Tables of the stored keyframes alone, without annotations: what the scan of full ones costs.
    "cameras, lean tables": Case(
        lidar=False,
        num_frames=480,
        num_files=480,
        num_rounds=9,
        leave_out=(*_SLOW, RESTART_COMMAND),
        full_tables=False,
    ),
}
OWN_SOURCE = Case(lidar=False, num_frames=0, num_files=0, num_rounds=3, leave_out=_SLOW)


class RestartCost(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--jpeg restart`` costs when shards are made: the rewriting alone, on all CPUs, and
    the bytes it leaves.
    """

    num_images: int
    images_per_s: float
    mb_per_s: float
    bytes_before: int
    bytes_after: int


class ShardingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rate [MB of source files a second] and CPU time [s for a GB of them] of each candidate,
    medians.
    """

    benchmark: str
    machine: MachineFacts
    num_cpus: int
    commits: dict[str, str | None]
    """The commit that each case measured; ``machine`` has the latest."""
    num_files: dict[str, int]
    num_bytes: dict[str, int]
    restart: dict[str, RestartCost]
    not_installed: list[str]
    mb_per_s: dict[str, dict[str, float]]
    cpu_s_per_gb: dict[str, dict[str, float]]
    share_of_floor: dict[str, Quartiles]
    """Fuelrail's rate over that of the floor that takes the same digests, in the same round."""
    comparisons: list[TimedContest]


def touch_memory(folder: Path, num_bytes: int) -> None:
    """Write as much as a run will, and remove it: a virtual machine's first use of a page takes
    longer than writing.
    """
    piece = bytes(1 << 20)
    path = folder / "touched"
    with path.open("wb") as file:
        for _ in range(num_bytes >> 20):
            file.write(piece)
    path.unlink()


def restart_cost(files: Files, num_cpus: int) -> RestartCost:
    """Rewrite some of the images."""
    paths = itertools.chain.from_iterable(paths for _, paths in files)
    photographs = [path for path in paths if path.suffix == ".jpg"]
    images = [path.read_bytes() for path in photographs[:NUM_REWRITTEN]]
    started = time.perf_counter()
    rewritten = in_threads(with_restart_rows, images, num_cpus)
    after = sum(map(len, rewritten))
    seconds = time.perf_counter() - started
    before = sum(map(len, images))
    return RestartCost(
        num_images=len(images),
        images_per_s=len(images) / seconds,
        mb_per_s=before / 1e6 / seconds,
        bytes_before=before,
        bytes_after=after,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.rate")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where to write (default: in memory)",
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DATAROOT",
        help="a nuScenes dataroot instead of a made one",
    )
    parser.add_argument(
        "--case",
        choices=sorted(CASES),
        help="one of the comparisons alone (default: all)",
    )
    parser.add_argument(
        "--cpus",
        type=int,
        metavar="N",
        help="CPUs for every candidate (default: all there are)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="a few frames, to see that it runs")
    options = parser.parse_args(argv)
    base = options.dir
    memory = Path("/dev/shm")
    if base is None and os.access(memory, os.W_OK):
        base = memory
    cpus = sorted(os.sched_getaffinity(0))
    if options.cpus is not None and not 1 <= options.cpus <= len(cpus):
        parser.error(f"--cpus {options.cpus}: there are {len(cpus)}")
    num_cpus = options.cpus or len(cpus)
    os.sched_setaffinity(0, cpus[:num_cpus])
    try:
        with tempfile.TemporaryDirectory(dir=base) as scratch:
            report = _measure(Path(scratch), options, num_cpus)
    finally:
        os.sched_setaffinity(0, cpus)
    sys.stdout.write(_table(report) + "\n")
    if options.out is not None:
        publish_json(options.out, _merged(options.out, report))
    return 0


def _merged(path: Path, report: ShardingReport) -> ShardingReport:
    """Add to the report the cases that only an earlier one of the same machine has."""
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=ShardingReport)
    except (OSError, msgspec.DecodeError):
        return report
    conditions = []
    for side in (earlier, report):
        machine = msgspec.structs.replace(side.machine, commit=None, uncommitted_changes=None)
        conditions.append((machine, side.num_cpus, side.not_installed))
    if conditions[0] != conditions[1]:
        return report
    tables = {}
    for name in (
        "commits",
        "num_files",
        "num_bytes",
        "restart",
        "mb_per_s",
        "cpu_s_per_gb",
        "share_of_floor",
    ):
        tables[name] = {**getattr(earlier, name), **getattr(report, name)}
    by_title = {}
    for comparison in (*earlier.comparisons, *report.comparisons):
        by_title[comparison.title] = comparison
    comparisons = sorted(
        by_title.values(),
        key=lambda comparison: [*CASES, comparison.title].index(comparison.title),
    )
    return msgspec.structs.replace(report, **tables, comparisons=comparisons)


def _measure(work: Path, options: argparse.Namespace, num_cpus: int) -> ShardingReport:
    size = (320, 180) if options.quick else (1600, 900)
    report = ShardingReport(
        benchmark="sharding",
        machine=machine_facts(),
        num_cpus=num_cpus,
        commits={},
        num_files={},
        num_bytes={},
        restart={},
        not_installed=[],
        mb_per_s={},
        cpu_s_per_gb={},
        share_of_floor={},
        comparisons=[],
    )
    cases = {options.case: CASES[options.case]} if options.case else CASES
    if options.source is not None:
        cases = {"own source": OWN_SOURCE}
    for title, case in cases.items():
        root = options.source
        if root is None:
            root = work / "source"
            shutil.rmtree(root, ignore_errors=True)
            make_dataroot(
                root,
                6 if options.quick else case.num_frames,
                lidar=case.lidar,
                size=size,
                num_files=6 if options.quick else case.num_files,
                full_tables=case.full_tables,
            )
        files = list_files(root)
        num_bytes = sum(path.stat().st_size for _, paths in files for path in paths)
        works, missing = candidates(root, files, work, num_cpus)
        clocks = {}
        for name, call in works.items():
            if name not in case.leave_out:
                clocks[name] = LapClock(call)
        touch_memory(work, 2 * num_bytes)
        effort = QUICK if options.quick else Effort(num_rounds=case.num_rounds, min_lap_s=0.0)
        comparison = compare(title, clocks, effort)
        rates = {}
        for entry in comparison.entries:
            rates[entry.name] = num_bytes / 1e6 / entry.seconds_per_call
        cpu_s_per_gb = {}
        for name, clock in clocks.items():
            cpu_s_per_gb[name] = statistics.median(clock.cpu_s) * 1e9 / num_bytes
        fuelrail_clock = clocks[fuelrail_with(num_cpus)]
        *_, floor = FLOORS
        report.comparisons.append(comparison)
        report.num_files[title] = sum(len(paths) for _, paths in files)
        report.num_bytes[title] = num_bytes
        report.mb_per_s[title] = rates
        report.share_of_floor[title] = fuelrail_clock.over(clocks[floor], effort.num_rounds)
        report.cpu_s_per_gb[title] = cpu_s_per_gb
        report.commits[title] = report.machine.commit
        report.not_installed[:] = missing
        if not isinstance(load_native(), str):
            report.restart[title] = restart_cost(files, num_cpus)
    return report


def _table(report: ShardingReport) -> str:
    plain = TimingReport(
        benchmark="sharding",
        machine=report.machine,
        comparisons=report.comparisons,
    )
    lines = [
        render(plain),
        "",
        f"everybody on {report.num_cpus} CPUs, page cache warm; MB are those of the source files",
    ]
    for title, rates in report.mb_per_s.items():
        for name, rate in rates.items():
            cpu_s = report.cpu_s_per_gb[title][name]
            lines.append(f"  {title}, {name}: {rate:,.0f} MB/s, {cpu_s:.2f} CPU-s/GB")
        share = report.share_of_floor[title]
        lines.append(
            f"  {title}, fuelrail's share of the floor with the same digests: {share.median:.2f} "
            f"({share.q25:.2f} to {share.q75:.2f})"
        )
    for title, cost in report.restart.items():
        lines.append(
            f"  {title}, --jpeg restart, rewriting alone: {cost.images_per_s:,.0f} images/s, "
            f"{cost.mb_per_s:,.0f} MB/s, {cost.bytes_after / cost.bytes_before - 1:+.2%} bytes"
        )
    if report.not_installed:
        lines.append(f"not installed, left out: {', '.join(report.not_installed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
