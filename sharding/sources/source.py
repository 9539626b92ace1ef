"""The protocol of a source of driving data.

Most adapters are a :class:`fuelrail.sharding.sources.adapter.source.FrameSource`, which implements
all of it but a few methods. All kinds are in :mod:`fuelrail.sharding.sources.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

from fuelrail.pipeline.format.manifest import Lineage

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.settings import Settings
    from fuelrail.sharding.sources.shared.scan_report import ScanReport
    from fuelrail.sharding.sources.shared.scan_table import ClipInfo, ScanWriter

Reads = Literal["random", "clip"]


class Camera(NamedTuple):
    """One camera of the rig: channel (lower case) and the source's name for it."""

    channel: str
    source_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanInfo:
    """The result of a scan: facts about the source as a whole.

    ``channels`` are those other than cameras, lidars and boxes: a sample's member of one is a
    reference whose name is the channel's ``field``, after the references of cameras and lidars and
    in the order of ``channels``. ``splits`` are the source's own: split name to clip names (None:
    it has none). ``names`` are the field names that occur, ``license`` is the data's, where the
    source states it. ``facts`` and ``report`` (what was kept, dropped and not understood; None
    where the source does not count) go into the manifest's provenance; no paths, times or host
    names. ``facts["poses"]`` is "none" where the source has no ego poses and all of them are the
    identity, ``facts["calibration"]`` where no camera is calibrated. ``lineage`` names the datasets
    that the source is made of.
    """

    name: str
    clips: list[ClipInfo]
    cameras: list[Camera]
    lidars: list[LidarEntry]
    classes: list[str]
    attributes: list[str]
    names: list[str]
    time_base: str
    ego_origin: str
    splits: dict[str, list[str]] | None
    facts: dict[str, Any]
    channels: tuple[Channel, ...] = ()
    license: str | None = None
    report: ScanReport | None = None
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def num_samples(self) -> int:
        """Rows of the scan table."""
        return sum(clip.num_samples for clip in self.clips)


class MemberSource(Protocol):
    """Where members are read from."""

    def open(self, ref: str) -> Buffer:
        """Read a member that the scan table refers to, as raw bytes to be stored.

        The caller keeps them while it reads others: no later call may overwrite them.
        """
        ...


class Source(MemberSource, Protocol):
    """A dataset in its native layout.

    Making one, of a location and options, is cheap and reads nothing but what locates the data:
    every worker makes its own. Errors are SourceError, naming table or file, and row or token.
    """

    kind: str
    settings_type: type[Settings]
    """The options; each with a description."""
    requires: Mapping[str, str]
    """Modules that it imports beyond Fuelrail's own dependencies, each with what brings it to
    `pip install`.
    """
    reads: Reads
    """"clip" where :meth:`open` is slow unless a clip is read in order: the source is a
    :class:`ClipSource` then.
    """

    @property
    def attribute_types(self) -> Mapping[str, type]:
        """Columns for ``attributes.parquet``: name to bool, int, float or str."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """All options, defaults filled in: what the source's part of the bytes depends on; no
        paths.
        """
        ...

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read tables and file sizes; write one row for each sample, clip by clip in time order.

        Sensor files are not read, but for the heads of images whose size no table has (64 KiB at
        most, in threads).
        """
        ...


class Place(NamedTuple):
    """Bytes of a file of this machine: ``length`` of them from ``offset`` on, or all of the
    file.
    """

    path: str
    offset: int = 0
    length: int | None = None


@runtime_checkable
class PlacedSource(Protocol):
    """A source, some of whose members are bytes in files as they are: those go to a shard
    without :meth:`open`.
    """

    def place(self, ref: str) -> Place | None:
        """Return where the member's bytes are; None where ``open`` makes them."""
        ...


@runtime_checkable
class ClipSource(Protocol):
    """A source that is read clip by clip: a run brings each clip's members into its work folder
    first.
    """

    def read_clip(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Yield each of these members of one clip once, in any order, with its reference.

        ``refs`` are in the order of the scan table. A member's bytes may be overwritten when the
        next one is asked for.
        """
        ...


class VideoStart(NamedTuple):
    """A video of a source, to estimate its cost by its first ``frames``; ``num_kept`` of all are
    images of samples.

    ``open()`` returns what has ``jpegs(frames, form)`` and ``num_decoded``, as ``VideoFile``.
    """

    num_frames: int
    num_bytes: int
    num_kept: int
    frames: Sequence[Any]
    open: Callable[[], Any]


@runtime_checkable
class OwnVideos(Protocol):
    """A source with video that is not in files of its own."""

    def videos(self, refs: Iterable[str], number: int) -> list[VideoStart]:
        """Return the videos of these made images, with up to ``number`` frames each."""
        ...
