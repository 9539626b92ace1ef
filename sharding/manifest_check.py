"""``fuelrail verify --deep``: what manifest and ``attributes.parquet`` say, checked against index and samples."""

from __future__ import annotations

from collections import Counter
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from fuelrail.pipeline.attributes import ATTRIBUTES_FILE
from fuelrail.pipeline.manifest import MANIFEST_FILE
from fuelrail.sharding.shard_check import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fuelrail.pipeline.dataset import Dataset

_ROWS_AT_ONCE: Final = 1 << 14
_OF_INDEX: Final = ("key", "clip_id", "frame", "timestamp_ns")


def check_manifest(dataset: Dataset, sizes: Mapping[str, set[tuple[int, int]]]) -> list[Fault]:
    """Where the manifest is wrong about its samples; ``sizes`` are those of the images that were decoded, by camera."""
    return [Fault(MANIFEST_FILE, text) for text in _of_manifest(dataset, sizes)] + list(_of_attributes(dataset))


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


def _of_attributes(dataset: Dataset) -> Iterator[Fault]:
    """The first row of ``attributes.parquet`` that says otherwise than the index, if any."""
    index, path = dataset.index, dataset.root / ATTRIBUTES_FILE
    if not path.is_file():
        return
    names = pq.read_schema(path).names
    columns = [name for name in (*_OF_INDEX, "split") if name in names]
    splits = sorted(dataset.manifest.splits.items(), key=lambda item: item[1].first_sample)
    split_of_row = chain.from_iterable(repeat(name, split.num_samples) for name, split in splits)
    first = 0
    for batch in pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE, columns=columns):
        there: dict[str, list[Any]] = batch.select(columns).to_pydict()
        for at in range(len(batch)):
            row, split = index.row(first + at), next(split_of_row)
            for name in columns:
                wanted = split if name == "split" else getattr(row, name)
                if there[name][at] != wanted:
                    text = f"row {first + at} has the {name} {there[name][at]!r:.80}, the index has {wanted!r:.80}"
                    yield Fault(ATTRIBUTES_FILE, text, key=row.key)
                    return
        first += len(batch)
