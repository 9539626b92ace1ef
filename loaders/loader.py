"""The DataLoader: chooses the parts, strings them together, keeps the position. Everything else is elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import torch

from fuelrail.loaders.assemble import BatchSlot, DecodedSample, assemble
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.mesh import default_num_workers, detect_world
from fuelrail.loaders.reader import FetchedSpan, SampleReader
from fuelrail.loaders.slots import BufferPool
from fuelrail.loaders.state import STATE_VERSION, Identity, LoaderState, decode_state, encode_state
from fuelrail.loaders.transfer import CudaTransfer
from fuelrail.pipeline.augment import ImageAugment
from fuelrail.pipeline.dataset import Dataset, open_dataset
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.order import ORDER_VERSION, Layout, Order, OrderSpec
from fuelrail.pipeline.stages import Pipeline, Stage, StageClock
from fuelrail.pipeline.world import Batching, Cursor

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.pipeline.geometry import ImageMap
    from fuelrail.pipeline.schema import Sample
    from fuelrail.pipeline.world import World

DEFAULT_IMAGE = ImageAugment(height=256, width=704)
"""704 x 256 from the bottom of each image, as BEVDet and its family evaluate."""


class LoaderStats(NamedTuple):
    """Clocks of the running (or last) epoch's stages, and the batches it handed out."""

    stages: tuple[StageClock, ...]
    batches: int
    samples: int
    images: int


class _Task(NamedTuple):
    """One sample to load: its row in the index and its place in a batch."""

    slot: BatchSlot
    at: int
    row: int
    valid: bool


class _Fetched(NamedTuple):
    task: _Task
    stored: FetchedSpan


class _Parsed(NamedTuple):
    task: _Task
    sample: Sample
    maps: Sequence[ImageMap]


class DataLoader:
    """Iterates over batches of a Fuelrail dataset, as torch's DataLoader does over its own.

    ::

        loader = DataLoader("OUT", batch_size=8, shuffle=True, seed=7)
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                loss = model(batch["img"], batch["ego2img"], ...)

    A batch is a dict; :mod:`fuelrail.loaders.assemble` lists names, shapes, dtypes and frames of reference. What the
    batch of a step holds depends on the dataset, ``order`` (or ``shuffle`` and ``seed``), the epoch, the global batch
    size and the step: not on ranks, threads or timing.

    Args:
        dataset: folder of a dataset, or an open one.
        batch_size: samples of this rank in each batch. The global batch is this times the number of ranks.
        split: name of the split.
        image: size and augmentation of the images.
        shuffle: seeded random order of all samples; False: as stored. ``order`` says it in full and replaces both
            ``shuffle`` and ``seed`` for the order.
        seed: of the order and of the augmentation.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch. False: fill it with the
            epoch's first samples, ``valid`` False. Either way all ranks get the same number of batches.
        num_workers: decoding threads; None: this rank's share of the CPUs it may use. No processes are forked.
        prefetch_factor: finished batches that may wait for the trainer.
        device: where batches go: None or "cpu" leaves them in host memory, a CUDA device gets them over a copy
            stream of its own, from pinned memory.
        pin_memory: decode into page-locked memory; None: when a CUDA device is given.
        world: data-parallel rank and size; None: from torch.distributed or the launcher's environment.
        points: also decode the first lidar's sweep.
        decoder: "turbo" (libjpeg-turbo), "pillow" or "auto".
        verify: hold every sample's bytes against the digest in the index (xxh3, about 0.05 ms a sample).

    Raises:
        ConfigError: an argument out of range; WorldError: ranks and batch do not fit together;
        DatasetNotReadyError and other DatasetErrors: the folder is not a finished dataset.

    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset,
        batch_size: int,
        *,
        split: str = "train",
        image: ImageAugment = DEFAULT_IMAGE,
        shuffle: bool = True,
        seed: int = 0,
        order: OrderSpec | None = None,
        drop_last: bool = True,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        device: torch.device | str | None = None,
        pin_memory: bool | None = None,
        world: World | None = None,
        points: bool = False,
        decoder: str = "auto",
        verify: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("prefetch_factor", prefetch_factor)):
            _at_least_1(name, value)
        self.dataset = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
        self.batch_size, self.image, self.seed, self.prefetch_factor = batch_size, image, seed, prefetch_factor
        self.num_workers = default_num_workers() if num_workers is None else num_workers
        _at_least_1("num_workers", self.num_workers)
        self.world = detect_world() if world is None else world
        self.order = order or OrderSpec(kind="shuffled" if shuffle else "sequential", seed=seed)
        entry = self.dataset.split(split)
        self._first_row = entry.first_sample
        self._layout = Layout.of_split(self.dataset.manifest, split)
        self._batching = Batching(entry.num_samples, batch_size * self.world.size, self.world, drop_last=drop_last)
        self._identity = Identity(
            dataset=self.dataset.manifest.fingerprint,
            split=split,
            order={"version": ORDER_VERSION, **msgspec.to_builtins(self.order)},
            drop_last=drop_last,
        )
        self._reader = SampleReader(self.dataset, verify=verify, points=points, extra=False)
        self._points = points
        self._decoder: ImageDecoder = make_decoder(decoder)
        self._cameras = [camera.channel for camera in self.dataset.manifest.cameras]
        target = torch.device(device) if device is not None else torch.device("cpu")
        self._transfer = CudaTransfer(target) if target.type == "cuda" else None
        pinned = self._transfer is not None if pin_memory is None else pin_memory
        if pinned and not torch.cuda.is_available():
            raise ConfigError("pin_memory=True needs CUDA, and torch finds none here; leave it out")
        # In flight at most: ready batches, one being assembled, those being decoded, one at the consumer.
        self._decode_ahead = max(batch_size, 2 * self.num_workers)
        keep = prefetch_factor + 3 + -(-self._decode_ahead // batch_size)
        shape = (batch_size, len(self._cameras), 3, image.height, image.width)
        self._buffers = BufferPool(shape, pinned=pinned, keep=keep)
        self._start = self._position = Cursor()
        self._epoch_is_set = False
        self._pipeline: Pipeline | None = None
        self._batches = 0

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self._batching.num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start the epoch, from its beginning or from where a restored state stands; ends an iteration under way.

        Once it is exhausted the next iteration is the next epoch.
        """
        self.close()
        if not self._epoch_is_set:
            # Restored at an epoch's very end: there the next epoch comes, unless set_epoch asks for that one's rest.
            self._start = self._start.rolled(self._batching)
        self._position = self._start
        self._batches = 0
        order = Order(self.order, self._layout, self._start.epoch)
        tasks = _tasks(order, self._start, self._start.rest(self._batching), self._first_row, self._buffers)
        self._pipeline = Pipeline(tasks, self._stages(), name=f"fuelrail-r{self.world.rank}")
        return self._drain(self._pipeline)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration runs.

        A position restored inside that epoch is kept; restored at its very end, the iteration has no batches.
        """
        if epoch != self._start.epoch:
            self._start = self._position = Cursor(epoch)
        self._epoch_is_set = True

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands after the last batch handed out; plain JSON types, equal on all ranks."""
        return encode_state(
            LoaderState(
                version=STATE_VERSION,
                identity=self._identity,
                epoch=self._position.epoch,
                samples_consumed=self._position.samples_consumed,
                global_batch_size=self._batching.global_batch,
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a saved state, on any number of ranks; the next iteration starts there.

        Raises StateMismatchError, with both sides, for a state of another dataset, split, order or version.
        """
        decoded = decode_state(state, self._identity)
        self.close()
        restored = Cursor(decoded.epoch, decoded.samples_consumed)
        restored.rest(self._batching)  # refuses more samples than an epoch has
        self._start = self._position = restored
        self._epoch_is_set = False

    def stats(self) -> LoaderStats:
        """The stages' clocks since the epoch's start, and what was handed out."""
        samples = self._batches * self.batch_size
        clocks = self._pipeline.clocks() if self._pipeline is not None else ()
        return LoaderStats(clocks, self._batches, samples, samples * len(self._cameras))

    def close(self) -> None:
        """Stop the threads of the iteration under way, if any. The loader can be iterated again."""
        if self._pipeline is not None:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, pipeline: Pipeline) -> Iterator[dict[str, Any]]:
        """Hand out the pipeline's batches, keeping the position; closing this iterator stops the threads."""
        epoch, rest = self._start.epoch, self._start.rest(self._batching)
        try:
            for number, batch in enumerate(pipeline, 1):
                if self._transfer is not None:
                    self._transfer.hand_over(batch)
                self._position = Cursor(epoch, rest.consumed(number))
                self._batches = number
                yield batch
                del batch  # while the consumer asks for the next one, its buffer is free for another
            if self._pipeline is pipeline:
                self._start = self._position = Cursor(epoch + 1)
                self._epoch_is_set = False
        finally:
            pipeline.close()

    def _stages(self) -> list[Stage]:
        stages = [
            Stage("fetch", partial(_fetch, self._reader), 1, 2 * self.num_workers),
            Stage("parse", partial(_parse, self._reader, self.image, self.seed), 1, 2 * self.num_workers),
            Stage("decode", partial(_decode, self._decoder, self._cameras), self.num_workers, self._decode_ahead),
            Stage("collate", partial(assemble, points=self._points), 1, self.prefetch_factor, group=self.batch_size),
        ]
        if self._transfer is not None:
            stages.append(Stage("transfer", self._transfer, 1, self.prefetch_factor))
        return stages


# What the pipeline's threads run must not refer to the loader: then dropping the loader stops them.


def _tasks(order: Order, start: Cursor, rest: Batching, first_row: int, buffers: BufferPool) -> Iterator[_Task]:
    """The samples of this rank from ``start`` to the epoch's end, in order, with their places in batches."""
    steps_done = start.samples_consumed // rest.global_batch
    for step in range(rest.num_steps):
        slot = BatchSlot(start.epoch, steps_done + step, buffers.take())
        rows = (order(rest.positions(step)) + first_row).tolist()
        for at, (row, valid) in enumerate(zip(rows, rest.valid(step).tolist(), strict=True)):
            yield _Task(slot, at, row, valid)


def _fetch(reader: SampleReader, task: _Task) -> _Fetched:
    return _Fetched(task, reader.fetch(task.row))


def _parse(reader: SampleReader, image: ImageAugment, seed: int, fetched: _Fetched) -> _Parsed:
    sample = reader.parse(fetched.stored)
    task = fetched.task
    maps = image.draw(sample.geometry.img_wh.tolist(), seed=seed, epoch=task.slot.epoch, sample=task.row)
    return _Parsed(task, sample, maps)


def _decode(decoder: ImageDecoder, cameras: Sequence[str], parsed: _Parsed) -> DecodedSample:
    task, sample, maps = parsed
    images = task.slot.images[task.at]
    for camera, (channel, image_map) in enumerate(zip(cameras, maps, strict=True)):
        encoded = sample.images.get(channel)
        if encoded is None:
            images[camera] = 0
            continue
        try:
            decoder.decode_into(encoded, image_map, images[camera])
        except ImageError as error:
            raise ImageError(error.message, key=sample.key, member=channel) from error
    return DecodedSample(task.slot, task.at, task.row, task.valid, sample, maps)


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} must be 1 or more")
