"""The facts of a dataset that a figure must carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fuelrail.pipeline.text import shown

if TYPE_CHECKING:
    from fuelrail.pipeline.dataset import Dataset


class DatasetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset, without its path. ``mean_sample_bytes``: of a sample of the split, as stored."""

    name: str
    fingerprint: str
    split: str
    num_samples: int
    num_shards: int
    cameras: list[str]
    mean_sample_bytes: float | None = None


def dataset_facts(dataset: Dataset, split: str) -> DatasetFacts:
    """The facts of one split; raises ConfigError where there is none of that name."""
    entry = dataset.split(split)
    lengths = dataset.index.column("length", entry.first_sample, entry.first_sample + entry.num_samples)
    return DatasetFacts(
        name=shown(dataset.manifest.name),
        fingerprint=dataset.manifest.fingerprint,
        split=split,
        num_samples=entry.num_samples,
        num_shards=entry.num_shards,
        cameras=[camera.channel for camera in dataset.manifest.cameras],
        mean_sample_bytes=float(lengths.mean()) if len(lengths) else None,
    )
