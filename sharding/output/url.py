"""A dataset written to a URL that fsspec knows, ``s3://bucket/prefix`` above all: no renames, no
half-written objects.

An object store shows an object whole or not at all, so nothing needs a temporary name: a file is a
multipart upload that is completed after its last byte and aborted when anything fails. Partial
uploads of a killed run are aborted by the next one, under its own prefix only. A finished shard is
kept if its size and ETag are those stored after its upload; without them (the run was killed in
between, or the store has no ETags) its bytes are read and checked against their SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from fuelrail.pipeline.errors import DatasetError, FuelrailError
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.storage.filesystem import (
    default_cache_folder,
    filesystem,
    shown_url,
    stated_version,
)
from fuelrail.pipeline.storage.retry import fault_of

PART_BYTES: Final = 32 << 20
_COPY_BYTES: Final = 8 << 20


class UrlOutput:
    """A prefix of an object store.

    Credentials and endpoints come by the library's own means, as for reading.
    """

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self.shown = shown_url(self.location)
        self.fs, self._root = filesystem(self.location)
        # Its files are put or completed when they are closed.
        self._is_s3 = hasattr(self.fs, "call_s3")
        self.work = (
            default_cache_folder()
            / "sharding"
            / hashlib.sha256(self.location.encode()).hexdigest()[:16]
        )

    def path(self, name: str) -> str:
        """Return the path of a file in the file system."""
        return f"{self._root}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """Return the names under the prefix, or under a folder there."""
        root = self.path(folder).rstrip("/")
        with self._reading():
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(root, detail=False)
            except FileNotFoundError:
                return []
        names = set()
        for path in paths:
            below = str(path).rstrip("/").removeprefix(root).strip("/")
            names.add(below.partition("/")[0])
        return sorted(names - {""})

    def read(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """Return a small object's bytes, or the first ones of an object."""
        with self._reading():
            try:
                data: bytes = self.fs.cat_file(self.path(name), end=num_bytes)
            except FileNotFoundError:
                return None
        return data

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[BinaryIO]:
        """Yield a multipart upload and complete it at the end; put what fits into one part at
        once.
        """
        file = self.fs.open(
            self.path(name),
            "wb",
            autocommit=self._is_s3,
            block_size=PART_BYTES,
        )
        try:
            yield file
            file.close()
            if not self._is_s3:
                file.commit()
        except BaseException:
            # close() would upload the rest of a file that is not wanted any more.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):  # a file in memory uploads nothing
                file.closed = True
            raise

    def publish_file(self, name: str, file: Path) -> None:
        """Upload it."""
        with file.open("rb") as source, self.publish(name) as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
        file.unlink()

    def size(self, name: str) -> int | None:
        """Return the size of an object."""
        info = self._info(name)
        if info is None:
            return None
        return int(info["size"])

    def holds(self, name: str, num_bytes: int, sha256: str) -> bool:
        """Return whether an object exists with this size and SHA-256; reads it."""
        if self.size(name) != num_bytes:
            return False
        digest = hashlib.sha256()
        with (
            self._reading(),
            self.fs.open(
                self.path(name),
                "rb",
                block_size=_COPY_BYTES,
                cache_type="readahead",
            ) as file,
        ):
            while data := file.read(_COPY_BYTES):
                digest.update(data)
        return digest.hexdigest() == sha256

    def version_tag(self, name: str) -> str:
        """Return size and ETag of an object."""
        info = self._info(name) or {}
        stated = stated_version(info)
        return f"{info['size']} {stated}" if stated else ""

    def remove(self, name: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_work(self) -> None:
        """Remove the objects under ``.fuelrail/``, and the working folder here."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            self.fs.rm(self.path(WORK_FOLDER), recursive=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def fetch(self, name: str, file: Path) -> None:
        """Bring an object into a local file."""
        with self._reading():
            self.fs.get_file(self.path(name), str(file))

    def abort_uploads(self) -> None:
        """Abort unfinished uploads under this prefix; to be called under the lock."""
        if not self._is_s3:
            return  # other stores delete them automatically
        bucket, _, prefix = self._root.partition("/")
        query: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        while True:
            page = self.fs.call_s3("list_multipart_uploads", **query)
            for upload in page.get("Uploads", ()):
                with contextlib.suppress(FileNotFoundError):  # completed or aborted in this moment
                    self.fs.call_s3(
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )
            if not page.get("IsTruncated"):
                return
            query |= {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    @contextlib.contextmanager
    def writing(self, reused: str = "finished shards") -> Iterator[None]:
        """Say which URL cannot be written, and why."""
        try:
            yield
        except (FuelrailError, KeyboardInterrupt, GeneratorExit):
            raise
        except Exception as error:
            fault = fault_of(error)
            hint = {
                "missing": "the bucket is not there",
                "refused": fault.advice,
                "invalid": "the store refused it",
            }.get(
                fault.kind,
                f"{reused} are kept; run the same command again to resume",
            )
            raise DatasetError(
                f"output '{self.shown}' cannot be written: {hint} ({fault.text})"
            ) from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (
            FuelrailError,
            KeyboardInterrupt,
            GeneratorExit,
            FileNotFoundError,
        ):
            raise
        except Exception as error:
            fault = fault_of(error)
            hint = f": {fault.advice}" if fault.kind == "refused" else ""
            raise DatasetError(
                f"output '{self.shown}' cannot be read{hint} ({fault.text})"
            ) from error

    def _info(self, name: str) -> dict[str, Any] | None:
        with self._reading():
            self.fs.invalidate_cache()
            try:
                info: dict[str, Any] = self.fs.info(self.path(name))
            except FileNotFoundError:
                return None
        return info
