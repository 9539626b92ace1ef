"""The one name for "bytes in memory": what members, spans and encoded images travel as, without copies."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A contiguous run of bytes. Views into mapped shards are ``memoryview`` and read-only."""
