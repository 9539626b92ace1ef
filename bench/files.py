"""Report files: complete under their name, or not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def publish(path: Path, data: bytes) -> None:
    """Write a file by rename; raises ConfigError where that cannot be done."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"report '{path}' cannot be written: {error.strerror}") from error


def publish_json(path: Path, value: Any) -> None:  # noqa: ANN401 - whatever msgspec can encode
    """Write a value as indented JSON, by rename; raises ConfigError where that cannot be done."""
    publish(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
