"""Open the datasets of a loader, check that they fit together, and give each a storage and a
reader.

A batch may hold samples of several datasets, so they must have the same rig and the same meaning of
labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from fuelrail.loaders.decode.protocol import ImageFacts
from fuelrail.loaders.records import Source
from fuelrail.loaders.storage.layers import with_layers
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.attributes import AttributeColumns
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.order.compile import plain
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.sample.schema import BOXES

if TYPE_CHECKING:
    from fuelrail.loaders.storage.protocol import Storage
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.storage.retry import RetryPolicy

_STORED_ONLY: Final = frozenset(
    {"field", "codec", "optional", "sizes", "source_name", "description"}
)

_FACTS: Final[Mapping[str, Callable[[Dataset], object]]] = {
    "classes": lambda dataset: list(dataset.manifest.classes),
    "labels": lambda dataset: "boxes" if BOXES in dataset.index.names else "no boxes",
    "ego poses": lambda dataset: "poses" if dataset.manifest.has_poses else "no poses",
    "calibrations": lambda dataset: "a calibration" if dataset.manifest.has_calibration else "none",
    "origins of the ego frame": lambda dataset: dataset.manifest.ego_origin,
    # A batch has the matrices from and to the lidar for all of its samples or for none.
    "lidars": lambda dataset: "a lidar" if dataset.manifest.lidars else "no lidar",
    "lidars' columns": lambda dataset: [
        f"{lidar.channel}: {', '.join(lidar.columns)}" for lidar in dataset.manifest.lidars[:1]
    ],
}
"""What must be equal in datasets of one batch; the columns where points are loaded."""

DatasetLike: TypeAlias = "str | os.PathLike[str] | Dataset"

_NUM_LOOKED_AT = 4


class Chosen(NamedTuple):
    """What is loaded of a dataset: cameras (None: all), channels of its table and of its layers,
    and attributes.
    """

    cameras: Sequence[str] | None = None
    channels: Sequence[Channel] = ()
    attributes: AttributeColumns = AttributeColumns()
    batch_names: Sequence[str] | None = None
    """The names that the cameras have in a batch; None: their own."""


def open_all(
    dataset: DatasetLike | Mapping[str, DatasetLike],
    mix: Mapping[str, int] | Sequence[MixStage] | None,
    storage_options: Mapping[str, Any] | None,
    cache_dir: str | os.PathLike[str] | None,
    retry: RetryPolicy | None,
) -> dict[str, Dataset]:
    """Return the datasets by name, opened; one alone has the name of its manifest, several need a
    ``mix``.

    Raises ConfigError for what is not a dataset, or no mapping of names to them, and what
    `open_dataset` raises.
    """

    def opened(place: object) -> Dataset:
        if isinstance(place, Dataset):
            return place
        if not (isinstance(place, str) or hasattr(place, "__fspath__")):
            raise ConfigError(
                f"dataset={place!r} must be a folder, a URL, an open dataset, or a dict of "
                "names to several of these"
            )
        return open_dataset(
            place,
            storage_options=storage_options,
            cache_dir=cache_dir,
            retry=retry,
        )

    if (mix is None) != (not isinstance(dataset, Mapping)):
        raise ConfigError(
            f"mix={mix!r} requires a dict of datasets, got dataset={dataset!r}: "
            'DataLoader({"a": PATH, "b": PATH}, batch_size, mix={"a": 3, "b": 1})'
        )
    if not isinstance(dataset, Mapping):
        single = opened(dataset)
        return {single.manifest.name: single}
    if not dataset or not all(isinstance(name, str) and name for name in dataset):
        raise ConfigError(
            f"dataset={dataset!r}: a mix needs at least one dataset, each with a name"
        )
    return {name: opened(location) for name, location in dataset.items()}


def check_compatible(
    datasets: Mapping[str, Dataset],
    *,
    points: bool = False,
    chosen: Mapping[str, Chosen],
) -> None:
    """Raise ConfigError, with both sides, where samples of these datasets cannot be in one batch.

    ``chosen`` is what is loaded of each dataset.
    """
    (first, first_dataset), *more = datasets.items()
    for name, second in more:
        entries = [
            (
                *chosen[dataset_name].channels,
                *chosen[dataset_name].attributes.channels,
            )
            for dataset_name in (first, name)
        ]
        first_names = {channel.name for channel in entries[0]}
        second_names = {channel.name for channel in entries[1]}
        lacking = sorted(first_names ^ second_names)
        if lacking:
            raise ConfigError(
                f"datasets {first!r} and {name!r} cannot be mixed in one batch: of the "
                f"selected channels only {(first if lacking[0] in first_names else name)!r} "
                f"has {lacking[0]!r}; give both such a layer, or select channels and "
                "attributes that both have (Transforms.select)"
            )
        cameras = [
            list(chosen[dataset_name].batch_names or chosen[dataset_name].cameras or ())
            for dataset_name in (first, name)
        ]
        facts: dict[str, Sequence[object]] = {"cameras": cameras}
        for fact, read in _FACTS.items():
            facts[fact] = read(first_dataset), read(second)
        if not points:
            del facts["lidars' columns"]
        # What only says how channels are stored may differ.
        second_channels = {channel.name: channel for channel in entries[1]}
        for channel in entries[0]:
            first_fields = plain(channel)
            second_fields = plain(second_channels[channel.name])
            for key in sorted({*first_fields, *second_fields} - _STORED_ONLY):
                sides = first_fields.get(key), second_fields.get(key)
                facts[f"channels '{channel.name}' ({key})"] = sides
        for fact, (one_side, other_side) in facts.items():
            if one_side != other_side:
                raise ConfigError(
                    f"datasets {first!r} and {name!r} cannot be mixed in one batch, their "
                    f"{fact} differ: {first!r} has {one_side}, {name!r} has {other_side}; "
                    "reshard one of them to match the other"
                )


def unknown_to(sources: Sequence[Source]) -> frozenset[str]:
    """Return which of "poses" and "calibration" the datasets of these sources do not know."""
    manifests = [source.dataset.manifest for source in sources]
    facts = {
        "poses": [manifest.has_poses for manifest in manifests],
        "calibration": [manifest.has_calibration for manifest in manifests],
    }
    return frozenset(name for name, are_known in facts.items() if not all(are_known))


def require_poses(datasets: Mapping[str, Dataset]) -> None:
    """Raise ConfigError for a dataset without ego poses: earlier sweeps have no place in the
    sample's ego.
    """
    for name, dataset in datasets.items():
        if not dataset.manifest.has_poses:
            raise ConfigError(
                f"dataset {name!r} has no ego poses (its source knew none), and earlier "
                "lidar sweeps need them: load points=True, without accumulation"
            )


def make_sources(
    datasets: Mapping[str, Dataset],
    split: str,
    open_storage: Callable[[Dataset], Storage],
    *,
    points: bool,
    sweeps: bool,
    chosen: Mapping[str, Chosen],
    layers: Mapping[str, Sequence[Layer]],
    named: bool,
) -> tuple[Source, ...]:
    """Make one source for each dataset, with rows numbered over all of them; raise ConfigError
    for an unknown split.
    """
    sources: list[Source] = []
    base = 0
    for name, dataset in datasets.items():
        selection = chosen.get(name, Chosen())
        storage = with_layers(
            open_storage(dataset),
            layers.get(name, ()),
            selection.channels,
            open_storage,
        )
        reader = SampleReader(
            dataset,
            storage=storage,
            points=points,
            sweeps=sweeps,
            extra=False,
            channels=selection.channels,
            cameras=selection.cameras,
            batch_names=selection.batch_names,
        )
        first_row = dataset.split(split).first_sample
        own_name = name if named else None
        sources.append(
            Source(
                name=own_name,
                dataset=dataset,
                first_row=first_row,
                base=base,
                storage=storage,
                reader=reader,
                attributes=selection.attributes,
            )
        )
        base += len(dataset.index)
    return tuple(sources)


def require_lidar(sources: Sequence[Source]) -> None:
    """Make samples without a lidar's pose bad ones, for boxes could not be in its frame.

    Raises ConfigError where a dataset has no lidar.
    """
    for source in sources:
        manifest = source.dataset.manifest
        if not manifest.lidars:
            raise ConfigError(
                f"box_frame='lidar' needs a lidar, and dataset {manifest.name!r} has none; "
                "use box_frame='ego'"
            )
        source.reader.needs_lidar = True


def image_facts(sources: Sequence[Source]) -> ImageFacts:
    """Return sizes from the manifests, and how the images of a few samples, spread over the
    datasets, are coded.
    """
    sizes: list[tuple[int, int]] = []
    for source in sources:
        for camera in source.dataset.manifest.cameras:
            if camera.channel in source.reader.cameras:
                sizes += camera.sizes
    is_baseline = []
    for source in sources:
        num_samples = len(source.dataset.index)
        for row in sorted(
            {number * num_samples // _NUM_LOOKED_AT for number in range(_NUM_LOOKED_AT)}
        ):
            try:
                images = source.reader.sample(row).images.values()
                is_baseline += [
                    info.format == "jpeg" and not info.progressive for info in map(probe, images)
                ]
            except FuelrailError:
                continue  # a bad sample is handled when its turn comes
    share = sum(is_baseline) / len(is_baseline) if is_baseline else 1.0
    return ImageFacts(
        (
            max((width for width, _ in sizes), default=0),
            max((height for _, height in sizes), default=0),
        ),
        share,
    )
