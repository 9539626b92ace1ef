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
from fuelrail.sharding.sources.shared.video import VideoFile
from fuelrail.sharding.write.images import stored_size

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        found = [f"video: {counted(self.num_videos, 'file')} of {self.num_frames:,} frames, {_size(self.num_bytes)}"]
        for option in self.options:
            share = option.num_bytes / max(self.num_bytes, 1)
            found.append(
                f"  as JPEG, {option.what}: {option.num_images:,} images, {_size(option.num_bytes)}, {share:.2f} of "
                f"the video; {option.cpu_hours:.3g} CPU hours, once"
            )
        return found


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3f} MB"


def break_even(table: ScanTable, files: SourceFiles, images: ImageRecipe | None) -> BreakEven | None:
    """Estimate what the frames of video in a scan table cost; None where there are none in files of this machine.

    ``images`` is how they would be stored. The first frames of a few videos are decoded and encoded.
    """
    kept: Counter[str] = Counter()
    for number in range(len(table)):
        for member in table.row(number).members:
            if member.ref.startswith(MADE) and FRAME in member.ref:
                kept[frame_of(member.ref.removeprefix(MADE))[0]] += 1
    paths = {name: path for name in sorted(kept) if (path := files.path(name)) is not None}
    if not paths:
        return None
    num_frames = sum(VideoFile(path).facts().num_frames for path in paths.values())
    num_bytes = sum(facts.num_bytes for name in paths if (facts := files.facts(name)) is not None)
    num_kept, measured = sum(kept.values()), list(paths.values())[:: -(-len(paths) // _VIDEOS)]
    given: list[tuple[str, int, ImageRecipe | None]] = [("all frames, full size", num_frames, None)]
    given += [("the kept frames, full size", num_kept, None), ("the kept frames, resize=0.5", num_kept, _HALF)]
    if images is not None:
        size = f"resize={images.resize}" if images.size is None else f"size={images.size[0]}x{images.size[1]}"
        given.append((f"the kept frames, {size},quality={images.quality}", num_kept, images))
    options = []
    for what, number, recipe in given:
        form = JpegForm() if recipe is None else JpegForm(recipe.quality, partial(stored_size, recipe))
        one, whole = _Runs(), _Runs()
        for path in measured:
            count = min(_FRAMES, VideoFile(path).facts().num_frames)
            one.run(path, [count - 1], form)
            whole.run(path, range(count), form)
        # Two equations: the time of a run is that of its decoded frames and that of its JPEGs.
        ratio = whole.num_decoded / one.num_decoded
        encode_s = max(0.0, (whole.time_s - one.time_s * ratio) / max(whole.num_made - one.num_made * ratio, 1))
        decode_s = max(0.0, (whole.time_s - whole.num_made * encode_s) / whole.num_decoded)
        hours = (decode_s * num_frames + encode_s * number) / 3600
        options.append(BreakEvenOption(what, number, round(whole.num_bytes / whole.num_made * number), hours))
    return BreakEven(len(paths), num_frames, num_bytes, options)


class _Runs:
    """The counts of some runs over frames of videos, and the time [s] that this process used."""

    def __init__(self) -> None:
        self.num_decoded = self.num_made = self.num_bytes = 0
        self.time_s = 0.0

    def run(self, path: str, numbers: Sequence[int], form: JpegForm) -> None:
        """Decode and encode frames of a video."""
        video, started = VideoFile(path), time.process_time()
        sizes = [len(jpeg) for _, jpeg in video.jpegs(numbers, form)]
        self.time_s += time.process_time() - started
        self.num_decoded, self.num_made = self.num_decoded + video.num_decoded, self.num_made + len(sizes)
        self.num_bytes += sum(sizes)
