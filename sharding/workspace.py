"""The output folder while a dataset is being made: lock, recipe, scan table, plan and the records of finished shards.

Everything that is not yet part of the dataset lies in ``OUT/.fuelrail/``; a file gets its name in OUT by a rename, when
it is whole and synced. So OUT holds whole files only, whatever happens; the working folder goes when the manifest is
there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import msgspec

from fuelrail.pipeline.errors import DatasetError, DatasetExistsError
from fuelrail.pipeline.manifest import MANIFEST_FILE
from fuelrail.sharding.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

WORK_FOLDER: Final = ".fuelrail"


@contextlib.contextmanager
def publish(final: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name ``final`` when the block ends well, synced; else it is removed.

    ``temporary`` must lie on the same file system. The number of this process is added to its name: a worker of a run
    that was killed may live a moment longer than that, and must not take the file of a new run for its own.
    """
    temporary = temporary.with_name(f"{temporary.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def publish_file(final: Path, temporary: Path) -> None:
    """Give a file that was written to ``temporary`` its name, synced."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn what the operating system says while OUT is written into one sentence (DatasetError)."""
    try:
        yield
    except OSError as error:
        # Arrow's errors have the number in their text alone.
        found = re.search(r"\[errno ([0-9]+)\]", str(error))
        number = int(found.group(1)) if error.errno is None and found else error.errno
        what = str(error) if number is None else os.strerror(number)
        hint = "; finished shards are kept, the same command goes on" if number == errno.ENOSPC else ""
        raise DatasetError(f"output folder '{out}' cannot be written: {what}{hint}") from error


class Workspace:
    """The working folder of one run, locked against a second one; use as a context manager.

    The lock is the kernel's (flock), so it ends with the process that holds it, however that ends.
    """

    def __init__(self, out: Path) -> None:
        """Make and lock it; raises DatasetExistsError for a folder with foreign files, DatasetError otherwise."""
        self.out = out
        self.folder = out / WORK_FOLDER
        self._made = _make_folders(self.folder)
        self._lock = self._acquire()
        for leftover in self.temporary.iterdir():
            leftover.unlink()

    @property
    def scan_table(self) -> Path:
        """The scan table."""
        return self.folder / "scan.arrow"

    @property
    def plan_rows(self) -> Path:
        """The plan's rows, ``.npy``."""
        return self.folder / "plan.npy"

    @property
    def selection(self) -> Path:
        """Which rows of the scan table are in the plan, ``.npy``."""
        return self.folder / "selection.npy"

    @property
    def records(self) -> Path:
        """Folder of the shards' records."""
        return self.folder / "records"

    @property
    def temporary(self) -> Path:
        """Folder of files that are being written."""
        return self.folder / "tmp"

    def recipe(self) -> Recipe | None:
        """The recipe that the work in this folder follows; None where none was begun."""
        try:
            return msgspec.json.decode((self.folder / "recipe.json").read_bytes(), type=Recipe)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DatasetExistsError(
                f"'{self.folder}' was left by another version of fuelrail ({error}); remove '{self.out}' or choose "
                "another output folder"
            ) from error

    def begin(self, recipe: Recipe) -> None:
        """Note the recipe, before the first shard."""
        with publish(self.folder / "recipe.json", self.temporary / "recipe.json") as file:
            file.write(msgspec.json.encode(recipe))

    def remove(self) -> None:
        """Remove the working folder."""
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Release the lock; what this run made is removed again if no work was begun."""
        if self.folder.is_dir() and not (self.folder / "recipe.json").exists():
            self.remove()
            for folder in self._made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> int:
        path = self.folder / "lock"
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
                os.close(handle)
                raise DatasetError(
                    f"another run (process {owner}) is writing to '{self.out}': wait for it or stop it first"
                ) from error
            # The holder before may have removed the working folder between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(handle).st_ino:
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
                    self.temporary.mkdir(exist_ok=True)
                    self.records.mkdir(exist_ok=True)
                    return handle
            os.close(handle)
            _make_folders(self.folder)


def check_out(out: Path) -> None:
    """Raise DatasetExistsError where OUT holds files that are neither a dataset's nor a run's."""
    try:
        names = sorted(entry.name for entry in out.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        file = next(path for path in (out, *out.parents) if path.is_file())
        raise DatasetExistsError(f"output folder '{out}' cannot be made: '{file}' is a file") from error
    except OSError as error:
        raise DatasetError(f"output folder '{out}' cannot be read: {error.strerror}") from error
    if names and MANIFEST_FILE not in names and WORK_FOLDER not in names:
        raise DatasetExistsError(
            f"output folder '{out}' is not empty and holds no dataset (there is '{names[0]}'): choose an empty one"
        )


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were made, the deepest first, without ``folder`` itself."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
