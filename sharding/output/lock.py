"""One run at a time on a URL: a lock object that its holder renews; an object store cannot see dead
processes.

The lock is ``.fuelrail/lock.json``, made by a conditional put (``If-None-Match: *``) that one of
several runs gets. Its holder rewrites it with a new number every ``BEAT_S`` seconds. A run that
finds it taken takes it over

- at once, where it was taken on this machine by a run that has ended (the working folder here is
  locked by the kernel, and its identity is in the lock), and
- after ``STALE_S`` seconds in which the number did not change. No clocks are compared.

Two runs that take over one stale lock at the same moment see each other: the last writer keeps it.
Should a holder have been asleep for that long and wake up, it finds another's lock and stops; what
it had written by then are the same bytes, for another recipe is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.sharding.output.url import UrlOutput

LOCK_NAME: Final = f"{WORK_FOLDER}/lock.json"
BEAT_S: Final = 10.0
STALE_S: Final = 45.0
_LOOK_S: Final = 1.0
_SETTLE_S: Final = 0.5


class _Held(msgspec.Struct, frozen=True):
    """The lock's content: its holder, the working folder, and how often it was renewed."""

    owner: str
    place: str
    who: str
    beat: int = 0


class ObjectLock:
    """The lock of a URL, held from the beginning to :meth:`release`.

    ``place`` identifies the working folder here.
    """

    def __init__(self, out: UrlOutput, place: str) -> None:
        """Take it; raises DatasetError where another run holds it."""
        self._out = out
        self._path = out.path(LOCK_NAME)
        self._mine = _Held(
            uuid.uuid4().hex,
            place,
            f"process {os.getpid()} on {socket.gethostname()}",
        )
        self._ended = threading.Event()
        self._lost: str | None = None
        held = None
        try:
            out.fs.pipe_file(self._path, msgspec.json.encode(self._mine), mode="create")
        except OSError:
            held = self._read()
            if held is None:
                raise  # it was no lock that was in the way
        if held is not None:
            end = time.monotonic() + (STALE_S if held.place != place else 0)
            while time.monotonic() < end:
                time.sleep(_LOOK_S)
                current = self._read()
                if current is None:
                    break
                if current != held:
                    self._refuse(current)
            self._write(self._mine)
            time.sleep(_SETTLE_S)  # another run may have found it stale at the same moment
            now = self._read()
            if now is None or now.owner != self._mine.owner:
                self._refuse(now or held)
        self._beating = threading.Thread(target=self._beat, name="object-lock", daemon=True)
        self._beating.start()

    def check(self) -> None:
        """Raise DatasetError where another run has taken the lock over."""
        if self._lost is not None:
            raise DatasetError(
                f"another run ({shortened(self._lost)}) has taken over '{self._out.shown}': "
                "this one stops"
            )

    def release(self) -> None:
        """Stop renewing it and remove it, if it is still ours."""
        self._ended.set()
        self._beating.join()
        holder = self._read()
        if holder is not None and holder.owner == self._mine.owner:
            self._out.remove(LOCK_NAME)

    def _refuse(self, held: _Held) -> None:
        raise DatasetError(
            f"another run ({shortened(held.who)}) is writing to '{self._out.shown}': wait for it "
            "or stop it first"
        )

    def _beat(self) -> None:
        held = self._mine
        while not self._ended.wait(BEAT_S):
            # Storage that fails for a moment fails the writers too; they report it.
            with contextlib.suppress(Exception):
                current = self._read()
                if current is None or current.owner != held.owner:
                    self._lost = "unknown" if current is None else current.who
                    return
                held = msgspec.structs.replace(held, beat=held.beat + 1)
                self._write(held)

    def _read(self) -> _Held | None:
        data = self._out.read(LOCK_NAME)
        try:
            if data is None:
                return None
            return msgspec.json.decode(data, type=_Held)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _Held("", "", "unknown")

    def _write(self, held: _Held) -> None:
        self._out.fs.pipe_file(self._path, msgspec.json.encode(held))
