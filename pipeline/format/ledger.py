"""Ledgers of runs: which positions of which order the weights have seen.

The format is on the page docs/guides/runs.md.

A ledger is a text file, a record a line: the record's digest, a space, the record as JSON. A digest
covers the record and the digest before it, so no record can be changed, removed or put between
others without a trace.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from fuelrail.pipeline.errors import LedgerError
from fuelrail.pipeline.limits import LEDGER, UNTYPED
from fuelrail.pipeline.settings import Settings, explain
from fuelrail.pipeline.storage.files import open_file, sync_folder

LEDGER_VERSION: Final = 1

_FIRST: Final = hashlib.sha256(b"fuelrail ledger 1").hexdigest()
_DIGEST_CHARS: Final = 64
_READING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITING: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

NotNegative = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
Place = tuple[NotNegative, NotNegative]
"""Epoch and samples of it consumed, over all ranks; after an epoch's last step the next epoch's
beginning.
"""


class RunSetup(Settings, frozen=True, tag="setup", tag_field="record"):
    """What a run is made of; valid for the segments behind it, up to the next setup."""

    version: int
    identity: dict[str, Any]
    """What a loader's state has: dataset, split, order, layers, windows, settings of the
    samples' content.
    """
    epoch_length: Positive
    """Positions in an epoch."""
    loader: dict[str, Any] | None
    """What a loader needs to be made again; None: a sampler's run."""
    decoder: str | None
    versions: dict[str, str]
    """The versions of packages that decide the content of a sample."""


class SegmentStart(Settings, frozen=True, tag="start", tag_field="record"):
    """A run started, or continued: written with the first batch that was handed out."""

    place: Place
    global_batch: Positive
    ranks: Positive
    restored: Place | None
    """The place of the saved state that the run continues from; None: it does not.

    Before ``place`` where fewer positions were left of the epoch than a step takes.
    """
    time: str
    """The clock's time, for people: ISO 8601, UTC."""


class PlaceReached(Settings, frozen=True, tag="reached", tag_field="record", omit_defaults=True):
    """All batches up to a place were handed out since the segment's start."""

    place: Place
    why: Literal["state", "epoch", "end"]
    """A state was saved, an epoch ended, or the iteration did."""
    epoch_length: Positive | None = None
    """Positions in the epoch that ended, where epochs differ in length."""


class SampleReplaced(Settings, frozen=True, tag="replaced", tag_field="record"):
    """Another sample took the place of a bad one."""

    since: Place
    """The start of the segment."""
    rank: NotNegative
    epoch: NotNegative
    position: NotNegative
    key: str | None
    replaced_by: str


class BatchDigest(Settings, frozen=True, tag="digest", tag_field="record"):
    """A digest of one rank's batch, as it was handed out."""

    place: Place
    """The place before the batch."""
    rank: NotNegative
    ranks: Positive
    xxh3: str


Record = RunSetup | SegmentStart | PlaceReached | SampleReplaced | BatchDigest
_DECODER: Final = msgspec.json.Decoder(Record)


class Ledger(NamedTuple):
    """The records of a ledger, checked."""

    records: tuple[Record, ...]
    head: str
    """The digest of the last record: it says which ledger this is."""
    size: int
    """Bytes of whole records."""
    last: int
    """Where the last whole record begins."""
    rest: bytes
    """What follows the whole records: a part of one."""


def read_ledger(path: str | os.PathLike[str], *, open_end: bool = False) -> Ledger:
    """Return the records of a ledger; ``open_end`` leaves out a last record that a killed run has
    written in part.

    Raises LedgerError, whose ``record`` is the number of the first wrong record, and for a file
    that cannot be read.
    """
    records: list[Record] = []
    checks = _Checks(path)
    digest = _FIRST
    size = 0
    last = 0
    setup_bytes = 0
    rest = b""
    try:
        with open_file(path, LEDGER.maximum) as file:
            for line in file:
                # A first line may be whole, cut off, or changed in its first digest.
                first_digest = line[:_DIGEST_CHARS]
                separator = line[_DIGEST_CHARS : _DIGEST_CHARS + 2]
                is_cut = separator in (b"", b" ") and not first_digest.strip(b"0123456789abcdef")
                if size == 0 and separator != b" {" and not is_cut:
                    raise LedgerError(
                        f"'{path}' is no ledger: its first line does not begin with a "
                        "digest; give a file that ledger= of a loader, or `fuelrail bench "
                        "train --ledger`, wrote",
                        0,
                    )
                if not line.endswith(b"\n"):
                    rest = line
                    break
                number = len(records)
                body = line[_DIGEST_CHARS + 1 : -1]
                digest = _digest(digest, body)
                if line[: _DIGEST_CHARS + 1] != digest.encode() + b" ":
                    wrong = (
                        "does not have the digest that follows from it and the record before it: "
                        "one of them was changed"
                    )
                    raise LedgerError(
                        f"ledger '{path}': record {number} {wrong}; take the file from a backup",
                        number,
                    )
                text = UNTYPED.broken(len(body))
                if text is None:
                    try:
                        record = _DECODER.decode(body)
                    except (
                        msgspec.DecodeError,
                        UnicodeError,
                        RecursionError,
                    ) as error:
                        fault = explain(error, body, Record)
                        raise LedgerError(
                            f"ledger '{path}': record {number} is of no known form: {fault}",
                            number,
                        ) from error
                    setup_bytes += len(body) if isinstance(record, RunSetup) else 0
                    text = UNTYPED.broken(setup_bytes)
                if text is not None:
                    raise LedgerError(
                        f"ledger '{path}': record {number}, with the setups before it, {text}",
                        number,
                    )
                checks.add(record, number)
                records.append(record)
                last = size
                size += len(line)
    except OSError as error:
        raise LedgerError(f"ledger '{path}' cannot be read: {error.strerror}") from error
    if rest and not open_end:
        raise LedgerError(
            f"ledger '{path}': record {len(records)} has no end: a run was killed while it "
            "wrote, and the next one removes the rest; or the file was changed",
            len(records),
        )
    return Ledger(
        records=tuple(records),
        head=digest,
        size=size,
        last=last,
        rest=rest,
    )


class _Checks:
    """Compares each record with what the ones before it allow."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._follows_setup = False
        self._reached: Place | None = None
        """The last place that a segment started at or came to."""

    def add(self, record: Record, number: int) -> None:
        """Take the next record; raise LedgerError for one that may not be the next."""
        last = self._reached
        if isinstance(record, RunSetup) and record.version != LEDGER_VERSION:
            wrong = f"has version {record.version}; this Fuelrail reads {LEDGER_VERSION}"
        elif number == 0 and not isinstance(record, RunSetup | SampleReplaced):
            wrong = "is the first one, and must be a setup"
        elif self._follows_setup and not isinstance(record, SegmentStart):
            wrong = "follows a setup, and must be a start"
        elif (
            isinstance(record, PlaceReached)
            and last is not None
            # Every end of an epoch is noted.
            and not (last <= record.place and record.place[0] <= last[0] + 1)
        ):
            wrong = (
                f"reaches {record.place}, which is before the place reached last, or more than an "
                "epoch behind it"
            )
        else:
            self._follows_setup = isinstance(record, RunSetup)
            if isinstance(record, SegmentStart | PlaceReached):
                self._reached = record.place
            return
        raise LedgerError(f"ledger '{self._path}': record {number} {wrong}", number)


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


class LedgerFile:
    """A ledger to append to; another process or loader that writes meanwhile is noticed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the ledger, or take an empty one where there is no file. Raises LedgerError."""
        self.path = Path(path)
        self.records: list[Record] = []
        self._head = _FIRST
        self._size = 0
        self._rest = b""
        """What a killed run has written of a record behind the last whole one."""
        self._before_last = _FIRST
        """The digest before the last record; that of this object's own records only."""
        self._last = 0
        """Where the last record begins."""
        self._file = self.path
        if os.path.lexists(self.path):
            ledger = read_ledger(self.path, open_end=True)
            self._file = Path(os.path.realpath(self.path))
            self.records = list(ledger.records)
            self._head = ledger.head
            self._size = ledger.size
            self._last = ledger.last
            self._rest = ledger.rest

    def is_newest(self) -> bool:
        """Return whether nobody else has written since."""
        try:
            handle = os.open(self._file, _READING)
        except OSError:
            return not self.records
        try:
            return self._is_as_read(handle)
        finally:
            os.close(handle)

    def _is_as_read(self, handle: int) -> bool:
        """Return whether the file ends as it did when this object read it or wrote to it last.

        The size does not say: another writer may have replaced the end by as many bytes.
        """
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != self._size + len(self._rest):
            return False
        if os.pread(handle, len(self._rest), self._size) != self._rest:
            return False
        head = os.pread(handle, _DIGEST_CHARS, self._last)
        return not self.records or head == self._head.encode()

    def append(
        self,
        *records: Record,
        in_place_of_last: bool = False,
        sync: bool = True,
    ) -> None:
        """Write some records, in one piece; ``in_place_of_last`` removes this object's last one
        before.

        ``sync``: they survive a crash of the machine. Raises LedgerError where another process has
        written since the file was read, and where it cannot be written.
        """
        start = self._size
        head = self._head
        if in_place_of_last:
            start = self._last
            head = self._before_last
        lines: list[bytes] = []
        last = start
        end = start
        before_last = head
        for record in records:
            body = msgspec.json.encode(record)
            last = end
            before_last = head
            head = _digest(head, body)
            lines.append(f"{head} ".encode() + body + b"\n")
            end += len(lines[-1])
        is_new = not self.records
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._file, _WRITING, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if not self._is_as_read(handle):
                    raise LedgerError(
                        f"ledger '{self.path}' was written to by another loader since this "
                        "one has read it; a ledger belongs to one run: give each run, and a "
                        "loader for validation, a file of its own, or none"
                    )
                if self._rest or in_place_of_last:
                    os.ftruncate(handle, start)
                data = b"".join(lines)
                if os.pwrite(handle, data, start) != len(data):
                    raise OSError("the file system is full")
                if sync:
                    os.fsync(handle)
            finally:
                os.close(handle)
            if is_new and sync:
                sync_folder(self.path.parent)
        except OSError as error:
            raise LedgerError(
                f"ledger '{self.path}' cannot be written: {error.strerror or error}"
            ) from error
        if in_place_of_last:
            self.records.pop()
        self.records += records
        self._head = head
        self._last = last
        self._before_last = before_last
        self._size = end
        self._rest = b""


class Stretch(NamedTuple):
    """A part of a run that the weights have seen."""

    record: int
    """The number of its start's record."""
    setup: RunSetup
    start: SegmentStart
    end: tuple[int, int]
    """The place where the next part starts; of the last part, the last place that is known to be
    reached.
    """
    trained: tuple[int, int]
    """The last place that is known to be reached: the steps from ``end`` on were trained, and
    thrown away.
    """
    skipped: bool
    """Positions before it were not shown, or that is not known."""


def seen_by_weights(
    records: Sequence[Record],
) -> tuple[list[Stretch], list[Stretch]]:
    """Return the parts of a run that the weights have seen, in order, and the segments of which
    nothing is left.

    A segment that starts at a place throws away whatever was trained behind that place before: its
    weights are those of the checkpoint there. How far a segment came is known from its last
    `PlaceReached`, and from a later segment that was restored from a place in it, at most an epoch
    behind: an epoch's end is always noted.
    """
    stretches: list[Stretch] = []
    lost: list[Stretch] = []
    setup: RunSetup | None = None
    newest: Stretch | None = None
    for number, record in enumerate(records):
        if isinstance(record, RunSetup):
            setup = record
        elif isinstance(record, PlaceReached) and newest is not None:
            stretches[-1] = newest = newest._replace(end=record.place, trained=record.place)
        elif isinstance(record, SegmentStart) and setup is not None:
            place = record.place if record.restored is None else record.restored
            while stretches and stretches[-1].start.place >= place:
                lost.append(stretches.pop())
            end = (0, 0)
            if stretches:
                before = stretches[-1]
                if (
                    before.end < place
                    and place[0] <= before.end[0] + 1
                    and record.restored is not None
                ):
                    before = before._replace(trained=max(before.trained, place), end=place)
                stretches[-1] = before._replace(end=min(before.end, place))
                end = stretches[-1].end
            remaining = setup.epoch_length - end[1]
            is_next = record.place == end or (
                record.place == (end[0] + 1, 0) and remaining < record.global_batch
            )
            newest = Stretch(
                record=number,
                setup=setup,
                start=record,
                end=record.place,
                trained=record.place,
                skipped=not is_next,
            )
            stretches.append(newest)
    return stretches, lost
