"""Does a loader grow? Memory over many epochs, and threads, files and memory over many open and close cycles.

``python -m fuelrail.bench.micro.loader_endurance WORK [--epochs 50] [--cycles 1000] [--out FILE]``. The slope is a
straight line's through the resident memory after each epoch of the second half, with the standard error that its
scatter gives. The order's digests show that every number of threads, tuned or not, made the same batches.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.gpu.cameras import write_cameras
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders import DataLoader, ImageAugment, Transforms
from fuelrail.loaders.distributed import batch_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TRANSFORMS = Transforms(image=ImageAugment(height=64, width=176, train=True, resize_range=(0.1, 0.13), flip_prob=0.5))


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of the resident memory [bytes a turn], and its standard error."""

    turns: int
    slope_bytes: float
    error_bytes: float
    first_mb: float
    last_mb: float


class EnduranceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What grew. ``cycles`` are of opening, iterating a little and closing."""

    benchmark: str
    machine: MachineFacts
    epochs: Line
    cycles: Line
    threads_before_after: tuple[int, int]
    files_before_after: tuple[int, int]
    same_batches: dict[str, bool]


def over_epochs(folder: Path, num_epochs: int) -> Line:
    """Resident memory after each epoch of one loader."""
    with DataLoader(folder, 8, transforms=TRANSFORMS, num_workers=2) as loader:
        resident = []
        for _ in range(num_epochs):
            for batch in loader:
                del batch
            resident.append(_resident_bytes())
    return _line(resident)


def over_cycles(folder: Path, num_cycles: int) -> tuple[Line, tuple[int, int], tuple[int, int]]:
    """Memory, threads and open files over loaders that are opened, used and closed, or just dropped."""
    resident = []
    counts: list[tuple[int, int]] = []
    for number in range(num_cycles):
        loader = DataLoader(folder, 4, transforms=TRANSFORMS, num_workers=2)
        next(iter(loader))
        if number % 2:
            loader.close()
        del loader
        resident.append(_resident_bytes())
        if number in (min(10, num_cycles - 1), num_cycles - 1):
            gc.collect()
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))  # noqa: PTH208
    before, after = counts[0], counts[-1]
    return _line(resident), (before[0], after[0]), (before[1], after[1])


def same_batches(folder: Path) -> dict[str, bool]:
    """Whether two epochs are the same, bit for bit, with other numbers of threads."""
    digests = {}
    for workers in (1, 2, 5, "auto"):
        with DataLoader(folder, 8, transforms=TRANSFORMS, seed=3, num_workers=workers) as loader:
            digests[str(workers)] = [batch_digest(batch) for _ in range(2) for batch in loader]
    return {name: found == digests["1"] for name, found in digests.items()}


def _line(values: Sequence[int]) -> Line:
    """A straight line through the second half."""
    y: NDArray[np.float64] = np.asarray(values[len(values) // 2 :], np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(x @ y / (x @ x))
    scatter = y - y.mean() - slope * x
    error = float(np.sqrt(scatter @ scatter / max(1, len(y) - 2) / (x @ x)))
    return Line(
        turns=len(values), slope_bytes=slope, error_bytes=error, first_mb=values[0] / 1e6, last_mb=values[-1] / 1e6
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.loader_endurance")
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the dataset")
    parser.add_argument("--samples", type=int, default=64, help="samples of an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=50, help="epochs of one loader (default: %(default)s)")
    parser.add_argument("--cycles", type=int, default=1000, help="loaders opened and closed (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    folder = options.work / "cameras"
    write_cameras(folder, options.samples)
    same = same_batches(folder)
    epochs = over_epochs(folder, options.epochs)
    cycles, threads, files = over_cycles(folder, options.cycles)
    report = EnduranceReport(
        benchmark="loader_endurance", machine=machine_facts(), epochs=epochs, cycles=cycles,
        threads_before_after=threads, files_before_after=files, same_batches=same,
    )  # fmt: skip
    for name, line in (("epochs", epochs), ("cycles", cycles)):
        growth = f"{line.slope_bytes / 1e3:+.1f} +- {line.error_bytes / 1e3:.1f} kB a turn"
        print(f"{line.turns} {name}: {growth}, {line.first_mb:.0f} to {line.last_mb:.0f} MB")  # noqa: T201
    print(f"threads {threads[0]} -> {threads[1]}, files {files[0]} -> {files[1]}, same batches: {same}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
