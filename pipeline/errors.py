"""Every way in which a dataset, a configuration or a run can be wrong.

::

    FuelrailError
    ├── ConfigError            (ValueError) an option, a config file or an argument
    ├── OrderError             (ValueError) an order that cannot be built
    ├── WorldError             (ValueError) rank, world size and batch do not fit together
    ├── SourceError            the data to be sharded: a missing table, file, calibration
    ├── DatasetError           a Fuelrail dataset folder
    │   ├── DatasetNotReadyError   no dataset.json: never finished
    │   ├── DatasetExistsError     the folder holds another dataset
    │   ├── ManifestError          dataset.json is malformed or of another version
    │   └── IndexFileError         index.arrow is malformed, cut or does not fit the manifest
    ├── ShardError             one shard file: carries shard, offset, key
    │   ├── TarFormatError         bytes that are not the tar they should be
    │   ├── FrameError             a zstd frame, or the table of them, that is not what it should be
    │   ├── TruncatedShardError    the file ends before the span does
    │   ├── ChecksumError          stored bytes differ from the digest in the index
    │   └── StorageError           storage that refuses, has lost the shard, or does not answer
    ├── MemberError            one member of one sample: carries key and member
    │   ├── CodecError             stored bytes that do not decode
    │   ├── MemberTooLargeError    over the size cap
    │   ├── SchemaError            decoded bytes that do not match the schema
    │   └── ImageError             an encoded image that is refused or broken
    ├── DecoderError           a decoder or its device that fails, or wrong pixels without an error
    ├── BadSamplesError        more bad samples than the policy allows
    ├── LedgerError            a ledger of a run that was changed, or cannot be written
    ├── WitnessError           rows of an epoch that came twice, never, or on the wrong rank
    ├── StateMismatchError     loader state of another dataset, order, version or augmentation
    └── StageError             an exception in a loader stage, with its origin
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fuelrail.pipeline.text import message as fit_to_print

_OWN_EXTRAS: Final = re.compile(r"fuelrail\[([\w,-]+)\]")
_EXTRAS: Final = {
    "cv2": "fuelrail[opencv]",
    "rich": "fuelrail[bench]",
    "torch": "fuelrail[torch]",
    "webdataset": "fuelrail[webdataset]",
}
"""The extras that bring what is imported in many places."""


class FuelrailError(Exception):
    """Base of all errors raised on purpose by Fuelrail. Its text is one sentence for the user.

    The text may quote what a dataset holds, and goes to terminals and logs: control characters in
    it are escaped, and its length is limited.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(fit_to_print(str(text)))


class ConfigError(FuelrailError, ValueError):
    """An option, argument or config entry that is unknown, of the wrong type or out of range."""


def how_to_install(*requirements: str) -> str:
    """Return the command that installs requirements, such as ``fuelrail[ros]`` or ``pylance``.

    Fuelrail is not on the package index, where anybody may take its name: its extras come from a
    checkout.
    """
    extras: list[str] = []
    packages: list[str] = []
    for requirement in requirements:
        extra_match = _OWN_EXTRAS.fullmatch(requirement)
        if extra_match is None:
            packages.append(repr(requirement))
        else:
            extras += [extra for extra in extra_match[1].split(",") if extra not in extras]
    commands = []
    if extras:
        commands.append(f"pip install -e '.[{','.join(extras)}]' in a checkout of Fuelrail")
    if packages:
        commands.append(f"pip install {' '.join(packages)}")
    return ", and ".join(commands)


@contextmanager
def needs(
    feature: str,
    install: str | None = None,
    *,
    extra: str | None = None,
) -> Iterator[None]:
    """Raise ConfigError where an import in the block fails: ``feature`` needs the package.

    ``install`` brings it. Without ``install`` the error is about torch, OpenCV, rich or webdataset,
    which ``extra`` brings or an extra of their own; that of another import stays as it is.
    """
    try:
        yield
    except ImportError as error:
        if install is None:
            own_extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if own_extra is None:
                raise
            install = extra or own_extra
        lacks = f"{feature} needs {error.name}, which is not installed or does not load"
        raise ConfigError(f"{lacks}: {how_to_install(install)} ({error})") from error


class OrderError(FuelrailError, ValueError):
    """An order that cannot be built from the given specification."""


class WorldError(FuelrailError, ValueError):
    """Rank, world size and batch sizes that do not fit together."""


class SourceError(FuelrailError):
    """Source data that is missing, malformed or inconsistent.

    ``faults``: several of them, which print a line each.
    """

    def __init__(self, text: str = "", faults: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.faults = tuple(map(fit_to_print, faults))

    def __str__(self) -> str:
        return "\n  ".join((super().__str__(), *self.faults))


class DatasetError(FuelrailError):
    """A Fuelrail dataset folder that cannot be used as asked."""


class DatasetNotReadyError(DatasetError):
    """The folder has no ``dataset.json``: sharding has not finished there."""


class DatasetExistsError(DatasetError):
    """The output folder already holds another dataset, or files that are not ours."""


class ManifestError(DatasetError):
    """``dataset.json`` is malformed, of another version, or contradicts the folder."""


class IndexFileError(DatasetError):
    """``index.arrow`` is malformed, cut short, or does not fit the manifest."""


class ShardError(FuelrailError):
    """Something wrong inside one shard file.

    Attributes: ``message`` (without the address), ``shard`` (file name or None), ``offset`` (bytes
    from its start or None), ``key`` (sample key or None).
    """

    def __init__(
        self,
        message: str,
        *,
        shard: str | None = None,
        offset: int | None = None,
        key: str | None = None,
    ) -> None:
        self.message = message
        self.shard = shard
        self.offset = offset
        self.key = key
        address = [
            f"{label} {value}"
            for label, value in (
                ("shard", shard),
                ("offset", offset),
                ("sample", key),
            )
            if value is not None
        ]
        super().__init__(f"{message} ({', '.join(address)})" if address else message)


class TarFormatError(ShardError):
    """Bytes that are not the normalised tar member they should be."""


class FrameError(ShardError):
    """A zstd frame of a ``.tar.zst`` shard that does not decode to its span, or a seek table
    that does not fit.
    """


class TruncatedShardError(ShardError):
    """The shard ends before the span that the index promises."""


class ChecksumError(ShardError):
    """Stored bytes differ from the digest in the index."""


class StorageError(ShardError):
    """Bytes that storage would not give: refused, missing, unreachable until the deadline.

    It says nothing about the sample itself, so it is never treated as a bad sample.
    """


class MemberError(FuelrailError):
    """Something wrong with one member of one sample.

    Attributes: ``key`` (sample key or None), ``member`` (field name such as ``cam_front.jpg`` or
    None).
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        member: str | None = None,
    ) -> None:
        self.message = message
        self.key = key
        self.member = member
        address = ".".join(part for part in (key, member) if part)
        super().__init__(f"{address}: {message}" if address else message)


class CodecError(MemberError):
    """Stored bytes that the member's codec cannot decode."""


class MemberTooLargeError(MemberError):
    """A member over the size cap, as stored or as it would decode."""


class SchemaError(MemberError):
    """Decoded bytes that do not match the sample schema."""


class ImageError(MemberError):
    """An encoded image that is refused (format, size limits) or broken."""


class DecoderError(FuelrailError):
    """A decoder that fails for any image: no memory, a CUDA error, or wrong pixels without an
    error.

    It says nothing about the sample, so it is never treated as a bad sample.
    """


class BadSamplesError(FuelrailError):
    """More bad samples than ``max_bad`` allows; ``__cause__`` is the last one's error."""


class LedgerError(FuelrailError):
    """A ledger that is not whole, or of another run; ``record`` is the number of the first wrong
    record, or None.
    """

    def __init__(self, text: str = "", record: int | None = None) -> None:
        super().__init__(text)
        self.record = record


class WitnessError(FuelrailError):
    """An epoch whose rows are not those that the ranks should have seen."""


class StateMismatchError(FuelrailError):
    """Loader state of another dataset, order, version or augmentation; the text shows both
    sides.
    """


class StageError(FuelrailError):
    """An exception in a loader stage; ``__cause__`` is the original, the text names stage and
    sample.
    """
