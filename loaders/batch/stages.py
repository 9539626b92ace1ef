"""How batches are made: the stages from a sample's bytes to a batch on its device, and the buffers they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fuelrail.loaders.autotune import Autotuner, Tuning, decode_ahead
from fuelrail.loaders.batch import packs, samples, static, user
from fuelrail.loaders.batch.assemble import assemble
from fuelrail.loaders.batch.channels import SelectedChannels
from fuelrail.loaders.batch.processes import ProcessTransform
from fuelrail.loaders.batch.samples import fetch
from fuelrail.loaders.decode import BatchDecoder, ImageDecoder, decodes_on_device, make_decoder
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.decode.protocol import MAX_LANES, MIN_LANES
from fuelrail.loaders.records import Collated
from fuelrail.loaders.schedule.datasets import image_facts, unknown_to
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.runtime.stages import Observer, Pipeline, Stage, StageClock, add_clocks

if TYPE_CHECKING:
    from fuelrail.loaders.batch.points import Points
    from fuelrail.loaders.batch.static import FixedBuffers
    from fuelrail.loaders.batch.transfer import CudaTransfer
    from fuelrail.loaders.config import Arguments, BoxFrame, Normalize, StaticBatches
    from fuelrail.loaders.records import CameraImages, DecodedSample, Fetched, Parsed, Source
    from fuelrail.loaders.schedule.bad_samples import BadSamples
    from fuelrail.loaders.schedule.prefetch import RequestStream
    from fuelrail.loaders.storage import StorageStats
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.order.batching import Cursor
    from fuelrail.pipeline.order.windows import FrameWindow
    from fuelrail.pipeline.transforms.pixels import PixelAugment

_FEW_AHEAD: Final = 8
"""Fetched and parsed samples that may wait for few threads; half of them are made in a row."""
_FEW_IMAGES: Final = 24
"""Images whose samples may wait at least: where samples are small, threads would change places too often."""


class BatchPipeline(NamedTuple):
    """What a loader's stages are made of; ``lidar`` is the one whose sweeps become ``points``."""

    bad: BadSamples
    cameras: tuple[str, ...]
    lidar: LidarEntry | None
    augments: samples.Augments
    decoder: ImageDecoder | BatchDecoder
    batch_size: int
    window: FrameWindow | None
    transform: ProcessTransform | Callable[[dict[str, Any]], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    normalize: Normalize | None
    transfer: CudaTransfer | None
    box_frame: BoxFrame
    channels: SelectedChannels
    unknown: frozenset[str]
    batch_transform: user.BatchTransform | None = None
    static: StaticBatches | None = None
    fixed: FixedBuffers | None = None
    is_packed: bool = False

    @property
    def groups(self) -> tuple[CameraImages, ...]:
        """Groups of cameras whose images differ in size; none where all have one size."""
        images = self.augments.images
        return () if images[0].name is None else images

    @property
    def parses_hard(self) -> bool:
        """Whether parsing is real work, done mostly without the interpreter's lock."""
        return self.augments.accumulation is not None or self.channels.are_large

    def hand_over(self, made: Any) -> Any:  # noqa: ANN401
        """Return the batch that the last stage made, for the consumer, on whose thread this must be called."""
        if self.transfer is None:
            return made if self.fixed is None else self.fixed(made)
        batch = self.transfer.hand_over(made)
        if self.fixed is None:
            return batch
        # What a batch_transform returns may be any views of that memory, other ones in each batch.
        return self.fixed(batch, made.arena if self.batch_transform is None else None)

    def close(self) -> None:
        """Free what the decoder and the transform hold until they are used again."""
        for part in (self.decoder, self.transform):
            if isinstance(part, (BatchDecoder, ProcessTransform)):
                part.close()

    def stages(self, tuning: Tuning) -> list[Stage]:
        """Return the stages under a tuning; another tuning changes only their numbers of threads and capacities."""
        num_workers = tuning.num_workers
        parse = partial(samples.parse, self.augments, self.bad, self.window)
        fill = self.augments.pixels.grid_mask_fill
        num_images = len(self.cameras) * (1 if self.window is None else len(self.window.frames))
        ahead = max(2 * num_workers, min(_FEW_AHEAD, 4 * num_workers), _FEW_IMAGES // max(num_images, 1))
        stages = [
            Stage("fetch", partial(samples.fetch, self.bad), 1, ahead, in_bursts=True),
            Stage("parse", parse, num_workers if self.parses_hard else 1, ahead, in_bursts=True),
        ]
        group: int | Callable[[Any], int] | None = packs.rows_of_batch if self.is_packed else self.batch_size
        if isinstance(self.decoder, BatchDecoder):
            decode_all = BatchDecode(self.decoder, self.cameras, fill, self.bad, parse)
            if not decodes_on_device(self.decoder):
                stages.append(Stage("decode", decode_all, 1, 1, group=group))
            else:
                lanes = min(max(num_workers, MIN_LANES), MAX_LANES)
                stages += [Stage("gather", list, 1, 1, group=group), Stage("decode", decode_all, lanes, 1)]
            group = None  # from here on the items are batches
        else:
            decode_one = partial(samples.decode, self.decoder, self.cameras, fill, self.bad, parse)
            stages.append(Stage("decode", decode_one, num_workers, decode_ahead(num_workers, self.batch_size)))
        if self.transform is None and self.collate_fn is None:
            collate: Callable[[Any], Any] = partial(
                assemble, lidar=self.lidar, box_frame=self.box_frame, channels=self.channels, unknown=self.unknown
            )
            if self.augments.second_at:
                collate = _of_views(collate, lambda decoded: (decoded, decoded.second))
        else:
            each: Callable[[Any], Any] = partial(
                user.transform,
                self.transform,
                lidar=self.lidar,
                seed=self.augments.seed,
                box_frame=self.box_frame,
                channels=self.channels,
                unknown=self.unknown,
            )
            if self.augments.second_at:
                each = partial(_transformed_views, each)
            each = each if group else partial(samples.for_each, each)
            if self.transfer is not None:
                each = self.transfer.on_own_stream(each)
            stages.append(Stage("transform", each, num_workers, self.batch_size if group else 1))
            collate = partial(user.collate, self.collate_fn)
            if self.augments.second_at:
                collate = _of_views(collate, tuple)
            if self.transfer is not None:
                collate = self.transfer.on_own_stream(collate)
        if self.static is not None:
            collate = _padded(self.static, collate)
        if self.batch_transform is not None:
            collate = partial(_placed, collate)
        stages.append(Stage("collate", collate, 1, tuning.ready, group=group))
        last = self.batch_transform or self.normalize
        if last is not None and self.transfer is None:
            name = "normalize" if self.batch_transform is None else "batch_transform"
            stages.append(Stage(name, last, 1, tuning.ready))
        if self.transfer is not None:
            stages.append(Stage("transfer", partial(self.transfer, then=last), 1, tuning.ready))
            return [with_ranges(stage) for stage in stages]
        return stages


def make_batch_pipeline(
    options: Arguments, points: Points, sources: Sequence[Source], bad: BadSamples, transfer: CudaTransfer | None
) -> BatchPipeline:
    """Choose the decoder, and put together what the stages need."""
    transforms = options.transforms
    cameras = tuple(sources[0].reader.cameras)
    num_frames = 1 if options.window is None else len(options.window.frames)
    batch_images = options.batch_size * (1 + transforms.two_views) * num_frames * len(cameras)
    decoder = make_decoder(
        transforms.decoder,
        options.device,
        lambda: image_facts(sources)._replace(batch_images=batch_images),
        options.num_threads,
        transforms.dali,
    )
    check_pixels(decoder, transforms.pixels)
    transform = options.transform
    if options.transform_in == "process":
        if decodes_on_device(decoder):
            raise ConfigError(
                f"transform_in='process' takes images in host memory, and decoder={decoder.name!r} decodes on "
                f"{decoder.device}: take decoder='turbo', or batch_transform="
            )
        transform = ProcessTransform(transform)
    augments = samples.Augments(
        samples.image_groups(transforms, cameras), transforms.pixels, transforms.ego, options.seed, points.accumulation,
        transforms.undistort, options.batch_size if transforms.two_views else 0,
    )  # fmt: skip
    samples.warn_of_enlarged(augments.images, sources)
    channels = (*sources[0].reader.channels, *sources[0].attributes.channels)
    fixed, pack = transforms.static_batches, None if options.order is None else options.order.pack
    batch_transform = options.batch_transform and user.BatchTransform(
        options.batch_transform,
        transforms.normalize,
        torch.device("cpu") if transfer is None else transfer.device,
        options.seed,
        must_be_dict=fixed is not None,
    )
    return BatchPipeline(
        bad, cameras, points.lidar, augments, decoder, options.batch_size, options.window, transform,
        options.collate_fn, transforms.normalize, transfer, transforms.box_frame,
        SelectedChannels(channels, cameras, packs.max_tokens(pack)), unknown_to(sources),
        batch_transform, fixed, None if fixed is None else static.FixedBuffers(fixed.buffers), pack is not None,
    )  # fmt: skip


def _placed(collate: Callable[[Any], Any], items: Sequence[Any]) -> Collated:
    """Collate decoded or transformed samples, each perhaps with its second view, to a batch with its place."""
    samples = [item[0] if isinstance(item, list) else item for item in items]
    slot = samples[0].slot
    return Collated(collate(items), slot.epoch, slot.step, slot.position, tuple(one.key for one in samples))


def _padded(settings: StaticBatches, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda decoded: static.pad(settings, collate(decoded))


def _transformed_views(each: Callable[[Any], Any], decoded: Any) -> list[Any]:  # noqa: ANN401
    return [each(decoded), each(decoded.second)]


def _of_views(collate: Callable[[Any], Any], views: Callable[[Any], Sequence[Any]]) -> Callable[[Any], Any]:
    """Return ``collate`` for items of two views each: it gets all first views, then all second ones."""
    return lambda items: collate(_firsts_then_seconds(map(views, items)))


def _firsts_then_seconds(views: Iterable[Sequence[Any]]) -> list[Any]:
    return [view for of_all in zip(*views, strict=True) for view in of_all]


def check_pixels(decoder: ImageDecoder, pixels: PixelAugment) -> None:
    """Raise ConfigError where pixel values are to be changed that never are in host memory."""
    if decodes_on_device(decoder) and not pixels.changes_nothing:
        raise ConfigError(
            f"pixels can be changed in host memory only, and decoder={decoder.name!r} decodes on {decoder.device}: "
            "leave out pixels, or take decoder='turbo'"
        )


class BatchDecode:
    """The stage's work: decodes all images of a batch in one call, B x T x N of them, of any sizes.

    Into the slot's host buffer, or, with a decoder on a GPU, into memory of that device, which takes the buffer's place
    in the slot. A bad image makes its sample bad, as with other decoders; the rest of the batch is not decoded again.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        cameras: Sequence[str],
        fill: tuple[int, int, int],
        bad: BadSamples,
        parse_again: Callable[[Fetched], Parsed],
    ) -> None:
        self._decoder, self._cameras, self._fill = decoder, cameras, fill
        self._bad, self._parse_again = bad, parse_again

    def __call__(self, batch: Sequence[Parsed]) -> list[DecodedSample]:
        """Decode the parsed samples of one batch."""
        slot = batch[0].task.slot
        on_cpu = not decodes_on_device(self._decoder)
        if not on_cpu:
            slot = slot.for_rows(len(batch) * len(batch[0].views), self._decoder.new_output)
        parts = slot.parts()
        samples = list(batch)
        failed = self._decode(_firsts_then_seconds(one.views for one in samples), parts)
        for row, (frame, error) in failed.items():
            at = row % len(samples)
            if row != at and at in failed:
                continue  # the other view of a sample that is replaced already
            is_bad: tuple[int, ImageError] | None = (frame, error)
            while is_bad is not None:
                samples[at] = self._parse_again(fetch(self._bad, self._bad.replace(samples[at].task, *is_bad)))
                for number, view in enumerate(samples[at].views):
                    place = at + number * len(samples)
                    is_bad = self._decode([view], [(cameras, part[place : place + 1]) for cameras, part in parts]).get(
                        0
                    )
                    if is_bad is not None:
                        break
        if on_cpu:
            for at, parsed in enumerate(_firsts_then_seconds(one.views for one in samples)):
                for sample, planes in zip(parsed.samples, slot.frames(at), strict=True):
                    for image, channel, change in zip(planes, self._cameras, parsed.changes, strict=True):
                        if channel in sample.images:
                            change_pixels(image, change, self._fill)
        return [parsed.decoded(slot) for parsed in samples]

    def _decode(
        self, samples: Sequence[Parsed], parts: Sequence[tuple[Sequence[int] | None, torch.Tensor]]
    ) -> dict[int, tuple[int, ImageError]]:
        """Decode the samples' images into uint8 [B', T, N, 3, H, W] of each group of cameras, all of one size.

        Returns each sample's first error and its frame.
        """
        errors: dict[int, tuple[int, ImageError]] = {}
        for cameras, images in parts:
            names = [
                (number, frame, camera)
                for number, parsed in enumerate(samples)
                for frame in range(len(parsed.samples))
                for camera in (range(len(self._cameras)) if cameras is None else cameras)
            ]
            encoded = [samples[n].samples[frame].images.get(self._cameras[camera]) for n, frame, camera in names]
            maps = [samples[number].maps[frame][camera] for number, frame, camera in names]
            for (number, frame, camera), error in zip(
                names, self._decoder.decode_batch(encoded, maps, images.flatten(0, 2)), strict=True
            ):
                if error is not None and number not in errors:
                    key, channel = samples[number].samples[frame].key, self._cameras[camera]
                    errors[number] = frame, ImageError(error.message, key=key, member=channel)
        return dict(sorted(errors.items()))


class Runner:
    """Starts, tunes and stops a loader's pipelines, one at a time, and adds up what they all did."""

    def __init__(self, name: str, tuner: Autotuner | None, observer: Observer | None) -> None:
        self._name, self._tuner, self._observer = name, tuner, observer
        self._pipeline: Pipeline | None = None
        self._streams: Sequence[RequestStream] = ()
        self._idle_at: Cursor | None = None
        self._start_s: float | None = None
        self._past: tuple[StageClock, ...] = ()  # of the pipelines before
        self._past_waited_s = 0.0

    def start(self, tasks: Iterator[Any], stages: Sequence[Stage], streams: Sequence[RequestStream]) -> None:
        """Run the tasks through the stages; ``streams`` are what they take their bytes from. Nothing may be running."""
        assert self._pipeline is None, "one pipeline at a time"
        self._streams = streams
        self._pipeline = Pipeline(tasks, stages, name=self._name, observer=self._observer)
        if self._tuner is not None:
            self._tuner.restart()
        if self._start_s is None:
            self._start_s = time.perf_counter()

    def stop(self) -> None:
        """Stop the threads, if there are any, and wait until they are gone."""
        for stream in self._streams:
            stream.session.close()  # a thread that waits for storage must not hold up the others' end
        self._streams = ()
        # Taken first: an iteration that ends in another thread stops too.
        pipeline, self._pipeline, self._idle_at = self._pipeline, None, None
        if pipeline is not None:
            pipeline.close()
            self._past = add_clocks(self._past, pipeline.clocks())
            self._past_waited_s += pipeline.waited_s

    def park_at(self, cursor: Cursor) -> None:
        """Record that an epoch is consumed; the threads continue, and the next result is the first after ``cursor``."""
        self._idle_at = cursor

    def idle_at(self, cursor: Cursor) -> bool:
        """Return whether the next result is the first after ``cursor``, and no iteration takes results."""
        return self._idle_at == cursor

    def take(self) -> Pipeline:
        """Return the pipeline to a caller who takes its results from now on."""
        assert self._pipeline is not None, "to be started first"
        self._idle_at = None
        return self._pipeline

    def runs(self, pipeline: Pipeline) -> bool:
        """Return whether this pipeline has not been stopped, or replaced by another."""
        return self._pipeline is pipeline

    @property
    def is_running(self) -> bool:
        """Whether there is a pipeline of which results can still come."""
        return self._pipeline is not None and self._pipeline.is_running

    def tuning_due(self) -> Tuning | None:
        """Note that a batch was handed out; the new tuning, if it is time for one: :meth:`adapt` makes it so."""
        if self._tuner is None or self._pipeline is None:
            return None
        now_s = time.perf_counter()
        if not self._tuner.due(now_s):
            return None
        return self._tuner.update(now_s, self._pipeline.waited_s, self._pipeline.clocks())

    def adapt(self, stages: Sequence[Stage]) -> None:
        """Give the running stages these numbers of threads and capacities."""
        if self._pipeline is not None:
            for stage in stages:
                self._pipeline.set_num_threads(stage.name, stage.num_threads)
                self._pipeline.set_capacity(stage.name, stage.capacity)

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the stages' clocks, over all pipelines; empty before the first."""
        return self._past if self._pipeline is None else add_clocks(self._past, self._pipeline.clocks())

    @property
    def waited_s(self) -> float:
        """Seconds that consumers have waited for results, over all pipelines."""
        return self._past_waited_s + (0.0 if self._pipeline is None else self._pipeline.waited_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first pipeline began."""
        return 0.0 if self._start_s is None else time.perf_counter() - self._start_s


def with_ranges(
    stage: Stage,
    push: Callable[[str], object] = torch.cuda.nvtx.range_push,
    pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
) -> Stage:
    """Return stage with an NVTX range ``fuelrail NAME`` around each call of its work, on the thread that does it."""
    work, name = stage.work, f"fuelrail {stage.name}"

    def ranged(item: Any) -> Any:  # noqa: ANN401
        push(name)
        try:
            return work(item)
        finally:
            pop()

    return replace(stage, work=ranged)


class LoaderStats(NamedTuple):
    """What the loader did since it was made: its stages' clocks, and the batches handed out."""

    stages: tuple[StageClock, ...]
    batches: int
    samples: int
    images: int
    waited_s: float
    """Time that the trainer waited for batches."""
    elapsed_s: float
    """Time since the start of the first iteration."""
    storage: StorageStats
    """What was read, fetched, found in the cache."""
    bad_samples: int
    """Distinct bad samples that were substituted."""
    refused_images: int
    """Images that DALI failed on and libjpeg-turbo decoded on the CPU; if they are many, the GPU decodes nothing."""

    def _repr_html_(self) -> str:
        """Return a table for notebooks: each stage's share of its threads' time."""
        head = "<tr><th>stage</th><th>threads</th><th>done</th><th>busy</th><th>starved</th><th>blocked</th></tr>"
        rows = ""
        for one in self.stages:
            total = max(one.busy_s + one.starved_s + one.blocked_s, 1e-9)
            shares = (f"<td>{100 * part / total:.0f} %</td>" for part in (one.busy_s, one.starved_s, one.blocked_s))
            rows += f"<tr><td>{one.name}</td><td>{one.num_threads}</td><td>{one.items:,}</td>{''.join(shares)}</tr>"
        text = (
            f"{self.samples:,} samples in {self.elapsed_s:.1f} s; the trainer waited {self.waited_s:.1f} s for batches"
        )
        return f"<div><p>{text}</p><table>{head}{rows}</table></div>"
