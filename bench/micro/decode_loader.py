"""The whole DataLoader against the bare limit of decoding, in turns, on the same images and the same threads.

``python -m fuelrail.bench.micro.decode_loader DATASET [--restart DATASET] [--exact] [--out FILE]``. The bare limit
is `decode.bare`: threads that call libjpeg-turbo's half-scale decode and one bilinear resize into buffers of their own,
on encoded images that lie in memory, nothing else. The loader reads shards, checks digests, parses, decodes the same
way, and hands out whole batches. ``--restart`` is the same dataset made with ``shard --jpeg restart``. The exact mode
(``decoder="pillow"``) is compared with the Pillow that is installed (pillow-simd, where it is that) doing nothing but
``resize(box=...)`` on as many threads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.decode import NUM_THREADS, OUT_WH, bare, pillow_box
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders import DataLoader, ImageAugment, Transforms
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.format.dataset import open_dataset
from support.cameras import SOURCE_WH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_BATCH_SIZE = 8
_WARM_BATCHES = 3
_LAP_S = 1.5
_IMAGE = ImageAugment(height=OUT_WH[1], width=OUT_WH[0])


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Images a second of each way, a number a round, and the medians of their ratios within a round."""

    benchmark: str
    machine: MachineFacts
    pillow: str
    num_threads: int
    num_images: int
    mean_bytes: float
    images_per_s: dict[str, list[float]]
    ratios: dict[str, float]


def installed_pillow() -> str:
    """Name and version of what ``import PIL`` gets."""
    import PIL

    simd = [
        d for d in importlib.metadata.distributions() if d.metadata["Name"].lower().replace("_", "-") == "pillow-simd"
    ]
    # Both may be installed; the one whose files were imported has the version that the package says.
    is_simd = any(d.version.startswith(PIL.__version__.removesuffix(".post0")) for d in simd)
    return f"{'pillow-simd' if is_simd else 'pillow'} {PIL.__version__}"


def encoded_images(dataset: Path) -> list[bytes]:
    """All images of a dataset, in memory."""
    opened = open_dataset(dataset)
    reader = SampleReader(opened, points=False)
    return [bytes(data) for row in range(len(opened.index)) for data in reader.sample(row).images.values()]


def rate_of_threads(decode: Callable[[bytes, NDArray[np.uint8]], object], images: Sequence[bytes]) -> float:
    """Images a second that ``NUM_THREADS`` threads decode."""
    out = np.empty((NUM_THREADS, 3, *OUT_WH[::-1]), np.uint8)

    def work(thread: int) -> None:
        for encoded in images[thread::NUM_THREADS]:
            decode(encoded, out[thread])

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))  # warm
        start_s = time.perf_counter()
        list(pool.map(work, range(NUM_THREADS)))
        return len(images) / (time.perf_counter() - start_s)


def rate_of_loader(loader: DataLoader) -> float:
    """Images a second of a loader, from its third batch on, over epochs."""
    arrived = 0
    start_s = now_s = 0.0
    while True:
        for batch in loader:
            now_s = time.perf_counter()
            arrived += 1
            if arrived == _WARM_BATCHES:
                start_s = now_s
            elif arrived > _WARM_BATCHES and now_s - start_s >= _LAP_S:
                # Intervals, not batches: the one that the clock started at was made before.
                num_images: int = (arrived - _WARM_BATCHES) * batch["img"].shape[0] * batch["img"].shape[1]
                return num_images / (now_s - start_s)


def measure(
    keep: Path, restart: Path | None, rounds: int, *, exact: bool
) -> tuple[dict[str, list[float]], list[bytes]]:
    """Rates of all ways, in turns."""
    images = encoded_images(keep)

    def loader(path: Path, decoder: str = "turbo") -> Callable[[], float]:
        transforms = Transforms(image=_IMAGE, decoder=decoder)

        def run() -> float:
            with DataLoader(path, _BATCH_SIZE, transforms=transforms, num_workers=NUM_THREADS) as made:
                return rate_of_loader(made)

        return run

    ways: dict[str, Callable[[], float]] = {"bare limit": lambda: rate_of_threads(bare, images)}
    ways["loader, turbo"] = loader(keep)
    if restart is not None:
        ways["loader, turbo, restart rows"] = loader(restart)
    if exact:
        some = images[: len(images) // 2]
        ways["Pillow resize(box=...)"] = lambda: rate_of_threads(pillow_box, some)
        ways["loader, pillow"] = loader(keep, "pillow")
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            rates[name].append(ways[name]())
    return rates, images


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rates and ratios and, with ``--out``, write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.decode_loader")
    parser.add_argument("dataset", type=Path, help=f"six cameras of {SOURCE_WH[0]}x{SOURCE_WH[1]}, JPEGs as they were")
    parser.add_argument("--restart", type=Path, metavar="DATASET", help="the same, made with --jpeg restart")
    parser.add_argument("--exact", action="store_true", help="also the exact mode and the Pillow that is installed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    rates, images = measure(options.dataset, options.restart, options.rounds, exact=options.exact)
    pairs = [(name, "Pillow resize(box=...)" if name == "loader, pillow" else "bare limit") for name in rates]
    ratios = {
        f"{name} / {other}": statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
        for name, other in pairs
        if name.startswith("loader")
    }
    report = Rates(
        benchmark="decode_loader",
        machine=machine_facts(),
        pillow=installed_pillow(),
        num_threads=NUM_THREADS,
        num_images=len(images),
        mean_bytes=float(np.mean([len(encoded) for encoded in images])),
        images_per_s=rates,
        ratios=ratios,
    )
    for name, values in rates.items():
        print(f"{statistics.median(values):7.0f} images/s  {name}")  # noqa: T201
    for name, ratio in ratios.items():
        print(f"{ratio:7.3f}  {name}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
