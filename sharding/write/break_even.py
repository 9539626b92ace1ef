"""What JPEGs of a source's video cost against the video itself, in bytes and CPU hours, measured on a few frames."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.cli import counted
from fuelrail.sharding.planning.recipe import ImageRecipe
from fuelrail.sharding.sources.adapter.members import MADE
from fuelrail.sharding.sources.adapter.videos import FRAME, frame_of
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import VideoFacts, VideoFile
from fuelrail.sharding.write.images import stored_size

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.shared.scan_table import ScanTable

_VIDEOS, _FRAMES = 3, 24  # that are measured
_HALF: Final = ImageRecipe(resize=0.5)


class BreakEvenOption(msgspec.Struct, frozen=True):
    """JPEGs of ``num_images`` frames: their bytes, and CPU hours to decode the video and make them, once."""

    what: str
    num_images: int
    num_bytes: int
    cpu_hours: float


class BreakEven(msgspec.Struct, frozen=True):
    """The video files of a source, and what JPEGs of their frames cost, by estimate."""

    num_videos: int
    num_frames: int
    num_bytes: int
    options: list[BreakEvenOption]

    def lines(self) -> list[str]:
        """Return the report for people."""
        about = f"{counted(self.num_videos, 'file')} of {self.num_frames:,} frames, {self.num_bytes / 1e6:,.1f} MB"
        return [f"video: {about}"] + [
            f"  as JPEG, {one.what}: {one.num_images:,} images, {one.num_bytes / 1e6:,.1f} MB, "
            f"{one.num_bytes / max(self.num_bytes, 1):.2f} of the video; {one.cpu_hours:.3g} CPU hours, once"
            for one in self.options
        ]


def break_even(table: ScanTable, files: SourceFiles, images: ImageRecipe | None) -> BreakEven | None:
    """Estimate what the frames of video in a scan table cost; None where there are none in files of this machine.

    ``images`` is how they would be stored. The first frames of a few videos are decoded and encoded.
    """
    refs = (member.ref for number in range(len(table)) for member in table.row(number).members)
    kept = Counter(frame_of(ref.removeprefix(MADE))[0] for ref in refs if ref.startswith(MADE) and FRAME in ref)
    paths = {name: path for name in sorted(kept) if (path := files.path(name)) is not None}
    if not paths:
        return None
    facts_of = {path: VideoFile(path).facts() for path in paths.values()}
    num_bytes = sum(facts.num_bytes for name in paths if (facts := files.facts(name)) is not None)
    measured, num_all = list(facts_of)[:: -(-len(paths) // _VIDEOS)], sum(one.num_frames for one in facts_of.values())
    options = []
    for what, number, recipe in (
        ("all frames", num_all, None),
        *(("the kept frames", sum(kept.values()), one) for one in (None, _HALF, images)[: 3 if images else 2]),
    ):
        form = JpegForm() if recipe is None else JpegForm(recipe.quality, partial(stored_size, recipe))
        runs = [_measured(path, facts_of[path], form) for path in measured]
        made, size, decode_s, encode_s = map(sum, zip(*runs, strict=True))
        hours = (decode_s * num_all + encode_s * number) / made / 3600
        options.append(BreakEvenOption(f"{what}, {_said(recipe)}", number, round(size / made * number), hours))
    return BreakEven(len(paths), num_all, num_bytes, options)


def _said(images: ImageRecipe | None) -> str:
    if images is None:
        return "full size"
    size = f"resize={images.resize}" if images.size is None else f"size={images.size[0]}x{images.size[1]}"
    return f"{size},quality={images.quality}"


def _measured(path: str, facts: VideoFacts, form: JpegForm) -> tuple[float, float, float, float]:
    """Return of the first frames of a video: their number, bytes as JPEG, and CPU time [s] to decode and to encode."""
    times, decoded, sizes = [], [], [0]
    numbers = range(facts.first_frame, min(facts.first_frame + _FRAMES, facts.num_frames))
    count = len(numbers)
    for wanted in (numbers[-1:], numbers):
        video, started = VideoFile(path), time.process_time()
        sizes = [len(jpeg) for _, jpeg in video.jpegs(wanted, form)]
        times.append(time.process_time() - started)
        decoded.append(video.num_decoded)
    # Two equations: the time of a run is that of the frames that it decodes and that of its JPEGs.
    ratio = decoded[1] / decoded[0]
    encode_s = max(0.0, (times[1] - times[0] * ratio) / max(count - ratio, 1)) * count
    return count, sum(sizes), max(0.0, times[1] - encode_s), encode_s
