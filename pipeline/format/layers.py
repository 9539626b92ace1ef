"""Layers: channels that are added to the rows of a dataset, its *base*, in a dataset folder of
their own.

A layer is stored as a dataset is: shards, index, digests. Its samples have no metadata and no
geometry, but the members of its own channels, under the keys of the base. ``rows.npy`` says which
row of its index belongs to which position of the base. FORMAT.md has the rules, section 10.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Self,
    TypeAlias,
    cast,
)

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.pipeline.channels.selection import check_table
from fuelrail.pipeline.channels.sensors import CAMERA, LIDAR, RESERVED
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import (
    ConfigError,
    IndexFileError,
    ManifestError,
    SchemaError,
)
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import Dataset, open_kind
from fuelrail.pipeline.format.manifest import (
    BRING_BACK,
    DATASETS,
    Fingerprint,
    Kinds,
    Manifest,
    Text,
    check_parts,
)
from fuelrail.pipeline.settings import Settings, must_be
from fuelrail.pipeline.storage.files import map_npy

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.storage.retry import RetryPolicy

LAYER_FORMAT: Final = "fuelrail-layer"
LAYER_SPLIT: Final = "layer"
"""The split that all rows of a layer belong to; its shards are ``layer-{number:06d}.tar``."""
ROWS_FILE: Final = "rows.npy"
ROWS_DTYPE: Final = np.dtype("<i8")
NO_ROW: Final = -1
INDEXED: Final = ("key", "clip_id", "split", "frame", "timestamp_ns")
"""Columns that ``attributes.parquet`` has of its own."""
_NEAR_ROWS: Final = 64
"""Attributes of rows that are no farther apart are read in one pass."""

Missing: TypeAlias = Literal["error", "mask", "drop"]
"""What a loader does where a layer has no row for a sample."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")
_SHOWN_KEYS: Final = 3
_ROWS_AT_ONCE: Final = 1 << 16


class LayerView(Settings, frozen=True, omit_defaults=True):
    """What of a sample the values of a layer were computed from.

    Attributes:
        kind: ``fixed``: the sample without augmentation; the values move by the laws of their
            channels. ``per_view``: the sample as augmented in one epoch; the values belong to that
            view, and nothing moves them.
        epoch: of ``per_view``: the epoch.
        settings: of ``per_view``: the seed and the settings of the augmentation, as plain JSON
            types (`fuelrail.loaders.schedule.layers.view_settings`).

    """

    kind: Annotated[Literal["fixed", "per_view"], must_be("one of fixed, per_view")] = "fixed"
    epoch: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None,
        must_be("an integer >= 0, or None"),
    ] = None
    settings: Annotated[dict[str, Any] | None, must_be("a dict or None")] = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a view without epoch and settings, or with them where the values
        are of all views.
        """
        is_per_view = self.kind == "per_view"
        if (self.epoch is not None) != is_per_view or (self.settings is not None) != is_per_view:
            raise ConfigError(
                "a view of kind 'per_view' has epoch and settings, one of kind 'fixed' has neither"
            )


class BaseEntry(Settings, frozen=True):
    """The base of a layer; ``sensors`` are its entries of cameras and lidars, which laws of the
    layer may name.
    """

    fingerprint: Fingerprint
    name: Text
    num_samples: int
    sensors: tuple[Channel, ...]

    @classmethod
    def from_dataset(cls, base: Dataset) -> Self:
        """Make the entry of this dataset."""
        manifest = base.manifest
        return cls(
            fingerprint=manifest.fingerprint,
            name=manifest.name,
            num_samples=manifest.num_samples,
            sensors=tuple(
                channel for channel in manifest.channels if channel.sensor in (CAMERA, LIDAR)
            ),
        )


class LayerManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of a layer: that of a dataset, and what it is a layer of."""

    base: BaseEntry
    view: LayerView

    @property
    def recipe(self) -> dict[str, Any]:
        """How the layer was made, such as by which ``teacher`` and at which ``temperature``."""
        stated = self.provenance.get("recipe")
        return stated if isinstance(stated, dict) else {}

    @property
    def known_channels(self) -> tuple[Channel, ...]:
        """The table, and the sensors of the base, which its laws may name."""
        return (*self.base.sensors, *self.channels)

    def check_channels(self, where: str) -> None:
        """Raise ManifestError for a table that is empty, broken or has what only a base has, and
        for a wrong base.
        """
        if not self.channels:
            raise ManifestError(
                f"'{where}': the layer has no channels, and a layer has at least one; {BRING_BACK}"
            )
        check_layer_table(self.channels, self.base, where, ManifestError)
        check_parts(self.base.sensors, where)
        if [*self.splits] != [LAYER_SPLIT] or any(
            channel.sensor not in (CAMERA, LIDAR) for channel in self.base.sensors
        ):
            raise ManifestError(
                f"'{where}': a layer has the one split '{LAYER_SPLIT}', and names cameras "
                f"and lidars of its base; {BRING_BACK}"
            )


LAYERS: Final[Kinds] = {LAYER_FORMAT: LayerManifest}
EITHER: Final[Kinds] = {**DATASETS, **LAYERS}
"""Formats of commands that take a dataset or a layer."""


def check_layer_table(
    channels: Sequence[Channel],
    base: BaseEntry,
    where: str,
    error: type[Exception],
    *,
    known_only: bool = True,
) -> None:
    """Raise ``error``, naming the channel, for a table that is not one of a layer of this base."""
    for channel in channels:
        if channel.sensor in (CAMERA, LIDAR) or channel.name in RESERVED:
            raise error(
                f"'{where}': channel {channel.name!r:.110} cannot be in a layer: cameras, "
                f"lidars and the names {', '.join(RESERVED)} belong to a base; give it another name"
            )
    check_table((*base.sensors, *channels), where, error, known_only=known_only)


@dataclass(frozen=True)
class Layer:
    """An open layer that is attached to its base under a name.

    ``data`` is the layer as a dataset: its tables, its shards. ``rows`` has the row of its index
    for each position of the base, int64 (num_samples,), `NO_ROW` where it has none; None: row i
    belongs to position i.
    """

    name: str
    data: Dataset
    rows: I64 | None
    missing: Missing = "error"

    @property
    def manifest(self) -> LayerManifest:
        """The layer's manifest."""
        assert isinstance(self.data.manifest, LayerManifest)
        return self.data.manifest

    @property
    def is_complete(self) -> bool:
        """Whether every row of the base has a row of the layer."""
        return self.manifest.num_samples == self.manifest.base.num_samples

    def find(self, position: int, key: str) -> tuple[int, IndexRow] | None:
        """Return the number of the layer's row for a sample of the base, and the row; None where it
        has none.

        Raises IndexFileError for a row that the index does not have, or that has another key than
        the sample.
        """
        number = position
        if self.rows is not None:
            number = self._checked(int(self.rows[position]))
        if number == NO_ROW:
            return None
        row = self.data.index.row(number)
        if row.key != key:
            raise IndexFileError(
                f"layer '{self.name}' ('{self.data.location}') has the key '{row.key}' for "
                f"sample '{key}' of its base: verify the layer"
            )
        return number, row

    def rows_at(self, positions: I64) -> I64:
        """Return the rows for positions of the base, int64, `NO_ROW` where there is none; `NO_ROW`
        stays `NO_ROW`.

        Raises IndexFileError for rows that the index does not have.
        """
        if self.rows is None:
            return positions
        if not len(self.rows):
            return np.full_like(positions, NO_ROW)
        stored_rows = self.rows[np.maximum(positions, 0)]
        rows: I64 = np.where(positions < 0, NO_ROW, stored_rows)
        if rows.size:
            self._checked(int(rows.min()))
            self._checked(int(rows.max()))
        return rows

    def _checked(self, row: int) -> int:
        if not NO_ROW <= row < len(self.data.index):
            raise IndexFileError(
                f"layer '{self.name}': '{self.data.root / ROWS_FILE}' names row {row}, and "
                f"the index has {len(self.data.index)} rows: verify the layer"
            )
        return row

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The layer's channels as a loader sees them: named ``{layer}.{channel}``, optional where
        rows may lack.

        Values of one view are not moved again, so their law is ``fixed``.
        """
        is_view = self.manifest.view.kind == "per_view"
        may_lack = self.missing != "error"
        return tuple(
            msgspec.structs.replace(
                channel,
                name=f"{self.name}.{channel.name}",
                field=f"{self.name}.{channel.field}",
                law=Law("fixed") if is_view else channel.law,
                optional=channel.optional or may_lack,
            )
            for channel in self.manifest.channels
        )


def open_layer(
    name: str,
    location: str | os.PathLike[str],
    base: Dataset,
    missing: Missing = "error",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    retry: RetryPolicy | None = None,
) -> Layer:
    """Open a layer, in a folder or at a URL, and attach it to its base under a name.

    Raises ConfigError for a name that is not ``[a-z][a-z0-9_]*``, ManifestError for what is not a
    layer, for a layer of another dataset and for one of an older version of this dataset, and what
    `open_dataset` raises.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"layer name {name!r:.110} must match {_NAME.pattern}")
    data = open_layer_data(
        location,
        storage_options=storage_options,
        cache_dir=cache_dir,
        retry=retry,
    )
    layer = Layer(
        name=name,
        data=data,
        rows=read_rows(data),
        missing=missing,
    )
    check_base(layer, base)
    return layer


def open_layer_data(
    location: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    retry: RetryPolicy | None = None,
) -> Dataset:
    """Open the tables of a layer, without its base; raises ManifestError for what is not a
    layer.
    """
    data = open_kind(
        location,
        LAYERS,
        storage_options=storage_options,
        cache_dir=cache_dir,
        retry=retry,
    )
    entry = data.manifest.file(ROWS_FILE)
    if entry is not None and data.origin is not None:
        data.origin.ensure_file(entry)
    return data


def read_rows(data: Dataset) -> I64 | None:
    """Map ``rows.npy``; None where the layer has none, because row i belongs to position i.

    Raises IndexFileError for a file that is not as the manifest says.
    """
    manifest = data.manifest
    assert isinstance(manifest, LayerManifest)
    num_samples = manifest.base.num_samples
    path = data.root / ROWS_FILE
    if manifest.file(ROWS_FILE) is None:
        if manifest.num_samples != num_samples:
            raise ManifestError(
                f"layer '{data.location}' has {manifest.num_samples} rows for {num_samples} "
                f"samples of its base, and no {ROWS_FILE}, which says whose they are"
            )
        return None
    try:
        rows = map_npy(path)
    except (OSError, ValueError, SchemaError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise IndexFileError(f"'{path}' cannot be read: {why}") from error
    if rows.dtype != ROWS_DTYPE or rows.shape != (num_samples,):
        raise IndexFileError(
            f"'{path}' must hold int64 [{num_samples}], a row for each sample of the base"
        )
    return cast("NDArray[np.int64]", rows)


def check_base(layer: Layer, base: Dataset) -> None:
    """Raise ManifestError, with both sides, where a layer does not belong to this dataset."""
    entry = layer.manifest.base
    manifest = base.manifest
    if entry.fingerprint == manifest.fingerprint:
        return
    sides = (
        f"layer '{layer.data.location}' belongs to dataset '{entry.name}' of "
        f"{entry.num_samples} samples (fingerprint {entry.fingerprint[:16]}), not to "
        f"'{base.location}', '{manifest.name}' of {manifest.num_samples} samples "
        f"({manifest.fingerprint[:16]})"
    )
    base_keys = base.index.texts("key").combine_chunks()
    layer_keys = layer.data.index.texts("key").combine_chunks()
    is_in_base = pa.compute.is_in(layer_keys, value_set=base_keys)
    if not len(layer_keys) or not pa.compute.all(is_in_base).as_py():
        raise ManifestError(
            f"{sides}; give the dataset that it was made for, or make the layer again"
        )
    is_in_layer = pa.compute.is_in(base_keys, value_set=layer_keys)
    lacking = base_keys.filter(pa.compute.invert(is_in_layer))
    coverage = "every sample has a value"
    if len(lacking):
        examples = lacking.slice(0, _SHOWN_KEYS).to_pylist()
        if len(lacking) > _SHOWN_KEYS:
            examples.append("...")
        coverage = f"{len(lacking)} samples have no value: {', '.join(examples)}"
    raise ManifestError(
        f"{sides}; all keys of the layer are in this dataset, so it is another version of "
        f"the same one, in which {coverage}; "
        "`fuelrail layer rebase LAYER DATASET OUT` makes the layer of this version"
    )


class JoinedAttributes(Attributes):
    """The attributes of a split's samples, and those of layers under ``{layer}.{attribute}``;
    null without a row.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        layers: Sequence[Layer] = (),
    ) -> None:
        super().__init__(dataset, split)
        self._own = super().names
        self._layers: dict[str, tuple[Layer, str]] = {}
        for layer in layers:
            file = layer.data.attributes_file()
            if not file.exists:
                continue
            for name in file.schema(len(layer.data.index)).names:
                if name not in INDEXED:
                    self._layers[f"{layer.name}.{name}"] = (layer, name)

    @property
    def names(self) -> tuple[str, ...]:
        """All attributes there are."""
        return (*self._own, *self._layers)

    def read(self, names: Sequence[str]) -> pa.Table:
        """Return columns ``names`` of the split's samples, in the index's order; raise
        OrderError for unknown names.
        """
        base_names = [name for name in names if name not in self._layers]
        base_columns = super().read(base_names)
        columns = {}
        for name in names:
            if name not in self._layers:
                columns[name] = base_columns[name]
                continue
            layer, column = self._layers[name]
            file = layer.data.attributes_file()
            table = pa.Table.from_batches(file.batches([column]))
            rows = layer.rows_at(np.arange(self._first, self._end))
            taken_rows = pa.array(rows, mask=rows < 0)
            columns[name] = table[column].take(taken_rows)
        return pa.table(columns)


def read_attributes(
    dataset: Dataset,
    rows: Collection[int],
    layers: Sequence[Layer] = (),
    names: Collection[str] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return attributes of some samples by row, those of a layer as ``{layer}.{attribute}``; of the
    file, what is about these rows is read.

    ``names`` are those that are read, also key, clip_id, frame and timestamp_ns of the index; None:
    all but these. A name that a sample has no value of is absent, or None.
    """
    index_names = [name for name in names or () if name in INDEXED and name != "split"]
    attributes: dict[int, dict[str, Any]] = {}
    for row in rows:
        entry = dataset.index.row(row)
        attributes[row] = {name: getattr(entry, name) for name in index_names}
    own_rows = {row: row for row in rows}
    places: list[tuple[str, Dataset, dict[int, int]]] = [("", dataset, own_rows)]
    for layer in layers:
        numbers = {}
        for row in rows:
            key = dataset.index.row(row).key
            place = layer.find(row, key)
            if place is not None:
                number, _ = place
                numbers[number] = row
        places.append((f"{layer.name}.", layer.data, numbers))
    for prefix, data, row_of_number in places:
        file = data.attributes_file()
        columns = file.schema(len(data)).names if file.exists else []
        columns = [name for name in columns if name not in INDEXED]
        if names is not None:
            columns = [name for name in columns if prefix + name in names]
        if not columns:
            continue
        # Numbers near each other are read at once.
        stretches: list[range] = []
        for number in sorted(row_of_number):
            if stretches and number < stretches[-1].stop + _NEAR_ROWS:
                stretches[-1] = range(stretches[-1].start, number + 1)
            else:
                stretches.append(range(number, number + 1))
        for stretch in stretches:
            number = stretch.start
            for batch in file.batches(columns, stretch):
                for record in batch.to_pylist():
                    if number in row_of_number:
                        named = {prefix + name: value for name, value in record.items()}
                        attributes[row_of_number[number]] |= named
                    number += 1
    return attributes


def present_samples(layer: Layer, dataset: Dataset, split: str) -> I64:
    """Return the samples of a split, numbered from its first, that a layer has a row for:
    ascending int64.
    """
    entry = dataset.split(split)
    positions = np.arange(entry.first_sample, entry.first_sample + entry.num_samples)
    return np.flatnonzero(layer.rows_at(positions) >= 0)
