"""A dataset as it was before samples were deleted, for the orders of runs over it: made of what is
left and receipts.

Its fingerprint and rows are the old ones, so a run's ledger fits. Samples that are gone have key,
clip, frame, time and attributes out of the receipt, and no bytes: whoever reads one finds a bad
sample.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.index.blocks import BlockFile
from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.index.shards import SHARDS_FILE, ShardTable
from fuelrail.pipeline.format.index.tables import (
    open_attributes,
    open_tables,
    write_tables,
)
from fuelrail.pipeline.format.layers import (
    NO_ROW,
    BaseEntry,
    Layer,
    Missing,
    open_layer,
    open_layer_data,
)
from fuelrail.pipeline.format.manifest import Manifest, SplitEntry
from fuelrail.pipeline.settings import explain
from fuelrail.pipeline.storage.files import read_file
from fuelrail.sharding.forget import (
    MAX_RECEIPT_BYTES,
    ForgetReport,
    OrderInputs,
    order_digest,
)
from fuelrail.sharding.write.publish import (
    ROWS_PER_GROUP,
    write_attributes,
    write_index,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.attributes_file import AttributesFile
    from fuelrail.pipeline.format.index.shards import ShardEntry

    Rows = np.ndarray[tuple[int], np.dtype[np.int64]]

_MOST_RECEIPTS: Final = 128


class _Shards(ShardTable):
    """The shards that are left, and how many samples each had before."""

    def __init__(
        self,
        file: BlockFile,
        manifest: Manifest,
        cut: dict[str, list[int]],
    ) -> None:
        super().__init__(file, manifest)
        self._cut_by_range = {
            (entry.first_shard, entry.first_shard + entry.num_shards): cut[name]
            for name, entry in manifest.splits.items()
        }

    def split_lengths(self, first: int, end: int) -> Rows:
        """Return the number of samples of the shards that a split had."""
        return np.array(self._cut_by_range[first, end], np.int64)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class EarlierDataset(Dataset):
    """A dataset as it was; tables are in ``scratch``, shards in the folder of what is left."""

    scratch: Path = Path()
    deleted: frozenset[str] = frozenset()
    """Keys of the samples that are gone."""

    def attributes_file(self) -> AttributesFile:
        """Return ``attributes.parquet`` of all samples that there were."""
        return open_attributes(self.scratch, self.manifest)


class _Deletion(NamedTuple):
    """What a receipt says of one folder: its fingerprint before, and the samples that are gone."""

    file: Path
    before: str
    names: list[tuple[str, str]]
    """Key and clip of each."""
    inputs: OrderInputs


def as_it_was(
    place: str | os.PathLike[str],
    fingerprint: str,
    receipts: Sequence[str | os.PathLike[str]] = (),
) -> Dataset:
    """Open a dataset as it was when it had a fingerprint; as it is where no receipts lead there.

    ``receipts`` are those of `fuelrail.forget`; those that lie beside a folder under their usual
    names are used too. Raises ConfigError for a receipt in ``receipts`` that cannot be read or is
    not of this dataset.
    """
    dataset = open_dataset(place)
    if dataset.manifest.fingerprint == fingerprint:
        return dataset
    deletions: dict[str, _Deletion] = {}
    for file, report in _read_receipts(dataset, receipts):
        if report.folders and report.order is not None:
            folder = report.folders[0]
            names = [(sample.key, sample.clip_id) for sample in report.samples]
            deletion = _Deletion(
                file=file,
                before=folder.before,
                names=names,
                inputs=report.order,
            )
            deletions.setdefault(folder.after, deletion)
    chain = _chain_between(dataset, fingerprint, deletions)
    if chain:
        return _rebuild_tables(dataset, fingerprint, chain)
    return dataset


def layer_as_it_was(
    name: str,
    place: str | os.PathLike[str],
    base: Dataset,
    fingerprint: str,
    receipts: Sequence[str | os.PathLike[str]] = (),
    missing: Missing = "error",
) -> Layer:
    """Open a layer as it was when it had a fingerprint, of a base as that was; as `open_layer`
    where no receipts lead there.

    ``receipts`` are as in `as_it_was`; those beside the base's folder are used too.
    """
    data = open_layer_data(place)
    deletions: dict[str, _Deletion] = {}
    if data.manifest.fingerprint != fingerprint:
        for file, report in _read_receipts(base, receipts):
            clips = {sample.key: sample.clip_id for sample in report.samples}
            for folder in report.folders[1:]:
                if folder.order is not None:
                    names = [(key, clips.get(key, "")) for key in folder.keys]
                    deletion = _Deletion(
                        file=file,
                        before=folder.before,
                        names=names,
                        inputs=folder.order,
                    )
                    deletions.setdefault(folder.after, deletion)
    chain = _chain_between(data, fingerprint, deletions)
    if not chain:
        return open_layer(name, place, base, missing)
    earlier = _rebuild_tables(data, fingerprint, chain)
    keys = earlier.index.texts("key").combine_chunks()
    rows = pc.index_in(base.index.texts("key"), value_set=keys)
    rows_of_base = np.asarray(pc.fill_null(rows, NO_ROW).to_numpy(), np.int64)
    manifest = msgspec.structs.replace(earlier.manifest, base=BaseEntry.from_dataset(base))
    return Layer(
        name=name,
        data=replace(earlier, manifest=manifest),
        rows=rows_of_base,
        missing=missing,
    )


def _read_receipts(
    dataset: Dataset, receipts: Sequence[str | os.PathLike[str]]
) -> Iterator[tuple[Path, ForgetReport]]:
    """Yield the receipts that were given, and those beside a folder that are some."""
    files = [*map(Path, receipts)]
    if dataset.url is None:
        root = dataset.root.resolve()
        files += sorted(root.parent.glob(f"{root.name}-forgot-*.json"))[:_MOST_RECEIPTS]
    for number, file in enumerate(files):
        try:
            data = read_file(file, MAX_RECEIPT_BYTES)
            report = msgspec.json.decode(data, type=ForgetReport)
        except (
            OSError,
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:
            if number >= len(receipts):  # another file that has such a name
                continue
            why = (
                error.strerror if isinstance(error, OSError) else explain(error, data, ForgetReport)
            )
            raise ConfigError(f"receipt '{file}' cannot be read: {why}") from error
        yield file, report


def _chain_between(
    dataset: Dataset,
    fingerprint: str,
    deletions: dict[str, _Deletion],
) -> list[_Deletion]:
    """Return the deletions since a dataset or layer had a fingerprint, the newest first; empty
    where they do not lead there.

    Raises ConfigError unless the newest is the one that the manifest has a digest of.
    """
    chain: list[_Deletion] = []
    version = dataset.manifest.fingerprint
    while version != fingerprint:
        if version not in deletions:
            return []
        chain.append(deletions.pop(version))
        version = chain[-1].before
    if chain:
        facts = dataset.manifest.provenance.get("facts", {})
        forgotten = facts.get("forgotten") if isinstance(facts, dict) else None
        stated = forgotten.get("order_sha256") if isinstance(forgotten, dict) else None
        newest = chain[0]
        if stated != order_digest(newest.names, newest.inputs):
            raise _make_mismatch_error(newest.file, dataset)
    return chain


def _rebuild_tables(
    dataset: Dataset,
    fingerprint: str,
    chain: Sequence[_Deletion],
) -> EarlierDataset:
    """Make the tables of a dataset as it was before the deletions of a chain, the newest first."""
    order = np.arange(len(dataset))  # rows of what is left; below 0: deleted samples
    deleted: list[IndexRow] = []
    attributes: list[dict[str, Any]] = []
    for file, _, names, inputs in chain:
        num_rows = len(order) + len(inputs.rows)
        rows = np.array(inputs.rows, np.int64)
        counts = {len(inputs.rows), len(names), len(inputs.frames)}
        counts |= {
            len(inputs.timestamps_ns),
            *map(len, inputs.attributes.values()),
        }
        is_ascending = (np.diff(rows, prepend=-1) > 0).all()
        is_of_rows = len(counts) == 1 and is_ascending
        num_samples = sum(map(sum, inputs.splits.values()))
        has_last = not len(rows) or rows[-1] < num_rows
        if not (is_of_rows and has_last and num_rows == num_samples):
            raise _make_mismatch_error(file, dataset)
        merged = np.empty(num_rows, np.int64)
        is_deleted = np.zeros(num_rows, bool)
        is_deleted[rows] = True
        merged[~is_deleted] = order
        numbers = len(deleted) + np.arange(len(rows))
        merged[rows] = -1 - numbers
        order = merged
        for number, (key, clip_id) in enumerate(names):
            deleted.append(
                IndexRow(
                    key=key,
                    clip_id=clip_id,
                    frame=inputs.frames[number],
                    timestamp_ns=inputs.timestamps_ns[number],
                    shard=0,
                    offset=0,
                    length=0,
                    xxh3=0,
                    members=(),
                )
            )
            attributes.append({name: values[number] for name, values in inputs.attributes.items()})
    oldest = chain[-1]
    folder = Path(tempfile.mkdtemp(prefix="fuelrail-"))

    def rows_as_they_were() -> Iterator[IndexRow]:
        for number in order.tolist():
            yield (dataset.index.row(number) if number >= 0 else deleted[-1 - number])

    write_index(
        folder,
        names=dataset.index.names,
        codecs=dataset.index.codecs,
        rows=rows_as_they_were(),
    )
    if dataset.attributes_file().exists:
        write_attributes(folder, _rebuild_attributes(dataset, order, attributes))
    splits, entries = _rebuild_splits(
        dataset,
        order=order,
        cut=oldest.inputs.splits,
        file=oldest.file,
    )
    dictionary = [file for file in dataset.manifest.files if file.name == DICTIONARY_FILE]
    manifest = msgspec.structs.replace(
        dataset.manifest,
        fingerprint=fingerprint,
        num_samples=len(order),
        splits=splits,
        files=(*write_tables(folder, entries), *dictionary),
    )
    tables = open_tables(folder, manifest)
    shards = _Shards(BlockFile(folder / SHARDS_FILE), manifest, oldest.inputs.splits)
    weakref.finalize(shards, shutil.rmtree, folder, ignore_errors=True)
    return EarlierDataset(
        root=dataset.root,
        manifest=manifest,
        shards=shards,
        index=tables.samples,
        keys=tables.keys,
        url=dataset.url,
        storage_options=dataset.storage_options,
        dictionary=dataset.dictionary,
        origin=dataset.origin,
        scratch=folder,
        deleted=frozenset(row.key for row in deleted),
    )


def _make_mismatch_error(file: Path, dataset: Dataset) -> ConfigError:
    return ConfigError(
        f"receipt '{file}' is not that of a deletion from '{dataset.location}', or it was edited: "
        "give the file that `fuelrail forget` wrote"
    )


def _rebuild_attributes(
    dataset: Dataset,
    order: Rows,
    deleted: Sequence[dict[str, Any]],
) -> Iterator[pa.Table]:
    file = dataset.attributes_file()
    schema = file.schema(len(dataset))
    batches = [*file.batches(schema.names)]
    table_schema = batches[0].schema if batches else schema
    remaining = pa.Table.from_batches(batches, table_schema)
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in deleted]
        try:
            column = pa.array(values, field.type)
        except (pa.ArrowException, TypeError, OverflowError):
            # The column has a type that JSON has not.
            texts = [str(value) for value in values]
            column = pa.array(texts).cast(field.type)
        columns.append(column)
    fields = [pa.field(field.name, field.type) for field in schema]
    remaining = pa.Table.from_arrays(remaining.columns, schema=pa.schema(fields))
    gone = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    places_of_deleted = len(remaining) - 1 - order
    places = np.where(order >= 0, order, places_of_deleted)
    table = pa.concat_tables([remaining, gone])
    for first in range(0, len(places), ROWS_PER_GROUP):
        rows = pa.array(places[first : first + ROWS_PER_GROUP])
        yield table.take(rows).combine_chunks()


def _rebuild_splits(
    dataset: Dataset,
    order: Rows,
    cut: dict[str, list[int]],
    file: Path,
) -> tuple[dict[str, SplitEntry], list[ShardEntry]]:
    """Return the splits as they were, and the shards that are left, which tile their samples."""
    splits: dict[str, SplitEntry] = {}
    entries: list[ShardEntry] = []
    row_of = np.full(len(dataset), -1, np.int64)
    row_of[order[order >= 0]] = np.flatnonzero(order >= 0)
    first = 0
    for name, lengths in cut.items():
        num_samples = sum(lengths)
        end = first + num_samples
        shards = [shard for shard in dataset.shards if shard.split == name]
        firsts = [int(row_of[shard.first_sample]) for shard in shards]
        if firsts and not first <= firsts[0] <= firsts[-1] < end:
            raise _make_mismatch_error(file, dataset)
        firsts[:1] = [first] if firsts else []
        splits[name] = SplitEntry(
            first_sample=first,
            num_samples=num_samples,
            first_shard=len(entries),
            num_shards=len(shards),
            num_clips=dataset.splits[name].num_clips if name in dataset.splits else 0,
        )
        ends = [*firsts[1:], end]
        for shard, begin, stop in zip(shards, firsts, ends, strict=False):
            entries.append(shard._replace(first_sample=begin, num_samples=stop - begin))
        first = end
    if len(entries) != len(dataset.shards):
        raise _make_mismatch_error(file, dataset)
    return splits, entries
