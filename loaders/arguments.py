"""What the loader's arguments may be."""

from __future__ import annotations

from fuelrail.pipeline.errors import ConfigError


def at_least_1(name: str, value: int) -> None:
    """Raise ConfigError for a count below 1."""
    if value < 1:
        raise ConfigError(f"{name}={value} must be 1 or more")
