"""The report of a scan: counts of what it kept and dropped, for the user and for the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_NAMES: Final = 12
_MOST_CHARACTERS: Final = 60


class ScanReport(msgspec.Struct, kw_only=True):
    """Counts over the whole source, before a selection; the same source and options give the same report.

    Attributes:
        samples: samples that were kept.
        dropped_samples: reason to number of samples that were not.
        masked: channel to reason to number of sensor members that are absent from kept samples.
        distorted: camera channel to number of images with lens coefficients.
        boxes: boxes of kept samples; the counts below are parts of it.
        unmapped: category that the source's class list does not know, to number of boxes (``label`` -1).
        outside_classes: category that is known and on purpose no class, to number of boxes (``label`` -1).
        unknown_visibility: text of the visibility that is not known, to number of boxes (``visibility`` -1).
        unknown_points: boxes with an unknown number of lidar or radar points (-1).

    """

    samples: int = 0
    dropped_samples: dict[str, int] = {}
    masked: dict[str, dict[str, int]] = {}
    distorted: dict[str, int] = {}
    boxes: int = 0
    unmapped: dict[str, int] = {}
    outside_classes: dict[str, int] = {}
    unknown_visibility: dict[str, int] = {}
    unknown_points: int = 0

    def mask(self, channel: str, reason: str) -> None:
        """Count an absent member."""
        reasons = self.masked.setdefault(channel, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def builtins(self) -> dict[str, Any]:
        """The report for JSON: fields in order, names in each sorted."""
        found: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return found

    def lines(self) -> list[str]:
        """The report for people: one line, and one more for each thing that was not taken as it was."""
        num_samples = self.samples + sum(self.dropped_samples.values())
        said = [f"scan: kept {self.samples:,} of {counted(num_samples, 'sample')}, {self.boxes:,} boxes"]
        if self.dropped_samples:
            said.append(f"  dropped samples: {_listed(self.dropped_samples)}")
        if self.masked:
            by_channel = {f"{name}, {why}": n for name, found in self.masked.items() for why, n in found.items()}
            said.append(f"  absent sensor members: {_listed(by_channel, '; ')}")
        if self.distorted:
            said.append(f"  images with lens distortion (undistort=True rectifies them): {_listed(self.distorted)}")
        if self.unmapped:
            said.append(f"  unmapped categories, boxes have label -1: {_listed(self.unmapped)}")
        if self.outside_classes:
            said.append(f"  categories outside the classes, boxes have label -1: {_listed(self.outside_classes)}")
        if self.unknown_visibility:
            said.append(f"  unknown visibility levels, boxes have visibility -1: {_listed(self.unknown_visibility)}")
        if self.unknown_points:
            said.append(f"  boxes with an unknown number of points, valid is 1: {self.unknown_points:,}")
        if self.boxes and sum(self.unmapped.values()) + sum(self.outside_classes.values()) == self.boxes:
            said.append(f"  no box has a class: the label of all {self.boxes:,} is -1")
        return said


def _listed(counts: Mapping[str, int], separator: str = ", ") -> str:
    """Names with their counts, most frequent first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{_plain(name)} {number:,}" for name, number in ranked[:_MOST_NAMES]]
    more = len(ranked) - len(shown)
    return separator.join([*shown, *([f"and {more:,} more names"] if more else [])])


def _plain(name: str) -> str:
    """A name of the source that is safe to print."""
    short = name if len(name) <= _MOST_CHARACTERS else name[:_MOST_CHARACTERS] + "..."
    return short if short and short.isprintable() else ascii(short)
