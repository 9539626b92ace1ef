"""What is known of a clip's files before they are read: size, time of change, and the size of
images by their heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from fuelrail.pipeline.errors import ConfigError, ImageError, SourceError
from fuelrail.pipeline.format.rules import LARGEST_IMAGE
from fuelrail.pipeline.sample.schema import POINTS_EXTENSION, Mask
from fuelrail.sharding.sources.adapter.channels import COMPUTED
from fuelrail.sharding.sources.adapter.frame import Absent, FileMember, Image
from fuelrail.sharding.sources.adapter.vector_maps import MAP
from fuelrail.sharding.sources.shared.files import looks
from fuelrail.sharding.sources.shared.pictures import (
    CONVERTED,
    EXTENSION_OF,
    ConvertiblePng,
    examined,
)
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo
    from fuelrail.sharding.sources.adapter.frame import Frame, Sensors, Sweep
    from fuelrail.sharding.sources.shared.files import FileFacts, SourceFiles
    from fuelrail.sharding.sources.shared.pictures import Depth, ImagePolicy
    from fuelrail.sharding.sources.shared.scan_report import (
        Findings,
        ScanReport,
    )

MADE_PREFIX: Final = "made:"
"""Begins the reference of an image that the source makes."""
POINTS: Final = "points:"
"""Begins the reference of a lidar sweep."""
MASK: Final = "mask:"
"""Begins the reference of a mask, which may be stored in another form
(`fuelrail.sharding.sources.adapter.masks`).
"""
PLAIN: Final = "plain:"
"""Begins the reference of a PNG that is converted
(`fuelrail.sharding.sources.shared.pictures.plain_png`).
"""
NO_FILE: Final = (MADE_PREFIX, POINTS, MAP, COMPUTED, MASK, PLAIN)
"""What begins references that name no file."""
NOT_IN_CLIP: Final = "not in the clip"
"""Why no frame of a clip has the image of a camera of the rig."""
NO_POSE: Final = "no ego pose"
DAMAGED: Final = "damaged"
"""Why there is no image of a camera whose file is."""
NOTED: Final = "faulty"
"""Stands for what is noted as a fault of the source, so that it is noted once."""
LEFT_OUT: Final = (
    "; the option damaged_image=mask leaves such members out, damaged_image=drop the whole frames"
)
_NUMBER: Final = re.compile(r"[0-9]{1,18}\Z", re.ASCII)


class Part(msgspec.Struct, frozen=True, gc=False):
    """A file below the root, or ``length`` bytes of it from ``offset`` on."""

    name: str
    offset: int = 0
    length: int | None = None

    @classmethod
    def parse(cls, ref: str) -> Part:
        """Parse a reference: ``NAME`` or ``NAME#OFFSET+LENGTH``."""
        if "#" not in ref:
            return cls(ref)
        name, _, place = ref.rpartition("#")
        offset, plus, length = place.partition("+")
        if name and plus and _NUMBER.match(offset) and _NUMBER.match(length):
            return cls(name, int(offset), int(length))
        return cls(ref)

    def read(self, files: SourceFiles) -> bytes:
        """Return the bytes, fewer where the file ends before."""
        return files.read(self.name, self.offset, self.length)


def is_inside(name: str) -> bool:
    """Return whether a file name does not lead out of the source's root."""
    if name.startswith("/") or "\0" in name:
        return False
    return ".." not in name or ".." not in name.split("/")


def check_inside(name: str, where: str) -> None:
    """Raise SourceError, naming ``where``, for a file name that leads out of the source's root."""
    if not is_inside(name):
        raise SourceError(f"{where}: the file name '{name}' is not inside the source")
    if name.startswith(NO_FILE):
        raise SourceError(
            f"{where}: the file name '{name}' begins with a word of Fuelrail's own: rename it"
        )


def facts_by_name(files: SourceFiles, names: Iterable[str]) -> dict[str, FileFacts | None]:
    """Return size and time of change of each file, None where it does not exist; look at each
    once.
    """
    unique = list(dict.fromkeys(names))
    return dict(zip(unique, files.facts_of(unique), strict=True))


def image_heads(
    files: SourceFiles,
    parts: Sequence[Part],
    facts: Mapping[str, FileFacts | None],
    depth: Depth,
) -> list[ImageInfo | str]:
    """Return the heads of images, after a look at as much as ``depth`` says; of a damaged one, what
    is wrong.

    ``facts`` are of the files, which are there.
    """

    def look(part: Part) -> ImageInfo | str:
        file_facts = facts[part.name]
        file_bytes = 0 if file_facts is None else file_facts.num_bytes
        length = file_bytes if part.length is None else part.length
        if part.offset + length > file_bytes:
            return f"{length} bytes in a file of {file_bytes}, from byte {part.offset} on"
        try:
            return examined(
                lambda offset, limit: files.read(part.name, part.offset + offset, limit),
                length,
                depth,
            )
        except ImageError as error:
            return error.message
        except SourceError as error:
            return str(error)

    return looks(look, parts)


def made_heads(
    make: Callable[[Sequence[str]], Iterator[tuple[str, Buffer]]],
    refs: Sequence[str],
    depth: Depth,
) -> Iterator[tuple[str, ImageInfo | str]]:
    """Yield references and heads of images that the source makes, after a look as of
    :func:`image_heads`.
    """
    for ref, data in make(refs):
        view = memoryview(data).cast("B")

        def read(offset: int, length: int, view: memoryview = view) -> memoryview:
            return view[offset : offset + length]

        try:
            yield ref, examined(read, len(view), depth)
        except ImageError as error:
            yield ref, error.message


class StampedReference(msgspec.Struct, frozen=True, gc=False):
    """An image or a sweep that is there: its reference, and what changes when its file does."""

    reference: Reference
    stamp: str


Entry: TypeAlias = StampedReference | str
"""What a frame has of a sensor; a text says why it has nothing."""


@dataclass(frozen=True, slots=True)
class MemberFinder:
    """Finds the files of a clip's frames: images, sweeps, other members; notes what is wrong with
    them.

    ``points`` and ``policy`` are options of the source, ``make_images`` is its method. The first
    image of each camera and those whose size or form is not stated are looked at in any case, but
    for those that the source makes.
    """

    files: SourceFiles
    sensors: Sensors
    findings: Findings
    report: ScanReport
    points: bool
    policy: ImagePolicy
    make_images: Callable[[Sequence[str]], Iterator[tuple[str, Buffer]]]

    def find(
        self,
        where: str,
        frames: Sequence[Frame],
        has_pose: Mask,
    ) -> tuple[list[dict[str, Entry]], list[list[StampedReference]]]:
        """Return for each frame the image or sweep by channel, in rig order, or why it is missing.

        ``has_pose`` (F, N) is whether the ego pose of an image is known.
        """
        in_clip: set[str] = set()
        channels_seen: set[str] = set()
        parts: dict[str, Part] = {}
        looked_at: dict[str, str] = {}
        made_images: dict[str, str] = {}
        other_files: dict[str, None] = {}
        are_all_looked_at = self.policy.depth != "head"
        for frame in frames:
            in_clip.update(frame.images)
            for channel, frame_image in frame.images.items():
                if isinstance(frame_image, Absent) or frame_image.absent or frame_image.fault:
                    continue
                if frame_image.made:
                    if frame_image.encoded_of == "video":
                        self._check_video(channel)
                    elif frame_image.encoded_of == "raw":
                        self.findings.tolerate(1, [])  # its fault would be known
                    elif self.policy.looks_at_made:
                        made_images[frame_image.ref] = channel
                    continue
                ref = frame_image.ref
                parts[ref] = Part.parse(ref)
                is_first = are_all_looked_at or channel not in channels_seen
                if is_first or min(frame_image.size) <= 0 or not _find_extension(frame_image):
                    looked_at[ref] = channel
                    channels_seen.add(channel)
            if self.points:
                for frame_sweep in frame.sweeps.values():
                    if frame_sweep.num_bytes is None and not frame_sweep.absent:
                        parts[frame_sweep.ref] = Part.parse(frame_sweep.ref)
            for member in frame.members:
                if isinstance(member, FileMember):
                    other_files.update(dict.fromkeys(member.files))
        part_names = [part.name for part in parts.values()]
        names = list(dict.fromkeys([*part_names, *other_files]))
        for name in names:
            check_inside(name, where)
        facts = facts_by_name(self.files, names)
        stored = {ref: parts[ref] for ref in looked_at if facts[parts[ref].name]}
        stored_heads = image_heads(
            self.files,
            parts=list(stored.values()),
            facts=facts,
            depth=self.policy.depth,
        )
        stored_results = zip(stored, stored_heads, strict=True)
        heads = self._judge_heads(where, looked_at, stored_results)
        if made_images:
            looks_at_made = made_heads(self.make_images, list(made_images), self.policy.depth)
            by_ref = ((MADE_PREFIX + ref, head) for ref, head in looks_at_made)
            heads |= self._judge_heads(
                where,
                {MADE_PREFIX + ref: name for ref, name in made_images.items()},
                by_ref,
            )
        known_files = _KnownFiles(parts, facts, heads)
        rows_found: list[dict[str, Entry]] = []
        members: list[list[StampedReference]] = []
        channels = [camera.channel for camera in self.sensors.cameras]
        for number, (frame, placed) in enumerate(zip(frames, has_pose.tolist(), strict=True)):
            row: dict[str, Entry] = {}
            place = f"{where}: frame {number}"
            for channel, is_placed in zip(channels, placed, strict=True):
                image = frame.images.get(channel)
                if image is None:
                    row[channel] = "no image" if channel in in_clip else NOT_IN_CLIP
                elif isinstance(image, Absent):
                    row[channel] = image.reason
                elif image.absent:
                    row[channel] = image.absent
                elif not is_placed:
                    row[channel] = NO_POSE
                else:
                    row[channel] = self._find_image(place, channel, image, known_files)
            if self.points:
                for lidar in self.sensors.lidars:
                    sweep = frame.sweeps.get(lidar.channel)
                    if sweep is None or sweep.absent:
                        row[lidar.channel] = "no sweep" if sweep is None else sweep.absent
                    else:
                        row[lidar.channel] = self._find_sweep(
                            place,
                            channel=lidar.channel,
                            sweep=sweep,
                            known_files=known_files,
                        )
            rows_found.append(row)
            members.append(self._find_members(place, frame, facts))
        return rows_found, members

    def _find_members(
        self,
        place: str,
        frame: Frame,
        facts: Mapping[str, FileFacts | None],
    ) -> list[StampedReference]:
        found_members = []
        for member in frame.members:
            if not isinstance(member, FileMember):
                found_members.append(StampedReference(member, ""))
                continue
            member_facts = [facts[name] for name in member.files]
            empty = [
                name
                for name, file_facts in zip(member.files, member_facts, strict=True)
                if file_facts is not None and not file_facts.num_bytes
            ]
            existing = [file_facts for file_facts in member_facts if file_facts is not None]
            if empty:
                self._note(
                    place,
                    member.name,
                    f"file '{self.files.shown}/{empty[0]}' is empty (0 bytes)",
                )
            elif len(existing) == len(member_facts):
                num_bytes = member.num_bytes or sum(file_facts.num_bytes for file_facts in existing)
                reference = Reference(
                    member.name,
                    member.ref,
                    num_bytes,
                    is_estimate=member.is_estimate,
                )
                found_members.append(
                    StampedReference(
                        reference,
                        " ".join(file_facts.stamp for file_facts in existing),
                    )
                )
            elif member.hint:
                name = member.files[member_facts.index(None)]
                self._note(
                    place,
                    member.name,
                    f"file '{self.files.shown}/{name}' is not there; {member.hint}",
                )
        return found_members

    def _judge_heads(
        self,
        where: str,
        channels: Mapping[str, str],
        heads: Iterable[tuple[str, ImageInfo | str]],
    ) -> dict[str, ImageInfo | None]:
        """Return heads by reference, None for a damaged image, which is noted as the policy
        says.
        """
        judged: dict[str, ImageInfo | None] = {}
        for ref, head in heads:
            if isinstance(head, str):
                judged[ref] = None
                is_made = ref.startswith(MADE_PREFIX)
                name = ref.removeprefix(MADE_PREFIX) if is_made else f"{self.files.shown}/{ref}"
                self._note_damage(f"{where}: image '{name}'", f": {head}")
            else:
                judged[ref] = head
                self.report.note_image(channels[ref], head)
        self.findings.tolerate(len(judged), [])
        return judged

    def _note_damage(self, image: str, fault: str) -> str:
        """Note a damaged image, as the policy says; return why there is none."""
        if self.policy.damaged == "error":
            self.findings.add("images", f"{image}{fault}{LEFT_OUT}")
            return NOTED
        self.findings.tolerate(0, [f"{image}{fault}"])
        return DAMAGED

    def _check_video(self, channel: str) -> None:
        """Raise ConfigError where the policy cannot hold: frames of video are decoded when
        shards are written.
        """
        if self.policy.damaged != "error":
            raise ConfigError(
                f"damaged_image={self.policy.damaged} is not for the images of {channel}, "
                "which are frames of video: they are decoded when shards are written, after "
                "the scan, and a damaged one is an error then; leave the option out, or "
                "leave the camera out by the option cameras"
            )

    def _find_image(
        self,
        place: str,
        channel: str,
        image: Image,
        known_files: _KnownFiles,
    ) -> Entry:
        width, height = image.size
        if not (0 <= width <= LARGEST_IMAGE and 0 <= height <= LARGEST_IMAGE):
            stated = f"{width} x {height} px; allowed are 1 to {LARGEST_IMAGE}, and 0 for unknown"
            return self._note(
                place,
                channel,
                f"image '{image.ref}' is stated to have {stated}",
            )
        if image.fault:
            self.findings.tolerate(1, [])
            name = image.ref if image.made else f"{self.files.shown}/{image.ref}"
            return self._note_damage(f"{place}: image '{name}' of {channel}", f": {image.fault}")
        key = MADE_PREFIX + image.ref if image.made else image.ref
        head = known_files.heads.get(key)
        if head is None and key in known_files.heads:
            return NOTED if self.policy.damaged == "error" else DAMAGED
        size = image.size
        extension = _find_extension(image)
        if image.made and not extension:
            listed = ", ".join(EXTENSION_OF)
            return self._note(
                place,
                channel,
                f"image '{image.ref}' has none of the extensions {listed}; state it",
            )
        if head is not None:  # not the name, which may be wrong
            extension = EXTENSION_OF[head.format]
            stated_size = size
            size = (head.width, head.height)
            if 0 not in stated_size and stated_size != size:
                text = (
                    f"has {size[0]} x {size[1]} px, stated are {stated_size[0]} x {stated_size[1]}"
                )
                return self._note_damage(
                    f"{place}, {channel}: image '{image.ref}' {text}",
                    "; state the file's, with K of that size",
                )
        name = f"{channel}.{extension}"
        if image.made:
            if 0 in size or not image.num_bytes:
                text = (
                    f"image '{image.ref}' is made: state its size, and about how many bytes it has"
                )
                return self._note(place, channel, text)
            return StampedReference(
                Reference(
                    name,
                    MADE_PREFIX + image.ref,
                    image.num_bytes,
                    *size,
                    is_estimate=True,
                ),
                "",
            )
        part = known_files.parts[image.ref]
        file_facts = known_files.facts[part.name]
        if file_facts is None:
            return "no file"
        end = file_facts.num_bytes if part.length is None else part.offset + part.length
        num_bytes = file_facts.num_bytes if part.length is None else part.length
        if not file_facts.num_bytes:
            image_file = f"'{self.files.shown}/{part.name}'"
            return self._note_damage(
                f"{place}, {channel}: image {image_file}", " is empty (0 bytes)"
            )
        has_stated = image.num_bytes in (None, num_bytes)
        if end > file_facts.num_bytes or not num_bytes or not has_stated:
            stated = "" if image.num_bytes is None else f", stated are {image.num_bytes}"
            return self._note_damage(
                f"{place}, {channel}: image '{image.ref}'",
                f" has {num_bytes} bytes in a file of {file_facts.num_bytes}{stated}",
            )
        if isinstance(head, ConvertiblePng):
            self.report.note(CONVERTED, 1)
            estimate = size[0] * size[1] * head.num_components
            reference = Reference(
                name,
                PLAIN + image.ref,
                estimate,
                *size,
                is_estimate=True,
            )
            return StampedReference(reference, file_facts.stamp)
        reference = Reference(name, image.ref, num_bytes, *size)
        return StampedReference(reference, file_facts.stamp)

    def _find_sweep(
        self,
        place: str,
        channel: str,
        sweep: Sweep,
        known_files: _KnownFiles,
    ) -> Entry:
        num_bytes = sweep.num_bytes
        stamp = ""
        if num_bytes is None:
            part = known_files.parts[sweep.ref]
            file_facts = known_files.facts[part.name]
            if file_facts is None:
                end = 0
            elif part.length is None:
                end = file_facts.num_bytes
            else:
                end = part.offset + part.length
            if file_facts is None or not file_facts.num_bytes or end > file_facts.num_bytes:
                short = "is empty" if file_facts and not file_facts.num_bytes else "ends before"
                problem = "is not there" if file_facts is None else short
                text = (
                    f"lidar file '{self.files.shown}/{sweep.ref}' {problem}; the option "
                    "points=false leaves sweeps out"
                )
                return self._note(place, channel, text)
            num_bytes = file_facts.num_bytes if part.length is None else part.length
            stamp = file_facts.stamp
        return StampedReference(
            Reference(f"{channel}.{POINTS_EXTENSION}", POINTS + sweep.ref, num_bytes),
            stamp,
        )

    def _note(self, place: str, channel: str, text: str) -> str:
        self.findings.add(channel, f"{place}, {channel}: {text}")
        return NOTED


def _find_extension(image: Image) -> str:
    """Return the stated extension, or that of the name; "" where neither is one that is stored."""
    suffix = image.ref[image.ref.rfind(".") + 1 :]
    extension = EXTENSION_OF.get(image.extension or suffix)
    if extension is not None:
        return extension
    path = image.ref.partition("#")[0]
    stated = image.extension or path.rpartition(".")[2].lower()
    return EXTENSION_OF.get(stated, "")


class _KnownFiles(NamedTuple):
    """What is known by reference (part of a file, head of an image of unknown size) and by name
    (the file's facts).
    """

    parts: Mapping[str, Part]
    facts: Mapping[str, FileFacts | None]
    heads: Mapping[str, ImageInfo | None]
