"""Ledgers of runs: which positions of which order the weights have seen. The format is on the page docs/guides/runs.md.

A ledger is a text file, a record a line: the record's digest, a space, the record as JSON. A digest covers the
record and the digest before it, so no record can be changed, removed or put between others without a trace.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from fuelrail.pipeline.errors import LedgerError
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.storage.files import read_file, sync_folder

LEDGER_VERSION: Final = 1

_FIRST: Final = hashlib.sha256(b"fuelrail ledger 1").hexdigest()
_DIGEST_CHARS: Final = 64
_MAX_BYTES: Final = 1 << 28

NotNegative = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
Place = tuple[NotNegative, NotNegative]
"""Epoch and samples of it consumed, over all ranks; after an epoch's last step the next epoch's beginning."""


class RunSetup(Settings, frozen=True, tag="setup", tag_field="record"):
    """What a run is made of; valid for the segments behind it, up to the next setup."""

    version: int
    identity: dict[str, Any]
    """What a loader's state has: dataset, split, order, layers, windows, settings of the samples' content."""
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
_DECODER: Final = msgspec.json.Decoder(Annotated[Record, "record"])


class Ledger(NamedTuple):
    """The records of a ledger, checked."""

    records: tuple[Record, ...]
    head: str
    """The digest of the last record: it says which ledger this is."""
    size: int
    """Bytes of whole records."""


def read_ledger(path: str | os.PathLike[str], *, open_end: bool = False) -> Ledger:
    """Return the records of a ledger; ``open_end`` leaves out a last record that a killed run has written in part.

    Raises LedgerError, whose ``record`` is the number of the first wrong record, and for a file that cannot be read.
    """
    try:
        data = read_file(path, _MAX_BYTES)
    except OSError as error:
        raise LedgerError(f"ledger '{path}' cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    rest = lines.pop()
    if not _begins_as_ledger(data):
        raise LedgerError(
            f"'{path}' is no ledger: its first line does not begin with a digest; give a file that "
            "ledger= of a loader, or `fuelrail bench train --ledger`, wrote",
            0,
        )
    records: list[Record] = []
    digest = _FIRST
    for number, line in enumerate(lines):
        body = line[_DIGEST_CHARS + 1 :]
        digest = _digest(digest, body)
        if line[: _DIGEST_CHARS + 1] != f"{digest} ".encode():
            wrong = "does not have the digest that follows from it and the record before it: one of them was changed"
            raise LedgerError(
                f"ledger '{path}': record {number} {wrong}; take the file from a backup", number
            )
        try:
            record = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise LedgerError(
                f"ledger '{path}': record {number} is of no known form: {error}", number
            ) from error
        _check_next(record, records, path)
        records.append(record)
    if rest and not open_end:
        raise LedgerError(
            f"ledger '{path}': record {len(records)} has no end: a run was killed while it wrote, and the next one "
            "removes the rest; or the file was changed",
            len(records),
        )
    return Ledger(tuple(records), digest, len(data) - len(rest))


def _begins_as_ledger(data: bytes) -> bool:
    """Return whether data may be a ledger: whole, cut off, or changed in its first digest."""
    digest, behind = data[:_DIGEST_CHARS], data[_DIGEST_CHARS : _DIGEST_CHARS + 2]
    return behind == b" {" or (behind in (b"", b" ") and not digest.strip(b"0123456789abcdef"))


def _check_next(record: Record, before: Sequence[Record], path: str | os.PathLike[str]) -> None:
    number, kinds = len(before), {type(one) for one in before[-1:]}
    if isinstance(record, RunSetup) and record.version != LEDGER_VERSION:
        what = f"has version {record.version}; this Fuelrail reads {LEDGER_VERSION}"
    elif not before and not isinstance(record, RunSetup | SampleReplaced):
        what = "is the first one, and must be a setup"
    elif kinds == {RunSetup} and not isinstance(record, SegmentStart):
        what = "follows a setup, and must be a start"
    elif isinstance(record, PlaceReached) and not _is_next(record.place, before):
        what = f"reaches {record.place}, which is before the place reached last, or more than an epoch behind it"
    else:
        return
    raise LedgerError(f"ledger '{path}': record {number} {what}", number)


def _is_next(place: Place, before: Sequence[Record]) -> bool:
    """Return whether a place may be the next one that is noted as reached: every end of an epoch is noted."""
    last = next(
        (one.place for one in reversed(before) if isinstance(one, SegmentStart | PlaceReached)),
        place,
    )
    return last <= place and place[0] <= last[0] + 1


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


class LedgerFile:
    """A ledger to append to; another process, or another loader, that appends meanwhile is noticed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the ledger, or take an empty one where there is no file. Raises LedgerError."""
        self.path = Path(path)
        self.records: list[Record] = []
        self._head, self._size, self._found = _FIRST, 0, 0
        self._last = 0, _FIRST
        """Where the last record of this object begins, and the digest before it."""
        if self.path.exists():
            self._found = self.path.stat().st_size
            found = read_ledger(self.path, open_end=True)
            self.records, self._head, self._size = list(found.records), found.head, found.size

    def is_newest(self) -> bool:
        """Return whether nobody else has written since."""
        try:
            return self.path.stat().st_size == self._found
        except OSError:
            return self._found == 0

    def append(self, *records: Record, in_place_of_last: bool = False, sync: bool = True) -> None:
        """Write some records, in one piece; ``in_place_of_last`` removes this object's last one before.

        ``sync``: they survive a crash of the machine. Raises LedgerError where another process has written since the
        file was read, and where it cannot be written.
        """
        start, head = self._last if in_place_of_last else (self._size, self._head)
        lines: list[bytes] = []
        last = start, head
        for record in records:
            body = msgspec.json.encode(record)
            last = start + sum(map(len, lines)), head
            head = _digest(head, body)
            lines.append(f"{head} ".encode() + body + b"\n")
        is_new = self._found == 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if os.fstat(handle).st_size != self._found:
                    raise LedgerError(
                        f"ledger '{self.path}' was written to by another loader since this one has read it; a ledger "
                        "belongs to one run: give each run, and a loader for validation, a file of its own, or none"
                    )
                if (
                    start != self._found
                ):  # a killed run's part of a record, or the record to replace
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
        self._head, self._last = head, last
        self._size = self._found = start + len(data)


class Stretch(NamedTuple):
    """A part of a run that the weights have seen."""

    record: int
    """The number of its start's record."""
    setup: RunSetup
    start: SegmentStart
    end: tuple[int, int]
    """The place where the next part starts; of the last part, the last place that is known to be reached."""
    trained: tuple[int, int]
    """The last place that is known to be reached: the steps from ``end`` on were trained, and thrown away."""
    skipped: bool
    """Positions before it were not shown, or that is not known."""


def seen_by_weights(records: Sequence[Record]) -> tuple[list[Stretch], list[Stretch]]:
    """Return the parts of a run that the weights have seen, in order, and the segments of which nothing is left.

    A segment that starts at a place throws away whatever was trained behind that place before: its weights are those of
    the checkpoint there. How far a segment came is known from its last `PlaceReached`, and from a later segment that
    was restored from a place in it, at most an epoch behind: an epoch's end is always noted.
    """
    kept: list[Stretch] = []
    lost: list[Stretch] = []
    setup: RunSetup | None = None
    newest: Stretch | None = None
    for number, record in enumerate(records):
        if isinstance(record, RunSetup):
            setup = record
        elif isinstance(record, PlaceReached) and newest is not None:
            kept[-1] = newest = newest._replace(end=record.place, trained=record.place)
        elif isinstance(record, SegmentStart) and setup is not None:
            place = record.place if record.restored is None else record.restored
            while kept and kept[-1].start.place >= place:
                lost.append(kept.pop())
            end = (0, 0)
            if kept:
                before = kept[-1]
                if (
                    before.end < place
                    and place[0] <= before.end[0] + 1
                    and record.restored is not None
                ):
                    before = before._replace(trained=max(before.trained, place), end=place)
                kept[-1] = before._replace(end=min(before.end, place))
                end = kept[-1].end
            left = setup.epoch_length - end[1]
            is_next = record.place == end or (
                record.place == (end[0] + 1, 0) and left < record.global_batch
            )
            newest = Stretch(number, setup, record, record.place, record.place, not is_next)
            kept.append(newest)
    return kept, lost
