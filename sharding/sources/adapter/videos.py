"""Frames of video files as images of a source: ``VIDEO#frame=N``, N from 0 in the order in which
frames are shown.

:class:`VideoSource` is the base class of adapters whose images are such frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import FRAME, Absent, Image
from fuelrail.sharding.sources.adapter.members import check_inside
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import (
    VideoFacts,
    VideoFile,
    VideoSettings,
    libraries,
)

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.source import Reads

_FRAME: Final = re.compile(r"(.+)#frame=([0-9]{1,18})\Z", re.DOTALL)
_NUM_KEPT: Final = 256
_KEPT_ORDERS: Final = 8
"""Videos of which the order of the frames is kept: clips that follow each other may be in the
same ones.
"""
S = TypeVar("S", bound=VideoSettings)


class Videos:
    """The video files of a source; what is known of the last ones is kept.

    ``num_decoded`` counts decoded frames.
    """

    def __init__(
        self,
        files: SourceFiles,
        inside: Callable[[str], str] = str,
        *,
        only_keyframes: bool = False,
    ) -> None:
        """Take ``inside``, which makes names below the root of paths; with ``only_keyframes``
        others are left out.
        """
        self._files = files
        self._inside = inside
        self._only_keyframes = only_keyframes
        self.facts = lru_cache(maxsize=_NUM_KEPT)(self._facts)
        self._video = lru_cache(maxsize=_KEPT_ORDERS)(VideoFile)
        self.num_decoded = 0

    def _facts(self, name: str) -> VideoFacts | None:
        """Return what the video states; None where it does not exist. Raise SourceError."""
        check_inside(name, "video")
        path = self._files.path(name)
        if path is None:
            raise SourceError(
                f"video '{name}' is at the URL {self._files.shown}: copy the source to a folder"
            )
        if self._files.facts(name) is None:
            return None
        return VideoFile(path).facts()

    def completed(self, image: Image) -> Image | Absent:
        """Return the image that ``image.ref``, VIDEO#frame=NUMBER, names: with its size, and as one
        that is made.

        A frame of a video that does not exist, or before its first keyframe, is absent. Raises
        SourceError for a number beyond the last frame, and for a size other than a stated one.
        """
        name, number = frame_of(self._inside(image.ref))
        facts = self.facts(name)
        if facts is None:
            return Absent("no file", name)
        if number >= facts.num_frames:
            raise SourceError(
                f"'{image.ref}': the video has {facts.num_frames} frames, counted from 0"
            )
        if number < facts.first_frame:
            return Absent("no keyframe before it", image.ref)
        if (
            self._only_keyframes
            and not self._video(self._files.path(name) or name).order.packets[number].is_keyframe
        ):
            image = msgspec.structs.replace(image, absent="between keyframes")
        width = facts.width
        height = facts.height
        stated_width, stated_height = image.size
        if stated_width > 0 and (stated_width, stated_height) != (width, height):
            raise SourceError(
                f"'{image.ref}' is {width}x{height}, and {stated_width}x{stated_height} is stated"
            )
        return msgspec.structs.replace(
            image,
            ref=f"{name}{FRAME}{number}",
            width=width,
            height=height,
            num_bytes=max(width * height // 5, 1),
            made=True,
            encoded_of="video",
            extension="jpg",
        )

    def jpegs(self, refs: Sequence[str], form: JpegForm) -> Iterator[tuple[str, bytes]]:
        """Yield these frames as JPEG: video by video, in the order of presentation, each decoded
        once.
        """
        numbers: dict[str, list[int]] = {}
        for ref in refs:
            name, number = frame_of(ref)
            numbers.setdefault(name, []).append(number)
        for name, frame_numbers in numbers.items():
            video = self._video(self._files.path(name) or name)
            before = video.num_decoded
            for number, jpeg in video.jpegs(frame_numbers, form):
                yield f"{name}{FRAME}{number}", jpeg
            self.num_decoded += video.num_decoded - before


def frame_of(ref: str) -> tuple[str, int]:
    """Return the video and the number that ``VIDEO#frame=NUMBER`` names; raise SourceError."""
    match = _FRAME.match(ref)
    if match is None:
        raise SourceError(
            f"'{ref}' must be VIDEO{FRAME}N, N from 0 in the order in which frames are shown"
        )
    return match[1], int(match[2])


class VideoSource(FrameSource[S]):
    """A source whose images are frames of video files: those that its adapter passes through
    :meth:`video_frame`.

    A clip names its videos in ``files``. Frames are decoded in order, each once, clip by clip.
    """

    settings_type: type[VideoSettings] = VideoSettings
    requires: ClassVar[Mapping[str, str]] = {"av": "fuelrail[video]"}
    reads: Reads = "clip"

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self.settings.check_libraries()
        only_keyframes = self.settings.frames == "keyframes"
        self._videos = Videos(self.files, only_keyframes=only_keyframes)

    @property
    def options(self) -> dict[str, Any]:
        """All options, and the versions of the libraries that decode."""
        return {**super().options, "libraries": libraries()}

    def video_frame(self, image: Image) -> Image | Absent:
        """Return the image of a frame of a video; ``image.ref`` is VIDEO#frame=NUMBER, and its size
        may be left out.

        Raises SourceError where the video cannot be read, or has no such frame.
        """
        return self._videos.completed(image)

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Decode frames of video, each once."""
        form = self.stored or JpegForm(self.settings.video_quality)
        return self._videos.jpegs(refs, form)
