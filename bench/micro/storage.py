"""How fast stored bytes come: over a bad network, from S3, through a cache. As ratios in one run.

* *http*: an HTTP server on loopback with 20 ms of latency, beside itself with 1 % of the requests failing or stalling.
* *s3*: an S3 server on loopback (nginx if it is installed, else moto), beside s3fs reading sample by sample; requests
  and CPU time too.
* *cache*: hit rates of a cache of a quarter of the dataset over shuffled epochs, by next use and by LRU, both in a run
  and in a simulation, beside what no policy exceeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.measure.machine import machine_facts
from fuelrail.bench.micro.storage_cache import HitRates, measure_cache
from fuelrail.bench.micro.storage_remote import Cost, Requests, measure_http, measure_s3
from fuelrail.bench.micro.timing import QUICK, Comparison, Effort, Report, render
from fuelrail.bench.report.files import publish_json

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("http", "s3", "cache")


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report: comparisons, and what ratios cannot say."""

    benchmark: str
    machine: Any
    comparisons: list[Comparison]
    faults: Requests | None
    costs: list[Cost]
    hit_rates: HitRates | None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.storage", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--folder", type=Path, help="where to put the data, about 0.6 GB (None: a temporary folder)")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else Effort(num_rounds=9, min_lap_s=0.0)
    comparisons: list[Comparison] = []
    faults = rates = None
    costs: list[Cost] = []
    folder = Path(tempfile.mkdtemp(prefix="fuelrail-storage-", dir=options.folder))
    try:
        if "http" in options.parts:
            samples, passes = (20, (1, 2)) if options.quick else (600, (4, 16))
            compared_http, faults = measure_http(effort, folder / "http", samples, passes)
            comparisons += compared_http
        if "s3" in options.parts and all(map(importlib.util.find_spec, ("moto", "flask", "s3fs"))):
            compared, costs = measure_s3(effort, folder / "s3", quick=options.quick)
            comparisons.append(compared)
        if "cache" in options.parts:
            rates = measure_cache(folder / "cache", 40 if options.quick else 400)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = StorageReport(
        benchmark="storage",
        machine=machine_facts(),
        comparisons=comparisons,
        faults=faults,
        costs=costs,
        hit_rates=rates,
    )
    print(render(Report(benchmark="storage", machine=report.machine, comparisons=comparisons)))  # noqa: T201
    for extra in (faults, *costs, rates):
        if extra is not None:
            print(f"  {msgspec.to_builtins(extra)}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    # The faults are injected; a line for each would bury the tables.
    logging.getLogger("fuelrail").setLevel(logging.ERROR)
    sys.exit(main())
