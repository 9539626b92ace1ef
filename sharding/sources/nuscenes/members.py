"""The sensor files of nuScenes' keyframes: which are there, which are masked, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import POINTS_EXTENSION, SWEEPS_FIELD
from fuelrail.sharding.sources.adapter.members import DAMAGED, Part, image_heads, is_inside
from fuelrail.sharding.sources.shared.pictures import EXTENSION_OF
from fuelrail.sharding.sources.shared.scan_report import Findings
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.image_header import ImageInfo
    from fuelrail.sharding.sources.nuscenes.geometry import Frame, Keyframes, SensorRow
    from fuelrail.sharding.sources.nuscenes.sweeps import LidarSweeps, SweepList
    from fuelrail.sharding.sources.shared.files import FileFacts, SourceFiles
    from fuelrail.sharding.sources.shared.pictures import ImagePolicy
    from fuelrail.sharding.sources.shared.scan_report import ScanReport

_NOT_VALID: Final = "marked as not valid"


class KeyframeFiles:
    """Finds the files of samples; ``findings`` has what is wrong with them, once a whole scan is through."""

    def __init__(
        self, files: SourceFiles, policy: ImagePolicy, max_damaged: float, *, points: bool, num_sweeps: int
    ) -> None:
        """All but ``files`` are options of the source."""
        self._files, self._policy, self._points, self._num_sweeps = files, policy, points, num_sweeps
        self._facts: dict[str, FileFacts | None] = {}
        self._heads: dict[str, ImageInfo | str] = {}
        self.findings = Findings(max_damaged)

    def look_at(self, filenames: Iterable[str], *, more: bool = False) -> None:
        """Look at many files together; :meth:`file_bytes` knows of them then, with ``more`` of those before too."""
        if not more:
            self._facts = {}
        inside = [name for name in dict.fromkeys(filenames) if is_inside(name) and name not in self._facts]
        self._facts.update(zip(inside, self._files.facts_of(inside), strict=True))

    def examine(self, filenames: Iterable[str]) -> None:
        """Look into images that :meth:`look_at` knows of, where more than the tables is asked for."""
        if self._policy.depth != "head":
            parts = [Part(name) for name in dict.fromkeys(filenames) if (there := self._facts.get(name)) and there[0]]
            heads = image_heads(self._files, parts, self._facts, self._policy.depth)
            self._heads = dict(zip((part.name for part in parts), heads, strict=True))

    def has_picture(self, filename: str) -> bool:
        """Whether an image is there and, where it was looked into, not damaged."""
        is_there = self.file_bytes(filename, []) is not None or self._policy.missing == "error"
        return is_there and not isinstance(self._heads.get(filename), str)

    def of(self, keyframes: Keyframes, frame: Frame, stamps: list[str], report: ScanReport) -> list[Reference]:
        """References of the sample's sensor files that are there, in rig order."""
        members: list[Reference] = []
        for camera, row in zip(keyframes.cameras, frame.sensors, strict=False):
            with self.findings.of(camera):
                member = self._image(frame, camera, row, stamps, report)
                if isinstance(member, str):
                    report.mask(camera.lower(), member)
                else:
                    members.append(member)
        for lidar, row in self._lidars(keyframes, frame):
            if not row.is_valid:
                report.mask(lidar.lower(), _NOT_VALID)
                continue
            with self.findings.of(lidar):
                size = self.file_bytes(row.filename, stamps)
                if size is None:
                    what = f"lidar file '{self._files.shown}/{row.filename}' of table 'sample_data' is not there"
                    raise SourceError(f"{what}; the option points=false leaves all lidar sweeps out")
                if not row.filename.endswith(".bin"):
                    raise _of_no_known_kind(row.filename, lidar)
                members.append(Reference(f"{lidar.lower()}.{POINTS_EXTENSION}", row.filename, size))
        return members

    def _image(
        self, frame: Frame, camera: str, row: SensorRow | None, stamps: list[str], report: ScanReport
    ) -> Reference | str:
        """Reference of an image, or why it is masked; raises SourceError where it is refused."""
        if row is None:
            self._refuse_missing(f"sample '{frame.token}' has no row for {camera}")
            return "no row"
        if not row.is_valid:
            return _NOT_VALID
        size = self.file_bytes(row.filename, stamps)
        if size is None:
            self._refuse_missing(
                f"camera file '{self._files.shown}/{row.filename}' of table 'sample_data' is not there"
            )
            return "no file"
        extension = EXTENSION_OF.get(row.filename.rpartition(".")[2].lower())
        if extension is None:
            raise _of_no_known_kind(row.filename, camera)
        if row.width <= 0 or row.height <= 0:
            raise SourceError(
                f"table 'sample_data': row '{row.token}' of {camera} has the size {row.width} x {row.height}"
            )
        head = self._heads.get(row.filename)
        if isinstance(head, str):
            if self._policy.damaged == "error":
                text = "the option damaged_image=mask makes it an absent member instead"
                raise SourceError(f"image '{self._files.shown}/{row.filename}': {head}; {text}")
            report.damaged[camera.lower()] = report.damaged.get(camera.lower(), 0) + 1
            self.findings.tolerate(1, [f"'{row.filename}' ({head})"])
            return DAMAGED
        if head is not None:
            self.findings.tolerate(1, ())
            report.note_image(camera.lower(), head)
            if (head.width, head.height, EXTENSION_OF[head.format]) != (row.width, row.height, extension):
                raise SourceError(
                    f"image '{self._files.shown}/{row.filename}' is a {head.format} of "
                    f"{head.width} x {head.height} px; table 'sample_data' says {row.width} x {row.height}"
                )
        return Reference(f"{camera.lower()}.{extension}", row.filename, size, row.width, row.height)

    def _lidars(self, keyframes: Keyframes, frame: Frame) -> Iterator[tuple[str, SensorRow]]:
        """The lidars of which points are to be stored, with their rows."""
        if self._points:
            for lidar, row in zip(keyframes.lidars, frame.sensors[len(keyframes.cameras) :], strict=True):
                if row is not None:
                    yield lidar, row

    def sweeps_before(self, keyframes: Keyframes, sweeps: LidarSweeps, frame: Frame) -> dict[str, SweepList]:
        """The sweeps before the sample's own ones by lidar, which are valid as these are."""
        return {
            lidar: sweeps.before(row.row, self._num_sweeps)
            for lidar, row in self._lidars(keyframes, frame)
            if row.is_valid
        }

    def earlier(self, sweeps: dict[str, SweepList], stamps: list[str]) -> list[Reference]:
        """References of what :meth:`sweeps_before` found; raises SourceError for a file that is not there."""
        members = []
        for lidar, found in sweeps.items():
            num_bytes = 0
            for filename in found.files:
                size = self.file_bytes(filename, stamps)
                if size is None:
                    what = f"file '{self._files.shown}/{filename}' of table 'sample_data' is not there"
                    raise SourceError(f"lidar {what}; the option sweeps=0 leaves earlier sweeps out")
                num_bytes += size
            if found.files:
                members.append(Reference(f"{lidar.lower()}{SWEEPS_FIELD}", found.encode(), num_bytes))
        return members

    def file_bytes(self, filename: str, stamps: list[str]) -> int | None:
        """Size of a source file, None where it is not there; SourceError for a name that leads out of the root.

        Its stamp is added to ``stamps``.
        """
        if not is_inside(filename):
            raise SourceError(f"table 'sample_data' names the file '{filename}', which is not inside the dataroot")
        facts = self._facts[filename] if filename in self._facts else self._files.facts(filename)
        if facts is None:
            return None
        if facts.num_bytes == 0:
            raise SourceError(f"file '{self._files.shown}/{filename}' of table 'sample_data' is empty (0 bytes)")
        stamps.append(facts.stamp)
        return facts.num_bytes

    def _refuse_missing(self, what: str) -> None:
        if self._policy.missing == "error":
            raise SourceError(f"{what}; the option missing_camera=mask makes it an absent member instead")


def _of_no_known_kind(filename: str, sensor: str) -> SourceError:
    return SourceError(f"file '{filename}' of {sensor} is of a kind this adapter does not read")
