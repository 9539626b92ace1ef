"""The public DataLoader: it builds the pipeline and tracks the resume position."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, Literal, Never

import msgspec

from fuelrail.loaders.autotune import Tuning, batches_in_flight
from fuelrail.loaders.batch import buffer_pool
from fuelrail.loaders.batch.channels import choose
from fuelrail.loaders.batch.counterfactual import LeftOut, LoaderPart, leave_out
from fuelrail.loaders.batch.packs import check_packs
from fuelrail.loaders.batch.points import Points, choose_points
from fuelrail.loaders.batch.runner import LoaderStats, Runner
from fuelrail.loaders.batch.stages import make_batch_pipeline
from fuelrail.loaders.batch.transfer import make_transfer, require_cuda
from fuelrail.loaders.config import (
    Arguments,
    Budget,
    StorageOptions,
    Transforms,
    UnlikeTorch,
    refuse_unknown,
)
from fuelrail.loaders.distributed import (
    batch_digest,
    check_process,
    check_ranks_agree,
    resolve_world,
)
from fuelrail.loaders.schedule.bad_samples import BadSamplePolicy, BadSamples
from fuelrail.loaders.schedule.datasets import (
    DatasetLike,
    open_all,
    require_lidar,
)
from fuelrail.loaders.schedule.layers import (
    check_epoch,
    check_views,
    open_layers,
)
from fuelrail.loaders.schedule.ledger import LedgerOptions, RunLedger
from fuelrail.loaders.schedule.prefetch import prefetch
from fuelrail.loaders.schedule.schedule import (
    Schedule,
    ScheduleRequest,
    make_schedule,
)
from fuelrail.loaders.schedule.state import (
    decode_state,
    settings_of_state,
    state_at,
)
from fuelrail.loaders.serving.client import serve_elsewhere
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.buffers import Memory, pageable
from fuelrail.loaders.storage.protocol import add_stats
from fuelrail.loaders.viewer.batch import LoaderDisplay
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.order.balance import check_micro_batches, order_batching
from fuelrail.pipeline.order.batching import (
    Batching,
    Cursor,
    Walk,
    WorkerShard,
    World,
)
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.loaders.records import Scheduled
    from fuelrail.loaders.serving.ray_workers import RemoteWorkers
    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.order.windows import FrameWindow, TimeWindow
    from fuelrail.pipeline.runtime.stages import Observer, Pipeline, Stage

    Fields = Mapping[str, Any] | str | os.PathLike[str]
    """Settings as a dict of their fields, or as the path of a YAML file."""
    DatasetPlaces = Mapping[str, tuple[str | os.PathLike[str], Mapping[str, Any] | None]]
    """Places and storage options of datasets by their names."""

DEFAULT_TRANSFORMS = Transforms()
DEFAULT_STORAGE = StorageOptions()
DEFAULT_POLICY = BadSamplePolicy()


class DataLoader(LoaderDisplay, UnlikeTorch, AbstractContextManager["DataLoader"]):
    """Iterates over batches of a Fuelrail dataset, as torch's DataLoader does over its own.

    ::

        loader = DataLoader("DATASET", batch_size=8, shuffle=True, drop_last=True, seed=7)
        for epoch in range(epochs):
            for batch in loader:
                loss = model(batch["img"], batch["ego2img"], ...)

    A batch is a dict with entries of `Batch`; :meth:`describe` shows this loader's.
    It depends on dataset, ``order`` (or ``shuffle`` and ``seed``), epoch, global batch size and
    step, and not on ranks, threads or timing.

    Settings (``order``, ``window``, ``transforms``, ``storage``, ``bad_samples``, a `Budget`) may
    be a dict of their fields, or the path of a YAML file.

    Args:
        dataset: folder or fsspec URL of a dataset, or an open one; or a dict of names to several of
            these, to ``mix``.
        batch_size: samples, or packs, of this rank in each batch. The global batch is this times
            the number of ranks.
        shuffle: True gives a seeded random order, another one each epoch; False the stored order.
            None: what ``order`` says; without one the stored order, as torch's default is.
        seed: seed of the augmentation; without ``order`` also of the order. The order of an
            `OrderSpec` has the seed of that alone.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch. False,
            torch's default too: fill it with the epoch's first samples, as DistributedSampler does;
            ``valid`` of these is False. Either way all ranks get the same number of batches, of the
            same size.
        num_workers: number of decoding threads (no processes are forked); None: this rank's share
            of the CPUs it may use; "auto": start there, and while the trainer waits for data search
            for better numbers of threads and ready batches. A `Budget` means "auto" within limits.
            The batches are the same with any number.
        prefetch_factor: number of finished batches that may wait for the trainer.
        pin_memory: decode into page-locked memory; None: when a CUDA device is given.
        collate_fn: called with the list of a batch's samples instead of stacking them; its result
            is the batch.
        order: which samples (filter, keys), how often (weights), shuffled, in windows of shards, or
            in lanes that follow clips; packed, balanced; an `OrderSpec`. It has its own seed.
            One without a kind follows ``shuffle``, and is shuffled where that is None.
        split: name of the split.
        mix: number of samples of each dataset in every block of the order, such as ``{"city": 3,
            "highway": 1}`` (:mod:`fuelrail.pipeline.order.mix`); with a global batch that is a
            multiple of their sum, in every batch. Or stages of a run, ``[fr.order.MixStage(ratios,
            until=samples, ramp=True), fr.order.MixStage(ratios)]``.
        window: temporal window, a `FrameWindow`, such as ``{"frames": [-2, -1, 0]}``, or a
            `TimeWindow`, such as ``{"img": [-0.5, 0], "speed": {"from": -1.6, "to": 0, "hz":
            10}}``. What belongs to a frame gets a T axis after B
            (:mod:`fuelrail.loaders.batch.temporal`). None: each sample is one frame.
        layers: layers by name, ``{"teacher": PATH_OR_URL}``; of a mix by dataset and name. Their
            channels and attributes are called ``teacher.logits``. A `LayerOptions` also says what
            to do with samples that the layer has no row for.
        transforms: what becomes of a sample: image size, augmentation, lidar points and other
            channels, decoder, normalization, frame of the boxes.
        transform: called with each sample, a dict like a batch without the B axis, and its
            ``seed``; returns what goes into the batch (:mod:`fuelrail.loaders.batch.user`).
        transform_in: "thread": ``transform`` runs in threads of this process; restrict it to numpy
            and torch. "process": in worker processes; it must be picklable
            (:mod:`fuelrail.loaders.batch.processes`).
        batch_transform: called with each batch on its device, after ``normalize``, and a
            `torch.Generator` there, whose seed belongs to the batch's place in the order
            (:class:`fuelrail.loaders.batch.user.BatchTransform`).
        storage: how shards are read and cached: a `StorageOptions`, or just the name of a backend
            such as "pread".
        bad_samples: what to do with bad samples; by default they are errors.
        device: where batches go: None or "cpu" leaves them in host memory; to a CUDA device they
            are copied from pinned memory, on a separate stream.
        world: data-parallel rank and size, or a device mesh, whose axis names distinguish data
            parallelism (dp, dp_shard, ...) from model parallelism (tp, pp, cp); None: from
            Megatron-Core, torch.distributed or the launcher's environment. Ranks of one
            model-parallel group get the same batches.
        trace: receives timing events, for example a
            `fuelrail.pipeline.runtime.trace.TraceRecorder`.
        check_ranks: at the start of each iteration compare settings and first batch over all
            processes, in one small collective operation that every process must take part in; for
            debugging.
        ledger: file that records which samples the weights have seen, or a `LedgerOptions`; of one
            run, which appends to it when it is continued (docs/guides/runs.md). Call
            :meth:`state_dict` for checkpoints only.
        where: where batches are made: None: in threads of this process; "process": in one process
            of their own, whose Python does not hold this one's lock; "node": in one process for all
            ranks of this host, where those of one model-parallel group share each batch; a
            `RemoteWorkers`: by Ray actors, on other machines (:mod:`fuelrail.loaders.serving`). The
            batches are the same.

    Raises:
        ConfigError: an argument out of range; TypeError: one that does not exist; WorldError: ranks
            and batch do not fit together; DatasetNotReadyError and other DatasetErrors: the folder
            is not a finished dataset.

    """

    def __init__(
        self,
        dataset: DatasetLike | Mapping[str, DatasetLike],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int | Literal["auto"] | Budget | Mapping[str, Any] | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        order: OrderSpec | Fields | None = None,
        split: str = "train",
        mix: Mapping[str, int] | Sequence[MixStage] | None = None,
        window: FrameWindow | TimeWindow | Fields | None = None,
        layers: Mapping[str, Any] | None = None,
        transforms: Transforms | Fields = DEFAULT_TRANSFORMS,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        transform_in: Literal["thread", "process"] = "thread",
        batch_transform: Callable[[Any, torch.Generator], Any] | None = None,
        storage: StorageOptions | Fields = DEFAULT_STORAGE,
        bad_samples: BadSamplePolicy | Fields = DEFAULT_POLICY,
        device: torch.device | str | None = None,
        world: World | DeviceMesh | None = None,
        trace: Observer | None = None,
        check_ranks: bool = False,
        ledger: LedgerOptions | Fields | None = None,
        where: Literal["process", "node"] | RemoteWorkers | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown)
        arguments: dict[str, Any] = {
            "dataset": dataset,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "collate_fn": collate_fn,
            "order": order,
            "split": split,
            "mix": mix,
            "window": window,
            "layers": layers,
            "transforms": transforms,
            "transform": transform,
            "transform_in": transform_in,
            "batch_transform": batch_transform,
            "storage": storage,
            "bad_samples": bad_samples,
            "device": device,
            "world": world,
            "trace": trace,
            "check_ranks": check_ranks,
            "ledger": ledger,
            "where": where,
        }
        options = Arguments(**arguments)  # which reads dicts and files of settings
        self.batch_size = options.batch_size
        self.seed = options.seed
        self.world = resolve_world(world)
        self._world_is_detected = world is None
        self._window = options.window
        self._check_ranks = options.check_ranks
        self.datasets = open_all(
            dataset,
            mix=options.mix,
            storage_options=options.storage.options,
            cache_dir=options.storage.cache_dir,
            retry=options.storage.retry,
        )
        self.transforms = options.transforms.with_stored_size(self.datasets)
        """The transforms; the size of the images is known here, also where none was given."""
        self._arguments = options = msgspec.structs.replace(options, transforms=self.transforms)
        self.dataset = next(iter(self.datasets.values()))
        """The dataset; of a mix the first one, whose rig and classes all others share."""
        if options.order is None:
            self.order = OrderSpec(seed=options.seed).resolved(shuffle=bool(options.shuffle))
        else:
            self.order = options.order.resolved(shuffle=options.shuffle)
        points, *_ = [
            choose_points(opened, options.transforms.points) for opened in self.datasets.values()
        ]
        self._schedule, self._batching = _choose_samples(
            options,
            datasets=self.datasets,
            order=self.order,
            points=points,
            world=self.world,
        )
        sources = self._schedule.sources
        self.where = self._schedule.where
        """The positions of an epoch to rows of the datasets, and back."""
        self._look_ahead_bytes = options.storage.look_ahead_bytes or max(
            source.storage.look_ahead_bytes for source in sources
        )
        self._bad = BadSamples(options.bad_samples, sources, self.where, self.world.rank)
        transfer = make_transfer(device, pinned=pin_memory is not False)
        self._make = make_batch_pipeline(
            options,
            points=points,
            sources=sources,
            bad=self._bad,
            transfer=transfer,
        )
        self.selected = self._make.channels.channels
        self.layers = tuple(next(iter(self._schedule.layers.values()), ()))
        self.cameras = self._make.cameras
        """Names of the cameras in a batch, in its order."""
        settings = self._make.content(options, len(self.dataset.manifest.cameras))
        self._identity = msgspec.structs.replace(self._schedule.identity, settings=settings)
        self._ledger = RunLedger(
            options.ledger,
            self._identity,
            self._batching,
            self._make.decoder.name,
        )
        self._ledger.records_loader(options, self.datasets, self.order)
        self._bad.note = self._ledger.replaced
        self._num_images = self._make.num_frames * len(self._make.cameras)
        tuner = self._make.tuner(options.budget, options.prefetch_factor)
        if tuner is None:
            tuning = limits = Tuning(options.num_threads, options.prefetch_factor)
        else:
            tuning = tuner.tuning
            limits = tuner.limits
        self.num_workers, self.prefetch_factor = tuning
        pinned = transfer is not None if pin_memory is None else pin_memory
        if pinned:
            require_cuda("pin_memory=True")
        self._limits = limits
        self._memory: Memory = buffer_pool.page_locked if pinned else pageable
        self._take = self._buffers()
        self._start = self._position = Cursor()
        self._epoch_is_set = False
        self._committed: Cursor | None = None
        """The place after the last committed step; None: steps are final when handed out."""
        self._iteration: object | None = None
        """The iteration under way."""
        self._made_for = self.world
        self._client = serve_elsewhere(
            make_loader,
            self._recipe(),
            tuning,
            self._bad,
            finishes=transfer is None,
            pinned=pinned,
        )
        clocks_there = self._client.clocks if self._client else tuple
        self._runner = Runner(f"fuelrail-r{self.world.rank}", tuner, trace, clocks_there)
        self._share = WorkerShard()
        self._batches = 0
        self._samples = 0
        self._left_out = LeftOut()
        self._walk = Walk(self._start, self._batching)
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        names = "+".join(self.datasets)
        return (
            f"DataLoader({names}, split {self._arguments.split}, {self.where.epoch_length} "
            f"samples, {len(self)} batches of {self.batch_size}, rank {self.world.rank} of "
            f"{self.world.size}, decoder {self.transforms.decoder})"
        )

    def __len__(self) -> int:
        """Return batches in a whole epoch, the same on every rank; in packs, in the epoch of the
        position.
        """
        return self._batching.of_epoch(self._position.epoch).num_steps

    @property
    def global_batch(self) -> int:
        """Samples, or packs, of a batch over all ranks."""
        return self._batching.global_batch

    @property
    def steps_left(self) -> int:
        """Batches of the epoch after those handed out; 0 at its end."""
        return Walk(self._position, self._batching).num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start an epoch: the first one, or the one after that of the last iteration, however far
        that one went.

        After :meth:`load_state_dict` it is the rest of the restored epoch, after :meth:`set_epoch`
        the given one. An iteration that handed out no batch does not count. A running iteration
        ends, of any thread: it raises FuelrailError if it is continued, so that no epoch is short
        without an error. Once exhausted, the next iteration finds the next epoch's first batches
        loaded: threads continue over the epoch's end, until :meth:`close` or garbage collection.
        """
        check_process(self.world if self._world_is_detected else None, self._share)
        if not self._epoch_is_set:
            # Restored at an epoch's very end: there the next epoch comes, unless set_epoch asks for
            # that one's rest.
            self._start = self._start.rolled(self._batching)
        is_next = self._position.rolled(self._batching) == self._start
        check_epoch(self._schedule.layers, self._start.epoch)
        if self._committed is not None and not (is_next and self._committed != self._position):
            self._committed = self._start  # else steps before it are still to be committed
        self._position = self._start
        self._ledger.enter(self._start)
        with self._starting:
            iteration = self._iteration = object()
            if not (self._runner.is_running and self._runner.idle_at(self._start)):
                self._halt()
                self._begin()
            else:
                self._walk = Walk(self._start, self._batching, self._share)
            return self._drain(self._runner.take(), self._walk, iteration)

    def _begin(self) -> None:
        """Start the threads at the start of the next steps."""
        self._walk = walk = Walk(self._start, self._batching, self._share)
        if self._client is not None:
            items = self._client.items(walk)
            self._runner.start(items, self.stages(), [self._client])
        else:
            self._run(walk, self.where.scheduled(walk))

    def _run(self, walk: Walk, scheduled: Iterator[Scheduled]) -> None:
        """Start the threads on scheduled samples of a walk."""
        streams = self._schedule.streams(walk)
        requested = prefetch(scheduled, streams, self._look_ahead_bytes)
        tasks = buffer_pool.tasks(
            requested,
            sources=self._schedule.sources,
            take=self._take,
            window=self._window,
            groups=self._make.groups,
        )
        self._runner.start(
            tasks,
            self._left_out.stages(self.stages()),
            [stream.session for stream in streams],
        )

    def _drain(
        self,
        pipeline: Pipeline,
        walk: Walk,
        iteration: object,
    ) -> Iterator[dict[str, Any]]:
        """Hand out one epoch's batches, where ranks change or steps are given again too."""
        try:
            while True:
                yield from self._hand_out(pipeline, walk, iteration)
                if self._iteration is not iteration or self._walk is walk:
                    break
                walk = self._walk
                pipeline = self._runner.take()
        finally:
            if self._iteration is iteration:
                self._iteration = None
                if self._walk is not walk:
                    self._halt()

    def _hand_out(
        self,
        pipeline: Pipeline,
        walk: Walk,
        iteration: object,
    ) -> Iterator[dict[str, Any]]:
        """Hand out the batches of a pipeline up to the epoch's end, keeping the position; leaving
        it early stops the threads.
        """
        num_batches = walk.num_steps
        handed_out = 0

        def begin_epoch() -> None:
            """Make the following epoch the next iteration's, unless another one was set since
            this one started.
            """
            if self._start is walk.start:
                self._start = walk.following
                self._epoch_is_set = False

        try:
            for output in islice(pipeline, num_batches):
                batch = self._make.hand_over(output)
                del output
                if self._check_ranks and not handed_out:
                    settings = settings_of_state(
                        {**self.state_dict(), "batch_size": self._arguments.batch_size}
                    )
                    check_ranks_agree(settings, self.world, batch)
                begin_epoch()
                handed_out += 1
                self._batches += 1
                self._samples += self.batch_size
                if not self._batching.is_even and isinstance(batch, dict):
                    batch["weight"] = self._batching.rank_weight
                self._position = following = walk.after(handed_out)
                if handed_out == num_batches:
                    following = walk.following.rolled(self._batching)
                self._ledger.hand_out(
                    walk.after(handed_out - 1),
                    following=following,
                    digest=partial(batch_digest, batch),
                )
                tuning = self._runner.tuning_due()
                if tuning is not None:
                    self.tune(tuning)
                if handed_out == num_batches and self._runner.runs(pipeline):
                    # Before the last batch, not after the loop: a user who counts by len() never
                    # asks for one more.
                    self._runner.park_at(following)
                yield batch
                # While the consumer asks for the next one, its buffer is free for another.
                del batch
            if self._runner.runs(pipeline):
                following = walk.following.rolled(self._batching)
                if not num_batches:
                    begin_epoch()
                    self._runner.park_at(following)
                if self._runner.idle_at(following):  # and no other iteration has started
                    self._position = following
            elif (
                handed_out < num_batches
                and self._walk is not walk
                and self._iteration is not iteration
            ):
                raise FuelrailError(
                    "another iteration of this loader was started, which ended this one "
                    f"after {handed_out} of {num_batches} batches: a loader has one "
                    "position; make one for each"
                )
        finally:
            if self._runner.runs(pipeline) and handed_out < num_batches:
                self._halt()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration runs, from its beginning.

        A position restored inside that epoch is kept; restored at its very end, the iteration has
        no batches.
        """
        if epoch != self._start.epoch:
            self._start = Cursor(epoch)
        self._position = self._start
        if self._committed is not None:
            self._committed = self._start
        self._epoch_is_set = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch; plain JSON types, equal on all ranks.

        After a ``break`` that is the place of the break: a loader that loads it continues with the
        rest of that epoch. Once steps are committed, it is the place after the last such step.
        """
        self._ledger.reached("state")
        place = self._position if self._committed is None else self._committed
        return state_at(self._identity, place, self._batching.global_batch)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue after a saved state, on any number of ranks; the next iteration starts there, and
        one under way goes on there.

        ``strict=False`` accepts a state that was saved with another seed or other settings of the
        samples' content (``transforms``). Raises StateMismatchError, with both sides, for these
        otherwise, and always for a state of another dataset, split, order or version, and of a run
        that has shown what this order leaves out (``without``).
        """
        decoded = decode_state(state, self._identity, strict=strict)
        restored = Cursor(decoded.epoch, decoded.samples_consumed)
        self.where.check_unseen(decoded.identity.order, restored, decoded.full_batch)
        self._halt()
        Walk(restored, self._batching)  # refuses more samples than an epoch has
        if self._committed is not None:
            self._committed = restored
        self._continue_at(restored)
        # Where the next iteration begins without set_epoch: a script loops from that epoch on.
        self._position = restored.rolled(self._batching)

    def stats(self) -> LoaderStats:
        """Return the stages' clocks and the counts since the loader was made; empty before the
        first iteration.
        """
        runner = self._runner
        samples = self._samples
        client = self._client
        storage = (client.storage() if client else []) or [
            source.storage.stats() for source in self._schedule.sources
        ]
        return LoaderStats(
            stages=runner.clocks(),
            batches=self._batches,
            samples=samples,
            images=samples * self._num_images,
            waited_s=runner.waited_s,
            elapsed_s=runner.elapsed_s,
            storage=add_stats(storage),
            bad_samples=self._bad.count,
            refused_images=client.refused_images
            if client
            else getattr(self._make.decoder, "num_refused", 0),
        )

    def take_share(self, index: int, count: int) -> None:
        """Make only every ``count``-th step of this rank from ``index`` on; for worker processes
        that take turns.

        Decoding threads are shared out too. State then counts ``count`` steps a batch, for loaders
        of the same share.
        """
        assert 0 <= index < count, "a share is one of count"
        self._ledger.refuse_share()
        if self._client is not None:
            raise ConfigError(
                f"where={self._arguments.where!r} cannot be used in worker processes: leave "
                "it out there"
            )
        if self._share.stride == 1 < count:
            self.num_workers = max(1, self.num_workers // count)
        self._share = WorkerShard(index, count)

    def close(self) -> None:
        """Stop the threads and processes, ending an iteration under way.

        The loader can be iterated again.
        """
        self._halt()
        self._iteration = None
        if self._client is not None:
            self._client.end()

    @property
    def rank_weight(self) -> float:
        """What this rank's mean loss is multiplied with, where ranks differ by a row: its rows
        times R / G.

        The mean of the gradients over the ranks is then that of the global batch: by itself where
        all ranks have equally many rows, whose weight is 1. A batch that is a dict has it as
        ``weight`` where they do not; see `fuelrail.rank_weight`.
        """
        return self._batching.rank_weight

    def commit(self) -> None:
        """Make the steps handed out so far final: all ranks have taken them.

        From the first call on, `state_dict`, :meth:`reshape`, :meth:`rollback` and the ledger know
        committed steps only. Of a loader that was never told, every batch handed out is final.
        """
        self._committed = self._position
        self._ledger.commit()

    def rollback(self) -> None:
        """Give the steps after the last :meth:`commit` again, in this iteration or the next one.

        Without any commit so far these are all steps of the iteration.
        """
        self._runner.stop()
        self._continue_at(self._walk.start if self._committed is None else self._committed)

    def reshape(self, world: World | DeviceMesh) -> None:
        """Continue as another rank, or with another number of ranks, from 1 to the global batch.

        Call it between two steps, on every rank that stays. The iteration under way continues after
        the last step that was committed (:meth:`commit`), and takes the rest of its order on the
        new ranks: steps, global batches and the position stay as they are. Open files, caches and
        worker processes stay; what was made in advance is dropped. A new process joins with a
        loader of the same global batch, which it reshapes. In ``lanes`` a lane may change its rank.

        Raises WorldError for more ranks than rows, ConfigError for a loader whose batches have
        another number of rows then and a fixed shape (``static``), or are shared with other
        processes.
        """
        resolved = resolve_world(world)
        batching = dataclasses.replace(self._batching, world=resolved)
        check_micro_batches(self.where.order, batching)
        rows = batching.rank_batch
        if self._make.static is not None and rows != self.batch_size:
            raise ConfigError(
                f"static batches have a fixed shape, and as rank {resolved.rank} of "
                f"{resolved.size} this loader's would have {rows} rows in the place of "
                f"{self.batch_size}: leave static out, or take a number of ranks that keeps the "
                "rows"
            )
        if self._arguments.where == "node" or self._share.stride > 1:
            raise ConfigError(
                "reshape changes one process, and this loader's batches are made for several "
                "(where='node', or worker processes of torch's DataLoader): make it without"
            )
        place = self._position if self._committed is None else self._committed
        self._ledger.reshape(batching)
        self._runner.stop()
        self._batching = batching
        self.world = resolved
        self._world_is_detected = False
        self._bad.rank = resolved.rank
        if rows != self.batch_size:
            self.batch_size = rows
            self._make = self._make.with_rows(rows)
            self._take = self._buffers()
        self._continue_at(place)

    def _continue_at(self, place: Cursor) -> None:
        """Go to a place of the run, in the iteration under way too; nothing is running."""
        self._start = self._position = place
        self._epoch_is_set = False
        self._ledger.restore(place)
        if self._iteration is not None:
            self._ledger.enter(place)
            self._begin()

    def _buffers(self) -> Callable[[Scheduled], Any]:
        """Return what takes memory for the images of a batch of this rank's rows."""
        keep = batches_in_flight(self._limits, self.batch_size)
        return self._make.buffers(keep, self._memory)

    def _halt(self) -> None:
        self._runner.stop()
        self._make.close()
        self._ledger.reached("end")

    def _recipe(self) -> tuple[Arguments, DatasetPlaces]:
        """Return what `make_loader` makes this loader again from, with its rank."""
        arguments = msgspec.structs.replace(self._arguments, dataset=None, world=self._made_for)
        places = {
            name: (dataset.url or dataset.root, dataset.storage_options)
            for name, dataset in self.datasets.items()
        }
        return arguments, places

    def _place(self) -> tuple[Cursor, Cursor, bool]:
        return self._start, self._position, self._epoch_is_set

    def __reduce__(self) -> tuple[Any, Any, Any]:
        """Pickle, for spawned processes, the arguments, the rank and the position: a copy
        continues as a fork does.
        """
        return make_loader, (*self._recipe(), self.world), self._place()

    def __setstate__(self, place: tuple[Cursor, Cursor, bool]) -> None:
        self._start, self._position, self._epoch_is_set = place

    def _copy(self, **changes: Any) -> DataLoader:
        """Return a loader of these arguments, but for ``changes``, at the same position."""
        loader = make_loader(*self._recipe(), self.world, **changes)
        loader.__setstate__(self._place())
        return loader

    def __exit__(self, *_: object) -> None:
        self.close()

    def stages(self) -> list[Stage]:
        """Return the stages that samples go through to become batches, unstarted.

        A subclass may wrap them, to watch or to disturb a loader.
        """
        tuning = Tuning(self.num_workers, self.prefetch_factor)
        if self._client is None:
            return self._make.stages(tuning)
        return self._make.receiving(tuning)

    def tune(self, tuning: Tuning) -> None:
        """Change the numbers of threads and of ready batches, also of an iteration under way."""
        self.num_workers, self.prefetch_factor = tuning
        self._runner.adapt(self._left_out.stages(self.stages()))
        if self._client is not None:
            self._client.tune(tuning)

    def leave_out(self, parts: Collection[LoaderPart]) -> None:
        """Leave out the work of parts to measure its cost, from the first iteration on; batches
        keep their shape.
        """
        if self._client is not None:
            raise ConfigError("parts can be left out of a loader without where= only")
        self._left_out, self._schedule, self._make = leave_out(parts, self._schedule, self._make)

    def serve(
        self,
        memory: Memory,
        note: Callable[..., None],
        *,
        finishes: bool,
    ) -> BadSamples:
        """Make batches in this memory, for another process; return what knows its bad samples,
        which ``note`` gets.

        Unless it ``finishes`` them, a batch is a `Collated`, not normalised and not transformed.
        """
        self._bad.note = note
        self._make = self._make._replace(fixed=None, serves=not finishes)
        self._memory = memory
        self._take = self._buffers()
        return self._bad

    def make_steps(
        self,
        place: Cursor,
        number: int,
        count: int = 1,
    ) -> Iterator[Any]:
        """Yield ``count`` batches from this number after a place on, and request nothing else;
        the position stays.
        """
        walk = Walk(Walk(place, self._batching).cursor(number), self._batching)
        steps = groupby(
            self.where.scheduled(walk),
            lambda sample: (sample.epoch, sample.step),
        )
        scheduled = chain.from_iterable(samples for _, samples in islice(steps, count))
        self._run(walk, scheduled)
        try:
            yield from map(self._make.hand_over, self._runner.take())
        finally:
            self._runner.stop()

    def batches_from(self, place: Cursor, num_batches: int) -> Generator[Any]:
        """Yield the batches after a number of them from a place on, epoch by epoch, without end."""
        self.__setstate__(
            (
                Walk(place, self._batching).cursor(num_batches),
                self._position,
                False,
            )
        )
        while True:
            yield from self


def _choose_samples(
    options: Arguments,
    datasets: Mapping[str, Dataset],
    order: OrderSpec,
    points: Points,
    world: World,
) -> tuple[Schedule, Batching]:
    """Compile the order and open the storages; split the order into steps."""
    check_packs(options)
    storage = options.storage
    transforms = options.transforms
    is_mix = options.mix is not None
    opening: Any = {
        "storage_options": storage.options,
        "cache_dir": storage.cache_dir,
        "retry": storage.retry,
    }
    layers = open_layers(datasets, options.layers, opening, is_mix=is_mix)
    check_views(
        layers,
        options.seed,
        transforms.content(),
        is_mix=is_mix,
        window=options.window,
    )
    global_batch = options.batch_size * world.size
    chosen = {
        name: choose(
            dataset,
            name=name,
            split=options.split,
            options=transforms,
            layers=layers[name],
            lidar=points.lidar,
        )
        for name, dataset in datasets.items()
    }
    choice = ScheduleRequest(
        datasets=datasets,
        mix=options.mix,
        split=options.split,
        order=order,
        window=options.window,
        points=points.lidar is not None,
        sweeps=points.accumulation is not None,
        chosen=chosen,
        layers=layers,
    )
    schedule = make_schedule(
        choice,
        partial(
            open_storage,
            backend=storage.backend,
            verify=storage.verify,
            cache_size=storage.cache_size,
            **opening,
        ),
        global_batch=global_batch,
        drop_last=options.drop_last,
    )
    if transforms.box_frame == "lidar":
        require_lidar(schedule.sources)
    return schedule, order_batching(
        schedule.where.order,
        global_batch,
        world,
        drop_last=options.drop_last,
    )


def make_loader(
    arguments: Arguments,
    places: DatasetPlaces,
    world: World | None = None,
    **changes: object,
) -> DataLoader:
    """Return a loader of these arguments, but for ``changes``, and of datasets by their places
    and storage options; reshaped where ``world`` is another one than it is made for.
    """
    storage = arguments.storage
    opened = {
        name: open_dataset(
            location,
            storage_options=options,
            cache_dir=storage.cache_dir,
            retry=storage.retry,
        )
        for name, (location, options) in places.items()
    }
    keywords = {name: getattr(arguments, name) for name in arguments.__struct_fields__}
    keywords["dataset"] = opened if arguments.mix is not None else next(iter(opened.values()))
    loader = DataLoader(**keywords | changes)
    if world is not None and world != loader.world:
        loader.reshape(world)
    return loader
