"""Which rows a batch holds: an identity for each row, in a form of constant size.

A row's identity is what the loader says of it (a number, a text, bytes), or a digest of its
content.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.text import shortened

Hashes: TypeAlias = NDArray[np.uint64]
Names: TypeAlias = NDArray[np.uint8]
Key: TypeAlias = Callable[[Any], Any]

NAME_BYTES: Final = 64
"""Bytes of a text's name that are kept; the middle of a longer text is left out."""

ID_ENTRIES: Final = (
    *("sample_key", "__key__", "index", "idx", "id", "ids", "sample_idx", "sample_index"),
    *("sample_id", "image_id", "row", "key", "uid"),
)
"""Entries of a batch that are taken for its rows' ids, where no key is given; the first one that
is there."""

_SEED: Final = 0x6675656C
_SECOND: Final = np.uint64(0x9E3779B97F4A7C15)


class Rows(NamedTuple):
    """The rows of one batch.

    Attributes:
        kind: what their identities are: "integer", "text", or "content" for digests of what the
            rows hold.
        hashes: (rows, 2); the first column tells rows apart, the second makes sums 128 bits wide.
        names: (rows, NAME_BYTES), texts in UTF-8, filled up with zeros; (rows, 0) for integers,
            whose hashes can be inverted.
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
    return numbers ^ (numbers >> np.uint64(30)) ^ (numbers >> np.uint64(60))


def integer_rows(ids: NDArray[Any]) -> Rows:
    """Return the rows of ids that are integers of at most 64 bits."""
    numbers = ids.astype(np.int64, copy=False).view(np.uint64)
    first = mix(numbers + np.uint64(_SEED))
    hashes = np.stack([first, mix(first + _SECOND)], axis=1)
    return Rows("integer", hashes, np.empty((len(ids), 0), np.uint8))


def text_rows(ids: Sequence[str | bytes], kind: str = "text") -> Rows:
    """Return the rows of ids that are texts or bytes."""
    hashes = np.empty((len(ids), 2), np.uint64)
    names = np.zeros((len(ids), NAME_BYTES), np.uint8)
    for row, identity in enumerate(ids):
        encoded = identity.encode(errors="surrogatepass") if isinstance(identity, str) else identity
        digest = xxhash.xxh3_128_intdigest(encoded, seed=_SEED)
        hashes[row] = digest >> 64, digest & (2**64 - 1)
        if len(encoded) > NAME_BYTES:
            half = (NAME_BYTES - 3) // 2
            encoded = encoded[:half] + b"..." + encoded[-half:]
        names[row, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    return Rows(kind, hashes, names)


def row_names(kind: str, hashes: Hashes, names: Names) -> list[int | str]:
    """Return the ids of rows as a report shows them: integers, texts, or digests.

    ``hashes``: the first column of theirs. Texts that were not kept are shown as digests.
    """
    if kind == "integer":
        numbers = unmix(hashes) - np.uint64(_SEED)
        return [int(number) for number in numbers.view(np.int64)]
    shown: list[int | str] = []
    for row, digest in enumerate(hashes):
        text = bytes(names[row]).rstrip(b"\0").decode(errors="replace") if names.size else ""
        shown.append(text or f"digest {int(digest):016x}")
    return shown


def read_rows(batch: object, key: Key | None) -> Rows:
    """Return the rows of a batch.

    Args:
        batch: what the loader gave.
        key: gives the ids of a batch's rows, or of a batch that is one row; None: the first of
            `ID_ENTRIES` that the batch has, else a digest of each row's content.

    Raises ConfigError for ids that are neither integers, texts nor bytes.
    """
    if key is None:
        ids = None
        if isinstance(batch, Mapping):
            ids = next((batch[name] for name in ID_ENTRIES if name in batch), None)
        if ids is None:
            digests = [digest_row(batch, row).to_bytes(8, "big").hex() for row in rows_of(batch)]
            return text_rows(digests, "content")
    else:
        ids = key(batch)
    ids = _as_list(ids)
    if len(ids) == 0:
        return integer_rows(np.empty(0, np.int64))
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind in "iu" and ids.dtype != np.uint64:
            return integer_rows(ids)
        ids = ids.tolist()
    if all(isinstance(identity, int) and -(2**63) <= identity < 2**63 for identity in ids):
        return integer_rows(np.array(ids, np.int64))
    if all(isinstance(identity, str | bytes) for identity in ids):
        return text_rows(ids)
    if all(isinstance(identity, int | str | bytes | tuple) for identity in ids):
        return text_rows([str(identity) for identity in ids])
    wrong = next(item for item in ids if not isinstance(item, int | str | bytes | tuple))
    raise ConfigError(
        f"the witness's key gives {shortened(repr(wrong))} for a row; an id is an integer, a "
        "text, bytes, or a tuple of these: give key=, a function of a batch to its rows' ids"
    )


def _as_list(ids: Any) -> Any:
    """Return ids as an array of one axis or a list, without waiting for a device."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, np.ndarray):
        return ids.reshape(-1)
    if isinstance(ids, int | str | bytes | np.integer):
        return [int(ids) if isinstance(ids, np.integer) else ids]
    if isinstance(ids, list | tuple) and ids and hasattr(ids[0], "__array__"):
        return np.array([int(item) for item in ids], np.int64)
    return list(ids)


def entries_of(batch: object) -> Iterator[tuple[str, Any]]:
    """Give the names and values of a batch's entries, those of nested ones with a dot between."""
    if isinstance(batch, Mapping):
        pairs = [(str(name), value) for name, value in batch.items()]
    elif isinstance(batch, list | tuple) and any(map(_is_array, batch)):
        pairs = [(str(place), value) for place, value in enumerate(batch)]
    else:
        yield "", batch
        return
    for name, value in pairs:
        if isinstance(value, Mapping):
            for inner, entry in entries_of(value):
                yield f"{name}.{inner}", entry
        else:
            yield name, value


def rows_of(batch: object) -> range:
    """Return the rows of a batch, by the first axis of its first array, or by its first list."""
    for _, value in entries_of(batch):
        if _is_array(value) and value.ndim:
            return range(len(value))
    for _, value in entries_of(batch):
        if isinstance(value, list | tuple):
            return range(len(value))
    return range(1)


def row_entries(batch: object, row: int) -> Iterator[tuple[str, Any]]:
    """Give the names of a batch's entries and what they hold of one row."""
    count = len(rows_of(batch))
    for name, value in entries_of(batch):
        if _is_array(value) and value.ndim and len(value) == count:
            part = value[row]
            if hasattr(part, "detach"):
                part = part.detach().cpu()
                if str(part.dtype) == "torch.bfloat16":
                    part = part.float()
                part = part.numpy()
            yield name, np.ascontiguousarray(part)
        elif isinstance(value, list | tuple) and len(value) == count:
            yield name, value[row]


def digest_row(batch: object, row: int) -> int:
    """Return a 64-bit digest of what a batch holds of a row: arrays, tensors, numbers, texts."""
    digest = xxhash.xxh3_64(seed=_SEED)
    for name, value in row_entries(batch, row):
        digest.update(name.encode())
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(value.reshape(-1).view(np.uint8).data)
        elif isinstance(value, str | int | float | bool | bytes | type(None)):
            digest.update(repr(value).encode())
    return digest.intdigest()


def _is_array(value: object) -> bool:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return is_tensor or isinstance(value, np.ndarray)
