"""A dataset to read and not to decode: members of the usual sizes, with random content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuelrail.bench.micro.made_dataset import MadeSample, even_lengths, write_made_dataset
from fuelrail.pipeline.format.codecs import RAW
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.write.packer import RawMember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fuelrail.pipeline.format.dataset import Dataset

MEMBER_BYTES = {"meta.json": 2500, "geometry.safetensors": 3500, "boxes.safetensors": 6000} | {
    f"cam_{number}.jpg": 145_000 for number in range(6)
}
"""A sample of six cameras as nuScenes has it; content is random, for nothing here decodes it."""


def make_dataset(folder: Path, num_samples: int, samples_per_shard: int, scale: float = 1.0) -> Dataset:
    """A dataset of random members, all stored raw, sizes varying by a fifth."""
    rng = np.random.default_rng(0)

    def samples() -> Iterator[MadeSample]:
        for number in range(num_samples):
            key = f"clip-{number:08d}"
            members = [
                RawMember(name, RAW, rng.bytes(int(size * scale * rng.uniform(0.8, 1.2))))
                for name, size in MEMBER_BYTES.items()
            ]
            yield MadeSample(key, key, 0, number, members)

    write_made_dataset(folder, even_lengths(num_samples, samples_per_shard), samples())
    return open_dataset(folder)
