"""Remedies of ten trainings, each with another fault: what ``fr.watch`` says that the remedy gains,
and what it gains when it is made.

::

    python -m fuelrail.bench.micro.remedies --out bench/results/remedies.json

On a loaded host ``--slower 10`` makes all that sleeps ten times as long, against which what other
processes take is little; what computes stays as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import fuelrail as fr
from fuelrail.bench.measure.machine import CpuWatch, machine_facts
from fuelrail.bench.measure.records import Remedy, rank_path, read_rank
from fuelrail.bench.studies.watch.remedies import SECONDS, start_one_thread
from fuelrail.bench.studies.watch.report import RECORDS
from fuelrail.pipeline.transforms.image import ImageAugment

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "slow storage, 2 workers": ("num_workers=4", {"num_workers": 2}),
    "slow storage, no workers": ("num_workers=4", {"num_workers": 0}),
    "slow transform": ("num_workers=2", {"num_workers": 1}),
    "BLAS with many threads": ("one thread", {"num_workers": 2}),
    "JPEGs read by Pillow": ("fr.decode_jpeg", {"num_workers": 1}),
    "JPEGs in single files": ("Fuelrail shards", {"num_workers": 1}),
    "workers that start each epoch": ("persistent_workers=True", {"num_workers": 2}),
    "now and then a slow sample": ("prefetch_factor=4", {"num_workers": 2}),
    "slow reads of a stream": ("num_workers=2", {"num_workers": 1}),
    "convolutions": ("channels_last", {"num_workers": 0}),
}
"""The remedy that is made in each case, and the options of its loader."""

_NUM_STEPS: Final = 120
_NUM_SLOW_STEPS: Final = 60
_WARM_UP: Final = 10
_BATCH: Final = 4
_HEIGHT: Final = 180
_WIDTH: Final = 320
_SLOWER_VARIABLE: Final = "FUELRAIL_REMEDIES_SLOWER"


def slower() -> float:
    """Return how many times as long as usual sleeps are."""
    return float(os.environ.get(_SLOWER_VARIABLE, "1"))


def sleep(seconds: float) -> None:
    """Sleep, in place of storage or an accelerator."""
    time.sleep(seconds * slower())


class FaultyRows(Dataset[torch.Tensor]):
    """Images of a fault."""

    def __init__(self, case: str, files: list[Path], *, is_applied: bool) -> None:
        self.case = case
        self.is_applied = is_applied
        if case.startswith("JPEGs"):
            self.files = files
        self.length = 60 if case == "workers that start each epoch" else 2000

    def __len__(self) -> int:
        return len(self.files) if self.case.startswith("JPEGs") else self.length

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.case.startswith("JPEGs"):
            return self.decode(self.files[row % len(self.files)])
        if self.case.startswith("slow storage"):
            sleep(0.015)
        elif self.case == "slow transform":
            values = np.random.default_rng(row).random(150_000)
            for _ in range(2):
                values.sort()
                values = values[::-1].copy()
        elif self.case == "BLAS with many threads":
            matrix = np.ones((384, 384), np.float32)
            for _ in range(6):
                matrix = matrix @ matrix * 1e-3
        elif self.case == "now and then a slow sample" and row % 40 == 0:
            sleep(0.3)
        return torch.full((3, 64, 64), row / 2000)

    def decode(self, path: Path) -> torch.Tensor:
        """Return the pixels of a JPEG."""
        from PIL import Image

        if self.is_applied:
            image = Image.fromarray(fr.decode_jpeg(path.read_bytes()))
        else:
            image = Image.open(path).convert("RGB")
        pixels = np.asarray(image.resize((_WIDTH, _HEIGHT)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


class SlowStream(IterableDataset[torch.Tensor]):
    """Rows that come from slow reads."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for row in range(0, 4000, info.num_workers if info else 1):
            sleep(0.012)
            yield torch.full((3, 64, 64), row / 4000)


def make_loader(case: str, folder: Path, *, is_applied: bool) -> Any:
    """Return the loader of a case, with its remedy or without."""
    remedy, options = CASES[case]
    options = dict(options)
    files = sorted((folder / "images" / "all").glob("*.jpg"))
    if is_applied and remedy == "Fuelrail shards":
        if not (folder / "dataset").exists():
            fr.shard(f"imagefolder:{folder / 'images'}", folder / "dataset")
        size = fr.Transforms(image=ImageAugment(height=_HEIGHT, width=_WIDTH, resize="stretch"))
        return fr.DataLoader(
            folder / "dataset", _BATCH, shuffle=True, drop_last=True, transforms=size
        )
    name, _, value = remedy.partition("=")
    if is_applied and value:
        options[name] = value == "True" or int(value)
    if is_applied and remedy == "one thread":
        options["worker_init_fn"] = partial(start_one_thread, None)
    if case == "workers that start each epoch":
        options["worker_init_fn"] = start_slowly
    if case == "slow reads of a stream":
        return DataLoader(SlowStream(), _BATCH, **options)
    rows = FaultyRows(case, files, is_applied=is_applied)
    return DataLoader(rows, _BATCH, shuffle=True, drop_last=True, **options)


def start_slowly(_: int) -> None:
    """Open what a worker needs."""
    sleep(0.2)


def train(
    case: str, folder: Path, *, is_applied: bool, is_tried: bool
) -> tuple[float, list[Remedy]]:
    """Train some steps; return the mean step [ms], and the remedies that were tried in between."""
    torch.manual_seed(0)
    width = 32 if case == "convolutions" else 8
    layers = [nn.Conv2d(3, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1))
    is_channels_last = is_applied and CASES[case][0] == "channels_last"
    form = torch.channels_last if is_channels_last else torch.contiguous_format
    model.to(memory_format=form)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as out:
        loader = make_loader(case, folder, is_applied=is_applied)
        watched = fr.watch(loader, model=model, optimizer=optimizer, out=out)
        if is_tried:
            watched.try_remedies(seconds=SECONDS if slower() == 1 else 2 * SECONDS)
        num_steps = _NUM_STEPS if slower() == 1 else _NUM_SLOW_STEPS
        batches = itertools.chain.from_iterable(itertools.repeat(watched))
        for batch in itertools.islice(batches, num_steps):
            images = batch["img"][:, 0] / 255 if isinstance(batch, dict) else batch
            model(images.to(memory_format=form)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if case != "convolutions":
                sleep(0.015)  # what an accelerator would take, for which the host waits
        records = Path(out) / RECORDS
        watched.finish()
        log = read_rank(rank_path(records, 0))
    steps_ns = [step.wall_ns for step in log.steps[_WARM_UP:]]
    return float(np.mean(steps_ns)) / 1e6, log.remedies or []


def compare(case: str, folder: Path) -> dict[str, Any]:
    """Train with and without the remedy of a case in turns."""
    torch.set_num_threads(1)
    remedy = CASES[case][0]
    before_ms, tried = train(case, folder, is_applied=False, is_tried=True)
    turns = [before_ms]
    for number in range(1, 4 if slower() == 1 else 2):
        step_ms, _ = train(case, folder, is_applied=number % 2 == 1, is_tried=False)
        turns.append(step_ms)
    gain = 1 - sum(turns[1::2]) / sum(turns[::2])
    prediction = next(entry for entry in tried if entry.name == remedy)
    return {
        "case": case,
        "remedy": remedy,
        "steps_ms": turns,
        "predicted": prediction.gain,
        "interval": [prediction.low, prediction.high],
        "made": gain,
        "is_within_a_tenth": abs(prediction.gain - gain) <= 0.1,
    }


def make_images(folder: Path) -> None:
    """Write 200 JPEGs of 1280 x 720."""
    from PIL import Image

    place = folder / "images" / "all"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(200):
        coarse = Image.fromarray(rng.integers(0, 255, (90, 160, 3), np.uint8))
        coarse.resize((1280, 720)).save(place / f"{number:04}.jpg", quality=90)


def main() -> None:
    """Run all cases, or one of them, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", action="append")
    parser.add_argument("--slower", default="1")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        sys.stdout.write(json.dumps(compare(args.case[0], args.folder)) + "\n")
        return
    os.environ[_SLOWER_VARIABLE] = args.slower
    cases = []
    watch = CpuWatch()
    with tempfile.TemporaryDirectory() as name:
        make_images(Path(name))
        for case in args.case or CASES:
            command = [sys.executable, "-m", __spec__.name, "--case", case, "--folder", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            cases.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(cases[-1]), flush=True)  # noqa: T201
    result = {
        "benchmark": "remedies",
        "slower": slower(),
        "machine": msgspec.to_builtins(machine_facts()),
        "disturbed": watch.use().disturbed,
        "num_within_a_tenth": sum(row["is_within_a_tenth"] for row in cases),
        "cases": cases,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
