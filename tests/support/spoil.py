"""What spoils a source on disk: rows of tests of bad input are made of these."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyarrow import feather

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"


def gone(*names: str) -> Callable[[Path], None]:
    """Remove files or folders."""

    def spoil(root: Path) -> None:
        for name in names:
            shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()

    return spoil


def content(name: str, change: bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Give a file another content, or change the one that it has."""

    def spoil(root: Path) -> None:
        path = root / name
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return spoil


def column(name: str, field: str, values: object) -> Callable[[Path], None]:
    """Give a table in Feather or Parquet another column; None takes it out, a function changes it."""

    def spoil(root: Path) -> None:
        path = root / name
        read, write = (
            (feather.read_table, feather.write_feather)
            if path.suffix == ".feather"
            else (pq.read_table, pq.write_table)
        )
        table = read(path)
        index = table.column_names.index(field)
        new = values(table.column(index)) if callable(values) else values
        write(
            table.remove_column(index) if new is None else table.set_column(index, field, new),
            path,
        )

    return spoil
