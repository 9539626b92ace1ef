"""Which DALI package is installed, and which packages that it requires are not; DALI is not loaded."""

from __future__ import annotations

import importlib.metadata
import re
from typing import NamedTuple

_EXTRAS = {"nvidia-dali-cuda120": "fuelrail[dali]", "nvidia-dali-cuda130": "fuelrail[dali-cu13]"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class InstalledDali(NamedTuple):
    """A DALI package with its version, and the names of the packages that it requires and that are missing."""

    package: str
    version: str
    missing: list[str]

    @property
    def advice(self) -> str:
        """What to do about missing packages."""
        return f"install it with what it requires: pip install '{_EXTRAS[self.package]}'"


def installed_dali() -> InstalledDali | None:
    """Return the first DALI package that is installed; None where there is none."""
    for package in _EXTRAS:
        version = _version(package)
        if version is not None:
            required = importlib.metadata.requires(package) or []
            names = [_NAME.match(text) for text in required if "extra ==" not in text]
            return InstalledDali(package, version, [n[0] for n in names if n is not None and _version(n[0]) is None])
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
