"""The protocol of a source of driving data, and the registry of sources."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.manifest import Lineage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuelrail.pipeline.format.manifest import LidarEntry
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.scan_report import ScanReport
    from fuelrail.sharding.sources.scan_table import ClipInfo, ScanWriter

_REGISTRY: Final = {
    "nuscenes": "fuelrail.sharding.sources.nuscenes.source:NuScenesSource",
    "fuelrail": "fuelrail.sharding.sources.fuelrail:FuelrailSource",
}


class Channel(NamedTuple):
    """One camera of the rig: channel (lower case) and the source's name for it."""

    channel: str
    source_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanInfo:
    """The result of a scan: facts about the source as a whole.

    ``splits`` are the source's own: split name to clip names (None: it has none). ``names`` are the field names that
    occur, ``license`` is the data's, where the source states it. ``facts`` and ``report`` (what was kept, dropped and
    not understood; None where the source does not count) go into the manifest's provenance; no paths, times or host
    names. ``lineage`` names the datasets that the source is made of.
    """

    name: str
    clips: list[ClipInfo]
    cameras: list[Channel]
    lidars: list[LidarEntry]
    classes: list[str]
    attributes: list[str]
    names: list[str]
    time_base: str
    ego_origin: str
    splits: dict[str, list[str]] | None
    facts: dict[str, Any]
    license: str | None = None
    report: ScanReport | None = None
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def num_samples(self) -> int:
        """Rows of the scan table."""
        return sum(clip.num_samples for clip in self.clips)


class Source(Protocol):
    """A dataset in its native layout.

    Making one is cheap and reads nothing but what locates the data: every worker makes its own. Errors are
    SourceError, naming table, file and token.
    """

    kind: str

    @property
    def attribute_types(self) -> Mapping[str, type]:
        """Columns for ``attributes.parquet``: name to bool, int, float or str."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """All options, defaults filled in: what the source's part of the bytes depends on; no paths."""
        ...

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Read tables and file sizes, no sensor bytes; write one row for each sample, clip by clip in time order."""
        ...

    def open(self, ref: str) -> Buffer:
        """The bytes of a member that the scan table refers to, as they are to be stored (raw)."""
        ...


@runtime_checkable
class FileSource(Protocol):
    """A source, some of whose members are files of this machine as they are: those are read without :meth:`open`."""

    def path(self, ref: str) -> str | None:
        """The file whose bytes are the member's; None where ``open`` makes them."""
        ...


class SourceSpec(NamedTuple):
    """A source by kind, location and options: everything that a worker needs to open it."""

    kind: str
    location: str
    options: dict[str, Any]


def parse_source(text: str, options: dict[str, Any]) -> SourceSpec:
    """Parse ``KIND:LOCATION``; raises ConfigError for an unknown kind or a missing location."""
    kind, _, location = text.partition(":")
    known = ", ".join(name for name in _REGISTRY if name != "fuelrail")  # a dataset goes to `fuelrail reshard`
    if not location:
        raise ConfigError(f"source {text!r} must be KIND:PATH, such as nuscenes:/data/nuscenes; known kinds: {known}")
    if kind not in _REGISTRY:
        raise ConfigError(f"source {text!r} has the unknown kind {kind!r}; known kinds: {known}")
    return SourceSpec(kind, location, options)


def make_source(spec: SourceSpec) -> Source:
    """Make the source; raises ConfigError where its options are wrong."""
    module, _, name = _REGISTRY[spec.kind].partition(":")
    made: Source = getattr(importlib.import_module(module), name)(spec.location, spec.options)
    return made
