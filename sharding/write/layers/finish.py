"""The rows of a layer become its files: shards by arithmetic, tables, attributes, the manifest
last.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail import __version__
from fuelrail.pipeline.channels.table import Channel
from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.format.index.tables import file_entry
from fuelrail.pipeline.format.layers import (
    LAYER_FORMAT,
    LAYER_SPLIT,
    LAYERS,
    NO_ROW,
    ROWS_DTYPE,
    ROWS_FILE,
    BaseEntry,
    LayerManifest,
    LayerView,
)
from fuelrail.pipeline.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Lineage,
)
from fuelrail.pipeline.format.tar import END_OF_ARCHIVE
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.storage.files import save_npy
from fuelrail.sharding.output.folder import Output, manifest_in
from fuelrail.sharding.write.layers.segments import (
    SEGMENTS,
    SegmentRow,
    Segments,
)
from fuelrail.sharding.write.packer import dali_index
from fuelrail.sharding.write.publish import (
    ROWS_PER_GROUP,
    publish_tables,
    write_index,
)
from fuelrail.sharding.write.records import publish_listing

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.schema import I64

SHARD_BYTES: Final = 256 << 20
"""A shard ends before the row that would make it larger."""

_SHOWN_KEYS: Final = 3


class LayerRun(Settings, frozen=True):
    """What all writers of a layer must agree on."""

    name: str
    base: BaseEntry
    channels: tuple[Channel, ...]
    view: LayerView
    zstd: str
    recipe: dict[str, Any] = msgspec.field(default_factory=dict)
    """What else the values depend on; in the manifest in ``provenance.recipe``."""


_ARROW: Final = {
    "b": pa.bool_(),
    "i": pa.int64(),
    "u": pa.int64(),
    "f": pa.float64(),
}


def scalar_channels(channels: Sequence[Channel]) -> dict[str, pa.DataType]:
    """Return Arrow types of the channels that are attributes too: numbers of at most 63 bits and
    bools.
    """
    return {
        channel.name: _ARROW[channel.numpy_dtype.kind]
        for channel in channels
        if channel.kind == "array" and not channel.shape and channel.dtype != "uint64"
    }


def finish_layer(
    out: Output,
    base: Dataset,
    run: LayerRun,
    *,
    partial: bool,
) -> LayerManifest:
    """Cut all published rows into shards, unless that was done; returns the manifest.

    Raises DatasetError where samples of the base have no row, unless ``partial`` allows it, and
    what `Segments.rows` raises.
    """
    manifest = manifest_in(out, LAYERS)
    if manifest is None:
        segments = Segments(out, len(base))
        lacking = np.flatnonzero(~segments.are_there())
        is_refused = lacking.size and not partial
        if len(lacking) == len(base) or is_refused:
            samples = lacking[:_SHOWN_KEYS].tolist()
            keys = ", ".join(base.index.row(sample).key for sample in samples)
            raise DatasetError(
                f"{lacking.size} of {len(base)} samples have no row in '{out.shown}', such as "
                f"{keys}: write them, or finish with partial=True (at least one row is needed)"
            )
        (out.work / "tmp").mkdir(parents=True, exist_ok=True)
        # A new folder: files in tmp may be second names of others, which would be written.
        temporary = Path(tempfile.mkdtemp(dir=out.work / "tmp"))
        try:
            manifest = _write_layer(
                out,
                temporary=temporary,
                base=base,
                run=run,
                segments=segments,
            )
        except FileNotFoundError:
            # At a URL another machine may have finished the layer, and removed the segments.
            manifest = manifest_in(out, LAYERS)
            if manifest is None:
                raise
    out.remove_work()
    assert isinstance(manifest, LayerManifest), "what the format of layers is decoded to"
    return manifest


def _write_layer(
    out: Output,
    temporary: Path,
    base: Dataset,
    run: LayerRun,
    segments: Segments,
) -> LayerManifest:
    rows = np.full(len(base), NO_ROW, ROWS_DTYPE)
    codecs = {channel.field: channel.codec for channel in run.channels}
    entries: list[ShardEntry] = []
    table = temporary / ATTRIBUTES_FILE
    with (
        closing(_write_shards(out, segments, entries)) as shards,
        _AttributesWriter(table, run.channels) as attributes,
    ):

        def written() -> Iterator[IndexRow]:
            for count, (position, segment_row, row) in enumerate(shards):
                _check_row(
                    out,
                    base=base,
                    codecs=codecs,
                    position=position,
                    row=segment_row,
                )
                attributes.add(row, segment_row.attributes)
                rows[position] = count
                yield row

        write_index(
            temporary,
            names=list(codecs),
            codecs=codecs.values(),
            rows=written(),
        )
    make = functools.partial(
        LayerManifest,
        format=LAYER_FORMAT,
        version=FORMAT_VERSION,
        name=run.name,
        seed=0,
        order_unit="frame",
        channels=run.channels,
        classes=base.manifest.classes,
        attributes=(),
        time_base=base.manifest.time_base,
        ego_origin=base.manifest.ego_origin,
        license=base.manifest.license,
        compression={
            "layout": "member",
            "level": DEFAULT_ZSTD_LEVEL,
            "codecs": codecs,
        },
        lineage=Lineage(),
        provenance={
            "recipe": {
                "source": "layer",
                "tool": f"fuelrail {__version__}",
                "zstd": run.zstd,
                **run.recipe,
            }
        },
        base=run.base,
        view=run.view,
    )
    clips_with_values = base.index.clip_numbers()[rows != NO_ROW]
    num_clips = len(np.unique(clips_with_values))
    published = publish_rows(out, temporary, rows)
    return publish_tables(
        out,
        folder=temporary,
        shards=entries,
        clips_by_split={LAYER_SPLIT: num_clips},
        make=make,
        published=published,
    )


def _check_row(
    out: Output,
    base: Dataset,
    codecs: Mapping[str, str],
    position: int,
    row: SegmentRow,
) -> None:
    """Raise DatasetError for a row of a segment that is not of the base's sample, or not of this
    table.
    """
    sample = base.index.row(position)
    names = (row.row.key, row.row.clip_id, row.row.frame, row.row.timestamp_ns)
    is_of_sample = names == (
        sample.key,
        sample.clip_id,
        sample.frame,
        sample.timestamp_ns,
    )
    members = row.row.members
    is_of_table = all(
        entry.codec == codecs.get(entry.name)
        and 0 <= entry.offset <= entry.offset + entry.stored_bytes <= row.row.length
        and 0 <= entry.raw_bytes < 1 << 63
        and entry.xxh3 >= 0
        for entry in members
    )
    if not is_of_sample or not is_of_table:
        raise DatasetError(
            f"a row of '{out.shown}/{SEGMENTS}' for position {position} is not of sample "
            f"'{sample.key}' and of the channels of this layer: remove the segment that holds it, "
            "and write its rows again"
        )


def publish_rows(out: Output, folder: Path, rows: I64) -> list[FileEntry]:
    """Publish ``rows.npy``, written in the folder, and return its entry; nothing where row i
    belongs to position i.
    """
    if np.array_equal(rows, np.arange(len(rows))):
        return []
    save_npy(folder / ROWS_FILE, rows.astype(ROWS_DTYPE))
    entry = file_entry(folder / ROWS_FILE)
    out.publish_file(ROWS_FILE, folder / ROWS_FILE)
    return [entry]


def _write_shards(
    out: Output,
    segments: Segments,
    entries: list[ShardEntry],
) -> Generator[tuple[int, SegmentRow, IndexRow]]:
    """Write spans one after the other into shards; yield each row with its position and its place,
    and add entries.

    A shard gets its name when it is full.
    """
    pending_rows = segments.rows()
    first = 0
    following = next(pending_rows, None)
    while following is not None:
        name = shard_name(LAYER_SPLIT, len(entries))
        digest = hashlib.sha256()
        offset = 0
        rows: list[IndexRow] = []
        with out.publish(name) as file:
            while following is not None:
                position, segment_row = following
                if rows and offset + len(segment_row.span) + len(END_OF_ARCHIVE) > SHARD_BYTES:
                    break
                rows.append(segment_row.row._replace(shard=len(entries), offset=offset))
                file.write(segment_row.span)
                digest.update(segment_row.span)
                offset += len(segment_row.span)
                yield position, segment_row, rows[-1]
                following = next(pending_rows, None)
            file.write(END_OF_ARCHIVE)
            digest.update(END_OF_ARCHIVE)
        num_bytes = offset + len(END_OF_ARCHIVE)
        entry = ShardEntry(
            name=name,
            split=LAYER_SPLIT,
            first_sample=first,
            num_samples=len(rows),
            bytes=num_bytes,
            sha256=digest.hexdigest(),
        )
        entries.append(publish_listing(out, entry, dali_index(rows)))
        first += len(rows)


class _AttributesWriter:
    """Writes ``attributes.parquet``: what the index has too, and the single numbers among the
    channels.
    """

    def __init__(self, path: Path, channels: Sequence[Channel]) -> None:
        fields = [
            pa.field("key", pa.string(), nullable=False),
            pa.field("clip_id", pa.string()),
            pa.field("split", pa.string()),
            pa.field("frame", pa.int32(), nullable=False),
            pa.field("timestamp_ns", pa.int64(), nullable=False),
        ]
        self._schema = pa.schema(
            [
                *fields,
                *(pa.field(*item) for item in scalar_channels(channels).items()),
            ]
        )
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[tuple[Any, ...]] = []

    def add(self, row: IndexRow, values: Sequence[Any]) -> None:
        """Take the next row."""
        self._rows.append(
            (
                row.key,
                row.clip_id,
                LAYER_SPLIT,
                row.frame,
                row.timestamp_ns,
                *values,
            )
        )
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is left, unless there was an error, and the file's footer."""
        with self._writer:
            if kind is None and self._rows:
                self._flush()

    def _flush(self) -> None:
        try:
            columns = zip(*self._rows, strict=True)
            arrays = [
                pa.array(column, kind)
                for column, kind in zip(columns, self._schema.types, strict=True)
            ]
        except (ValueError, TypeError, OverflowError) as error:
            # The segment was edited.
            raise DatasetError(
                f"a row of '{SEGMENTS}' has attributes that are not those of this layer ({error}): "
                "remove its segment, and write its rows again"
            ) from error
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table)
        self._rows.clear()
