"""The state of a run until its dataset is finished: lock, state of the run, scan table, plan.

What the next run needs to resume is stored in OUT under ``.fuelrail/``: ``run.json`` (recipe,
samples, shards that were planned) and the records of finished shards. Each run makes its own scan
table and plan, in the output's working folder on this machine, which for a local OUT is the same
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.storage.files import empty_folder, open_lock, read_file
from fuelrail.pipeline.storage.filesystem import is_url
from fuelrail.sharding.output.folder import check_work, read_json
from fuelrail.sharding.planning.plan import PlannedShard
from fuelrail.sharding.planning.recipe import Recipe

if TYPE_CHECKING:
    from fuelrail.sharding.output.folder import Output
    from fuelrail.sharding.output.lock import ObjectLock

_PLACE_BYTES: Final = 1 << 10
STATE: Final = f"{WORK_FOLDER}/run.json"


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A started run: the recipe (without the scan's digest), its samples and the shards they are
    cut into.

    Of a run that reuses shards, the recipe says it all.

    ``samples_sha256`` is of the keys that are in the dataset and of the clips' splits. Metadata,
    and names and sizes of files, are not part of it: where those change, the shards concerned are
    written again, in the same cut.
    """

    recipe: Recipe
    num_samples: int = 0
    num_clips: int = 0
    samples_sha256: str = ""
    shards: list[PlannedShard] = msgspec.field(default_factory=list)


class Workspace:
    """The working folder of one run, locked against a second one; use as a context manager.

    The lock is the kernel's (flock), so it ends with the process that holds it, however that ends;
    for a URL there is another one beside it, for other machines
    (:mod:`fuelrail.sharding.output.lock`).

    In it are ``temporary``, a folder of files that are being written, ``scan_table``, and as
    ``.npy`` the plan's rows (``plan_rows``) and the mask of the scan table's rows that are in the
    plan (``selection``).
    """

    def __init__(self, out: Output) -> None:
        """Make and lock it; raises DatasetError where another run is writing to OUT."""
        self.out = out
        self.folder = out.work
        self.temporary = self.folder / "tmp"
        self.scan_table = self.folder / "scan.arrow"
        self.plan_rows = self.folder / "plan.npy"
        self.selection = self.folder / "selection.npy"
        check_work(out)
        self._made = _make_folders(self.folder)
        self._lock = self._acquire()
        self._remote_lock: ObjectLock | None = None
        try:
            try:
                empty_folder(self.temporary)
            except PermissionError as error:
                where = error.filename or self.temporary
                raise DatasetError(f"'{where}' cannot be used: {error.strerror}") from error
            if self._is_elsewhere:
                from fuelrail.sharding.output.lock import ObjectLock
                from fuelrail.sharding.output.url import UrlOutput

                assert isinstance(self.out, UrlOutput), "what is at a URL"
                place = self.folder / "place"
                with (
                    contextlib.suppress(FileExistsError),
                    place.open("x") as file,
                ):
                    file.write(uuid.uuid4().hex)
                lock = ObjectLock(
                    self.out,
                    read_file(place, _PLACE_BYTES).decode(errors="replace"),
                )
                self.out.abort_uploads()
                self._remote_lock = lock
        except BaseException:
            os.close(self._lock)
            raise

    def state(self) -> RunState | None:
        """Return the state of an earlier run in OUT, None where there is none."""
        remedy = (
            "remove this one file and run the same command again; finished shards are kept where "
            "they are of the same recipe"
        )
        return read_json(self.out, STATE, RunState, remedy)

    def start(self, state: RunState) -> None:
        """Store the state, before the first shard."""
        with self.out.publish(STATE) as file:
            file.write(msgspec.json.encode(state))

    def check(self) -> None:
        """Raise DatasetError where another run has taken this one's place."""
        if self._remote_lock is not None:
            self._remote_lock.check()

    def remove(self) -> None:
        """Remove the working folder: the dataset is finished."""
        self.out.remove_work()
        self._release_remote()

    def close(self) -> None:
        """Release the lock; what this run made is removed again if it stored no state."""
        try:
            self._release_remote()
            if self.folder.is_dir() and (self._is_elsewhere or self.out.read(STATE) is None):
                shutil.rmtree(self.folder, ignore_errors=True)
                if not self._is_elsewhere:
                    for folder in self._made:
                        with contextlib.suppress(OSError):
                            folder.rmdir()
        finally:
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self) -> int:
        path = self.folder / "lock"
        while True:
            try:
                handle = open_lock(path)
            except FileNotFoundError:  # the holder before may have removed the folder
                _make_folders(self.folder)
                continue
            except PermissionError as error:
                raise DatasetError(f"'{path}' cannot be used: {error.strerror}") from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
                os.close(handle)
                raise DatasetError(
                    f"another run (process {owner}) is writing to '{self.out.shown}': wait "
                    "for it or stop it first"
                ) from error
            # The holder before may have removed the working folder between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(handle).st_ino:
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
                    return handle
            os.close(handle)
            _make_folders(self.folder)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether OUT is at a URL, and only the working folder on this machine."""
        return is_url(self.out.location)

    def _release_remote(self) -> None:
        if self._remote_lock is not None:
            self._remote_lock.release()
            self._remote_lock = None


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were made, the deepest first, without
    ``folder`` itself.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
