"""What JPEGs of a source's video cost against the video itself, in bytes and CPU hours, measured
on a few frames.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.pipeline.cli import counted
from fuelrail.sharding.planning.recipe import ImageRecipe
from fuelrail.sharding.sources.adapter.frame import FRAME
from fuelrail.sharding.sources.adapter.members import MADE_PREFIX
from fuelrail.sharding.sources.adapter.videos import frame_of
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import VideoFile
from fuelrail.sharding.sources.source import OwnVideos, VideoStart
from fuelrail.sharding.write.images import stored_size

if TYPE_CHECKING:
    from fuelrail.sharding.sources.adapter.source import FrameSource
    from fuelrail.sharding.sources.shared.scan_table import ScanTable

# that are measured
_VIDEOS = 3
_FRAMES = 24


class BreakEvenOption(msgspec.Struct, frozen=True):
    """JPEGs of ``num_images`` frames: their bytes, and CPU hours to decode the video and make
    them, once.
    """

    what: str
    num_images: int
    num_bytes: int
    cpu_hours: float


class BreakEven(msgspec.Struct, frozen=True):
    """The video of a source, by file or topic, and what JPEGs of its frames cost, by estimate."""

    num_videos: int
    num_frames: int
    num_bytes: int
    options: list[BreakEvenOption]

    def lines(self) -> list[str]:
        """Return the report for people."""
        summary = (
            f"{counted(self.num_videos, 'stream')} of {self.num_frames:,} frames, "
            f"{self.num_bytes / 1e6:,.1f} MB"
        )
        return [f"video: {summary}"] + [
            f"  as JPEG, {option.what}: {option.num_images:,} images, "
            f"{option.num_bytes / 1e6:,.1f} MB, {option.num_bytes / max(self.num_bytes, 1):.2f} of "
            f"the video; {option.cpu_hours:.3g} CPU hours, once"
            for option in self.options
        ]


def break_even(
    table: ScanTable,
    source: FrameSource[Any],
    images: ImageRecipe | None,
) -> BreakEven | None:
    """Estimate what the frames of video in a scan table cost; None where there are none in files of
    this machine.

    ``images`` is how they would be stored. The first frames of a few videos are decoded and
    encoded.
    """

    def iter_made_refs() -> Iterator[str]:
        for number in range(len(table)):
            for member in table.row(number).members:
                if member.ref.startswith(MADE_PREFIX):
                    yield member.ref.removeprefix(MADE_PREFIX)

    if isinstance(source, OwnVideos):
        videos = source.videos(iter_made_refs(), _FRAMES)
    else:
        counts = Counter(frame_of(ref)[0] for ref in iter_made_refs() if FRAME in ref)
        videos = []
        for name in sorted(counts):
            path = source.files.path(name)
            file_facts = source.files.facts(name)
            if path is None or file_facts is None:
                continue
            video_file = partial(VideoFile, path)
            facts = video_file().facts()
            end = min(facts.first_frame + _FRAMES, facts.num_frames)
            videos.append(
                VideoStart(
                    num_frames=facts.num_frames,
                    num_bytes=file_facts.num_bytes,
                    num_kept=counts[name],
                    frames=range(facts.first_frame, end),
                    open=video_file,
                )
            )
    if not videos:
        return None
    columns = list(zip(*videos, strict=True))
    num_all, num_bytes, num_kept = (sum(column) for column in columns[:3])
    options = []
    for title, number, recipe in (
        ("all frames", num_all, None),
        *(
            ("the kept frames", num_kept, image_recipe)
            for image_recipe in (None, ImageRecipe(resize=0.5), images)[: 3 if images else 2]
        ),
    ):
        form = JpegForm()
        size_text = "full size"
        if recipe is not None:
            form = JpegForm(recipe.quality, partial(stored_size, recipe))
            resize = f"resize={recipe.resize}"
            if recipe.size is not None:
                resize = f"size={recipe.size[0]}x{recipe.size[1]}"
            size_text = f"{resize},quality={recipe.quality}"
        made_of = 0
        size = 0
        decode_s = 0.0
        encode_s = 0.0
        for video in videos[:: -(-len(videos) // _VIDEOS)]:
            times = []
            decoded = []
            sizes = [0]
            count = len(video.frames)
            for frames in (video.frames[-1:], video.frames):
                reader = video.open()
                before = reader.num_decoded
                started = time.process_time()
                sizes = [len(jpeg) for _, jpeg in reader.jpegs(frames, form)]
                times.append(time.process_time() - started)
                decoded.append(reader.num_decoded - before)
            # Two equations: the time of a run is that of the frames that it decodes and that of
            # its JPEGs.
            ratio = decoded[1] / decoded[0]
            slower_s = times[1] - times[0] * ratio
            encode_1_s = slower_s / max(count - ratio, 1)
            encode_all_s = max(0.0, encode_1_s) * count
            made_of += count
            size += sum(sizes)
            decode_s += max(0.0, times[1] - encode_all_s)
            encode_s += encode_all_s
        hours = (decode_s * num_all + encode_s * number) / made_of / 3600
        options.append(
            BreakEvenOption(
                f"{title}, {size_text}",
                number,
                round(size / made_of * number),
                hours,
            )
        )
    return BreakEven(
        num_videos=len(videos),
        num_frames=num_all,
        num_bytes=num_bytes,
        options=options,
    )
