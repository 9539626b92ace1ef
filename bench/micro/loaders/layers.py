"""Layers: what three small ones cost a loader.

``python -m fuelrail.bench.micro.loaders.layers WORK [--out FILE] [--samples N] [--rounds N]``. The loader runs epochs
with and without three layers (10 logits, a feature grid of 256 x 8 x 8 in float16, a text) in turns, over samples of
six 1600x900 images decoded to 704x256, in the page cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders import DataLoader
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.cameras import write_cameras

_FIXED: Final = {"name": "fixed"}
_TABLES: Final[dict[str, list[dict[str, Any]]]] = {
    "logits": [
        {"name": "logits", "kind": "array", "field": "logits.npy", "law": _FIXED, "dtype": "float16",
         "axes": ["class"], "shape": [10]},
    ],
    "features": [
        {"name": "grid", "kind": "array", "field": "grid.npy", "law": _FIXED, "dtype": "float16",
         "axes": ["channel", "y", "x"], "shape": [256, 8, 8]},
    ],
    "text": [{"name": "caption", "kind": "text", "field": "caption.txt", "law": _FIXED}],
}  # fmt: skip
_BATCH: Final = 8


class LayersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rates with and without layers: medians over the rounds; CPU times: the least of a round."""

    benchmark: str
    machine: MachineFacts
    num_samples: int
    rounds: int
    samples_per_s: dict[str, float]
    cpu_ms_per_sample: dict[str, float]
    ratio: float
    """Samples a second with three layers over those without, in the same round."""
    cpu_ratio: float
    """CPU time of a sample without layers over that with three, of both the least; others hardly show in it."""
    ratios_of_rounds: list[float]
    cpu_ratios_of_rounds: list[float]


def values(name: str, position: int, key: str) -> dict[str, Any]:
    """The values of one row of a layer."""
    rng = np.random.default_rng(position)
    if name == "logits":
        return {"logits": rng.normal(size=10).astype(np.float16)}
    if name == "features":
        return {"grid": rng.normal(size=(256, 8, 8)).astype(np.float16)}
    return {"caption": f"a street seen in sample {key}"}


def write_rows(base: Path, out: Path, name: str) -> None:
    """Write a whole layer."""
    dataset = open_dataset(base)
    with LayerWriter(dataset, out, channels=_TABLES[name], name=name) as writer:
        for position in range(len(dataset)):
            writer.write(position, values(name, position, dataset.index.row(position).key))
    writer.finish()


def measure_rates(
    base: Path, layers: dict[str, Path], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Samples a second, and CPU time [ms] of a sample, of epochs without and with layers, in turns after a warm-up."""
    given: dict[str, dict[str, Path] | None] = {"without layers": None, "three layers": layers}
    loaders = {
        name: DataLoader(base, _BATCH, shuffle=True, drop_last=True, num_workers=2, seed=0, layers=one)
        for name, one in given.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    cpu_ms: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        turns = list(loaders.items()) if number % 2 else list(loaders.items())[::-1]
        for name, loader in turns:
            start, cpu_s, count = time.perf_counter(), time.process_time(), 0
            for batch in loader:
                count += len(batch["sample_key"])
            loader.close()
            if number:
                rates[name].append(count / (time.perf_counter() - start))
                cpu_ms[name].append(1e3 * (time.process_time() - cpu_s) / count)
    return rates, cpu_ms


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print, and write the report with ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.loaders.layers")
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the datasets: new or empty")
    parser.add_argument("--samples", type=int, default=128, help="samples of an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="epochs of each candidate (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    base = options.work / "cameras"
    write_cameras(base, options.samples)
    layers = {name: options.work / "layers" / name for name in _TABLES}
    for name, folder in layers.items():
        write_rows(base, folder, name)
    rates, cpu_ms = measure_rates(base, layers, options.rounds)
    ratios = _ratios(rates["three layers"], rates["without layers"])
    least_ms = {name: min(found) for name, found in cpu_ms.items()}
    report = LayersReport(
        benchmark="layers",
        machine=machine_facts(),
        num_samples=options.samples,
        rounds=options.rounds,
        samples_per_s={name: median(found) for name, found in rates.items()},
        cpu_ms_per_sample=least_ms,
        ratio=median(ratios),
        cpu_ratio=least_ms["without layers"] / least_ms["three layers"],
        ratios_of_rounds=ratios,
        cpu_ratios_of_rounds=_ratios(cpu_ms["without layers"], cpu_ms["three layers"]),
    )
    print(f"{report.samples_per_s}, ratio {report.ratio:.3f}, of CPU time {report.cpu_ratio:.3f}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
