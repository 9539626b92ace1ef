"""Which rows a batch holds: an identity for each row, in a form of constant size.

A row's identity is what the loader says of it (a number, a text, bytes), or a digest of its
content.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.text import shortened

Hashes: TypeAlias = NDArray[np.uint64]
Names: TypeAlias = NDArray[np.bytes_]
Key: TypeAlias = Callable[[Any], Any]

NAME_BYTES: Final = 64
"""Bytes of a text's name that are kept; the middle of a longer text is left out."""

ID_ENTRIES: Final = (
    *(
        "sample_key",
        "__key__",
        "index",
        "idx",
        "id",
        "ids",
        "sample_idx",
        "sample_index",
    ),
    *("sample_id", "image_id", "row", "key", "uid"),
)
"""Entries of a batch that are taken for its rows' ids, where no key is given; the first one that
holds integers, texts or bytes."""

_SEED: Final = 0x6675656C
_SECOND: Final = np.uint64(0x9E3779B97F4A7C15)


class Rows(NamedTuple):
    """The rows of one batch.

    Attributes:
        kind: what their identities are: "integer", "text", or "content" for digests of what the
            rows hold.
        hashes: (rows, 2); the first column tells rows apart, the second makes sums 128 bits wide.
        names: (rows,), texts in UTF-8, at most `NAME_BYTES`; empty for other kinds. Integers are
            had from their hashes.
    """

    kind: str
    hashes: Hashes
    names: Names


def mix(numbers: Hashes) -> Hashes:
    """Return a bijection of 64-bit numbers that spreads their bits.

    It is the finaliser "Mix13" of Stafford, which splitmix64 uses (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, 2014).
    """
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: Hashes = mixed ^ (mixed >> np.uint64(31))
    return last


def unmix(mixed: Hashes) -> Hashes:
    """Return the numbers whose :func:`mix` these are."""
    numbers = mixed ^ (mixed >> np.uint64(31)) ^ (mixed >> np.uint64(62))
    numbers = numbers * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    numbers = numbers ^ (numbers >> np.uint64(27)) ^ (numbers >> np.uint64(54))
    numbers = numbers * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    first: Hashes = numbers ^ (numbers >> np.uint64(30)) ^ (numbers >> np.uint64(60))
    return first


def integer_rows(ids: NDArray[Any]) -> Rows:
    """Return the rows of ids that are integers of at most 64 bits."""
    numbers = ids.astype(np.int64, copy=False).view(np.uint64)
    first = mix(numbers + np.uint64(_SEED))
    hashes = np.stack([first, mix(first + _SECOND)], axis=1)
    return Rows("integer", hashes, np.zeros(len(ids), f"S{NAME_BYTES}"))


def text_rows(ids: Sequence[str | bytes]) -> Rows:
    """Return the rows of ids that are texts or bytes."""
    hashes = np.empty((len(ids), 2), np.uint64)
    names = []
    for row, identity in enumerate(ids):
        encoded = identity.encode(errors="surrogatepass") if isinstance(identity, str) else identity
        digest = xxhash.xxh3_128_intdigest(encoded, seed=_SEED)
        hashes[row] = digest >> 64, digest & (2**64 - 1)
        if len(encoded) > NAME_BYTES:
            half = (NAME_BYTES - 3) // 2
            encoded = encoded[:half] + b"..." + encoded[-half:]
        names.append(encoded)
    return Rows("text", hashes, np.array(names, f"S{NAME_BYTES}"))


def row_names(kind: str | None, hashes: Hashes, names: Names) -> list[int | str]:
    """Return the ids of rows as a report shows them: integers, texts, or digests.

    ``hashes``: the first column of theirs. Texts that were not kept are shown as digests.
    """
    if kind == "integer":
        return [int(number) for number in (unmix(hashes) - np.uint64(_SEED)).view(np.int64)]
    return [
        shortened(bytes(name).decode(errors="replace")) or f"digest {int(digest):016x}"
        for digest, name in zip(hashes, names, strict=True)
    ]


def id_rows(ids: Any) -> Rows:
    """Return the rows of ids; raise ConfigError for what is neither integers, texts nor bytes."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, int | str | bytes | np.generic):
        ids = [ids]
    if isinstance(ids, np.ndarray) and ids.ndim > 1:
        rows = ids.reshape(len(ids), -1)
        ids = rows[:, 0] if rows.shape[1] == 1 else [tuple(row) for row in rows.tolist()]
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.dtype != np.uint64:
        return integer_rows(ids.reshape(-1))
    ids = [item.item() if hasattr(item, "item") else item for item in ids]
    wrong = [item for item in ids if not isinstance(item, int | str | bytes | tuple)]
    if wrong:
        raise ConfigError(
            f"the witness has {shortened(repr(wrong[0]))} for a row's id; an id is an integer, a "
            "text, bytes, or a tuple of these: give key=, a function of a batch to its rows' ids"
        )
    if all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in ids):
        return integer_rows(np.array(ids, np.int64))
    return text_rows([item if isinstance(item, str | bytes) else str(item) for item in ids])


def read_rows(batch: object, key: Key | None) -> Rows:
    """Return the rows of a batch.

    Args:
        batch: what the loader gave.
        key: gives the ids of a batch's rows, or of a batch that is one row; None: the first of
            `ID_ENTRIES` that the batch has, else a digest of each row's content.

    Raises ConfigError for ids that are neither integers, texts nor bytes, and for a batch without
    ids or content.
    """
    if key is not None:
        return id_rows(key(batch))
    columns = read_columns(batch)
    for name in ID_ENTRIES:
        if name in columns and _may_be_ids(columns[name]):
            return id_rows(columns[name])
    count = count_rows(columns)
    digests = [digest_row(columns, row, count) for row in range(count)]
    if None in digests:
        raise ConfigError(
            f"the witness finds neither ids nor tensors in a batch of {type(batch).__name__}: "
            "give key=, a function of a batch to its rows' ids"
        )
    hashes = np.array(digests, np.uint64).reshape(-1, 1)
    hashes = np.concatenate([hashes, mix(hashes + _SECOND)], axis=1)
    return Rows("content", hashes, np.zeros(len(digests), f"S{NAME_BYTES}"))


def read_columns(batch: object) -> dict[str, Any]:
    """Return a batch's entries by name, those of nested mappings with a dot between."""
    if not isinstance(batch, Mapping) and not _is_array(batch) and hasattr(batch, "__dict__"):
        batch = vars(batch)
    if isinstance(batch, list | tuple) and any(_is_array(value) for value in batch):
        batch = dict(enumerate(batch))
    if not isinstance(batch, Mapping):
        return {"": batch}
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        inner = read_columns(value) if isinstance(value, Mapping) else {"": value}
        columns |= {f"{name}.{entry}".rstrip("."): column for entry, column in inner.items()}
    return columns


def count_rows(columns: Mapping[str, Any]) -> int:
    """Return how many rows a batch has, by the first axis of its first array, or by its first
    list; 1 where it is a row itself.
    """
    arrays = [value for value in columns.values() if _is_array(value) and value.ndim]
    lists = [value for value in columns.values() if isinstance(value, list | tuple)]
    return len((arrays or lists or [[None]])[0])


def read_row(columns: Mapping[str, Any], row: int, count: int) -> dict[str, Any]:
    """Return what entries of ``count`` rows hold of a row: arrays and plain values.

    Of a batch that is a row itself these are all its entries.
    """
    parts = {}
    for name, value in columns.items():
        is_sized = value.ndim > 0 if _is_array(value) else isinstance(value, list | tuple)
        if is_sized and len(value) == count:
            parts[name] = value[row]
    if not parts and count == 1:
        parts = dict(columns)
    for name, part in parts.items():
        if hasattr(part, "detach"):
            part = part.detach().cpu()
            parts[name] = (part.float() if str(part.dtype) == "torch.bfloat16" else part).numpy()
    return parts


def digest_row(columns: Mapping[str, Any], row: int, count: int) -> int | None:
    """Return a 64-bit digest of a row's arrays, tensors, numbers and texts; None without such."""
    digest = xxhash.xxh3_64(seed=_SEED)
    is_empty = True
    for name, value in read_row(columns, row, count).items():
        if isinstance(value, np.ndarray | np.generic):
            content = f"{value.dtype}{value.shape}".encode() + value.tobytes()
        elif isinstance(value, str | int | float | bytes | list | tuple | Mapping):
            content = repr(value).encode(errors="surrogatepass")
        else:
            continue
        digest.update(f"{name}:".encode() + content)
        is_empty = False
    return None if is_empty else digest.intdigest()


def _may_be_ids(value: Any) -> bool:
    """Return whether an entry may hold ids: integers, texts or bytes."""
    if _is_array(value):
        return not str(value.dtype).removeprefix("torch.").startswith(("float", "bfloat", "bool"))
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, int | str | bytes | tuple | np.integer) or hasattr(first, "__index__")


def _is_array(value: object) -> bool:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return is_tensor or isinstance(value, np.ndarray)
