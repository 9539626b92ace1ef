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
    "sample_key",
    "__key__",
    "index",
    "idx",
    "id",
    "ids",
    "sample_idx",
    "sample_index",
    "sample_id",
    "image_id",
    "row",
    "key",
    "uid",
)
"""Entries of a batch that are taken for its rows' ids, where no key is given; the first one that
holds integers, texts or bytes."""

_SEED: Final = np.uint64(0x6675656C)
_SECOND: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = np.uint64(0x94D049BB133111EB)


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
    mixed: Hashes = numbers ^ (numbers >> np.uint64(30))
    mixed = mixed * _FIRST_FACTOR
    mixed = mixed ^ (mixed >> np.uint64(27))
    mixed = mixed * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


def unmix(mixed: Hashes) -> Hashes:
    """Return the numbers whose :func:`mix` these are."""
    numbers: Hashes = mixed ^ (mixed >> np.uint64(31)) ^ (mixed >> np.uint64(62))
    numbers = numbers * np.uint64(pow(int(_SECOND_FACTOR), -1, 2**64))
    numbers = numbers ^ (numbers >> np.uint64(27)) ^ (numbers >> np.uint64(54))
    numbers = numbers * np.uint64(pow(int(_FIRST_FACTOR), -1, 2**64))
    originals: Hashes = numbers ^ (numbers >> np.uint64(30)) ^ (numbers >> np.uint64(60))
    return originals


def integer_rows(ids: NDArray[Any]) -> Rows:
    """Return the rows of ids that are integers of at most 64 bits."""
    numbers = ids.astype(np.int64, copy=False).view(np.uint64)
    return _widened("integer", mix(numbers + _SEED))


def text_rows(ids: Sequence[str | bytes]) -> Rows:
    """Return the rows of ids that are texts or bytes."""
    hashes = np.empty((len(ids), 2), np.uint64)
    names = []
    for row, identity in enumerate(ids):
        name = identity.encode(errors="surrogatepass") if isinstance(identity, str) else identity
        digest = xxhash.xxh3_128_intdigest(name, seed=int(_SEED))
        hashes[row] = divmod(digest, 2**64)
        if len(name) > NAME_BYTES:
            half = (NAME_BYTES - 3) // 2
            name = name[:half] + b"..." + name[-half:]
        names.append(name)
    return Rows("text", hashes, np.array(names, f"S{NAME_BYTES}"))


def _widened(kind: str, hashes: Hashes) -> Rows:
    """Return rows without names by the first column of their hashes."""
    columns = np.stack([hashes, mix(hashes + _SECOND)], axis=1)
    names = np.zeros(len(hashes), f"S{NAME_BYTES}")
    return Rows(kind, columns, names)


def row_names(kind: str | None, hashes: Hashes, names: Names) -> list[int | str]:
    """Return the ids of rows as a report shows them: integers, texts, or digests.

    ``hashes``: the first column of theirs. Texts that were not kept are shown as digests.
    """
    if kind == "integer":
        numbers = unmix(hashes) - _SEED
        integers: list[int | str] = numbers.view(np.int64).tolist()
        return integers
    ids: list[int | str] = []
    for name, digest in zip(names.tolist(), hashes.tolist(), strict=True):
        text = shortened(name.decode(errors="replace"))
        ids.append(text or f"digest {digest:016x}")
    return ids


def id_rows(ids: Any) -> Rows:
    """Return the rows of ids; raise ConfigError for what is neither integers, texts nor bytes."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, int | str | bytes | np.generic):
        ids = [ids]
    if isinstance(ids, np.ndarray) and ids.ndim > 1:
        ids = ids.reshape(len(ids), -1)
        has_columns = ids.shape[1] != 1
        ids = list(map(tuple, ids.tolist())) if has_columns else ids[:, 0]
    if isinstance(ids, np.ndarray):
        is_int64 = ids.dtype.kind in "iu" and ids.dtype != np.uint64
        if is_int64:
            return integer_rows(ids.reshape(-1))
    ids = [identity.item() if hasattr(identity, "item") else identity for identity in ids]
    for identity in ids:
        if not isinstance(identity, int | str | bytes | tuple):
            raise ConfigError(
                f"the witness has {shortened(repr(identity))} for a row's id; an id is an integer, "
                "a text, bytes, or a tuple of these: give key=, a function of a batch to its rows' "
                "ids"
            )
    if all(isinstance(identity, int) and -(2**63) <= identity < 2**63 for identity in ids):
        return integer_rows(np.array(ids, np.int64))
    texts = [text if isinstance(text, str | bytes) else str(text) for text in ids]
    return text_rows(texts)


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
        ids: Any = columns.get(name)
        if _is_array(ids):
            dtype = str(ids.dtype)
            is_id = "float" not in dtype and "bool" not in dtype
        else:
            first = ids[0] if isinstance(ids, list | tuple) and ids else ids
            is_id = isinstance(first, str | bytes | tuple) or hasattr(first, "__index__")
        if is_id:
            return id_rows(ids)
    count = count_rows(columns)
    digests = []
    for row in range(count):
        parts = read_row(columns, row, count)
        digests.append(digest_row(parts))
    if None in digests:
        raise ConfigError(
            f"the witness finds neither ids nor tensors in a batch of {type(batch).__name__}: "
            "give key=, a function of a batch to its rows' ids"
        )
    return _widened("content", np.array(digests, np.uint64))


def read_columns(batch: object) -> dict[str, Any]:
    """Return a batch's entries by name, those of nested mappings with a dot between."""
    is_record = hasattr(batch, "__dict__") and not isinstance(batch, Mapping)
    if is_record and not _is_array(batch):
        batch = vars(batch)
    if isinstance(batch, list | tuple) and any(map(_is_array, batch)):
        batch = dict(enumerate(batch))
    if not isinstance(batch, Mapping):
        return {"": batch}
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            for entry, column in read_columns(value).items():
                columns[f"{name}.{entry}"] = column
        else:
            columns[str(name)] = value
    return columns


def count_rows(columns: Mapping[str, Any]) -> int:
    """Return how many rows a batch has, by the first axis of its first array, or by its first
    list; 1 where it is a row itself.
    """
    lists = []
    for value in columns.values():
        if _is_array(value) and value.ndim:
            return len(value)
        if isinstance(value, list | tuple):
            lists.append(value)
    return len(lists[0]) if lists else 1


def read_row(columns: Mapping[str, Any], row: int, count: int) -> dict[str, Any]:
    """Return what entries of ``count`` rows hold of a row: arrays and plain values.

    Of a batch that is a row itself these are all its entries.
    """
    parts = {}
    for name, column in columns.items():
        is_sized = column.ndim > 0 if _is_array(column) else isinstance(column, list | tuple)
        if is_sized and len(column) == count:
            parts[name] = column[row]
    if not parts and count == 1:
        parts = dict(columns)
    for name, part in parts.items():
        if hasattr(part, "detach"):
            tensor = part.detach().cpu()
            if str(tensor.dtype) == "torch.bfloat16":
                tensor = tensor.float()
            parts[name] = tensor.numpy()
    return parts


def digest_row(parts: Mapping[str, Any]) -> int | None:
    """Return a 64-bit digest of a row's arrays, tensors, numbers and texts; None without such."""
    digest = xxhash.xxh3_64(seed=int(_SEED))
    is_empty = True
    for name, part in parts.items():
        if isinstance(part, np.ndarray | np.generic):
            form = f"{part.dtype}{part.shape}".encode()
            content = form + part.tobytes()
        elif isinstance(part, str | int | float | bytes | list | tuple | Mapping):
            content = repr(part).encode(errors="surrogatepass")
        else:
            continue
        digest.update(f"{name}:".encode() + content)
        is_empty = False
    return None if is_empty else digest.intdigest()


def _is_array(value: object) -> bool:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return is_tensor or isinstance(value, np.ndarray)
