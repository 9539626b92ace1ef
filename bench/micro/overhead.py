"""What the loader costs beside decoding: its CPU time a sample, for six cameras and for one.

``python -m fuelrail.bench.micro.overhead WORK [--out FILE]``. All loaders run over the same samples
in turns (six 1600x900 images each to 704x256, two decoding threads). "Nothing decoded" is
everything but decoding: index, order, checksums, zstd, metadata, image maps, batches, queues and
threads.
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
from fuelrail.bench.micro.source import make_dataroot
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.models.settings import MODEL_IMAGE
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.loader import DataLoader
from fuelrail.sharding.api import shard
from fuelrail.sharding.progress import Quiet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.transforms.image_map import ImageMap

_SIX = "six cameras"
_DIGEST_EVERY = 16


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of a sample [ms] by what was done, as medians over epochs, and the shares of that
    of six cameras.
    """

    benchmark: str
    machine: MachineFacts
    num_samples: int
    cpu_ms_per_sample: dict[str, float]
    share: dict[str, float]


class _NoDecoder:
    """Leaves every image as it is."""

    name = "none"

    def decode_into(self, encoded: Any, image_map: ImageMap, out: NDArray[Any]) -> None:
        """Do nothing."""


def measure(dataset: Path, ledger: Path, rounds: int) -> OverheadReport:
    """Run an epoch of each candidate in turns; the first round is not counted."""
    make = partial(
        DataLoader,
        dataset,
        8,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        seed=0,
        transforms=Transforms(image=MODEL_IMAGE),
    )
    loaders = {
        _SIX: make(),
        "nothing decoded": make(),
        f"a ledger with a digest of every {_DIGEST_EVERY}th batch": make(
            ledger={"path": ledger, "digest_every": _DIGEST_EVERY}
        ),
    }
    loaders["one camera of six"] = make(
        transforms=Transforms(image=MODEL_IMAGE, cameras=loaders[_SIX].cameras[:1])
    )
    idle = loaders["nothing decoded"]
    idle._make = idle._make._replace(decoder=_NoDecoder())  # type: ignore[arg-type]
    cpu_ms: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds + 1):
        for name, loader in loaders.items():
            started_s = time.process_time()
            count = 0
            for batch in loader:
                count += len(batch["sample_key"])
            # Threads continue into the next epoch; ended here, so that each candidate pays for its
            # own work alone.
            loader.close()
            cpu_ms[name].append(1e3 * (time.process_time() - started_s) / count)
    per_sample = {name: median(values[1:]) for name, values in cpu_ms.items()}
    return OverheadReport(
        benchmark="loader_overhead",
        machine=machine_facts(),
        num_samples=count,
        cpu_ms_per_sample=per_sample,
        share={name: value / per_sample[_SIX] for name, value in per_sample.items()},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print a table and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.overhead")
    parser.add_argument("work", type=Path, metavar="WORK", help="new folder for the dataset")
    # An epoch's start takes as long for one camera as for six; few samples would make that the
    # subject.
    parser.add_argument(
        "--samples", type=int, default=512, help="samples of an epoch (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="epochs of each candidate (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    source = options.work / "source"
    dataset = options.work / "dataset"
    make_dataroot(source, options.samples, lidar=False, num_files=8)
    shard(
        f"nuscenes:{source}",
        dataset,
        options={"version": "v1.0-bench"},
        workers=1,
        progress=Quiet(),
    )
    report = measure(dataset, options.work / "run.ledger", options.rounds)
    for name, value in report.cpu_ms_per_sample.items():
        print(f"{name:<48} {value:7.3f} ms of CPU a sample  {100 * report.share[name]:6.2f} %")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
