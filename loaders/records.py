"""The records of a sample's way through the loader, one per stage, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.pipeline.order.epoch import NO_FLAGS
from fuelrail.pipeline.transforms.ego import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.loaders.storage import Storage
    from fuelrail.loaders.storage.protocol import PendingSpan
    from fuelrail.loaders.storage.reader import FetchedSpan, SampleReader
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index_row import IndexRow
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.ego import BevMap
    from fuelrail.pipeline.transforms.image_map import ImageMap
    from fuelrail.pipeline.transforms.pixels import PixelChange


class Source(NamedTuple):
    """One dataset: where its split begins in its index, how many rows those before it have, and how it is read."""

    name: str | None
    """In a mix; None for a dataset alone."""
    dataset: Dataset
    first_row: int
    base: int
    storage: Storage
    reader: SampleReader


class Due(NamedTuple):
    """One sample in the order of loading: its place in the batches, its position in the epoch, its frames' rows.

    ``part`` says which dataset these are rows of, ``present`` which are the frames asked for (None: all).
    ``flags`` are the whole batch's (`fuelrail.loaders.records.BatchSlot`), the same for all of its samples.
    """

    epoch: int
    step: int
    at: int
    position: int
    rows: Sequence[int]
    valid: bool
    part: int = 0
    present: Sequence[bool] | None = None
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS


class Ahead(NamedTuple):
    """A sample that was asked for; ``takes`` wait for its frames' bytes. No ``entries``: the index could not tell."""

    due: Due
    entries: tuple[IndexRow, ...]
    takes: tuple[PendingSpan, ...]


class BatchSlot(NamedTuple):
    """One batch in the making: which it is, and the buffer its images are decoded into.

    ``flags`` are what the order says of the batch's samples, (B,) each, under their names in the batch.
    """

    epoch: int
    step: int
    images: NDArray[np.uint8] | torch.Tensor

    def img(self) -> torch.Tensor:
        """The images as a tensor on the same memory."""
        return self.images if isinstance(self.images, torch.Tensor) else torch.from_numpy(self.images)

    def frames(self, at: int) -> NDArray[np.uint8] | torch.Tensor:
        """The images of one sample, frame by frame: [T, N, 3, H, W], T being 1 without windows."""
        return self.images[at] if self.has_windows else self.images[at : at + 1]

    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    has_windows: bool = False


class FrameTask(NamedTuple):
    """One frame of a sample to load: its row in its dataset's index."""

    row: int
    present: bool
    """False: it stands in for a frame that the clip has not got."""
    entry: IndexRow | None
    """The row's content; None where the index is damaged there, which ``take`` tells."""
    take: PendingSpan
    """Waits for the bytes."""


class Task(NamedTuple):
    """One sample to load: its place in a batch, and its frames (one without windows)."""

    slot: BatchSlot
    at: int
    source: Source
    """The dataset that it is of."""
    frames: tuple[FrameTask, ...]
    current: int
    """Which of the frames is the sample's own."""
    valid: bool
    position: int
    """In the epoch, over all ranks."""
    num_replaced: int = 0
    """Bad samples that it stands in for."""

    @property
    def row(self) -> int:
        """The sample's own row."""
        return self.frames[self.current].row

    @property
    def number(self) -> int:
        """The sample's number over all datasets: what its augmentation is drawn by."""
        return self.source.base + self.row

    def __str__(self) -> str:
        return f"row {self.row} (epoch {self.slot.epoch}, step {self.slot.step})"


class Fetched(NamedTuple):
    """A sample as stored, frame by frame."""

    task: Task
    stored: tuple[FetchedSpan, ...]

    def __str__(self) -> str:
        return f"sample {self.stored[self.task.current].row.key!r}, {self.task}"


class Parsed(NamedTuple):
    """A sample with all members decoded but images, and what is to happen to those; frame by frame.

    ``changes`` and ``bev`` are drawn once for all frames, and so is what makes ``maps`` of the frames' image sizes.
    """

    task: Task
    samples: tuple[Sample, ...]
    maps: tuple[Sequence[ImageMap], ...]
    changes: Sequence[PixelChange]
    bev: BevMap

    @property
    def sample(self) -> Sample:
        """The sample itself."""
        return self.samples[self.task.current]

    def is_shown_before(self, frame: int) -> int | None:
        """The earlier frame that shows the same row, under the same maps, so that its images can be copied."""
        frames = self.task.frames
        for earlier in range(frame):
            if frames[earlier].row == frames[frame].row and self.samples[earlier] is self.samples[frame]:
                return earlier
        return None

    def decoded(self, slot: BatchSlot) -> DecodedSample:
        """What is left once the images are decoded into their place in ``slot``."""
        task = self.task
        window = None
        if task.slot.has_windows:
            frames = task.frames
            rows, present = tuple(frame.row for frame in frames), tuple(frame.present for frame in frames)
            window = DecodedWindow(rows, present, self.samples, self.maps)
        maps, source = self.maps[task.current], task.source
        return DecodedSample(
            slot, task.at, task.row, task.valid, self.sample, maps, self.bev, source.name, source.base, window
        )

    def __str__(self) -> str:
        return f"sample {self.sample.key!r}, {self.task}"


class DecodedWindow(NamedTuple):
    """The T frames of one sample: rows, which are the frames asked for, what they hold, how their images are mapped."""

    rows: tuple[int, ...]
    present: tuple[bool, ...]
    samples: tuple[Sample, ...]
    maps: tuple[Sequence[ImageMap], ...]


class DecodedSample(NamedTuple):
    """One sample whose images lie decoded in row ``at`` of its slot's buffer."""

    slot: BatchSlot
    at: int
    row: int
    valid: bool
    sample: Sample
    maps: Sequence[ImageMap]
    bev: BevMap = IDENTITY
    dataset: str | None = None
    """Its name in a mix."""
    base: int = 0
    """Rows of the mix's datasets before it: ``base + row`` numbers samples over all of them."""
    window: DecodedWindow | None = None
    """All frames, the sample's own among them."""

    def __str__(self) -> str:
        return f"sample {self.sample.key!r} (row {self.row}, epoch {self.slot.epoch}, step {self.slot.step})"
