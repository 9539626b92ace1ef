"""What one rank saw of an epoch, in a form that goes into a file, a checkpoint and a collective."""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.loaders.witness.rows import Rows, digest_row, mix, read_columns, read_row
from fuelrail.loaders.witness.sketch import (
    ALL,
    LARGE,
    ROW,
    SAMPLE_ROWS,
    SMALL,
    STATE_ROWS,
    CountedRows,
    Table,
)
from fuelrail.pipeline.errors import ConfigError, LedgerError
from fuelrail.pipeline.settings import find_fault
from fuelrail.pipeline.text import shortened

VERSION: Final = 1
_STEPS_AN_OCTAVE: Final = 8
_MIN_VALUES: Final = 4  # of an entry that is compared as noise
_MAX_BYTES: Final = 4 << 20

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Epoch(msgspec.Struct, forbid_unknown_fields=True):
    """What ranks saw of an epoch, up to some step.

    Attributes:
        epoch: number of the epoch.
        ranks: the ranks whose rows are counted here; a record of one rank has one.
        world: number of data-parallel ranks.
        batches: number of batches of each rank in `ranks`.
        rows: number of rows.
        own_rows: number of rows since the start or the last resume.
        largest_batch: rows of the largest batch.
        kind: what the rows' ids are (`Rows.kind`); None before the first row.
        sums: sum of the rows' hashes, in two numbers of 64 bits.
        steps: sums of the rows' hashes mixed with their step, of steps that are together: each
            number is of a span that begins at :func:`step_of` its place. Equal for any number of
            ranks that divide a global batch.
        sequence: digest of the rows in order, of one rank.
        is_complete: whether the loader came to the epoch's end.
        is_known: False where a part of the epoch is not: only one of several ranks' states was
            restored.
        table: counts of the rows since the start or the last resume, to name rows.
        before: table of the rows before it; None without a resume.
        sample: the rows of the epoch with the smallest hashes.
        noise: by entry of random numbers, hash of a row in the sample and digest of the entry.
    """

    epoch: Number = 0
    ranks: Annotated[list[Number], msgspec.Meta(min_length=1)] = []
    world: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1
    batches: list[Number] = []
    rows: Number = 0
    own_rows: Number = 0
    largest_batch: Number = 0
    kind: Literal["integer", "text", "content"] | None = None
    sums: tuple[int, int] = (0, 0)
    steps: Annotated[list[int], msgspec.Meta(max_length=512)] = []
    sequence: str = ""
    is_complete: bool = False
    is_known: bool = True
    table: Table | None = None
    before: Table | None = None
    sample: CountedRows = msgspec.field(default_factory=CountedRows)
    noise: dict[str, dict[int, int]] = {}
    version: int = VERSION

    def add(self, batch: object, rows: Rows, *, has_contents: bool) -> None:
        """Count a batch's rows; with digests of what rows of the sample hold."""
        hashes = rows.hashes[:, 0]
        count = len(hashes)
        if count and self.kind not in (None, rows.kind):
            raise ConfigError(
                f"the witness has ids that are {rows.kind} in one batch and {self.kind} in those "
                "before: give key=, a function of a batch to its rows' ids"
            )
        if count and self.table is None:
            self.table = Table(LARGE, has_names=rows.kind == "text")
            self.kind = rows.kind  # type: ignore[assignment]
        if self.table is not None:
            self.table.add(hashes, rows.names)
        place = place_of(self.batches[0])
        self.steps += [0] * (place + 1 - len(self.steps))
        step = mix(np.array(self.batches, np.uint64))
        step_sum = mix(hashes ^ step).sum(dtype=np.uint64)
        self.steps[place] = (self.steps[place] + int(step_sum)) % 2**64
        sums = rows.hashes.sum(axis=0, dtype=np.uint64)
        self.sums = add_sums(self.sums, sums.tolist())
        previous = f"{self.sequence}:{count}:".encode()
        self.sequence = xxhash.xxh3_128_hexdigest(previous + rows.hashes.tobytes())
        self.rows += count
        self.own_rows += count
        self.batches[0] += 1
        self.largest_batch = max(self.largest_batch, count)
        chosen = self.sample.select(hashes)
        if not len(chosen):
            return
        digests = np.zeros(len(chosen), np.uint64)
        if has_contents:
            columns = read_columns(batch)
            identities = set(self.sample.rows["hash"].tolist())
            for number, row in enumerate(chosen.tolist()):
                parts = read_row(columns, row, count)
                digests[number] = digest_row(parts) or 0
                identity = int(hashes[row])
                if identity in identities:
                    continue
                # Floats that are not all equal may be random numbers.
                for name, value in parts.items():
                    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
                    if not is_float or value.size < _MIN_VALUES:
                        continue
                    noise = self.noise.setdefault(name, {})
                    if len(noise) >= SAMPLE_ROWS:
                        continue
                    is_constant = (value == value.flat[0]).all()
                    if not is_constant:
                        noise[identity] = xxhash.xxh3_64_intdigest(value.tobytes())
        self.sample.add(rows, chosen, digests)

    def fold(self) -> Table:
        """Return a small table of all rows of the epoch."""
        folded = Table(SMALL) if self.table is None else self.table.fold()
        if self.before is not None:
            folded.cells += self.before.cells
        return folded

    def state(self) -> Epoch:
        """Return a copy that takes a few kB."""
        sample = CountedRows(self.sample.rows, self.sample.limit)
        state = msgspec.structs.replace(
            self,
            table=None,
            before=self.fold(),
            sample=sample.cut(STATE_ROWS),
            noise={},
        )
        return copy.deepcopy(state)


def place_of(step: int) -> int:
    """Return the place in `Epoch.steps` of a step, from 0: the later, the more steps share one."""
    number = step + _STEPS_AN_OCTAVE
    octave = number.bit_length() - _STEPS_AN_OCTAVE.bit_length()
    within = (number >> octave) - _STEPS_AN_OCTAVE
    return octave * _STEPS_AN_OCTAVE + within


def step_of(place: int) -> int:
    """Return the first step of a place in `Epoch.steps`."""
    octave, within = divmod(place, _STEPS_AN_OCTAVE)
    number = (_STEPS_AN_OCTAVE + within) << octave
    return number - _STEPS_AN_OCTAVE


def add_sums(first: Sequence[int], second: Sequence[int]) -> Any:
    """Return sums of two multisets' hashes, modulo 2^64 each, as the type of the first."""
    pairs = zip_longest(first, second, fillvalue=0)
    kind: Any = type(first)
    return kind(sum(pair) % 2**64 for pair in pairs)


def find_kind(records: Sequence[Epoch]) -> str | None:
    """Return what the ids of these records' rows are; None where they have no rows."""
    for record in records:
        if record.kind is not None:
            return record.kind
    return None


def merge_epochs(records: Sequence[Epoch]) -> Epoch:
    """Return one record of what several ranks saw in the same epoch."""
    merged = copy.deepcopy(records[0])
    for record in records[1:]:
        merged.sequence = ""
        merged.ranks += record.ranks
        merged.batches += record.batches
        merged.kind = merged.kind or record.kind
        merged.rows += record.rows
        merged.own_rows += record.own_rows
        merged.largest_batch = max(merged.largest_batch, record.largest_batch)
        merged.sums = add_sums(merged.sums, record.sums)
        merged.steps = add_sums(merged.steps, record.steps)
        merged.is_complete &= record.is_complete
        merged.is_known &= record.is_known
        merged.table = add_tables(merged.table, record.table)
        merged.before = add_tables(merged.before, record.before)
        merged.sample.merge(record.sample)
    return merged


def add_tables(first: Table | None, second: Table | None) -> Table | None:
    """Return the sum of two tables, the first of which is changed; of other ids the first alone."""
    if first is None:
        return copy.deepcopy(second)
    if second is not None and first.cells.shape == second.cells.shape:
        first.cells += second.cells
    return first


def encode_record(record: Epoch) -> dict[str, Any]:
    """Return a record as plain values."""

    def encode(value: Table | CountedRows) -> str:
        if isinstance(value, Table):
            return _pack(value.cells)
        return f"{value.limit}:{_pack(value.rows)}"

    plain: dict[str, Any] = msgspec.to_builtins(record, enc_hook=encode, str_keys=True)
    return plain


def _pack(array: NDArray[Any]) -> str:
    """Return an array's bytes as base64 of zlib."""
    compressed = zlib.compress(array.tobytes(), 1)
    return base64.b64encode(compressed).decode()


def decode_record(value: object, where: str) -> Epoch:
    """Return a record from plain values, or from their JSON; raise LedgerError."""
    plain = value
    try:
        if isinstance(value, bytes):
            plain = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LedgerError(f"{where} is not JSON: {' '.join(str(error).split())}") from error
    version = plain.get("version") if isinstance(plain, dict) else None
    if version != VERSION:
        raise LedgerError(
            f"{where} is not a witness's record of version {VERSION}, which this program reads; "
            f"its version is {shortened(repr(version))}"
        )
    try:
        record = msgspec.convert(
            plain,
            Epoch,
            dec_hook=_decode,
            str_keys=True,
        )
    except msgspec.ValidationError as error:
        fault = find_fault(error, plain, Epoch)
        raise LedgerError(f"{where} is not a witness's record: {fault}") from error
    tables = (
        (record.table, Table(LARGE, has_names=record.kind == "text")),
        (record.before, Table(SMALL)),
    )
    for table, usual in tables:
        if table is not None and table.cells.shape != usual.cells.shape:
            raise LedgerError(
                f"{where} has a table of {table.cells.size} numbers, not of {usual.cells.size}"
            )
    if len(record.ranks) != len(record.batches) or max(record.ranks) >= record.world:
        raise LedgerError(
            f"{where} has {len(record.batches)} numbers of batches for {len(record.ranks)} of "
            f"{record.world} ranks"
        )
    return record


def _decode(kind: type, value: Any) -> Table | CountedRows:
    """Return a table or a sample from its text; a ValueError becomes msgspec's with the place."""
    if not isinstance(value, str):
        raise ValueError(f"must be text; got {type(value).__name__}")  # noqa: TRY004 - see above
    limit, _, packed = value.rpartition(":")
    try:
        compressed = base64.b64decode(packed, validate=True)
        data = zlib.decompressobj().decompress(compressed, _MAX_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"must be base64 of zlib; got {shortened(value, 40)!r}") from error
    if kind is Table:
        tables = (
            Table(LARGE),
            Table(LARGE, has_names=True),
            Table(SMALL),
        )
        for table in tables:
            if len(data) == table.cells.nbytes:
                numbers = np.frombuffer(data, np.int64)
                table.cells.reshape(-1)[:] = numbers
                return table
        raise ValueError(f"must be a table's numbers; got {len(data)} bytes")
    if len(data) % ROW.itemsize or not limit.isascii() or not limit.isdigit():
        raise ValueError(f"must be a limit and a sample's rows; got {shortened(value, 40)!r}")
    rows = np.frombuffer(data, ROW).copy()
    hashes = rows["hash"]
    is_sample = len(rows) <= SAMPLE_ROWS
    is_limit = len(limit) <= 20 and int(limit) <= ALL
    is_sorted = (hashes[1:] > hashes[:-1]).all()
    is_counted = (rows["count"] > 0).all()
    if not (is_sample and is_limit and is_sorted and is_counted):
        raise ValueError(f"must be at most {SAMPLE_ROWS} rows in order, each of a count above 0")
    return CountedRows(rows, int(limit))
