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

from fuelrail.loaders.witness.rows import (
    Hashes,
    Rows,
    digest_row,
    mix,
    read_columns,
    read_row,
)
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
        hashes = rows.hashes
        if self.kind not in (None, rows.kind) and len(hashes):
            raise ConfigError(
                f"the witness has ids that are {rows.kind} in one batch and {self.kind} in those "
                "before: give key=, a function of a batch to its rows' ids"
            )
        if self.table is None and len(hashes):
            self.table = Table(LARGE, has_names=rows.kind == "text")
            self.kind = rows.kind  # type: ignore[assignment]
        if self.table is not None:
            self.table.add(rows)
        place = place_of(self.batches[0])
        self.steps += [0] * (place + 1 - len(self.steps))
        step = mix(np.array(self.batches, np.uint64))
        self.steps[place] = (self.steps[place] + _total(mix(hashes[:, 0] ^ step))) % 2**64
        self.sums = add_sums(self.sums, (_total(hashes[:, 0]), _total(hashes[:, 1])))
        previous = f"{self.sequence}:{len(hashes)}:".encode()
        self.sequence = xxhash.xxh3_128_hexdigest(previous + hashes.tobytes())
        self.rows += len(hashes)
        self.own_rows += len(hashes)
        self.batches[0] += 1
        self.largest_batch = max(self.largest_batch, len(hashes))
        chosen = self.sample.select(hashes[:, 0])
        if len(chosen):
            digests = np.zeros(len(chosen), np.uint64)
            if has_contents:
                digests = self._digest(batch, rows, chosen)
            self.sample.add(rows, chosen, digests)

    def _digest(self, batch: object, rows: Rows, chosen: NDArray[np.int64]) -> Hashes:
        """Return digests of rows' contents, and keep those of entries that may be random numbers:
        floats that are not all equal.
        """
        columns = read_columns(batch)
        count = len(rows.hashes)
        known = set(self.sample.rows["hash"].tolist())
        for row in chosen.tolist():
            identity = int(rows.hashes[row, 0])
            if identity in known:
                continue
            for name, value in read_row(columns, row, count).items():
                values = value.reshape(-1) if isinstance(value, np.ndarray) else np.empty(0)
                if values.dtype.kind != "f" or len(values) < _MIN_VALUES:
                    continue
                digests = self.noise.setdefault(name, {})
                if len(digests) < SAMPLE_ROWS and (values != values[0]).any():
                    digests[identity] = xxhash.xxh3_64_intdigest(values.tobytes())
        contents = [digest_row(columns, row, count) or 0 for row in chosen.tolist()]
        return np.array(contents, np.uint64)

    def fold(self) -> Table:
        """Return a small table of all rows of the epoch."""
        folded = Table(SMALL) if self.table is None else self.table.fold()
        if self.before is not None:
            folded.cells += self.before.cells
        return folded

    def state(self) -> Epoch:
        """Return a copy that takes a few kB."""
        state = msgspec.structs.replace(self, table=None, before=self.fold(), noise={})
        state.sample = CountedRows(self.sample.rows, self.sample.limit).cut(STATE_ROWS)
        return copy.deepcopy(state)


def place_of(step: int) -> int:
    """Return the place in `Epoch.steps` of a step, from 0: the later, the more steps share one."""
    octave = (step + _STEPS_AN_OCTAVE).bit_length() - _STEPS_AN_OCTAVE.bit_length()
    within = ((step + _STEPS_AN_OCTAVE) >> octave) - _STEPS_AN_OCTAVE
    return octave * _STEPS_AN_OCTAVE + within


def step_of(place: int) -> int:
    """Return the first step of a place in `Epoch.steps`."""
    octave, within = divmod(place, _STEPS_AN_OCTAVE)
    return ((_STEPS_AN_OCTAVE + within) << octave) - _STEPS_AN_OCTAVE


def add_sums(first: Sequence[int], second: Sequence[int]) -> Any:
    """Return sums of two multisets' hashes, modulo 2^64 each, as the type of the first."""
    pairs = zip_longest(first, second, fillvalue=0)
    return type(first)(sum(pair) % 2**64 for pair in pairs)  # type: ignore[call-arg]


def merge_epochs(records: Sequence[Epoch]) -> Epoch:
    """Return one record of what several ranks saw in the same epoch."""
    merged = copy.deepcopy(records[0])
    merged.sequence = records[0].sequence if len(records) == 1 else ""
    for record in records[1:]:
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
    plain: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_encode, str_keys=True)
    return plain


def decode_record(value: object, where: str) -> Epoch:
    """Return a record from plain values, or from their JSON; raise LedgerError."""
    try:
        plain = msgspec.json.decode(value) if isinstance(value, bytes) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LedgerError(f"{where} is not JSON: {' '.join(str(error).split())}") from error
    version = plain.get("version") if isinstance(plain, dict) else None
    if version != VERSION:
        raise LedgerError(
            f"{where} is not a witness's record of version {VERSION}, which this program reads; "
            f"its version is {shortened(repr(version))}"
        )
    try:
        record = msgspec.convert(plain, Epoch, dec_hook=_decode, str_keys=True)
    except msgspec.ValidationError as error:
        fault = find_fault(error, plain, Epoch)
        raise LedgerError(f"{where} is not a witness's record: {fault}") from error
    shapes = [
        Table(LARGE, has_names=record.kind == "text").cells.shape,
        Table(SMALL).cells.shape,
    ]
    for table, shape in zip((record.table, record.before), shapes, strict=True):
        if table is not None and table.cells.shape != shape:
            raise LedgerError(f"{where} has a table of {table.cells.size} numbers, not of {shape}")
    if len(record.ranks) != len(record.batches) or max(record.ranks) >= record.world:
        raise LedgerError(
            f"{where} has {len(record.batches)} numbers of batches for {len(record.ranks)} of "
            f"{record.world} ranks"
        )
    return record


def _encode(value: Any) -> str:
    array = value.cells if isinstance(value, Table) else value.rows
    packed = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return packed if isinstance(value, Table) else f"{value.limit}:{packed}"


def _decode(kind: type, value: Any) -> Table | CountedRows:
    """Return a table or a sample from its text; a ValueError becomes msgspec's with the place."""
    if not isinstance(value, str):
        raise ValueError(f"must be text; got {type(value).__name__}")  # noqa: TRY004 - see above
    limit, _, packed = value.rpartition(":")
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(packed, validate=True), _MAX_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"must be base64 of zlib; got {shortened(value, 40)!r}") from error
    if kind is Table:
        for size, has_names in ((LARGE, False), (LARGE, True), (SMALL, False)):
            table = Table(size, has_names=has_names)
            if len(data) == table.cells.nbytes:
                table.cells = np.frombuffer(data, np.int64).reshape(table.cells.shape).copy()
                return table
        raise ValueError(f"must be a table's numbers; got {len(data)} bytes")
    if len(data) % ROW.itemsize or not limit.isascii() or not limit.isdigit():
        raise ValueError(f"must be a limit and a sample's rows; got {shortened(value, 40)!r}")
    rows = np.frombuffer(data, ROW).copy()
    is_sorted = bool((rows["hash"][1:] > rows["hash"][:-1]).all()) and (rows["count"] > 0).all()
    if not is_sorted or len(limit) > 20 or int(limit) > ALL or len(rows) > SAMPLE_ROWS:
        raise ValueError(f"must be at most {SAMPLE_ROWS} rows in order, each of a count above 0")
    return CountedRows(rows, int(limit))


def _total(hashes: Hashes) -> int:
    return int(hashes.sum(dtype=np.uint64))
