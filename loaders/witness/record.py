"""What one rank saw of an epoch, in a form that goes into a file, a checkpoint and a collective."""

from __future__ import annotations

import copy
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.loaders.witness.rows import (
    NAME_BYTES,
    Hashes,
    Rows,
    digest_row,
    mix,
    row_entries,
)
from fuelrail.loaders.witness.sketch import LARGE, SAMPLE_ROWS, SMALL, Sample, Table
from fuelrail.pipeline.errors import LedgerError

VERSION: Final = 1
_MARKS: Final = 64
_MIN_VALUES: Final = 4  # of an entry that is compared as noise


class Epoch(msgspec.Struct):
    """What ranks saw of an epoch, up to some step.

    Attributes:
        epoch: number of the epoch.
        ranks: the ranks whose rows are counted here; a record of one rank has one.
        world: number of data-parallel ranks.
        kind: what the rows' ids are (`Rows.kind`); None before the first row.
        rows: number of rows.
        own_rows: number of rows that this rank saw itself, since the start or the resume.
        batches: number of batches of each rank in `ranks`.
        largest_batch: rows of the largest batch.
        sums: sum of the rows' hashes, in two numbers of 64 bits.
        steps: sum of the rows' hashes mixed with their step: equal for any number of ranks that
            divide a global batch.
        sequence: digest of the rows in order, of one rank; empty where several were merged.
        marks: steps and the sums of steps there, at ever wider distances.
        mark_every: distance of marks.
        is_from_start: whether `table` holds all of the epoch's rows; else it is of those since a
            resume, and only `small` is of all.
        is_complete: whether the loader came to the epoch's end.
        is_known: False where a part of the epoch is not: only one of several ranks' states was
            restored.
        table: counts of the rows (`Table`), to name rows; None in a checkpoint.
        small: the same with fewer cells and without names.
        sample: columns of a `Sample`.
        noise: by entry of random numbers, hash of a row and digest of the entry, of the rows in
            the sample.
    """

    epoch: int = 0
    ranks: list[int] = []
    world: int = 1
    kind: str | None = None
    rows: int = 0
    own_rows: int = 0
    batches: list[int] = []
    largest_batch: int = 0
    sums: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (0, 0)
    sequence: str = ""
    marks: list[tuple[int, int, int]] = []
    mark_every: int = 1
    is_from_start: bool = True
    is_complete: bool = False
    is_known: bool = True
    version: int = VERSION
    table: bytes | None = None
    small: bytes | None = None
    sample: dict[str, bytes] | None = None
    noise: dict[str, bytes] = {}


class EpochCounter:
    """Counts what one rank sees of an epoch.

    ``content``: whether contents of rows are digested, for the rows of the sample.
    """

    def __init__(self, epoch: Epoch, content: bool) -> None:
        self.epoch = epoch
        self.content = content
        self.table: Table | None = None
        self.small = Table(SMALL)
        self.sample = Sample()
        self.noise: dict[str, dict[int, int]] = {}
        if epoch.small is not None:
            self.small.cells = _array(epoch.small, np.int64).reshape(self.small.cells.shape).copy()

    def add(self, batch: object, rows: Rows) -> None:
        """Count a batch's rows."""
        epoch = self.epoch
        if epoch.kind is None:
            epoch.kind = rows.kind
        elif epoch.kind != rows.kind and len(rows.hashes):
            raise TypeError(f"a row's id is of kind {rows.kind!r}, and was {epoch.kind!r} before")
        if self.table is None:
            self.table = Table(LARGE, has_names=rows.names.shape[1] > 0)
        self.table.add(rows)
        self.small.add(rows)
        step = epoch.batches[0]
        epoch.sums = _add(epoch.sums, rows.hashes)
        epoch.steps = _add(epoch.steps, mix(rows.hashes ^ mix(np.array([step], np.uint64))))
        previous = f"{epoch.sequence}:{len(rows.hashes)}:".encode()
        epoch.sequence = xxhash.xxh3_128_hexdigest(previous + rows.hashes.tobytes())
        epoch.rows += len(rows.hashes)
        epoch.own_rows += len(rows.hashes)
        epoch.batches[0] += 1
        epoch.largest_batch = max(epoch.largest_batch, len(rows.hashes))
        self._mark(step + 1)
        chosen = self.sample.select(rows.hashes[:, 0])
        if len(chosen):
            digests = np.zeros(len(chosen), np.uint64)
            if self.content:
                self._note_noise(batch, rows, chosen)
                digests = np.array([digest_row(batch, int(row)) for row in chosen], np.uint64)
            self.sample.add(rows, chosen, digests)

    def _mark(self, step: int) -> None:
        epoch = self.epoch
        if step % epoch.mark_every:
            return
        epoch.marks.append((step, *epoch.steps))
        if len(epoch.marks) > _MARKS:
            epoch.mark_every *= 2
            epoch.marks = [mark for mark in epoch.marks if mark[0] % epoch.mark_every == 0]

    def _note_noise(self, batch: object, rows: Rows, chosen: NDArray[np.int64]) -> None:
        """Keep digests of entries that may be random numbers: floats that are not all equal."""
        known = set(self.sample.hashes.tolist())
        for row in chosen.tolist():
            identity = int(rows.hashes[row, 0])
            if identity in known:
                continue
            for name, value in row_entries(batch, row):
                if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
                    continue
                flat = value.reshape(-1)
                if len(flat) < _MIN_VALUES or (flat == flat[0]).all():
                    continue
                digests = self.noise.setdefault(name, {})
                if len(digests) < SAMPLE_ROWS:
                    digests[identity] = xxhash.xxh3_64_intdigest(flat.view(np.uint8).data)

    def record(self, *, with_table: bool = True, is_complete: bool = False) -> Epoch:
        """Return the epoch so far, with its table and sample; without these it takes a few kB."""
        epoch = copy.deepcopy(self.epoch)
        epoch.is_complete = is_complete
        epoch.small = self.small.cells.tobytes()
        if not with_table:
            return epoch
        if self.table is not None:
            epoch.table = self.table.cells.tobytes()
        epoch.sample = pack_sample(self.sample)
        epoch.noise = {
            name: np.array(list(digests.items()), np.uint64).tobytes()
            for name, digests in self.noise.items()
        }
        return epoch


def pack_sample(sample: Sample) -> dict[str, bytes]:
    """Return the columns of a sample as bytes."""
    return {name: getattr(sample, name).tobytes() for name in Sample.COLUMNS}


def unpack_sample(epoch: Epoch) -> Sample:
    """Return the sample of a record; raise LedgerError for columns that do not fit."""
    sample = Sample()
    columns = epoch.sample or {}
    if not columns:
        return sample
    sample.hashes = _array(columns.get("hashes", b""), np.uint64)
    count = len(sample.hashes)
    sample.counts = _array(columns.get("counts", b""), np.int64)
    sample.digests = _array(columns.get("digests", b""), np.uint64)
    sample.alike = _array(columns.get("alike", b""), np.int64)
    names = _array(columns.get("names", b""), np.uint8)
    lengths = {len(sample.counts), len(sample.digests), len(sample.alike)}
    if lengths != {count} or len(names) not in (0, count * NAME_BYTES):
        raise LedgerError("a witness's record has a sample whose columns differ in length")
    sample.names = names.reshape(count, NAME_BYTES if len(names) else 0)
    return sample


def unpack_table(epoch: Epoch) -> Table | None:
    """Return the table of a record that names most: the large one where it is of the whole epoch.

    None for a record without rows. Raises LedgerError for a table of another size.
    """
    if epoch.is_from_start and epoch.table is not None:
        cells = _array(epoch.table, np.int64)
        table = Table(LARGE, has_names=cells.size > Table(LARGE).cells.size)
    elif epoch.small is not None:
        table = Table(SMALL)
        cells = _array(epoch.small, np.int64)
    else:
        return None
    if cells.size != table.cells.size:
        raise LedgerError(
            f"a witness's record has a table of {cells.size} numbers, not {table.cells.size}"
        )
    table.cells = cells.reshape(table.cells.shape).copy()
    return table


def merge_records(records: list[Epoch]) -> Epoch:
    """Return one record of what several ranks saw in the same epoch, without a large table."""
    merged = copy.deepcopy(records[0])
    merged.table = merged.sample = None
    merged.noise = {}
    merged.sequence = records[0].sequence if len(records) == 1 else ""
    small = np.zeros(Table(SMALL).cells.shape, np.int64)
    for record in records:
        if record.small is not None:
            small += _array(record.small, np.int64).reshape(small.shape)
    merged.small = small.tobytes()
    for record in records[1:]:
        merged.ranks = [*merged.ranks, *record.ranks]
        merged.batches = [*merged.batches, *record.batches]
        merged.kind = merged.kind or record.kind
        merged.rows += record.rows
        merged.largest_batch = max(merged.largest_batch, record.largest_batch)
        merged.sums = add_sums(merged.sums, record.sums)
        merged.steps = add_sums(merged.steps, record.steps)
        merged.is_known = merged.is_known and record.is_known
        merged.is_from_start = merged.is_from_start and record.is_from_start
    merged.marks = _merged_marks(records)
    merged.mark_every = max(record.mark_every for record in records)
    return merged


def _merged_marks(records: list[Epoch]) -> list[tuple[int, int, int]]:
    """Return the marks at steps that all records have, added up."""
    merged = []
    others = [{mark[0]: mark for mark in record.marks} for record in records[1:]]
    for step, first, second in records[0].marks:
        sums = (first, second)
        if not all(step in marks for marks in others):
            continue
        for marks in others:
            sums = add_sums(sums, (marks[step][1], marks[step][2]))
        merged.append((step, *sums))
    return merged


def add_sums(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return sums of two multisets' hashes, in two numbers of 64 bits."""
    return (one[0] + other[0]) % 2**64, (one[1] + other[1]) % 2**64


def decode_record(data: object, where: str) -> Epoch:
    """Return a record from what JSON or a checkpoint holds; raise LedgerError."""
    try:
        plain = msgspec.json.decode(data) if isinstance(data, bytes) else data
        record = msgspec.convert(plain, Epoch)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LedgerError(f"{where} is not a witness's record: {error}") from error
    if record.version != VERSION:
        raise LedgerError(f"{where} has version {record.version}; this program reads {VERSION}")
    if len(record.ranks) != len(record.batches) or not record.ranks:
        raise LedgerError(f"{where} has {len(record.batches)} batches for ranks {record.ranks}")
    return record


def _add(sums: tuple[int, int], hashes: Hashes) -> tuple[int, int]:
    total = hashes.sum(axis=0, dtype=np.uint64)
    return add_sums(sums, (int(total[0]), int(total[1])))


def _array(data: bytes, dtype: Any) -> Any:
    if len(data) % np.dtype(dtype).itemsize:
        raise LedgerError(f"a witness's record has an array of {len(data)} bytes")
    return np.frombuffer(data, dtype)
