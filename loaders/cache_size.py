"""How large a cache may be: what a user writes, and what the disk has."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.private import open_file

if TYPE_CHECKING:
    from pathlib import Path

_PART_OF_FREE_SPACE: Final = 0.8
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text such as ``500GB``, ``1.5TiB``. Raises ConfigError."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", size.upper())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(
                f"cache_size={size!r} is not a size; write bytes, or a number with KB, MB, GB, TB, GiB, TiB"
            )
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError(f"cache_size={size} must be 1 byte or more")
    return size


def part_of_free_space(base: Path, folder: Path) -> int:
    """The default size [bytes] of the cache in ``folder``: 80 % of what is free on its disk and of what it holds."""
    free = shutil.disk_usage(base).free
    try:
        with os.fdopen(open_file(folder / "table", os.O_RDONLY), "rb") as table:
            here = int.from_bytes(table.read(8), "little")
    except FileNotFoundError:
        here = 0
    return max(1, int((free + here) * _PART_OF_FREE_SPACE))
