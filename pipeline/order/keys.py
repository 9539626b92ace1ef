"""Files and lists that name samples: their keys, their clips, and columns beside the keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.limits import NAMES
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]


def read_keys(file: str, keys: pa.ChunkedArray) -> Rows:
    """Return the samples (places in ``keys``, ascending) that a keys file lists.

    Text files have one key a line; empty lines and those that begin with # are skipped.
    ``.parquet`` and ``.csv`` files have a column ``key``. Raises OrderError where the file cannot
    be read, lists nothing, or names unknown keys.
    """
    import pyarrow.compute as pc

    names = listed_names(file)
    samples: Rows = np.flatnonzero(pc.is_in(keys, value_set=names).to_numpy())
    if len(samples) < len(names):
        is_key = pc.is_in(names, value_set=keys.combine_chunks())
        missing = names.filter(pc.invert(is_key))
        raise OrderError(
            f"keys file '{file}' names {len(missing)} of {len(names)} keys that are not in "
            f"the split, such as {missing[0].as_py()!r}"
        )
    return samples


def listed_names(file: str) -> pa.Array:
    """Return the names in a keys file, each once (see `read_keys`); raise OrderError where it
    cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if Path(file).suffix in {".parquet", ".csv"}:
        table = read_columns(file, ("key",))
        return table["key"].cast(pa.string()).unique()
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(NAMES.maximum + 1)
    except (OSError, ValueError) as error:
        raise OrderError(f"keys file '{file}' cannot be read: {error}") from error
    reason = NAMES.broken(len(data))
    if reason is not None:
        raise OrderError(f"keys file '{file}' {reason}")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # As Arrow's texts: a list of Python's would take twenty times the bytes of short lines.
    offsets = np.array([0, len(data)], np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    text = pa.Array.from_buffers(pa.large_string(), 1, buffers)
    try:
        text.validate(full=True)
    except pa.ArrowInvalid as error:
        raise OrderError(f"keys file '{file}' cannot be read: it is not text in UTF-8") from error
    lines = pc.split_pattern(text, "\n").flatten()
    names = pc.utf8_trim_whitespace(lines)
    is_empty = pc.equal(names, "")
    is_comment = pc.starts_with(names, "#")
    is_name = pc.invert(pc.or_(is_empty, is_comment))
    return names.filter(is_name).unique().cast(pa.string())


def read_columns(file: str, names: Sequence[str]) -> pa.Table:
    """Return some columns of a ``.parquet`` or ``.csv`` file; raise OrderError where it cannot
    be read or lacks one.
    """
    import pyarrow as pa

    from fuelrail.pipeline.storage.named_tables import (
        SUFFIXES,
        TableError,
        read_named_columns,
    )

    if Path(file).suffix not in SUFFIXES:
        raise OrderError(f"'{file}' must be one of {', '.join(SUFFIXES)}")
    try:
        return read_named_columns(file, names)
    except TableError as error:
        raise OrderError(f"'{file}': {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise OrderError(f"'{file}' cannot be read: {error}") from error


def named_rows(names: Collection[str], table: pa.Table) -> tuple[Rows, set[str]]:
    """Return the samples whose key, or whose clip, is among ``names``, ascending; and the names
    that are of none.

    ``table`` has what is compared: ``key``, ``clip_id`` or both.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    missing = set(names)
    values = pa.array(sorted(missing), pa.string())
    rows: Rows = np.zeros(0, np.int64)
    for column in table.columns:
        texts = column.cast(pa.string())
        is_named = pc.is_in(texts, value_set=values)
        column_rows = np.flatnonzero(is_named.to_numpy())
        rows = np.union1d(rows, column_rows)
        matches = texts.filter(is_named).unique()
        missing -= set(matches.to_pylist())
    return rows, missing


def unknown_names(names: Collection[str]) -> OrderError:
    """Return the error for names that are neither keys nor clips."""
    return OrderError(
        f"{len(names)} names are neither a key nor a clip of the samples there are, such as "
        f"{shortened(min(names))!r}"
    )
