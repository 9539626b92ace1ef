"""What the loader costs beside decoding: its CPU time with the real decoder and with one that does nothing.

``python -m fuelrail.bench.micro.overhead WORK [--out FILE]``. Both loaders run over the same samples in turns
(six 1600x900 images each to 704x256, two decoding threads). What the second one still takes is everything but
decoding: index, order, checksums, zstd, metadata, image maps, batches, queues and threads, so it is an upper bound of
what Python takes. A third and a fourth one show what checksums and the trace add, a fifth one what one camera takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.source import make_dataset
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders import DataLoader, TraceRecorder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.transforms.image_map import ImageMap

BATCH_SIZE = 8
NUM_WORKERS = 2


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of a sample by what was done [ms], and the shares of the first; medians over the epochs."""

    benchmark: str
    machine: MachineFacts
    num_samples: int
    cpu_ms_per_sample: dict[str, float]
    share_of_whole: dict[str, float]
    images_per_s: dict[str, float]


class NoDecoder:
    """Leaves every image as it is."""

    name = "none"

    def decode_into(self, encoded: Any, image_map: ImageMap, out: NDArray[Any]) -> None:  # noqa: ANN401
        """Do nothing."""


def measure(folder: Path, rounds: int) -> OverheadReport:
    """Run an epoch of each candidate in turns."""
    make = partial(DataLoader, folder, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=NUM_WORKERS, seed=0)
    loaders = {
        "whole": make(),
        "without decoding": make(),
        "without decoding and checksums": make(storage={"verify": False}),
        "whole, with a trace": make(trace=TraceRecorder()),
    }
    loaders["one camera of six"] = make(transforms={"cameras": loaders["whole"].cameras[:1]})
    for name, loader in loaders.items():
        if name.startswith("without"):
            loader._make = loader._make._replace(decoder=NoDecoder())  # type: ignore[arg-type]
    cpu_ms: dict[str, list[float]] = {name: [] for name in loaders}
    wall_s: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            cpu_s, start_s, count = time.process_time(), time.perf_counter(), 0
            for batch in loader:
                count += len(batch["sample_key"])
            # Threads continue into the next epoch; ended here, so that each candidate pays for its own work alone.
            loader.close()
            if number:
                cpu_ms[name].append(1e3 * (time.process_time() - cpu_s) / count)
                wall_s[name].append((time.perf_counter() - start_s) / count)
    per_sample = {name: median(values) for name, values in cpu_ms.items()}
    return OverheadReport(
        benchmark="loader_overhead",
        machine=machine_facts(),
        num_samples=count,
        cpu_ms_per_sample=per_sample,
        share_of_whole={name: value / per_sample["whole"] for name, value in per_sample.items()},
        images_per_s={name: len(loaders[name].cameras) / median(values) for name, values in wall_s.items()},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print a table and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.overhead")
    parser.add_argument("work", type=Path, metavar="WORK", help="new folder for the dataset")
    parser.add_argument("--samples", type=int, default=256, help="samples of an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each candidate (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    dataset = make_dataset(options.work, options.samples, num_files=8)
    report = measure(dataset, options.rounds)
    for name, value in report.cpu_ms_per_sample.items():
        share, rate = 100 * report.share_of_whole[name], report.images_per_s[name]
        print(f"{name:<32} {value:7.3f} ms CPU a sample  {share:6.2f} %  {rate:8.0f} images/s")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
