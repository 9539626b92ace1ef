"""How batches are made: the stages from a sample's bytes to a batch on its device, and the
buffers they share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fuelrail.loaders.autotune import (
    Autotuner,
    Tuning,
    decode_ahead,
    make_tuner,
)
from fuelrail.loaders.batch import packs, samples, static, user
from fuelrail.loaders.batch.assemble import assemble
from fuelrail.loaders.batch.buffer_pool import ImageBuffers, image_shapes
from fuelrail.loaders.batch.channels import SelectedChannels
from fuelrail.loaders.batch.processes import ProcessTransform
from fuelrail.loaders.batch.samples import fetch
from fuelrail.loaders.batch.timed import TimedChannels, timed_channels
from fuelrail.loaders.decode import decodes_on_device, make_decoder
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.decode.protocol import (
    MAX_LANES,
    MIN_LANES,
    BatchDecoder,
    ImageDecoder,
)
from fuelrail.loaders.records import Collated
from fuelrail.loaders.schedule.datasets import image_facts, unknown_to
from fuelrail.loaders.schedule.state import sample_settings
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.order.compile import plain
from fuelrail.pipeline.order.windows import has_frames
from fuelrail.pipeline.runtime.stages import Stage

if TYPE_CHECKING:
    from fuelrail.loaders.batch.points import Points
    from fuelrail.loaders.batch.static import FixedBuffers
    from fuelrail.loaders.batch.transfer import CudaTransfer
    from fuelrail.loaders.config import (
        Arguments,
        Budget,
        Normalize,
        StaticBatches,
    )
    from fuelrail.loaders.records import (
        CameraImages,
        Fetched,
        Parsed,
        Scheduled,
        Source,
    )
    from fuelrail.loaders.schedule.bad_samples import BadSamples
    from fuelrail.loaders.storage.buffers import Memory
    from fuelrail.pipeline.order.pack import Pack
    from fuelrail.pipeline.order.windows import Window
    from fuelrail.pipeline.transforms.pixels import PixelAugment

_FEW_AHEAD: Final = 8
"""Fetched and parsed samples that may wait for few threads; half of them are made in a row."""
_FEW_IMAGES: Final = 24
"""Images whose samples may wait at least: where samples are small, threads would change places
too often.
"""


class BatchPipeline(NamedTuple):
    """What a loader's stages are made of."""

    bad: BadSamples
    cameras: tuple[str, ...]
    augments: samples.Augments
    decoder: ImageDecoder | BatchDecoder
    batch_size: int
    window: Window | None
    transform: ProcessTransform | Callable[[dict[str, Any]], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    normalize: Normalize | None
    transfer: CudaTransfer | None
    channels: SelectedChannels
    assemble: Callable[[Sequence[Parsed]], dict[str, Any]]
    batch_transform: user.BatchTransform | None = None
    static: StaticBatches | None = None
    fixed: FixedBuffers | None = None
    pack: Pack | None = None
    serves: bool = False
    """Whether the batches are for another process, which normalises and transforms them."""
    timed: TimedChannels = samples.NOT_TIMED

    @property
    def groups(self) -> tuple[CameraImages, ...]:
        """Groups of cameras whose images differ in size; none where all have one size."""
        images = self.augments.images
        if images[0].name is None:
            return ()
        return images

    @property
    def _image_axes(self) -> tuple[int, ...]:
        """Axes of an image buffer before the cameras'."""
        rows = self.batch_size * (2 if self.augments.second_at else 1)
        if has_frames(self.window):
            return rows, self.num_frames
        return (rows,)

    @property
    def num_frames(self) -> int:
        """Frames of a sample whose images are decoded."""
        if self.window is None:
            return 1
        return len(self.window.frames)

    def with_rows(self, rows: int) -> BatchPipeline:
        """Return what makes batches of this number of samples, or of packs."""
        second_at = rows if self.augments.second_at else 0
        augments = self.augments._replace(second_at=second_at)
        return self._replace(batch_size=rows, augments=augments)

    def tuner(self, budget: Budget | None, ready: int) -> Autotuner | None:
        """Return what tunes the numbers of threads and of ready batches; see `make_tuner`."""
        shapes = image_shapes(self.augments.images, self._image_axes)
        batch_bytes = sum(map(math.prod, shapes))
        # On a GPU the only threads that do work worth tuning are those that decode, unless parsing
        # is work.
        lanes = (
            (MIN_LANES, MAX_LANES)
            if decodes_on_device(self.decoder) and not self.parses_hard
            else None
        )
        return make_tuner(
            budget,
            batch_size=self.batch_size,
            batch_bytes=batch_bytes,
            ready=ready,
            lanes=lanes,
        )

    def buffers(self, keep: int, memory: Memory) -> Callable[[Scheduled], Any]:
        """Return what takes a buffer for the images of a batch, given its first sample; see
        `ImageBuffers`.
        """
        varies = self.pack is not None
        on_device = decodes_on_device(self.decoder)
        axes = self._image_axes
        buffers = ImageBuffers(
            self.augments.images,
            varies=varies,
            on_device=on_device,
            memory=memory,
            keep=keep,
        )
        return lambda first: buffers.take((len(first.flags["pack"]),) if varies else axes)

    @property
    def parses_hard(self) -> bool:
        """Whether parsing is real work, done mostly without the interpreter's lock."""
        return self.augments.accumulation is not None or self.channels.are_large

    def content(self, options: Arguments, num_cameras: int) -> dict[str, Any]:
        """Return what decides the content of a sample, of a rig with this number of cameras."""
        channels = [channel.name for channel in self.channels.channels] or None
        cameras: Any = None if len(self.cameras) == num_cameras else [*self.cameras]
        if isinstance(options.transforms.cameras, dict):
            cameras = plain(options.transforms.cameras)
        return sample_settings(
            options.seed,
            **options.transforms.content(),
            channels=channels,
            cameras=cameras,
        )

    def hand_over(self, output: Any) -> Any:
        """Return the batch that the last stage made, for the consumer, on whose thread this must
        be called.
        """
        if self.transfer is None:
            if self.fixed is None:
                return output
            return self.fixed(output)
        batch = self.transfer.hand_over(output)
        if self.fixed is None:
            return batch
        # What a batch_transform returns may be any views of that memory, other ones in each batch.
        return self.fixed(batch, output.arena if self.batch_transform is None else None)

    def close(self) -> None:
        """Free what the decoder and the transform hold until they are used again."""
        for part in (self.decoder, self.transform):
            if isinstance(part, (BatchDecoder, ProcessTransform)):
                part.close()

    def stages(self, tuning: Tuning) -> list[Stage]:
        """Return the stages under a tuning; another tuning changes only their numbers of threads
        and capacities.
        """
        num_workers = tuning.num_workers
        parse = partial(
            samples.parse,
            self.augments,
            self.bad,
            self.window,
            timed=self.timed,
        )
        fill = self.augments.pixels.grid_mask_fill
        num_images = len(self.cameras) * self.num_frames
        ahead = max(
            2 * num_workers,
            min(_FEW_AHEAD, 4 * num_workers),
            _FEW_IMAGES // max(num_images, 1),
        )
        stages = [
            Stage(
                "fetch",
                partial(samples.fetch, self.bad),
                1,
                ahead,
                in_bursts=True,
            ),
            Stage(
                "parse",
                parse,
                num_workers if self.parses_hard else 1,
                ahead,
                in_bursts=True,
            ),
        ]
        group: int | Callable[[Any], int] | None = (
            packs.rows_of_batch if self.pack else self.batch_size
        )
        if isinstance(self.decoder, BatchDecoder):
            decode_all = BatchDecode(
                decoder=self.decoder,
                cameras=self.cameras,
                fill=fill,
                bad=self.bad,
                parse_again=parse,
            )
            if not decodes_on_device(self.decoder):
                stages.append(Stage("decode", decode_all, 1, 1, group=group))
            else:
                lanes = min(max(num_workers, MIN_LANES), MAX_LANES)
                stages += [
                    Stage("gather", list, 1, 1, group=group),
                    Stage("decode", decode_all, lanes, 1),
                ]
            group = None  # from here on the items are batches
        else:
            decode_one = partial(
                samples.decode,
                decoder=self.decoder,
                cameras=self.cameras,
                fill=fill,
                bad=self.bad,
                parse_again=parse,
            )
            stages.append(
                Stage(
                    "decode",
                    decode_one,
                    num_workers,
                    decode_ahead(num_workers, self.batch_size),
                )
            )
        collate: Callable[[Sequence[Any]], Any] = self.assemble
        if self.transform is not None or self.collate_fn is not None:
            transform_sample: Callable[[Any], Any] = partial(
                user.transform,
                self.transform,
                self.assemble,
                self.augments.seed,
            )
            transform_sample = (
                transform_sample if group else partial(samples.for_each, transform_sample)
            )
            collate = partial(user.collate, self.collate_fn)
            if self.transfer is not None:
                transform_sample = self.transfer.on_own_stream(transform_sample)
                collate = self.transfer.on_own_stream(collate)
            stages.append(
                Stage(
                    "transform",
                    transform_sample,
                    num_workers,
                    self.batch_size if group else 1,
                )
            )
        collate = partial(self._collate, collate)
        stages.append(Stage("collate", collate, 1, tuning.ready, group=group))
        return self._add_last_stages(stages, tuning)

    def _collate(self, collate: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> Any:
        """Return the batch of decoded or transformed samples, as a `Collated` where later work
        needs its place.
        """
        views = _list_views(items)
        batch = collate(views)
        if self.static is not None:
            batch = static.pad(self.static, batch, self.pack, self.batch_size)
        if self.batch_transform is None and not self.serves:
            return batch
        slot = views[0].slot
        keys = tuple(sample.key for sample in views[: len(items)])
        return Collated(
            batch=batch,
            epoch=slot.epoch,
            step=slot.step,
            position=slot.position,
            keys=keys,
        )

    def receiving(self, tuning: Tuning) -> list[Stage]:
        """Return the stages of batches that another process made: as far as that left them to
        this one.
        """
        if self.transfer is None:
            return [Stage("receive", samples.keep, 1, 1)]
        receive = operator.attrgetter("batch") if self.batch_transform is None else samples.keep
        return self._add_last_stages([Stage("receive", receive, 1, 1)], tuning)

    def _add_last_stages(self, stages: list[Stage], tuning: Tuning) -> list[Stage]:
        last = None if self.serves else self.batch_transform or self.normalize
        if last is not None and self.transfer is None:
            name = "normalize" if self.batch_transform is None else "batch_transform"
            stages.append(Stage(name, last, 1, tuning.ready))
        if self.transfer is not None:
            stages.append(
                Stage(
                    "transfer",
                    partial(self.transfer, function=last),
                    1,
                    tuning.ready,
                )
            )
            return [with_ranges(stage) for stage in stages]
        return stages


def make_batch_pipeline(
    options: Arguments,
    points: Points,
    sources: Sequence[Source],
    bad: BadSamples,
    transfer: CudaTransfer | None,
) -> BatchPipeline:
    """Choose the decoder, and put together what the stages need."""
    transforms = options.transforms
    cameras = tuple(sources[0].reader.batch_names)
    num_frames = 1 if options.window is None else len(options.window.frames)
    batch_images = options.batch_size * (1 + transforms.two_views) * num_frames * len(cameras)
    decoder = make_decoder(
        transforms.decoder,
        device=options.device if options.where is None else None,
        facts=lambda: image_facts(sources)._replace(batch_images=batch_images),
        num_threads=options.num_threads,
        dali=transforms.dali,
    )
    check_pixels(decoder, transforms.pixels)
    transform = options.transform
    if options.transform_in == "process":
        if decodes_on_device(decoder):
            raise ConfigError(
                "transform_in='process' takes images in host memory, and "
                f"decoder={decoder.name!r} decodes on {decoder.device}: take "
                "decoder='turbo', or batch_transform="
            )
        transform = ProcessTransform(transform)
    augments = samples.Augments(
        images=samples.image_groups(transforms, cameras),
        pixels=transforms.pixels,
        bev=transforms.ego,
        seed=options.seed,
        accumulation=points.accumulation,
        undistort=transforms.undistort,
        second_at=options.batch_size if transforms.two_views else 0,
    )
    channels = (*sources[0].reader.channels, *sources[0].attributes.channels)
    timed = timed_channels(options.window, channels)
    timed.set_up(sources)
    fixed = transforms.static_batches
    pack = None if options.order is None else options.order.pack
    selected = SelectedChannels(
        channels,
        tuple(sources[0].reader.cameras),
        packs.max_tokens(pack),
        timed.by_name,
    )
    batch_transform = options.batch_transform and user.BatchTransform(
        options.batch_transform,
        transforms.normalize,
        torch.device("cpu") if transfer is None else transfer.device,
        options.seed,
        must_be_dict=fixed is not None,
    )
    return BatchPipeline(
        bad=bad,
        cameras=cameras,
        augments=augments,
        decoder=decoder,
        batch_size=options.batch_size,
        window=options.window,
        transform=transform,
        collate_fn=options.collate_fn,
        normalize=transforms.normalize,
        transfer=transfer,
        channels=selected,
        assemble=partial(
            assemble,
            lidar=points.lidar,
            box_frame=transforms.box_frame,
            channels=selected,
            unknown=unknown_to(sources),
        ),
        batch_transform=batch_transform,
        static=fixed,
        fixed=None if fixed is None else static.FixedBuffers(fixed.buffers),
        pack=pack,
        timed=timed,
    )


def _list_views(items: Sequence[Parsed | user.Sample]) -> list[Any]:
    """Return the views of parsed or transformed samples: all first ones, then all second ones."""
    views: list[Any] = []
    for views_of_draw in zip(*(item.views for item in items), strict=True):
        views += views_of_draw
    return views


def check_pixels(decoder: ImageDecoder, pixels: PixelAugment) -> None:
    """Raise ConfigError where pixel values are to be changed that never are in host memory."""
    if decodes_on_device(decoder) and not pixels.changes_nothing:
        raise ConfigError(
            f"pixels can be changed in host memory only, and decoder={decoder.name!r} "
            f"decodes on {decoder.device}: leave out pixels, or take decoder='turbo'"
        )


class BatchDecode:
    """The stage's work: decodes all images of a batch in one call, B x T x N of them, of any sizes.

    Into the slot's host buffer, or, with a decoder on a GPU, into memory of that device, which
    takes the buffer's place in the slot. A bad image makes its sample bad, as with other decoders;
    the rest of the batch is not decoded again.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        cameras: Sequence[str],
        fill: tuple[int, int, int],
        bad: BadSamples,
        parse_again: Callable[[Fetched], Parsed],
    ) -> None:
        self._decoder = decoder
        self._cameras = cameras
        self._fill = fill
        self._bad = bad
        self._parse_again = parse_again

    def __call__(self, batch: Sequence[Parsed]) -> list[Parsed]:
        """Decode the parsed samples of one batch."""
        slot = batch[0].task.slot
        on_cpu = not decodes_on_device(self._decoder)
        if not on_cpu:
            num_rows = len(batch) * len(batch[0].views)
            slot = slot.for_rows(num_rows, self._decoder.new_output)
        parts = slot.parts()
        samples = list(batch)
        failed = self._decode(_list_views(samples), parts)
        for row, (frame, error) in failed.items():
            index = row % len(samples)
            if row != index and index in failed:
                continue  # the other view of a sample that is replaced already
            is_bad: tuple[int, ImageError] | None = (frame, error)
            while is_bad is not None:
                samples[index] = self._parse_again(
                    fetch(
                        self._bad,
                        self._bad.replace(samples[index].task, *is_bad),
                    )
                )
                for number, view in enumerate(samples[index].views):
                    place = index + number * len(samples)
                    is_bad = self._decode(
                        [view],
                        [(cameras, part[place : place + 1]) for cameras, part in parts],
                    ).get(0)
                    if is_bad is not None:
                        break
        if on_cpu:
            for index, parsed in enumerate(_list_views(samples)):
                for sample, planes in zip(parsed.samples, slot.frames(index), strict=True):
                    for image, channel, change in zip(
                        planes,
                        self._cameras,
                        parsed.changes,
                        strict=True,
                    ):
                        if channel in sample.images:
                            change_pixels(image, change, self._fill)
        if on_cpu:
            return samples
        return [parsed.in_slot(slot) for parsed in samples]

    def _decode(
        self,
        samples: Sequence[Parsed],
        parts: Sequence[tuple[Sequence[int] | None, torch.Tensor]],
    ) -> dict[int, tuple[int, ImageError]]:
        """Decode the samples' images into uint8 [B', T, N, 3, H, W] of each group of cameras, all
        of one size.

        Returns each sample's first error and its frame.
        """
        errors: dict[int, tuple[int, ImageError]] = {}
        for cameras, images in parts:
            camera_numbers = range(len(self._cameras)) if cameras is None else cameras
            places: list[tuple[int, int, int]] = []
            for number, parsed in enumerate(samples):
                places += product((number,), range(len(parsed.samples)), camera_numbers)
            encoded = [
                samples[number].samples[frame].images.get(self._cameras[camera])
                for number, frame, camera in places
            ]
            maps = [samples[number].maps[frame][camera] for number, frame, camera in places]
            outs = images.flatten(0, 2)
            faults = self._decoder.decode_batch(encoded, maps, outs)
            for (number, frame, camera), error in zip(places, faults, strict=True):
                if error is not None and number not in errors:
                    key = samples[number].samples[frame].key
                    channel = self._cameras[camera]
                    errors[number] = (
                        frame,
                        ImageError(error.message, key=key, member=channel),
                    )
        return dict(sorted(errors.items()))


def with_ranges(
    stage: Stage,
    push: Callable[[str], object] = torch.cuda.nvtx.range_push,
    pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
) -> Stage:
    """Return stage with an NVTX range ``fuelrail NAME`` around each call of its work, on the
    thread that does it.
    """
    work = stage.work
    name = f"fuelrail {stage.name}"

    def ranged(item: Any) -> Any:
        push(name)
        try:
            return work(item)
        finally:
            pop()

    return replace(stage, work=ranged)
