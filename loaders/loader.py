"""The DataLoader: chooses the parts, strings them together, keeps the position. Everything else is elsewhere."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from fuelrail.loaders.autotune import Tuning, batches_in_flight, make_tuner
from fuelrail.loaders.batch import buffer_pool, user
from fuelrail.loaders.batch.buffer_pool import BufferPool
from fuelrail.loaders.batch.points import choose_points
from fuelrail.loaders.batch.samples import Augments
from fuelrail.loaders.batch.stages import LoaderStats, Production, Runner, check_pixels
from fuelrail.loaders.batch.transfer import make_transfer, require_cuda
from fuelrail.loaders.config import DEFAULT_BUDGET, Budget, check_arguments, choose_window, default_num_workers
from fuelrail.loaders.decode import BatchDecoder, make_decoder
from fuelrail.loaders.distributed import check_ranks_agree, detect_world, resolve_world, warn_of_workers
from fuelrail.loaders.schedule import tasks
from fuelrail.loaders.schedule.bad_samples import MAX_BAD, QUARANTINE_FILE, BadSamples, make_policy
from fuelrail.loaders.schedule.datasets import add_stats, image_facts, open_all, require_lidar
from fuelrail.loaders.schedule.prefetch import look_ahead
from fuelrail.loaders.schedule.schedule import Choice, make_supply
from fuelrail.loaders.schedule.state import STATE_VERSION, LoaderState, decode_state, encode_state, sample_settings
from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.errors import FuelrailError, WorldError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Batching, Cursor, Share
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.loaders.config import BoxFrame, Normalize
    from fuelrail.loaders.decode.lens import Undistort
    from fuelrail.loaders.schedule.bad_samples import OnError
    from fuelrail.loaders.schedule.datasets import DatasetLike
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.order.batching import World
    from fuelrail.pipeline.order.windows import Padding
    from fuelrail.pipeline.runtime.stages import Observer, Pipeline, Stage
    from fuelrail.pipeline.storage.retry import RetryPolicy
    from fuelrail.pipeline.transforms.points import PointSweeps

DEFAULT_IMAGE = ImageAugment(height=256, width=704)
"""704 x 256 from the bottom of each image, as BEVDet and its family evaluate."""

NO_PIXEL_AUGMENT = PixelAugment()
NO_BEV_AUGMENT = BevAugment()


class DataLoader:
    """Iterates over batches of a Fuelrail dataset, as torch's DataLoader does over its own.

    ::

        loader = DataLoader("OUT", batch_size=8, shuffle=True, seed=7)
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                loss = model(batch["img"], batch["ego2img"], ...)

    A batch is a dict; :mod:`fuelrail.loaders.batch.assemble` lists names, shapes, dtypes and frames of reference.
    What the
    batch of a step holds depends on the dataset, ``order`` (or ``shuffle`` and ``seed``), the epoch, the global batch
    size and the step: not on ranks, threads or timing.

    Args:
        dataset: folder or fsspec URL of a dataset, or an open one; or a dict of names to several of these, to ``mix``.
        batch_size: samples of this rank in each batch. The global batch is this times the number of ranks.
        mix: how many samples of each dataset stand in every block of the order, such as ``{"city": 3, "highway": 1}``
            (:mod:`fuelrail.pipeline.order.mix`); with a global batch that is a multiple of their sum, in every batch.
        split: name of the split.
        frames: temporal windows: offsets in frames, 0 among them, such as ``[-2, -1, 0]``. A T axis follows B in what
            belongs to a frame (:mod:`fuelrail.loaders.batch.temporal`). None: each sample is one frame.
        stride: frames between neighbouring offsets.
        padding: what stands in for frames that the clip has not got: "repeat_edge" its first or last one,
            "repeat_current" the sample's own, "mask" nothing, "drop" leaves such samples out of the epoch.
        image: size and augmentation of the images.
        pixels: augmentation of their pixel values.
        bev: augmentation of the ego frame: boxes, points and matrices move together, pixels stay.
        shuffle: seeded random order of all samples; False: as stored. ``order`` says it in full and replaces both
            ``shuffle`` and ``seed`` for the order: which samples (filter, keys), how often (weights), in windows of
            shards, or in lanes that follow clips.
        seed: of the order and of the augmentation.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch. False: fill it with the
            epoch's first samples, ``valid`` False. Either way all ranks get the same number of batches.
        num_workers: decoding threads; None: this rank's share of the CPUs it may use; "auto": begin there, and while
            the trainer waits for data look for a number, and a ``prefetch_factor``, with which it waits less, within
            ``budget``. Batches are the same under any. No processes are forked.
        budget: bounds for "auto": decoding threads, memory for batch buffers.
        prefetch_factor: finished batches that may wait for the trainer.
        device: where batches go: None or "cpu" leaves them in host memory, a CUDA device gets them over a copy
            stream of its own, from pinned memory.
        pin_memory: decode into page-locked memory; None: when a CUDA device is given.
        world: data-parallel rank and size, or the device mesh that tells them by its axes' names (dp, dp_shard, ...
            against tp, pp, cp); None: from Megatron-Core, torch.distributed or the launcher's environment. Ranks of
            one model-parallel group get the same batches.
        points: also decode the first lidar's sweep; a `PointSweeps` says to put several together.
        box_frame: frame of boxes and velocities: "ego", which pairs with ``ego2img``, or "lidar", the first lidar's at
            its own time, which pairs with ``lidar2img`` and ``points``.
        decoder: "turbo" (libjpeg-turbo), "pillow" (exact antialiasing), "dali" (whole batches; on ``device`` if that
            is a GPU) or "auto".
        undistort: straighten the images of distorted cameras while they are decoded; None: as stored, with
            ``dist`` in the batch.
        normalize: makes ``img`` floating point, where the batch ends up; None: uint8.
        verify: hold every sample's bytes against the digest in the index (xxh3, about 0.05 ms a sample).
        storage: where bytes come from: "mapped", "pread" (network file systems), "remote" (any fsspec URL, by ranges;
            "fsspec" and "obstore" also say the client), or "auto"; see :mod:`fuelrail.loaders.storage`.
        storage_options: passed to fsspec: credentials, endpoint, profile. Better left to the environment.
        cache_dir: local folder to keep samples of slow or remote storage in, shared by the ranks of a host. It must
            belong to this user and be no link; what is made in it is for this user only.
        cache_size: bytes that it may take, or a text such as "500GB"; None: 80 % of the free space. When full, the
            sample whose next use is farthest goes.
        look_ahead_bytes: samples asked for before their turn, at most; None: 64 MiB locally, 256 MiB remotely.
        retry: how long to try when storage fails or does not answer; None: 120 s from the first attempt on.
        on_error: "raise" on a bad sample (wrong digest, cut off, does not decode), or "substitute" the next good one of
            the order, the same on every run.
        max_bad: so many distinct bad samples may be substituted on this rank; one more is an error.
        quarantine: file that lists them, a JSON line each; None: they are only logged.
        transform: called with each sample, a dict like a batch but for the B axis, and its ``seed``; returns what goes
            into the batch. It runs in threads of this process: keep it to numpy and torch
            (:mod:`fuelrail.loaders.batch.user`).
        collate_fn: called with the list of a batch's samples instead of stacking them; what it returns is the batch.
        check_ranks: at each iteration's start compare settings and first batch over all processes, in one small
            collective that every process must take part in; for debugging.
        trace: told of every piece of work, such as a `fuelrail.pipeline.runtime.trace.TraceRecorder`.

    Raises:
        ConfigError: an argument out of range; WorldError: ranks and batch do not fit together;
        DatasetNotReadyError and other DatasetErrors: the folder is not a finished dataset.

    """

    def __init__(
        self,
        dataset: DatasetLike | Mapping[str, DatasetLike],
        batch_size: int,
        *,
        mix: Mapping[str, int] | None = None,
        split: str = "train",
        frames: Sequence[int] | None = None,
        stride: int = 1,
        padding: Padding = "repeat_edge",
        image: ImageAugment = DEFAULT_IMAGE,
        pixels: PixelAugment = NO_PIXEL_AUGMENT,
        bev: BevAugment = NO_BEV_AUGMENT,
        shuffle: bool = True,
        seed: int = 0,
        order: OrderSpec | None = None,
        drop_last: bool = True,
        num_workers: int | Literal["auto"] | None = None,
        budget: Budget = DEFAULT_BUDGET,
        prefetch_factor: int = 2,
        device: torch.device | str | None = None,
        pin_memory: bool | None = None,
        world: World | DeviceMesh | None = None,
        points: bool | PointSweeps = False,
        box_frame: BoxFrame = "ego",
        decoder: str = "auto",
        undistort: Undistort | None = None,
        normalize: Normalize | None = None,
        verify: bool = True,
        storage: str = "auto",
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        look_ahead_bytes: int | None = None,
        retry: RetryPolicy | None = None,
        on_error: OnError = "raise",
        max_bad: int = MAX_BAD,
        quarantine: str | os.PathLike[str] | None = QUARANTINE_FILE,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        check_ranks: bool = False,
        trace: Observer | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        check_arguments(self._arguments)
        batch_size, seed = int(batch_size), int(seed)  # numpy's are integers too, but no JSON
        self.batch_size, self.image, self.seed = batch_size, image, seed
        self.world = resolve_world(world)
        self._world_is_detected = world is None
        global_batch = batch_size * self.world.size

        self.datasets = open_all(dataset, mix, storage_options, cache_dir, retry)
        self.order = order or OrderSpec(kind="shuffled" if shuffle else "sequential", seed=seed)
        (lidar, accumulation), *_ = [choose_points(one, points) for one in self.datasets.values()]
        self._window = choose_window(frames, stride, padding)
        self._supply = make_supply(
            Choice(self.datasets, mix, split, self.order, self._window, lidar is not None, accumulation is not None),
            partial(
                open_storage,
                backend=storage,
                verify=verify,
                storage_options=storage_options,
                cache_dir=cache_dir,
                cache_size=cache_size,
                retry=retry,
            ),
            global_batch=global_batch,
            drop_last=drop_last,
        )
        settings = sample_settings(
            seed, image=image, pixels=pixels if pixels.train else None, bev=bev if bev.train else None,
            undistort=undistort, normalize=normalize, points=points, box_frame=box_frame,
        )  # fmt: skip
        self._identity = msgspec.structs.replace(self._supply.identity, settings=settings)
        where, sources = self._supply.where, self._supply.sources
        if box_frame == "lidar":
            require_lidar(sources)
        self._batching = Batching(where.epoch_length, global_batch, self.world, drop_last=drop_last)
        self._look_ahead_bytes = look_ahead_bytes or max(source.storage.look_ahead_bytes for source in sources)
        self._bad = BadSamples(make_policy(on_error, max_bad, quarantine), sources, where, self.world.rank)

        threads = num_workers if num_workers is not None and num_workers != "auto" else default_num_workers()
        image_decoder = make_decoder(decoder, device, lambda: image_facts(sources), int(threads))
        check_pixels(image_decoder, pixels)
        cameras = tuple(camera.channel for camera in self.dataset.manifest.cameras)
        self._transfer = make_transfer(device, normalize)
        self._make = Production(
            self._bad, cameras, lidar, Augments(image, pixels, bev, seed, accumulation, undistort),
            image_decoder, batch_size, self._window,
            transform, collate_fn, normalize, self._transfer, box_frame,
        )  # fmt: skip

        self._num_images = where.frames * len(cameras)
        axes = () if self._window is None else (where.frames,)
        shape = (batch_size, *axes, len(cameras), 3, image.height, image.width)
        tuner = make_tuner(budget, batch_size, math.prod(shape), prefetch_factor) if num_workers == "auto" else None
        tuning = Tuning(threads, prefetch_factor) if tuner is None else tuner.tuning
        self.num_workers, self.prefetch_factor = tuning
        keep = batches_in_flight(tuning if tuner is None else tuner.most, batch_size)
        pinned = self._transfer is not None if pin_memory is None else pin_memory
        if pinned:
            require_cuda("pin_memory=True")
        self._buffers = BufferPool(shape, pinned=pinned, keep=keep)

        self._runner = Runner(f"fuelrail-r{self.world.rank}", tuner, trace)
        self._share = Share()
        self._check_ranks = check_ranks
        self._start = self._position = Cursor()
        self._epoch_is_set = False
        self._batches = 0

    @property
    def dataset(self) -> Dataset:
        """The dataset; of a mix the first one, whose rig and classes are everyone's."""
        return next(iter(self.datasets.values()))

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self._batching.num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start the epoch, from its beginning or from where a restored state stands; ends an iteration under way.

        That one raises FuelrailError if it is continued: never is an epoch short in silence.

        Once it is exhausted the next iteration is the next epoch, whose first batches are loaded by then: the threads
        go on over the epoch's end, until :meth:`close` or garbage collection.
        """
        if self._world_is_detected and (world := detect_world()) != self.world:
            raise WorldError(
                f"this loader was made as {self.world}, but the process is {world} by now: make it after "
                "torch.distributed is initialised (in Lightning: in `train_dataloader`), or pass world="
            )
        warn_of_workers(self._share)
        if not self._epoch_is_set:
            # Restored at an epoch's very end: there the next epoch comes, unless set_epoch asks for that one's rest.
            self._start = self._start.rolled(self._batching)
        self._position = self._start
        if not (self._runner.is_running and self._runner.rests_at(self._start)):
            self.close()
            shelves = self._supply.shelves(self._start, self._batching, self._share)
            coming = tasks.coming(self._supply.where, self._start, self._batching, self._share)
            asked_for = look_ahead(coming, shelves, self._look_ahead_bytes)
            made = buffer_pool.tasks(asked_for, self._supply.sources, self._buffers, self._window)
            self._runner.start(made, self.stages(), shelves)
        return self._drain(self._runner.take(), self._start)

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

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue after a saved state, on any number of ranks; the next iteration starts there.

        ``strict=False`` accepts a state that was saved with another seed or other settings of the samples' content
        (image, pixels, bev, undistort, normalize, points). Raises StateMismatchError, with both sides, for these
        otherwise, and always for a state of another dataset, split, order or version.
        """
        decoded = decode_state(state, self._identity, strict=strict)
        self.close()
        restored = Cursor(decoded.epoch, decoded.samples_consumed)
        restored.rest(self._batching)  # refuses more samples than an epoch has
        self._start = self._position = restored
        self._epoch_is_set = False

    def stats(self) -> LoaderStats:
        """The stages' clocks and what was handed out, since the loader was made; empty before the first iteration."""
        runner, samples = self._runner, self._batches * self.batch_size
        storage = add_stats([source.storage.stats() for source in self._supply.sources])
        return LoaderStats(
            stages=runner.clocks(),
            batches=self._batches,
            samples=samples,
            images=samples * self._num_images,
            waited_s=runner.waited_s,
            elapsed_s=runner.elapsed_s,
            storage=storage,
            bad_samples=self._bad.count,
        )

    def take_share(self, index: int, count: int) -> None:
        """Make only every ``count``-th step of this rank from ``index`` on; for worker processes that take turns.

        The decoding threads are shared out as well. State then counts ``count`` steps a batch, and fits a loader with
        the same share.
        """
        assert 0 <= index < count, "a share is one of count"
        if self._share.of == 1 < count:
            self.num_workers = max(1, self.num_workers // count)
        self._share = Share(index, count)

    def close(self) -> None:
        """Stop the threads, ending an iteration under way. The loader can be iterated again."""
        self._runner.stop()
        if isinstance(self._make.decoder, BatchDecoder):
            self._make.decoder.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, for spawned processes, is how the loader was made, as which rank, and where it stands."""
        datasets = {name: (one.url or one.root, one.storage_options) for name, one in self.datasets.items()}
        arguments = {**self._arguments, "dataset": None, "world": self.world}
        return _unpickle, (arguments, datasets, self.state_dict(), self._start.epoch if self._epoch_is_set else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, pipeline: Pipeline, start: Cursor) -> Iterator[dict[str, Any]]:
        """Hand out one epoch's batches, keeping the position; leaving it early stops the threads."""
        rest, share, following = start.rest(self._batching), self._share, Cursor(start.epoch + 1)
        num_batches, handed_out = len(share.steps(rest)), 0
        try:
            for batch in islice(pipeline, num_batches):
                if self._transfer is not None:
                    self._transfer.hand_over(batch)
                if self._check_ranks and not handed_out:
                    check_ranks_agree(self._settings(), self.world, batch)
                handed_out += 1
                self._batches += 1
                self._position = Cursor(start.epoch, rest.consumed(min(handed_out * share.of, rest.num_steps)))
                if (tuning := self._runner.tuning_due()) is not None:
                    self.num_workers, self.prefetch_factor = tuning
                    self._runner.adapt(self.stages())
                if handed_out == num_batches and self._runner.runs(pipeline):
                    # Here, not behind the loop: who counts batches by len() never asks for one more.
                    self._go_on(following)
                yield batch
                del batch  # while the consumer asks for the next one, its buffer is free for another
            if self._runner.runs(pipeline):
                if not num_batches:
                    self._go_on(following)
                if self._runner.rests_at(following):  # and no other iteration has begun
                    self._position = following
            elif handed_out < num_batches and self._runner.is_started:
                raise FuelrailError(
                    f"another iteration of this loader has begun, which ended this one after {handed_out} of "
                    f"{num_batches} batches: a loader has one position; make one for each"
                )
        finally:
            user.warn_if_slow(pipeline.clocks())
            if self._runner.runs(pipeline) and handed_out < num_batches:
                self.close()

    def _go_on(self, following: Cursor) -> None:
        """The epoch is over: the next iteration is the following one, where the pipeline stands already."""
        self._start = following
        self._runner.rest_at(following)
        self._epoch_is_set = False

    def _settings(self) -> dict[str, Any]:
        """What must be equal on all ranks, as plain JSON types."""
        state = self.state_dict()
        identity = msgspec.json.decode(state.pop("identity"))
        return {**identity.pop("settings"), **identity, "batch_size": self.batch_size, **state}

    def stages(self) -> list[Stage]:
        """The stages that samples go through to become batches, unstarted.

        A subclass may wrap them, to watch or to disturb what a loader does; how many there are decides nothing.
        """
        return self._make.stages(Tuning(self.num_workers, self.prefetch_factor))


def _unpickle(
    arguments: dict[str, Any],
    datasets: dict[str, tuple[str | os.PathLike[str], Mapping[str, Any] | None]],
    state: dict[str, Any],
    epoch: int | None,
) -> DataLoader:
    opened = {
        name: open_dataset(
            location, storage_options=options, cache_dir=arguments["cache_dir"], retry=arguments["retry"]
        )
        for name, (location, options) in datasets.items()
    }
    dataset = opened if arguments["mix"] is not None else next(iter(opened.values()))
    loader = DataLoader(**{**arguments, "dataset": dataset})
    loader.load_state_dict(state)
    if epoch is not None:
        loader.set_epoch(epoch)
    return loader
