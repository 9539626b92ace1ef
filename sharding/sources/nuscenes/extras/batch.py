"""The samples that a scan looks at together, as the opt-in channels see them, and references that are the member."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import Geometry
    from fuelrail.sharding.sources.nuscenes.geometry import Frame, Keyframes
    from fuelrail.sharding.sources.nuscenes.members import KeyframeFiles
    from fuelrail.sharding.sources.nuscenes.tables import Scene


class Batch(NamedTuple):
    """Some samples of the tables, in the scan's order.

    Attributes:
        samples: their rows (S,) in table ``sample``.
        geometry: theirs, with an axis of samples in front.
        frames: what the tables say of each.
        stamps: of each, the stamps of its files.
    """

    keyframes: Keyframes
    samples: NDArray[np.int64]
    geometry: Geometry
    frames: list[Frame]
    files: KeyframeFiles
    stamps: list[list[str]]

    def file_bytes(self, name: str, at: int) -> int | None:
        """Size of a file of sample number ``at``; None where it is not there. Raises SourceError."""
        return self.files.file_bytes(name, self.stamps[at])

    def timestamp_ns(self, at: int) -> int:
        """Time of sample number ``at``."""
        return self.frames[at].timestamp_us * NS_PER_US

    def scene(self, at: int) -> Scene:
        """The scene of sample number ``at``."""
        return self.keyframes.scene[int(self.keyframes.sample_scene[self.samples[at]])]

    def time_before_us(self, at: int) -> int | None:
        """Time of the keyframe before sample number ``at`` of its scene; None for the first one."""
        before = int(self.keyframes.prev[self.samples[at]])
        return None if before < 0 else int(self.keyframes.timestamp_us[before])


class Inline(msgspec.Struct, frozen=True, tag="inline"):
    """A member that the scan computed."""

    data: bytes

    def member(self, _: Callable[[str], bytes]) -> bytes:
        """The member's bytes."""
        return self.data


def inline(channel: Channel, data: bytes) -> Reference:
    """The reference of a member of these bytes."""
    return Reference(channel.field, msgspec.json.encode(Inline(data)).decode(), len(data))
