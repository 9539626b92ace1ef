"""Bad samples: raise, or substitute the next good one of the order; counted, listed, bounded.

What takes the place of a bad sample depends on dataset and order alone: the sample at the next
position of the epoch (after the last, the first; in lanes, the lane's next frame), and if that is
bad too the one behind it. So all runs, ranks and resumed runs agree, and no rank has fewer batches
than the others.

A sample is bad when its bytes differ from those written, do not decode, or are cut off. Storage
that refuses or does not answer is not a reason to train on another sample: that is always raised.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import (
    BadSamplesError,
    ChecksumError,
    FrameError,
    MemberError,
    TarFormatError,
    TruncatedShardError,
)
from fuelrail.pipeline.settings import CheckedSettings, PathText, must_be

if TYPE_CHECKING:
    from fuelrail.loaders.records import Source, Task
    from fuelrail.loaders.schedule.positions import PositionIndex

_LOG = logging.getLogger(__name__)

BAD_SAMPLE: Final = (
    ChecksumError,
    TruncatedShardError,
    TarFormatError,
    FrameError,
    MemberError,
)
"""What makes a sample bad."""


class BadSamplePolicy(CheckedSettings, frozen=True):
    """What to do with bad samples: wrong digest, cut off, not decodable.

    Attributes:
        on_error: ``"raise"``, or ``"substitute"``: replace it with the next good sample of the
            order, the same one in every run.
        max_bad: maximum number of distinct bad samples to substitute on this rank before an error
            is raised.
        file: file that lists the bad samples, one JSON line each; None: they are only logged.

    Raises ConfigError for values out of range.
    """

    on_error: Annotated[Literal["raise", "substitute"], must_be("one of raise, substitute")] = (
        "raise"
    )
    max_bad: Annotated[int, Meta(ge=0), must_be("an integer >= 0")] = 100
    file: Annotated[PathText | None, must_be("a path or None")] = "fuelrail-quarantine.jsonl"


class BadSamples:
    """The bad samples of one loader.

    Thread-safe. ``count`` is the number of distinct ones so far.
    """

    def __init__(
        self,
        policy: BadSamplePolicy,
        sources: Sequence[Source],
        where: PositionIndex,
        rank: int = 0,
    ) -> None:
        self._policy = policy
        self._sources = sources
        self._where = where
        self.rank = rank
        self.note: Callable[[int, int, str | None, str], None] | None = None
        """Called for each sample that takes another's place: epoch, position, and the keys of
        both.
        """
        self._bad: set[int] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Distinct bad samples so far."""
        return len(self._bad)

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the bad samples so far, over all datasets."""
        return frozenset(self._bad)

    def add(
        self,
        numbers: Collection[int],
        replaced: Sequence[tuple[int, int, str | None, str]],
    ) -> None:
        """Note bad samples that another process found, and what took their places."""
        with self._lock:
            self._bad.update(numbers)
            for event in replaced:
                if self.note is not None:
                    self.note(*event)

    def replace(self, task: Task, frame: int, error: Exception) -> Task:
        """Return the task with the next sample of the order, all its frames, in place of one that
        has a bad frame.

        Raises ``error`` itself where the policy says so and where it is not the sample that is bad;
        BadSamplesError where there are more than allowed.
        """
        if self._policy.on_error == "raise" or not isinstance(error, BAD_SAMPLE):
            raise error
        if task.num_replaced >= self._where.epoch_length:
            raise BadSamplesError(f"no sample of the epoch is good; the last: {error}") from error
        position = self._where.next_position(task.slot.epoch, task.position)
        positions = np.array([position])
        parts, rows, present, _, _ = self._where.places(task.slot.epoch, positions)
        source = self._sources[int(parts[0])]
        storage = source.storage
        frame_rows = rows[0].tolist()
        entries = source.reader.rows(frame_rows)
        frames = [
            task.frames[0]._replace(
                row=row,
                present=is_present,
                entry=entry,
                pending_read=partial(storage.span, row, entry),
            )
            for row, is_present, entry in zip(frame_rows, present[0].tolist(), entries, strict=True)
        ]
        replaced = task._replace(
            source=source,
            frames=tuple(frames),
            position=position,
            num_replaced=task.num_replaced + 1,
        )
        number = task.source.base + task.frames[frame].row
        with self._lock:
            is_new = number not in self._bad
            self._bad.add(number)
            if is_new:
                self._log_replacement(task, frame, error, entries[task.current].key)
            if self.note is not None:
                bad = task.frames[task.current].entry
                self.note(
                    task.slot.epoch,
                    task.position,
                    bad and bad.key,
                    entries[task.current].key,
                )
            if len(self._bad) > self._policy.max_bad:
                raise BadSamplesError(
                    f"{len(self._bad)} bad samples, max_bad={self._policy.max_bad} are "
                    f"allowed; the last: {error}"
                ) from error
        return replaced

    def _log_replacement(
        self,
        task: Task,
        frame: int,
        error: Exception,
        replaced_by: str,
    ) -> None:
        row, _, entry, _ = task.frames[frame]
        manifest = task.source.dataset.manifest
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "dataset": manifest.fingerprint,
            "rank": self.rank,
            "epoch": task.slot.epoch,
            "step": task.slot.step,
            "row": row,
            "key": None if entry is None else entry.key,
            "shard": None if entry is None else task.source.dataset.shards.name(entry.shard),
            "offset": None if entry is None else entry.offset,
            "member": getattr(error, "member", None),
            "error": type(error).__name__,
            "message": str(error),
            "replaced_by": replaced_by,
        }
        place = f"shard {line['shard']}, offset {line['offset']}"
        _LOG.warning(
            "bad sample %s replaced by %s: %s", f"{line['key']} ({place})", replaced_by, error
        )
        if self._policy.file is None:
            return
        try:
            # One write in append mode: lines of several ranks do not mix.
            with Path(self._policy.file).open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as failure:
            _LOG.warning("quarantine file '%s' cannot be written: %s", self._policy.file, failure)
