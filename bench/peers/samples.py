"""The samples that all loaders get: read from a Fuelrail dataset, numbered by key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import simplejpeg

from fuelrail.bench.peers.interface import Sample, Work
from fuelrail.loaders.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fuelrail.pipeline.dataset import Dataset


def read_samples(dataset: Dataset, numbers: Iterable[int] | None = None) -> Iterator[Sample]:
    """All samples by number, or those of some numbers. A sample's number is its place among the sorted keys.

    Raises ConfigError for a sample that lacks an image: the other loaders have no mask for it.
    """
    reader = SampleReader(dataset, extra=False)
    keys = sorted((dataset.index.row(at).key, at) for at in range(len(dataset.index)))
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    for number in range(len(keys)) if numbers is None else numbers:
        key, at = keys[number]
        images = reader.sample(at).images
        missing = [camera for camera in cameras if camera not in images]
        if missing:
            raise ConfigError(f"sample {key} has no image of {', '.join(missing)}: compare needs whole samples")
        yield Sample(number, tuple(bytes(images[camera]) for camera in cameras))


def describe_work(dataset: Dataset, *, height: int, width: int, batch_size: int, num_workers: int, seed: int) -> Work:
    """The work that a dataset's samples make; raises ConfigError for one that cannot be compared."""
    num_samples = len(dataset.index)
    if len(dataset.manifest.splits) != 1:
        raise ConfigError(
            f"dataset '{dataset.location}' has the splits {', '.join(dataset.manifest.splits)}; compare needs one: "
            "choose it with --split"
        )
    if not dataset.manifest.cameras:
        raise ConfigError(f"dataset '{dataset.location}' has no cameras: there is nothing to decode")
    least = 2 * num_workers * batch_size
    if num_samples < least:
        raise ConfigError(
            f"dataset '{dataset.location}' has {num_samples} samples, too few to warm up: {num_workers} workers with "
            f"batches of {batch_size} need {least}; use a smaller --batch-size or a larger dataset"
        )
    (first,) = read_samples(dataset, [0])
    try:
        height_px, width_px, _, _ = simplejpeg.decode_jpeg_header(first.images[0])
    except ValueError as error:
        raise ConfigError(f"the images of dataset '{dataset.location}' are no JPEGs: {error}") from error
    return Work(
        height=height,
        width=width,
        batch_size=batch_size,
        num_workers=num_workers,
        seed=seed,
        num_samples=num_samples,
        source_wh=(width_px, height_px),
        cameras=tuple(camera.channel for camera in dataset.manifest.cameras),
    )
