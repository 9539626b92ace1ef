"""``fuelrail verify --deep``: what the manifest says, checked against index and samples."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fuelrail.pipeline.format.manifest import MANIFEST_FILE
from fuelrail.sharding.verify.shard import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fuelrail.pipeline.format.dataset import Dataset


def check_manifest(dataset: Dataset, sizes: Mapping[str, set[tuple[int, int]]]) -> list[Fault]:
    """Return the faults of the manifest; ``sizes`` are those of the decoded images, by camera."""
    return [Fault(MANIFEST_FILE, text) for text in _of_manifest(dataset, sizes)]


def _of_manifest(dataset: Dataset, sizes: Mapping[str, set[tuple[int, int]]]) -> Iterator[str]:
    manifest, index = dataset.manifest, dataset.index
    for kind, names in (
        ("classes", manifest.classes),
        ("attributes", manifest.attributes),
        *((f"columns of {lidar.channel}", lidar.columns) for lidar in manifest.lidars),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"the {kind} have {name!r:.80} {count} times; each stands once"
    total = 0
    for name, split in manifest.splits.items():
        num_clips = len(index.clip_ids(split.first_sample, split.first_sample + split.num_samples))
        total += num_clips
        if num_clips != split.num_clips:
            yield f"num_clips of split '{name}' is {split.num_clips}, the index has {num_clips}"
    if total != manifest.num_clips:
        yield f"num_clips is {manifest.num_clips}, the index has {total}"
    for camera in manifest.cameras:
        found = sorted(sizes[camera.channel])
        if sorted(camera.sizes) != found:
            yield (
                f"sizes of camera '{camera.channel}' are {list(map(list, camera.sizes))!s:.160}, its images have "
                f"{list(map(list, found))!s:.160}"
            )
