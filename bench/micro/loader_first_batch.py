"""Seconds to the first batch: Fuelrail beside torch's DataLoader with worker processes over webdataset.

``python -m fuelrail.bench.micro.loader_first_batch WORK [--large N] [--rounds N] [--out FILE]``. Same shards, same
batch (8 samples of six 1600x900 images to 704x256), in the page cache. Each start is a process of its own, the
candidates taking turns, and its clock runs from the end of the imports. ``--large``: also start on a
dataset of this size, whose index repeats the small one's entries.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.gpu.cameras import write_cameras, write_large
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

BATCH_SIZE = 8
NUM_WORKERS = 2
OUT_WH = (704, 256)
RECIPES = ("full", "pil", "half")
"""How the webdataset candidates decode: whole picture and area resize, Pillow's bilinear, half scale and bilinear."""


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate's starts. ``ratio``: its median time over that of Fuelrail."""

    name: str
    num_samples: int
    first_batch_s: list[float]
    median_s: float
    ratio: float
    median_cpu_s: float


class FirstBatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates and the machine."""

    benchmark: str
    machine: MachineFacts
    candidates: list[Starts]


class _Candidate(NamedTuple):
    name: str
    kind: str
    folder: Path
    num_samples: int


def fuelrail_start(folder: str) -> Callable[[], Iterator[Any]]:
    """Everything imported; the call makes the loader and begins to iterate."""
    from fuelrail.loaders import DataLoader

    return lambda: iter(DataLoader(folder, BATCH_SIZE, seed=0, num_workers=NUM_WORKERS))


def webdataset_start(folder: str, recipe: str) -> Callable[[], Iterator[Any]]:
    """The same for torch's loader over webdataset's pipeline."""
    import torch
    import webdataset

    def sample(entry: dict[str, Any]) -> torch.Tensor:
        images = [decode_image(entry[name], recipe) for name in entry if name.endswith(".jpg")]
        return torch.from_numpy(np.stack(images))

    def start() -> Iterator[Any]:
        shards = sorted(str(path) for path in Path(folder).glob("train-*.tar"))
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0, nodesplitter=None)
        dataset = dataset.shuffle(16).map(sample).batched(BATCH_SIZE, collation_fn=torch.stack)
        return iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=NUM_WORKERS))

    return start


def decode_image(encoded: bytes, recipe: str) -> NDArray[np.uint8]:
    """One image as 704x256 planes: width to 704, the bottom 256 rows."""
    import cv2
    from PIL import Image

    width, height = OUT_WH
    if recipe == "pil":
        import io

        picture = Image.open(io.BytesIO(encoded)).convert("RGB")
        full = round(picture.height * width / picture.width)
        return np.ascontiguousarray(
            np.asarray(picture.resize((width, full), Image.Resampling.BILINEAR))[-height:].transpose(2, 0, 1)
        )
    flags = cv2.IMREAD_REDUCED_COLOR_2 if recipe == "half" else cv2.IMREAD_COLOR
    decoded = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    assert decoded is not None, "these images are whole"
    full = round(decoded.shape[0] * width / decoded.shape[1])
    resized = cv2.resize(decoded, (width, full), interpolation=cv2.INTER_LINEAR if recipe == "half" else cv2.INTER_AREA)
    return np.ascontiguousarray(resized[-height:, :, ::-1].transpose(2, 0, 1))


def _child(kind: str, folder: str) -> int:
    start = fuelrail_start(folder) if kind == "fuelrail" else webdataset_start(folder, kind)
    cpu_s, begun_s = _cpu_s(), time.perf_counter()
    batches = start()  # kept: to end the threads or processes behind it is no part of a first batch
    batch = next(batches)
    took_s = time.perf_counter() - begun_s
    cpu_s = _cpu_s() - cpu_s
    images = batch["img"] if kind == "fuelrail" else batch
    assert tuple(images.shape) == (BATCH_SIZE, 6, 3, *reversed(OUT_WH)), images.shape
    sys.stdout.write(f"{took_s} {cpu_s}\n")
    sys.stdout.flush()
    for worker in multiprocessing.active_children():  # left alone they would decode into the next candidate's time
        worker.kill()
        worker.join()
    os._exit(0)  # the workers' orderly end is not what is measured


def _cpu_s() -> float:
    """CPU time of this process and of its worker processes, those that have ended and those that live [s]."""
    children = multiprocessing.active_children()
    stats = [Path(f"/proc/{child.pid}/stat").read_text().split(")")[1].split()[11:13] for child in children]
    live_s = sum(int(ticks) for stat in stats for ticks in stat) / os.sysconf("SC_CLK_TCK")
    return sum(os.times()[:4]) + live_s


def measure(candidates: Sequence[_Candidate], rounds: int, *, quick: bool) -> list[Starts]:
    """Start each candidate in turns, once to warm the page cache up (but not if ``quick``), then ``rounds`` times."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it finds what this process found
    times: dict[str, list[tuple[float, float]]] = {candidate.name: [] for candidate in candidates}
    for number in range(quick, rounds + 1):
        for candidate in candidates:
            command = [sys.executable, "-m", __spec__.name, "WORK", "--child", candidate.kind, str(candidate.folder)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            took_s, cpu_s = map(float, output.split())
            if number:
                times[candidate.name].append((took_s, cpu_s))
    ours = median(took for took, _ in times[candidates[0].name])
    return [
        Starts(
            name=candidate.name,
            num_samples=candidate.num_samples,
            first_batch_s=[took for took, _ in found],
            median_s=median(took for took, _ in found),
            ratio=median(took for took, _ in found) / ours,
            median_cpu_s=median(cpu for _, cpu in found),
        )
        for candidate in candidates
        for found in [times[candidate.name]]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, measure, print a table and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.loader_first_batch")
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the dataset")
    parser.add_argument("--large", type=int, metavar="N", help="start on a dataset of N samples too (300 bytes each)")
    parser.add_argument("--samples", type=int, default=256, help="samples of the dataset (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each candidate (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one start each, to see that it runs")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="of the webdataset candidates")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        return _child(*options.child)
    folder = options.work / "cameras"
    write_cameras(folder, options.samples)
    candidates = [_Candidate("fuelrail", "fuelrail", folder, options.samples)]
    if options.large is not None:
        large = options.work / "large"
        write_large(large, write_cameras(options.work / "one", options.samples, num_shards=1), options.large)
        candidates.append(_Candidate(f"fuelrail, {options.large} samples", "fuelrail", large, options.large))
    candidates += [
        _Candidate(f"torch workers, webdataset, {recipe}", recipe, folder, options.samples)
        for recipe in options.recipes
    ]
    starts = measure(candidates, 1 if options.quick else options.rounds, quick=options.quick)
    report = FirstBatchReport(benchmark="loader_first_batch", machine=machine_facts(), candidates=starts)
    for entry in report.candidates:
        print(f"{entry.name:<32} {entry.median_s:7.3f} s  {entry.ratio:5.2f} x  CPU {entry.median_cpu_s:.2f} s")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
