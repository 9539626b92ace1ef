"""The place of a run's checkpoints: a local folder, or any URL that fsspec serves.

A checkpoint is visible when its manifest is: that is written last, and removed first. In a local folder the manifest
is written into a folder of another name, and one rename makes the whole visible. Object stores have no such rename, so
there the manifest alone is the mark. Every attempt has a folder of its own, so what a killed run left behind can
neither be taken for a checkpoint nor be mixed with the files of another run.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from fuelrail.pipeline.errors import FuelrailError, StateMismatchError
from fuelrail.pipeline.storage.filesystem import READ_BYTES, filesystem, is_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Digests = dict[str, tuple[int, str]]
"""Bytes and digest (xxh3) of files by name."""

VERSION = 1
_MANIFEST, _DAMAGED = "checkpoint.json", "damaged.json"
_PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d{8,})\.[0-9a-f]{8}")


class DamagedError(FuelrailError):
    """A checkpoint whose bytes are not those that were written."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The file ``checkpoint.json``: what is not a tensor, and the digests of all files.

    ``step`` steps were done. ``identity`` says what was trained. ``progress`` holds the states of loader, schedule and
    scaler as plain JSON, and the learning rate.
    """

    step: int
    world_size: int
    identity: dict[str, str]
    progress: dict[str, Any]
    files: Digests


class _Sealed(msgspec.Struct, frozen=True):
    """The file ``checkpoint.json``: ``xxh3`` is the digest of the version and the manifest's bytes."""

    version: int
    xxh3: str
    manifest: msgspec.Raw


class Store:
    """Checkpoints below one folder or URL. Raises ConfigError for a URL that cannot be opened."""

    def __init__(self, place: str) -> None:
        self._is_url = is_url(place)
        root = place if self._is_url else str(Path(place.removeprefix("file://")).absolute())
        self._fs, self._path = filesystem(root if self._is_url else f"file://{root}")
        self._root = root.rstrip("/")
        self.shown = shown_url(self._root)

    def folder(self, step: int, token: str) -> str:
        """Name the folder of an attempt to save the step. ``token``: 8 hexadecimal digits of this run alone."""
        return f"step-{step:08d}.{token}"

    def writer(self, folder: str) -> tuple[FileSystemWriter, Digests]:
        """Make torch's writer for an attempt; the digests are filled while this rank's files are written."""
        if not self._is_url:
            writer = FileSystemWriter(f"{self._root}/{folder}{_PARTIAL}")
        else:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            # An object has no file number to synchronise: torch would synchronise every file system instead.
            writer = FsspecWriter(f"{self._root}/{folder}", sync_files=False)
        create, found = writer.fs.create_stream, Digests()

        @contextmanager
        def create_hashed(path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with create(path, mode) as stream:
                hashed = _HashedStream(stream)
                yield hashed
            # torch writes its metadata under another name first.
            name = PurePosixPath(os.fspath(path)).name.removesuffix(".tmp")
            found[name] = hashed.num_bytes, hashed.hasher.hexdigest()

        writer.fs.create_stream = create_hashed  # type: ignore[method-assign]
        return writer, found

    def reader(self, folder: str) -> FileSystemReader:
        """Make torch's reader of a checkpoint."""
        if not self._is_url:
            return FileSystemReader(f"{self._root}/{folder}")
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(f"{self._root}/{folder}")

    def publish(self, folder: str, manifest: Manifest) -> None:
        """Make a written checkpoint visible, in one step."""
        body = msgspec.json.encode(manifest)
        sealed = msgspec.json.encode(_Sealed(VERSION, _digest(VERSION, body), msgspec.Raw(body)))
        if self._is_url:
            self._fs.pipe_file(f"{self._path}/{folder}/{_MANIFEST}", sealed)
            return
        partial = Path(self._root, folder + _PARTIAL)
        with (partial / _MANIFEST).open("wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        _synchronise(partial)
        partial.rename(partial.with_name(folder))
        _synchronise(partial.parent)

    def complete(self) -> list[str]:
        """The folders of visible checkpoints, newest first."""
        self._fs.invalidate_cache()
        found = [PurePosixPath(path).parent.name for path in self._fs.glob(f"{self._path}/step-*/{_MANIFEST}")]
        return sorted(filter(_NAME.fullmatch, found), key=step_of, reverse=True)

    def read(self, folder: str) -> Manifest:
        """Read a checkpoint's manifest. Raises DamagedError, and StateMismatchError for another version."""
        try:
            sealed = msgspec.json.decode(self._fs.cat_file(f"{self._path}/{folder}/{_MANIFEST}"), type=_Sealed)
        except msgspec.MsgspecError as error:
            raise DamagedError(f"{_MANIFEST} is not a manifest: {error}") from error
        body = bytes(sealed.manifest)
        if _digest(sealed.version, body) != sealed.xxh3:
            raise DamagedError(f"{_MANIFEST} does not match its digest")
        if sealed.version != VERSION:
            raise StateMismatchError(
                f"checkpoint '{self.shown}/{folder}' has version {sealed.version}; this Fuelrail reads version "
                f"{VERSION}: use the Fuelrail that wrote it, or another --checkpoint"
            )
        return msgspec.json.decode(body, type=Manifest)

    def check(self, folder: str, manifest: Manifest, names: Sequence[str]) -> None:
        """Read files of a checkpoint and compare them with the manifest. Raises DamagedError."""
        for name in names:
            size, digest = manifest.files[name]
            hasher, num_bytes = xxhash.xxh3_64(), 0
            try:
                with self._fs.open(f"{self._path}/{folder}/{name}", "rb") as file:
                    while chunk := file.read(READ_BYTES):
                        hasher.update(chunk)
                        num_bytes += len(chunk)
            except FileNotFoundError as error:
                raise DamagedError(f"{name} is missing") from error
            if num_bytes != size:
                raise DamagedError(f"{name} has {num_bytes} bytes, {size} were written")
            if hasher.hexdigest() != digest:
                raise DamagedError(f"{name} does not match its digest")

    def hide(self, folder: str) -> None:
        """Set a damaged checkpoint aside: its files stay, and it is no checkpoint any more."""
        self._fs.mv(f"{self._path}/{folder}/{_MANIFEST}", f"{self._path}/{folder}/{_DAMAGED}")

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints."""
        for folder in self.complete()[keep:]:
            self._fs.rm_file(f"{self._path}/{folder}/{_MANIFEST}")
            self._fs.rm(f"{self._path}/{folder}", recursive=True)

    def clean(self) -> None:
        """Remove what killed runs left: folders that are neither checkpoints nor damaged ones."""
        self._fs.makedirs(self._path, exist_ok=True)
        self._fs.invalidate_cache()
        for path in self._fs.ls(self._path, detail=False):
            name = PurePosixPath(path).name
            if _NAME.fullmatch(name.removesuffix(_PARTIAL)) and (
                name.endswith(_PARTIAL) or not any(self._fs.exists(f"{path}/{mark}") for mark in (_MANIFEST, _DAMAGED))
            ):
                self._fs.rm(path, recursive=True)


def step_of(folder: str) -> int:
    """The step that a folder's name says."""
    found = _NAME.fullmatch(folder)
    assert found is not None, folder
    return int(found[1])


def _digest(version: int, body: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(f"{version}\n".encode() + body)


def _synchronise(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedStream:
    """A stream that counts and hashes what is written."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - a binary file of any file system
        self._stream = stream
        self.hasher, self.num_bytes = xxhash.xxh3_64(), 0

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        self._stream.write(data)
        self.hasher.update(data)
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all that does not write
        return getattr(self._stream, name)
