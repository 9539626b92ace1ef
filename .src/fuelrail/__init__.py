"""Fuelrail: deterministic multi-camera shards and a loader that keeps every GPU fed.

Importing this package imports neither torch nor any other heavy library; the public names below are
resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fuelrail.loaders import DataLoader

__all__ = ["DataLoader", "__version__"]


def __getattr__(name: str) -> object:
    if name == "DataLoader":
        from fuelrail.loaders import DataLoader

        return DataLoader
    raise AttributeError(f"module 'fuelrail' has no attribute {name!r}")
