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
            rng = np.random.default_rng(row)
            values = rng.random(150_000)
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
            encoded = path.read_bytes()
            image = Image.fromarray(fr.decode_jpeg(encoded))
        else:
            image = Image.open(path).convert("RGB")
        image = image.resize((_WIDTH, _HEIGHT))
        pixels = np.array(image)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255


class SlowStream(IterableDataset[torch.Tensor]):
    """Rows that come from slow reads."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        num_workers = info.num_workers if info else 1
        for row in range(0, 4000, num_workers):
            sleep(0.012)
            yield torch.full((3, 64, 64), row / 4000)


def make_loader(case: str, folder: Path, *, is_applied: bool) -> Any:
    """Return the loader of a case, with its remedy or without."""
    remedy, case_options = CASES[case]
    options = dict(case_options)
    images = folder / "images"
    if is_applied and remedy == "Fuelrail shards":
        dataset = folder / "dataset"
        if not dataset.exists():
            fr.shard(f"imagefolder:{images}", dataset)
        resize = ImageAugment(height=_HEIGHT, width=_WIDTH, resize="stretch")
        return fr.DataLoader(
            dataset,
            _BATCH,
            shuffle=True,
            drop_last=True,
            transforms=fr.Transforms(image=resize),
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
    files = sorted((images / "all").glob("*.jpg"))
    rows = FaultyRows(case, files, is_applied=is_applied)
    return DataLoader(rows, _BATCH, shuffle=True, drop_last=True, **options)


def start_slowly(_: int) -> None:
    """Open what a worker needs."""
    sleep(0.2)


def train(
    case: str,
    folder: Path,
    *,
    is_applied: bool,
    is_tried: bool,
) -> tuple[float, list[Remedy]]:
    """Train some steps; return the mean step [ms], and the remedies that were tried in between."""
    torch.manual_seed(0)
    width = 32 if case == "convolutions" else 8
    layers = [
        nn.Conv2d(3, width, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, width, kernel_size=3, stride=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1),
    ]
    model = nn.Sequential(*layers)
    memory_format = torch.contiguous_format
    if is_applied and CASES[case][0] == "channels_last":
        memory_format = torch.channels_last
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    num_steps = _NUM_STEPS
    seconds = SECONDS
    if slower() != 1:
        num_steps = _NUM_SLOW_STEPS
        seconds = 2 * SECONDS
    with tempfile.TemporaryDirectory() as out:
        loader = make_loader(case, folder, is_applied=is_applied)
        watched = fr.watch(loader, model=model, optimizer=optimizer, out=out)
        if is_tried:
            watched.try_remedies(seconds=seconds)
        epochs = itertools.repeat(watched)
        batches = itertools.chain.from_iterable(epochs)
        for batch in itertools.islice(batches, num_steps):
            images = batch["img"][:, 0] / 255 if isinstance(batch, dict) else batch
            images = images.to(memory_format=memory_format)
            loss = model(images).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if case != "convolutions":
                sleep(0.015)  # what an accelerator would take, for which the host waits
        records = Path(out) / RECORDS
        watched.finish()
        log = read_rank(rank_path(records, 0))
    step_ns = float(np.mean([step.wall_ns for step in log.steps[_WARM_UP:]]))
    return step_ns / 1e6, log.remedies or []


def compare(case: str, folder: Path) -> dict[str, Any]:
    """Train with and without the remedy of a case in turns."""
    torch.set_num_threads(1)
    remedy = CASES[case][0]
    before_ms, tried = train(case, folder, is_applied=False, is_tried=True)
    turns = [before_ms]
    num_turns = 4 if slower() == 1 else 2
    for number in range(1, num_turns):
        is_applied = number % 2 == 1
        step_ms, _ = train(case, folder, is_applied=is_applied, is_tried=False)
        turns.append(step_ms)
    without_ms = turns[::2]
    with_ms = turns[1::2]
    gain = 1 - sum(with_ms) / sum(without_ms)
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
        pixels = rng.integers(0, 255, (90, 160, 3), np.uint8)
        image = Image.fromarray(pixels).resize((1280, 720))
        image.save(place / f"{number:04}.jpg", quality=90)


def main() -> None:
    """Run all cases, or one of them, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", action="append")
    parser.add_argument("--slower", default="1")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        comparison = compare(args.case[0], args.folder)
        sys.stdout.write(json.dumps(comparison) + "\n")
        return
    os.environ[_SLOWER_VARIABLE] = args.slower
    cases = []
    watch = CpuWatch()
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        module = [sys.executable, "-m", __spec__.name]
        for case in args.case or CASES:
            process = subprocess.run(
                [*module, "--case", case, "--folder", folder],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            last_line = process.stdout.splitlines()[-1]
            cases.append(json.loads(last_line))
            print(last_line, flush=True)  # noqa: T201
    num_within_a_tenth = sum(row["is_within_a_tenth"] for row in cases)
    result = {
        "benchmark": "remedies",
        "slower": slower(),
        "machine": msgspec.to_builtins(machine_facts()),
        "disturbed": watch.use().disturbed,
        "num_within_a_tenth": num_within_a_tenth,
        "cases": cases,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
