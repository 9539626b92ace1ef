"""Bad samples: raise, or put the next good one of the order in their place; counted, listed, bounded.

What takes the place of a bad sample depends on dataset and order alone: the sample at the next position of the epoch
(after the last, the first; in lanes, the lane's next frame), and if that is bad too the one behind it. So all runs,
ranks and resumed runs agree, and no rank has fewer batches than the others.

Bad means that the sample itself is: its bytes differ from those written, do not decode, or are cut off. Storage that
refuses or does not answer is no reason to train on something else: that is always raised.
"""

from __future__ import annotations

import json
import logging
import threading
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from fuelrail.pipeline.errors import (
    BadSamplesError,
    ChecksumError,
    ConfigError,
    FrameError,
    FuelrailError,
    MemberError,
    TarFormatError,
    TruncatedShardError,
)
from fuelrail.pipeline.lanes import LaneEpoch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fuelrail.loaders.storage import Storage
    from fuelrail.loaders.work import Task
    from fuelrail.pipeline.dataset import Dataset

_LOG = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "substitute"]
ON_ERROR: Final = ("raise", "substitute")
MAX_BAD: Final = 100
QUARANTINE_FILE: Final = "fuelrail-quarantine.jsonl"
BAD_SAMPLE: Final = (ChecksumError, TruncatedShardError, TarFormatError, FrameError, MemberError)
"""What makes a sample bad."""


class Policy(NamedTuple):
    """What to do with bad samples; ``file`` takes one JSON line for each (None: none is written)."""

    on_error: OnError = "raise"
    max_bad: int = MAX_BAD
    file: Path | None = None


def make_policy(on_error: str, max_bad: int, file: str | os.PathLike[str] | None) -> Policy:
    """The policy from a user's arguments; raises ConfigError."""
    if on_error not in ON_ERROR:
        raise ConfigError(f"on_error={on_error!r} must be one of {', '.join(ON_ERROR)}")
    if max_bad < 0:
        raise ConfigError(f"max_bad={max_bad} must be 0 or more")
    return Policy("substitute" if on_error == "substitute" else "raise", max_bad, None if file is None else Path(file))


class BadSamples:
    """The bad samples of one loader. Thread-safe. ``count`` is the number of distinct ones so far."""

    def __init__(
        self,
        policy: Policy,
        dataset: Dataset,
        storage: Storage,
        first_row: int,
        order_of: Callable[[int], Callable[[NDArray[np.int64]], NDArray[np.int64]]],
        epoch_length: int,
        rank: int = 0,
    ) -> None:
        self._policy, self._dataset, self._storage = policy, dataset, storage
        self._first_row, self._length, self._rank = first_row, epoch_length, rank
        self._order_of = lru_cache(maxsize=2)(order_of)
        self._bad: set[int] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Distinct bad samples so far."""
        return len(self._bad)

    def replace(self, task: Task, error: FuelrailError) -> Task:
        """The task with the next sample of the order in place of its bad one.

        Raises ``error`` itself where the policy says so, BadSamplesError where there are more than allowed.
        """
        if self._policy.on_error == "raise":
            raise error
        if task.num_replaced >= self._length:
            raise BadSamplesError(f"no sample of the epoch is good; the last: {error}") from error
        order = self._order_of(task.slot.epoch)
        # The next frame of the lane: another lane's would be of another clip.
        stride = order.num_lanes if isinstance(order, LaneEpoch) else 1
        position = (task.position + stride) % self._length
        row = int(order(np.array([position]))[0]) + self._first_row
        entry = self._dataset.index.row(row)
        with self._lock:
            is_new = task.row not in self._bad
            self._bad.add(task.row)
            if is_new:
                self._note(task, error, entry.key)
            if len(self._bad) > self._policy.max_bad:
                raise BadSamplesError(
                    f"{len(self._bad)} bad samples, max_bad={self._policy.max_bad} are allowed; the last: {error}"
                ) from error
        return task._replace(
            position=position,
            row=row,
            entry=entry,
            take=partial(self._storage.span, row, entry),
            num_replaced=task.num_replaced + 1,
        )

    def _note(self, task: Task, error: FuelrailError, replaced_by: str) -> None:
        entry = task.entry
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "dataset": self._dataset.manifest.fingerprint,
            "rank": self._rank,
            "epoch": task.slot.epoch,
            "step": task.slot.step,
            "row": task.row,
            "key": None if entry is None else entry.key,
            "shard": None if entry is None else self._dataset.manifest.shards[entry.shard].name,
            "offset": None if entry is None else entry.offset,
            "member": getattr(error, "member", None),
            "error": type(error).__name__,
            "message": str(error),
            "replaced_by": replaced_by,
        }
        _LOG.warning(
            "bad sample %s (shard %s, offset %s) replaced by %s: %s",
            line["key"], line["shard"], line["offset"], replaced_by, error,
        )  # fmt: skip
        if self._policy.file is None:
            return
        try:
            # One write in append mode: lines of several ranks do not mix.
            with self._policy.file.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as failure:
            _LOG.warning("quarantine file '%s' cannot be written: %s", self._policy.file, failure)
