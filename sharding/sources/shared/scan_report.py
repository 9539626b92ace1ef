"""The report of a scan: counts of what it kept and dropped, for the user and for the manifest;
and what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.sample.image_header import ImageInfo
    from fuelrail.pipeline.sample.schema import F64

_MOST_NAMES: Final = 12
_MOST_CHARACTERS: Final = 60
MOST_FINDINGS: Final = 20
"""The most findings of one table, or of one other place of a source."""


class ScanReport(msgspec.Struct, kw_only=True):
    """Counts over the whole source, before a selection; the same source and options give the same
    report.

    Attributes:
        samples: samples that were kept.
        dropped_samples: reason to number of samples that were not.
        masked: channel to reason to number of sensor members that are absent from kept samples.
        distorted: camera channel to number of images with lens coefficients.
        boxes: boxes of kept samples; the counts below are parts of it.
        unmapped: category that the source's class list does not know, to number of boxes (``label``
            -1).
        outside_classes: category that is known and on purpose no class, to number of boxes
            (``label`` -1).
        unknown_visibility: text of the visibility that is not known, to number of boxes
            (``visibility`` -1).
        unknown_points: boxes with an unknown number of lidar points (-1) and no known radar point:
            ``valid`` is 1.
        damaged: camera channel to number of damaged images that were masked, or whose frames were
            dropped.
        cut_links: table and column to number of links, to records that a cut-out source lacks, that
            were cut.
        max_offset_ms: channel to the largest time [ms] between a sample and the channel's own
            moment in it.
        noted: what else the source found, such as messages out of order, and its number.

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
    max_offset_ms: dict[str, float] = {}
    damaged: dict[str, int] = {}
    cut_links: dict[str, int] = {}
    noted: dict[str, int] = {}

    def mask(self, channel: str, reason: str) -> None:
        """Count an absent member."""
        reasons = self.masked.setdefault(channel, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def drop(self, reason: str) -> None:
        """Count a sample that is not kept."""
        self.dropped_samples[reason] = self.dropped_samples.get(reason, 0) + 1

    def offset(self, channel: str, offset_ns: int) -> None:
        """Note how far a channel's moment is from the sample's."""
        if offset_ns:
            offset_ms = offset_ns / 1e6
            largest_ms = self.max_offset_ms.get(channel, 0.0)
            self.max_offset_ms[channel] = max(largest_ms, offset_ms)

    def note_image(self, channel: str, info: ImageInfo) -> None:
        """Note what the head of an image says that neither the writer nor the loader applies."""
        if info.orientation != 1:
            self.note(
                f"{channel}: images with Exif orientation {info.orientation}, which is not "
                "applied; calibrate the pixels as they are stored, or turn the images and "
                "clear the tag (exiftran -ai)"
            )

    def note_principal_points(
        self,
        channels: Sequence[str],
        intrinsics: F64,
        sizes: NDArray[np.integer[Any]],
    ) -> None:
        """Note images whose K does not seem to be theirs: K (F, N, 3, 3), sizes (F, N, 2) [px],
        not over 0: none.
        """
        points = intrinsics[..., :2, 2]
        # Where a point is NaN it counts as inside.
        is_beyond = (points < -0.5) | (points > sizes - 0.5)
        outside = is_beyond.any(-1) & (sizes > 0).all(-1)
        counts = np.count_nonzero(outside, 0).tolist()
        for channel, number in zip(channels, counts, strict=True):
            text = (
                "principal point outside of the image: are the intrinsics those of images of "
                "this size?"
            )
            self.note(f"{channel}: {text}", number)

    def note(self, text: str, number: int = 1) -> None:
        """Count something that was found."""
        if number:
            self.noted[text] = self.noted.get(text, 0) + number

    def builtins(self) -> dict[str, Any]:
        """Return the report for JSON: fields in order, the names in each sorted."""
        values: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        for name in ("cut_links", "damaged"):
            # They are of some sources, and some options.
            if not values[name]:
                del values[name]
        return values

    def lines(self) -> list[str]:
        """Return the report for people: one line, and one more for each thing that was changed
        or left out.
        """
        num_samples = self.samples + sum(self.dropped_samples.values())
        lines = [
            f"scan: kept {self.samples:,} of {counted(num_samples, 'sample')}, {self.boxes:,} boxes"
        ]
        by_channel = {
            f"{name}, {why}": n for name, counts in self.masked.items() for why, n in counts.items()
        }
        lines += _format_lines(
            {
                "dropped samples": self.dropped_samples,
                "absent sensor members": by_channel,
                "damaged images": self.damaged,
                "links to records that are not there, cut": self.cut_links,
                "largest time offsets from the sample [ms]": {
                    name: round(value, 1) for name, value in self.max_offset_ms.items()
                },
            }
        )
        noted = [
            f"  noted: {_escape_name(name, limit=200)}: {number:,}"
            for name, number in sorted(self.noted.items())
        ]
        lines += noted[:_MOST_NAMES]
        more = len(noted[_MOST_NAMES:])
        if more:
            lines.append(f"  noted: {more:,} more, in provenance.scan of the manifest")
        lines += _format_lines(
            {
                "images with lens distortion (undistort=True rectifies them)": self.distorted,
                "unmapped categories, boxes have label -1": self.unmapped,
                "categories outside the classes, boxes have label -1": self.outside_classes,
                "unknown visibility levels, boxes have visibility -1": self.unknown_visibility,
            }
        )
        if self.unknown_points:
            lines.append(
                f"  boxes with an unknown number of points, valid is 1: {self.unknown_points:,}"
            )
        if (
            self.boxes
            and sum(self.unmapped.values()) + sum(self.outside_classes.values()) == self.boxes
        ):
            lines.append(f"  no box has a class: the label of all {self.boxes:,} is -1")
        return lines


def _format_lines(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each title, of names with their counts, most frequent first."""
    lines = []
    for title, group in counts.items():
        ranked = sorted(group.items(), key=lambda item: (-item[1], item[0]))
        texts = [f"{_escape_name(name)} {number:,}" for name, number in ranked[:_MOST_NAMES]]
        if len(ranked) > len(texts):
            texts.append(f"and {len(ranked) - len(texts):,} more names")
        separator = "; " if any("," in name for name in group) else ", "
        if group:
            lines.append(f"  {title}: {separator.join(texts)}")
    return lines


def _escape_name(name: str, limit: int = _MOST_CHARACTERS) -> str:
    """Return a name of the source that is safe to print."""
    short = name if len(name) <= limit else name[:limit] + "..."
    if short and short.isprintable():
        return short
    return ascii(short)


class _Cause:
    """A finding of many places: the first one, what is wrong, what helps, and the number of
    places.
    """

    def __init__(self, place: str, fault: str, remedy: str) -> None:
        self.place = place
        self.fault = fault
        self.remedy = remedy
        self.number = 0

    def __str__(self) -> str:
        more = f", and so {self.number - 1:,} more times" if self.number > 1 else ""
        return f"{self.place} {self.fault}{more}{self.remedy}"


class Findings:
    """What is wrong with a source: several findings are reported together, and the scan fails once.

    The first 20 of each table are shown. Of images, up to the share ``max_damaged`` may be damaged
    and left out.
    """

    def __init__(self, max_damaged: float = 0.0) -> None:
        self._max_damaged = max_damaged
        self._damaged = list[str]()
        self._num_images = self._num_damaged = 0
        self._texts: list[str | _Cause] = []
        self._causes: dict[tuple[str, str], _Cause] = {}
        self._counts: dict[str, int] = {}

    @property
    def num_found(self) -> int:
        """The number of all findings."""
        return sum(self._counts.values())

    def add(self, table: str, text: str) -> None:
        """Note a finding; ``text`` is a whole sentence, ``table`` is where it was found."""
        self._counts[table] = self._counts.get(table, 0) + 1
        if self._counts[table] <= MOST_FINDINGS:
            self._texts.append(text)

    def add_cause(
        self,
        table: str,
        cause: str,
        place: str,
        fault: str,
        remedy: str = "",
    ) -> None:
        """Note a finding of one ``cause``, whose places are one finding: the first is shown, with
        their number.

        ``place``, ``fault`` and ``remedy`` make a sentence; those of the first place are used.
        """
        noted = self._causes.get((table, cause))
        if noted is None:
            noted = self._causes[table, cause] = _Cause(place, fault, remedy)
            self._counts[table] = self._counts.get(table, 0) + 1
            if self._counts[table] <= MOST_FINDINGS:
                self._texts.append(noted)
        noted.number += 1

    def tolerate(self, num_images: int, damaged: Sequence[str]) -> None:
        """Note images that were looked at, and the damaged ones of them, which are left out."""
        self._num_images += num_images
        self._num_damaged += len(damaged)
        self._damaged += damaged[: MOST_FINDINGS - len(self._damaged)]

    @contextlib.contextmanager
    def collecting(self, table: str) -> Iterator[None]:
        """Note the SourceError that the block raises."""
        try:
            yield
        except SourceError as error:
            self.add(table, str(error))

    def check(self) -> None:
        """Raise SourceError where there are findings: the one, or all of them, a line each."""
        if self._num_damaged > self._max_damaged * self._num_images:
            self.add(
                "images",
                f"{self._num_damaged:,} of {self._num_images:,} images are damaged, more "
                f"than the share of max_damaged={self._max_damaged:g}: {', '.join(self._damaged)}",
            )
        if not self._texts:
            return
        if self.num_found == 1:
            raise SourceError(str(self._texts[0]))
        more = [
            f"and {count - MOST_FINDINGS:,} more of {table}"
            for table, count in self._counts.items()
            if count > MOST_FINDINGS
        ]
        raise SourceError(
            f"the source has {self.num_found:,} faults:",
            [*map(str, self._texts), *more],
        )
