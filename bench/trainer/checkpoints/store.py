"""The place of a run's checkpoints: a local folder, or any URL that fsspec serves.

A checkpoint is visible when its manifest is: that is written last, in a local folder by a rename,
and removed first. Every attempt has a folder of its own, so what a killed run left behind can
neither be taken for a checkpoint nor be mixed with the files of another run.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
import xxhash

from fuelrail.pipeline.errors import FuelrailError, StateMismatchError
from fuelrail.pipeline.limits import UNTYPED
from fuelrail.pipeline.settings import NotNegative, Positive, explain
from fuelrail.pipeline.storage.files import published, sync_folder
from fuelrail.pipeline.storage.filesystem import filesystem, is_url, shown_url
from fuelrail.pipeline.text import shortened

try:
    from torch.distributed.checkpoint.fsspec_filesystem import (
        FsspecReader,
        FsspecWriter,
    )
except ModuleNotFoundError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import (
        FsspecReader,
        FsspecWriter,
    )

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

VERSION = 1
_MANIFEST = "checkpoint.json"
_DAMAGED = "damaged.json"
_TENSORS = ".metadata"
_FILE_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,255}")
_NAME = re.compile(r"step-\d{8,}\.[0-9a-f]{8}")


class DamagedError(FuelrailError):
    """A checkpoint whose bytes are not those that were written."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The states of loader, schedule and scaler, as plain JSON."""

    loader: dict[str, Any]
    schedule: NotNegative
    scaler: dict[str, int | float]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor.

    ``step`` steps were done. ``identity`` says what was trained. ``files`` holds the number of
    bytes and the digest (xxh3) of each file.
    """

    step: NotNegative
    world_size: Positive
    identity: dict[str, str]
    progress: RunState
    files: dict[str, tuple[int, str]]


class _Sealed(msgspec.Struct, frozen=True):
    """The file ``checkpoint.json``: ``xxh3`` is the digest of the version and the manifest's
    bytes.
    """

    version: int
    xxh3: str
    manifest: msgspec.Raw


class Store:
    """Checkpoints below one folder or URL. Raises ConfigError for a URL that cannot be opened."""

    def __init__(self, place: str) -> None:
        self._is_url = is_url(place)
        root = place
        if not self._is_url:
            folder = Path(place.removeprefix("file://"))
            root = f"file://{folder.absolute()}"
        self._fs, self._path = filesystem(root)
        self._root = root.rstrip("/")
        self.shown = shown_url(self._root.removeprefix("file://"))

    def folder(self, step: int, token: str) -> str:
        """Name the folder of an attempt to save the step.

        ``token``: 8 hexadecimal digits of this run alone.
        """
        return f"step-{step:08d}.{token}"

    def writer(self, folder: str) -> FsspecWriter:
        """Make torch's writer for an attempt."""
        # An object has no file number to synchronise: torch would synchronise every file system
        # instead.
        return FsspecWriter(f"{self._root}/{folder}", sync_files=not self._is_url)

    def reader(self, folder: str) -> FsspecReader:
        """Make torch's reader of a checkpoint."""
        return FsspecReader(f"{self._root}/{folder}")

    def digests(self, folder: str, share: slice) -> dict[str, tuple[int, str]]:
        """Read a share of the files of an attempt, in order; return bytes and digest of each by
        name.
        """
        self._fs.invalidate_cache()
        paths = self._fs.ls(f"{self._path}/{folder}", detail=False)
        names = sorted(PurePosixPath(path).name for path in paths)
        return {name: self._digest_of(folder, name) for name in names[share]}

    def _digest_of(self, folder: str, name: str) -> tuple[int, str]:
        """Return the number of bytes of a file and their digest."""
        path, num_bytes = self._regular(folder, name)
        with self._fs.open(path, "rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return num_bytes, digest.hexdigest()

    def _regular(self, folder: str, name: str) -> tuple[str, int]:
        """Return a file's path and bytes; raises DamagedError where none is.

        To open a FIFO would wait for ever.
        """
        path = f"{self._path}/{folder}/{name}"
        try:
            info = self._fs.info(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.errno == errno.ELOOP:
                raise DamagedError(f"{name} is missing") from error
            raise
        if info["type"] == "directory":
            raise DamagedError(f"{name} is a folder, not a file")
        if info["type"] != "file":
            raise DamagedError(f"{name} is not a regular file")
        return path, info["size"]

    def publish(self, folder: str, manifest: Manifest) -> None:
        """Make a written checkpoint visible, in one step."""
        body = msgspec.json.encode(manifest)
        sealed = _Sealed(
            version=VERSION,
            xxh3=_digest(VERSION, body),
            manifest=msgspec.Raw(body),
        )
        data = msgspec.json.encode(sealed)
        path = f"{self._path}/{folder}/{_MANIFEST}"
        if self._is_url:
            self._fs.pipe_file(path, data)
        else:
            sync_folder(Path(self._path))
            with published(Path(path)) as file:
                file.write(data)

    def complete(self) -> list[str]:
        """Return the folders of visible checkpoints, newest first."""
        self._fs.invalidate_cache()
        paths = self._fs.glob(f"{self._path}/step-*/{_MANIFEST}")
        folders = [PurePosixPath(path).parent.name for path in paths]
        # A step of more digits is a longer name.
        return sorted(
            filter(_NAME.fullmatch, folders),
            key=lambda name: (len(name), name),
            reverse=True,
        )

    def read(self, folder: str, share: slice = slice(None)) -> Manifest:
        """Read a checkpoint's manifest, and compare a share of its files, in order, with it.

        Raises DamagedError, and StateMismatchError for another version.
        """
        path, num_bytes = self._regular(folder, _MANIFEST)
        text = UNTYPED.broken(num_bytes)
        if text is not None:
            raise DamagedError(f"{_MANIFEST} {text}")
        sealed = _decode(self._fs.cat_file(path), _Sealed)
        body = bytes(sealed.manifest)
        if _digest(sealed.version, body) != sealed.xxh3:
            raise DamagedError(f"{_MANIFEST} does not match its digest")
        if sealed.version != VERSION:
            raise StateMismatchError(
                f"checkpoint '{self.shown}/{folder}' has version {sealed.version}; this "
                f"Fuelrail reads version {VERSION}: use the Fuelrail that wrote it, or "
                "another --checkpoint"
            )
        manifest = _decode(body, Manifest)
        for name in manifest.files:
            if _FILE_NAME.fullmatch(name) is None or not name.strip("."):
                raise DamagedError(f"{_MANIFEST} names '{shortened(name)}', which is no plain name")
        if _TENSORS not in manifest.files:
            raise DamagedError(
                f"{_MANIFEST} does not name {_TENSORS}, torch's table of the tensors"
            )
        if not folder.startswith(self.folder(manifest.step, "")):
            raise DamagedError(f"{_MANIFEST} is of step {manifest.step}")
        for name in sorted(manifest.files)[share]:
            num_bytes, digest = manifest.files[name]
            _, stored_bytes = self._regular(folder, name)
            is_whole = stored_bytes == num_bytes
            if is_whole:
                _, stored_digest = self._digest_of(folder, name)
                is_whole = stored_digest == digest
            if not is_whole:
                raise DamagedError(
                    f"{name} does not match its digest; of {num_bytes} bytes it has {stored_bytes}"
                )
        return manifest

    def hide(self, folder: str) -> None:
        """Set a damaged checkpoint aside: its files stay, and it is no longer a checkpoint."""
        self._fs.mv(
            f"{self._path}/{folder}/{_MANIFEST}",
            f"{self._path}/{folder}/{_DAMAGED}",
        )

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints."""
        for folder in self.complete()[keep:]:
            self._fs.rm_file(f"{self._path}/{folder}/{_MANIFEST}")
            self._fs.rm(f"{self._path}/{folder}", recursive=True)

    def clean(self) -> None:
        """Remove what killed runs left, with a warning: folders that are neither checkpoints nor
        damaged ones.
        """
        self._fs.makedirs(self._path, exist_ok=True)
        self._fs.invalidate_cache()
        for path in self._fs.ls(self._path, detail=False):
            name = PurePosixPath(path).name
            if not _NAME.fullmatch(name):
                continue
            marks = (f"{path}/{_MANIFEST}", f"{path}/{_DAMAGED}")
            if not any(self._fs.exists(mark) for mark in marks):
                _LOG.warning(
                    "'%s/%s' has no %s: its save did not finish; it is removed",
                    self.shown,
                    name,
                    _MANIFEST,
                )
                self._fs.rm(path, recursive=True)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = explain(error, data, kind)
        raise DamagedError(f"{_MANIFEST} is not a manifest: {fault}") from error


def _digest(version: int, body: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(f"{version}\n".encode() + body)
