"""A program: a table of 100 images is sharded, and read in an order of `fuelrail.order` under torch's DataLoader.

It runs in the current folder, where neither OpenCV nor webdataset can be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

import fuelrail as fr

NUM_IMAGES = 100


class Images(torch.utils.data.Dataset[Any]):
    """The number of each frame, and its mean colour, by the row of the dataset."""

    def __init__(self, folder: str) -> None:
        self.dataset = fr.open(folder)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[int, float]:
        image = simplejpeg.decode_jpeg(self.dataset.read(row, ["front"])["front"])
        return row, float(image.mean())


def write_table(folder: Path) -> None:
    """Write images that get brighter, and the table that names them."""
    (folder / "front").mkdir(parents=True)
    lines = []
    for number in range(NUM_IMAGES):
        pixels = np.full((32, 64, 3), number * 2, np.uint8)
        name = f"front/{number:04d}.jpg"
        (folder / name).write_bytes(simplejpeg.encode_jpeg(pixels))
        row = {
            "clip_id": "drive-1",
            "timestamp_ns": 1_600_000_000_000_000_000 + number * 100_000_000,
            "cam.front.path": name,
            "cam.front.intrinsics": [60, 0, 32, 0, 60, 16, 0, 0, 1],
            "cam.front.cam2ego.t": [1.5, 0.0, 1.6],
            "cam.front.cam2ego.q_wxyz": [0.5, -0.5, 0.5, -0.5],
        }
        lines.append(json.dumps(row))
    (folder / "frames.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write, shard, verify, iterate; then ask for what the extras bring."""
    for module in ("cv2", "webdataset"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
            raise AssertionError(f"{module} is installed here")
    write_table(Path("data"))
    fr.shard("manifest:data", "dataset", seed=7, workers=1)
    assert not fr.verify("dataset", deep=True).faults
    dataset = Images("dataset")
    sampler = fr.order.BatchSampler(len(dataset), fr.OrderSpec(seed=7), global_batch=10)
    loader = sampler.count(
        torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    )
    shown = {}
    for rows, brightness in loader:
        shown |= dict(zip(rows.tolist(), brightness.tolist(), strict=True))
    assert list(shown) != sorted(shown), "the order shuffles"
    means = sorted(map(round, shown.values()))
    assert means == [number * 2 for number in range(NUM_IMAGES)]
    try:
        fr.DataLoader("dataset", 2)
    except fr.errors.FuelrailError as error:
        print(error)


if __name__ == "__main__":
    main()
