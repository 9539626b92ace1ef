"""The base class of adapters: a subclass yields frames, and this makes samples of them.

A subclass sets ``kind`` and has :meth:`FrameSource.sensors`, :meth:`FrameSource.clips`,
:meth:`FrameSource.frames`, and mostly :meth:`FrameSource.poses`; the rest is here. It is registered
under the entry points ``fuelrail.sources``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    TypeVar,
)

import msgspec
from msgspec import Meta

from fuelrail.pipeline.channels.sensors import choose_cameras, lies_on
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import F32, encode_points
from fuelrail.pipeline.settings import Settings, convert
from fuelrail.pipeline.storage.filesystem import is_url
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.channels import (
    COMPUTED,
    boxes2d_channel,
    computed_bytes,
)
from fuelrail.sharding.sources.adapter.classes import (
    SOURCE,
    ClassMap,
    ClassOption,
    loaded,
)
from fuelrail.sharding.sources.adapter.frame import Image
from fuelrail.sharding.sources.adapter.masks import mask_png
from fuelrail.sharding.sources.adapter.members import (
    MADE_PREFIX,
    MASK,
    NO_FILE,
    PLAIN,
    POINTS,
    Part,
)
from fuelrail.sharding.sources.adapter.rows import ClipRows, attribute_types
from fuelrail.sharding.sources.adapter.vector_maps import MAP
from fuelrail.sharding.sources.registry import CONTENTS
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.pictures import (
    CHECK_IMAGES,
    MAX_DAMAGED,
    Depth,
    ImagePolicy,
    JpegForm,
    MaxDamaged,
    plain_png,
    recorded,
)
from fuelrail.sharding.sources.shared.scan_report import Findings, ScanReport
from fuelrail.sharding.sources.source import Place, ScanInfo

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.adapter.frame import Clip, Frame, Sensors
    from fuelrail.sharding.sources.adapter.poses import Trajectory
    from fuelrail.sharding.sources.adapter.vector_maps import MapWindows
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads


class FrameSettings(Settings, frozen=True, kw_only=True):
    """Options that all these sources have; an adapter's own settings are a subclass."""

    classes: Annotated[
        ClassOption,
        Meta(
            description="classes of boxes: source (its own), nuscenes10, or a YAML file that maps "
            "category to class"
        ),
    ] = SOURCE
    missing_camera: Annotated[
        Literal["error", "mask", "drop"],
        Meta(
            description="a frame without the image of a camera: error; mask (leave the member "
            "out, mark it invalid); drop (leave the frame out)"
        ),
    ] = "error"
    damaged_image: Annotated[
        Literal["error", "mask", "drop"],
        Meta(
            description="an image that check_images finds damaged: error; mask (leave the member "
            "out, mark it invalid); drop (leave the frame out)"
        ),
    ] = "error"
    max_damaged: Annotated[MaxDamaged, Meta(description=MAX_DAMAGED)] = 0.01
    check_images: Annotated[Depth, Meta(description=CHECK_IMAGES)] = "head"
    rate: Annotated[float, Meta(ge=0, description="frames a second to keep at most; 0: all")] = 0.0
    points: Annotated[bool, Meta(description="false leaves lidar sweeps out")] = True
    cameras: Annotated[
        tuple[str, ...],
        Meta(description="cameras to keep, as a list of their names in the dataset; empty: all"),
    ] = ()


_MOST_LISTED: Final = 8
S = TypeVar("S", bound=FrameSettings)


class FrameSource(Generic[S]):
    """A source whose adapter yields frames, clip by clip.

    Attributes:
        kind: the word in front of the location: ``KIND:PATH``.
        settings_type: the type of the options, a subclass of :class:`FrameSettings`.
        requires: modules beyond Fuelrail's own dependencies, to what brings them to `pip install`.
        reads: "clip" where made images are slow to make unless a clip is read in order, as from
            video.
        time_base: "unix" where times are nanoseconds since 1970, else a word of the source's own.
        ego_origin: where in the vehicle the origin of ego is.
        sync: how images were matched to frames, for the metadata; empty: as the option
            missing_camera says.
        has_poses: false where the source knows no ego poses: all are the identity, and the manifest
            says so.
        columns: columns of attributes of the source's own: name to bool, int, float or str.
        image_boxes: cameras whose 2-D boxes frames have, to what these are; each becomes the
            channel boxes2d_CAMERA.
        maps: the vector maps of the source; they become the channel map, whose members frames name.
        channels: further channels of the source's own, whose members frames name.
        box_attributes: names that ``BoxRows.attribute`` counts.
        license: of the data, where the source states it.

    ``self.settings`` are the options, ``self.files`` the files below the root, ``self.file`` the
    name of the one file that the location is, None for a folder or a URL. ``self.depth`` is how
    much of each image this scan looks at. ``self.stored`` is how the run stores images, where it
    makes them smaller: an adapter that decodes images itself makes them so, as `StoredJpeg`. What
    an adapter counts in ``self.noted`` during the scan is reported.
    """

    kind: str
    settings_type: type[FrameSettings] = FrameSettings
    requires: ClassVar[Mapping[str, str]] = {}
    reads: Reads = "random"
    time_base: str = "unix"
    ego_origin: str = "unknown"
    sync: str = ""
    has_poses: bool = True
    columns: Mapping[str, type] = {}
    image_boxes: Mapping[str, str] = {}
    maps: MapWindows | None = None
    channels: Sequence[Channel] = ()
    box_attributes: Sequence[str] = ()
    license: str | None = None
    depth: Depth = "head"
    stored: JpegForm | None = None

    settings: S

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        """Take the options and the root; reads nothing."""
        settings = convert(options, self.settings_type, f"options of source {self.kind}")
        settings = msgspec.structs.replace(settings, classes=loaded(settings.classes))
        self.settings = settings  # type: ignore[assignment]
        self.location = location
        self.noted = Counter[str]()
        path = Path(location.removeprefix("file://"))
        is_file = not is_url(location) and os.path.isfile(path)  # noqa: PTH113 - False for any name
        self.file = path.name if is_file else None
        if is_file:
            self.files = source_files(str(path.parent), path.name)
        else:
            self.files = source_files(location)

    # What an adapter has.

    def sensors(self) -> Sensors:
        """Return the rig of the whole source: the union of the clips' cameras, in the order of
        the dataset.
        """
        raise NotImplementedError

    def clips(self) -> Iterable[Clip]:
        """Yield the clips in a fixed order, without reading their frames."""
        raise NotImplementedError

    def poses(self, clip: Clip) -> Trajectory | None:  # noqa: ARG002 - for adapters
        """Return the clip's ego poses over time; None where every frame, image and sweep has its
        own.
        """
        return None

    def frames(self, clip: Clip) -> Iterable[Frame]:
        """Yield the clip's frames in time order.

        A SourceError ends this clip, and the scan looks for other faults.
        """
        raise NotImplementedError

    def category_names(self) -> Sequence[str]:
        """Return the classes of boxes that the format has, in the order of the dataset; empty:
        as they occur.
        """
        return ()

    def points(self, ref: str) -> F32:
        """Read a lidar sweep: (P, C) in the lidar's frame, columns as :meth:`sensors` names
        them.
        """
        raise NotImplementedError

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Make these images of one clip, each once, in any order, with their references.

        Bytes may be overwritten when the next image is asked for.
        """
        raise NotImplementedError

    # The protocol of Source.

    @property
    def options(self) -> dict[str, Any]:
        """All options; a mapping file of classes as what it says."""
        # Stored options have no tuples.
        encoded = msgspec.json.encode(self.settings)
        values: dict[str, Any] = msgspec.json.decode(encoded)
        return recorded(values)

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes: of the clip, counts, speed, time of day, and the source's own."""
        return attribute_types(self._classes().names, self.columns)

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Write a row for each frame that is kept; raises SourceError with all that is wrong."""
        with self.files.scanning():
            return self._scan(out)

    def _classes(self) -> ClassMap:
        return ClassMap(self.settings.classes, self.category_names())

    def _scan(self, out: ScanWriter) -> ScanInfo:
        options = self.settings
        self.depth = out.depth(options.check_images, options.damaged_image)
        policy = ImagePolicy(
            missing=options.missing_camera,
            damaged=options.damaged_image,
            depth=self.depth,
            looks_at_made=options.damaged_image != "error" or options.check_images != "head",
        )
        self.files.listed()  # the root must be there
        sensors = self.sensors()
        classes = self._classes()
        report = ScanReport()
        findings = Findings(options.max_damaged)
        columns = list(self.attribute_types)
        boxes2d = (boxes2d_channel(camera, text) for camera, text in self.image_boxes.items())
        channels = (
            *self.channels,
            *boxes2d,
            *([self.maps.channel] if self.maps is not None else ()),
        )
        # Of logs, `cameras` names topics besides.
        names = self.settings.cameras if isinstance(self.settings.cameras, tuple) else ()
        sensors, channels, left_out = _select_sensors(
            sensors,
            channels=channels,
            names=names,
            where=self.files.shown,
        )
        rows = ClipRows(
            out=out,
            files=self.files,
            sensors=sensors,
            classes=classes,
            report=report,
            findings=findings,
            columns=columns,
            policy=policy,
            sync=self.sync,
            points=self.settings.points,
            has_poses=self.has_poses,
            is_unix=self.time_base == "unix",
            make_images=self.make_images,
            channels=channels,
        )
        splits: dict[str, list[str]] = {}
        num_clips = 0
        is_calibrated = False
        for clip in self.clips():
            num_clips += 1
            with findings.collecting("clips"):
                frames = [
                    frame.without(left_out) if left_out else frame for frame in self.frames(clip)
                ]
                is_calibrated = is_calibrated or any(
                    isinstance(image, Image) and image.calibration.intrinsics is not None
                    for frame in frames
                    for image in frame.images.values()
                )
                rows.add(
                    clip,
                    frames=frames,
                    trajectory=self.poses(clip),
                    rate=self.settings.rate,
                )
            if clip.split and out.clips and out.clips[-1].clip_name == clip.name:
                splits.setdefault(clip.split, []).append(clip.name)
        with findings.collecting("classes"):
            classes.report(report)
        report.noted.update(self.noted)
        if self.files.hidden:
            text = "hidden files and folders left out, such as .DS_Store, Thumbs.db and ._NAME"
            report.noted[text] = sum(self.files.hidden.values())
        findings.check()
        if not num_clips:
            summary = (type(self).__doc__ or "").strip().partition("\n")[0]
            patterns = CONTENTS.get(self.kind)
            looked_for = f"; looked for {', '.join(patterns)}" if patterns else ""
            files = self.files.listed()[:_MOST_LISTED]
            contents = ", ".join(map(shortened, files)) or "nothing"
            raise SourceError(
                f"the {self.kind} source '{self.files.shown}' has no clips{looked_for}; in "
                f"it is {contents}; the kind is for: {summary}"
            )
        if not out.clips:
            dropped = (
                ", ".join(f"{why} {count:,}" for why, count in report.dropped_samples.items())
                or "there are none"
            )
            raise SourceError(
                f"no frame of the {self.kind} source '{self.files.shown}' is kept: {dropped}"
            )
        return ScanInfo(
            name=self.kind,
            clips=out.clips,
            cameras=list(sensors.cameras),
            lidars=list(sensors.lidars),
            classes=classes.names,
            attributes=list(self.box_attributes),
            channels=channels,
            names=out.member_names([*sensors.channels, *(channel.name for channel in channels)]),
            time_base=self.time_base,
            ego_origin=self.ego_origin,
            splits=splits or None,
            facts={
                **({} if self.has_poses else {"poses": "none"}),
                **({} if is_calibrated else {"calibration": "none"}),
            },
            license=self.license,
            report=report,
        )

    def place(self, ref: str) -> Place | None:
        """Return where an image's bytes are, if a file of this machine has them unchanged."""
        if ref.startswith(NO_FILE):
            return None
        part = Part.parse(ref)
        path = self.files.path(part.name)
        if path is None:
            return None
        return Place(path, part.offset, part.length)

    def open(self, ref: str) -> Buffer:
        """Return the bytes of a member: an image, points as ``.npy``, or a result of the scan."""
        if ref.startswith(COMPUTED):
            return computed_bytes(ref)
        if ref.startswith(MAP):
            assert self.maps is not None, "the scan has named it"
            return self.maps.member(ref)
        if ref.startswith(POINTS):
            return encode_points(self.points(ref.removeprefix(POINTS)))
        if ref.startswith(MADE_PREFIX):
            made_ref = ref.removeprefix(MADE_PREFIX)
            return next(self.make_images([made_ref]))[1]
        image = ref.removeprefix(PLAIN)
        if image != ref:
            return plain_png(self._read_bytes(image))
        mask = ref.removeprefix(MASK)
        if mask != ref:
            where = f"mask '{self.files.shown}/{mask}'"
            return mask_png(self._read_bytes(mask), where)
        return self._read_bytes(ref)

    def _read_bytes(self, ref: str) -> bytes:
        part = Part.parse(ref)
        data = part.read(self.files)
        if part.length is not None and len(data) < part.length:
            raise SourceError(
                f"file '{self.files.shown}/{part.name}' ends before byte "
                f"{part.offset + part.length}"
            )
        return data

    def read_clip(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Yield each of these members of one clip once."""
        made_refs = [ref.removeprefix(MADE_PREFIX) for ref in refs if ref.startswith(MADE_PREFIX)]
        if made_refs:
            for ref, data in self.make_images(made_refs):
                yield MADE_PREFIX + ref, data
        for ref in refs:
            if not ref.startswith(MADE_PREFIX):
                yield ref, self.open(ref)


def _select_sensors(
    sensors: Sensors,
    channels: Sequence[Channel],
    names: Sequence[str],
    where: str,
) -> tuple[Sensors, tuple[Channel, ...], frozenset[str]]:
    """Return cameras of these names (none: all) and channels to keep, and names of cameras and
    fields to leave out.
    """
    rig = [camera.channel for camera in sensors.cameras]
    cameras_kept = choose_cameras(rig, names or None, where)
    return (
        sensors._replace(
            cameras=[camera for camera in sensors.cameras if camera.channel in cameras_kept]
        ),
        tuple(channel for channel in channels if lies_on(channel, cameras_kept)),
        frozenset(
            {*rig} - {*cameras_kept}
            | {channel.field for channel in channels if not lies_on(channel, cameras_kept)}
        ),
    )
