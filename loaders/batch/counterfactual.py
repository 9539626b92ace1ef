"""Counterfactual runs: a loader that leaves out the work of some parts, to measure what they
cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from fuelrail.loaders.batch.samples import keep
from fuelrail.loaders.decode import decodes_on_device
from fuelrail.loaders.records import Fetched, Parsed, Task
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fuelrail.loaders.batch.stages import BatchPipeline
    from fuelrail.loaders.schedule.schedule import Schedule
    from fuelrail.loaders.storage.reader import FetchedSpan
    from fuelrail.pipeline.runtime.stages import Stage

LoaderPart = Literal["storage", "decompression", "decode", "transform"]
"""The parts of a loader that can be left out, in the order of the data's way."""

# Samples whose bytes or parsed members replace those of all others; enough that their sizes average
# out.
_NUM_KEPT = 8


class LeftOut(NamedTuple):
    """The parts that a loader leaves out.

    ``spans`` holds the stored samples of each source that replace all reads, ``new_images`` takes
    memory for images where that is the decoder's.
    """

    parts: frozenset[LoaderPart] = frozenset()
    spans: Mapping[int, Sequence[FetchedSpan]] = {}
    new_images: Callable[[tuple[int, ...]], torch.Tensor] | None = None

    def stages(self, stages: list[Stage]) -> list[Stage]:
        """Replace the work of the stages whose part is left out."""
        if not self.parts:
            return stages

        def fetch(task: Task) -> Fetched:
            spans = self.spans[task.source.base]
            return Fetched(task, tuple(spans[frame.row % len(spans)] for frame in task.frames))

        def decode(parsed: Parsed | list[Parsed]) -> Parsed | list[Parsed]:
            # A sample, or those of a batch: nothing is written into the batch's buffer.
            if not isinstance(parsed, list) or self.new_images is None:
                return parsed
            num_rows = len(parsed) * len(parsed[0].views)
            slot = parsed[0].slot.for_rows(num_rows, self.new_images)
            return [sample.in_slot(slot) for sample in parsed]

        remaining = []
        for stage in stages:
            work = stage.work
            if stage.name == "fetch" and "storage" in self.parts:
                work = fetch
            elif stage.name == "parse" and "decompression" in self.parts:
                work = _Remembered(work)
            elif stage.name == "decode" and "decode" in self.parts:
                work = decode
            remaining.append(replace(stage, work=work))
        return remaining


def leave_out(
    parts: Collection[LoaderPart],
    schedule: Schedule,
    pipeline: BatchPipeline,
) -> tuple[LeftOut, Schedule, BatchPipeline]:
    """Prepare to leave out parts.

    Returns what to load, which reads nothing without ``storage``, and the stages.

    Raises ConfigError for a part that does not exist.
    """
    allowed = get_args(LoaderPart)
    unknown = sorted(set(parts) - {*allowed})
    if unknown:
        raise ConfigError(
            f"a loader has no part {unknown[0]!r} to leave out; allowed: {', '.join(allowed)}"
        )
    if "transform" in parts and pipeline.transform is not None:
        pipeline = pipeline._replace(transform=keep)
    if "transform" in parts:
        pipeline = pipeline._replace(batch_transform=None)
    new_images = pipeline.decoder.new_output if decodes_on_device(pipeline.decoder) else None
    if "storage" not in parts:
        return (
            LeftOut(frozenset(parts), new_images=new_images),
            schedule,
            pipeline,
        )
    spans: dict[int, list[FetchedSpan]] = {}
    for source in schedule.sources:
        entry = source.dataset.split(schedule.identity.split)
        end = entry.first_sample + entry.num_samples
        stride = max(1, entry.num_samples // _NUM_KEPT)  # neighbours may be of one clip
        rows = range(entry.first_sample, end, stride)[:_NUM_KEPT]
        fetched = [source.reader.fetch(row) for row in rows]
        spans[source.base] = [sample._replace(span=sample.span.copied()) for sample in fetched]
    return (
        LeftOut(frozenset(parts), spans, new_images),
        schedule._replace(reads=False),
        pipeline,
    )


class _Remembered:
    """Parsing of the first samples only; their results replace those of all others."""

    def __init__(self, work: Callable[[Fetched], Parsed]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._kept: list[Parsed] = []

    def __call__(self, fetched: Fetched) -> Parsed:
        with self._lock:
            if len(self._kept) < _NUM_KEPT:
                parsed = self._work(fetched)
                self._kept.append(_own_bytes(parsed))
                return parsed
        parsed = self._kept[fetched.task.row % len(self._kept)]
        if parsed.second is None:
            return parsed._replace(task=fetched.task)
        second_at = fetched.task.batch_row + parsed.second.task.batch_row - parsed.task.batch_row
        second = parsed.second._replace(task=fetched.task._replace(batch_row=second_at))
        return parsed._replace(task=fetched.task, second=second)


def _own_bytes(parsed: Parsed) -> Parsed:
    """Return the sample with copies of its images: the storage may reuse the buffer that holds
    the bytes.
    """
    samples = tuple(
        replace(
            sample,
            images={name: bytes(image) for name, image in sample.images.items()},
        )
        for sample in parsed.samples
    )
    second = None if parsed.second is None else _own_bytes(parsed.second)
    return parsed._replace(samples=samples, second=second)
