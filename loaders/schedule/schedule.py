"""Resolve datasets, splits, windows and the order into a schedule of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fuelrail.loaders.schedule.datasets import (
    Chosen,
    check_compatible,
    make_sources,
    require_poses,
)
from fuelrail.loaders.schedule.layers import Layers, fingerprints_of
from fuelrail.loaders.schedule.positions import Part, PositionIndex
from fuelrail.loaders.schedule.prefetch import RequestStream
from fuelrail.loaders.schedule.state import Identity
from fuelrail.loaders.storage.cache.future_uses import (
    Range,
    RequestNumbers,
    build_future_uses,
)
from fuelrail.loaders.storage.layers import LayeredSession
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.compile import compile_mix, compile_order, plain
from fuelrail.pipeline.order.windows import TimeWindow, window_lookup

if TYPE_CHECKING:
    from fuelrail.loaders.records import Source
    from fuelrail.loaders.storage.protocol import PendingSpan, Storage
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.order.batching import Walk
    from fuelrail.pipeline.order.epoch import EndlessOrder
    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.order.spec import OrderSpec
    from fuelrail.pipeline.order.windows import Window, WindowLookup

_SEARCHED_AT_A_TIME = 1 << 16


class ScheduleRequest(NamedTuple):
    """Arguments of a schedule: one dataset, or several and their ratios; a split; an order;
    temporal windows.
    """

    datasets: Mapping[str, Dataset]
    mix: Mapping[str, int] | Sequence[MixStage] | None
    split: str
    order: OrderSpec
    window: Window | None
    points: bool
    sweeps: bool
    """Earlier sweeps of the lidar too."""
    chosen: Mapping[str, Chosen]
    """What is loaded of each dataset, by the dataset's name."""
    layers: Layers
    """The layers of each dataset, by the dataset's name."""


class Schedule(NamedTuple):
    """Datasets and the samples to load from them, by position."""

    sources: tuple[Source, ...]
    where: PositionIndex
    identity: Identity
    layers: Layers
    reads: bool = True
    """False: nothing is requested, for a loader whose samples come from elsewhere."""

    def streams(self, walk: Walk) -> list[RequestStream]:
        """Open a request stream for the samples of this walk with each storage."""
        is_regrouped = {
            "has_pack",
            "has_bucket",
            "has_balance",
        } & self.identity.order.keys()
        streams = []
        for source in self.sources:
            numbers = None
            if not self.reads:
                session = LayeredSession(_NoSession())
            elif is_regrouped:
                # Which samples a step has, and in which turn, is known when its turn comes: the
                # cache keeps what it has.
                session = source.storage.session()
            else:
                only = None
                # Samples that channels of other times need are often the same ones, and then
                # requested once.
                if len(self.sources) > 1 or source.reader.num_frames is not None:
                    numbers = RequestNumbers()
                    only = Range(source.base, len(source.dataset.index), numbers)
                uses = build_future_uses(self.where.numbers, walk, self.where.frames, only)
                session = source.storage.session(*uses)
            streams.append(RequestStream(source.reader, session, numbers))
        return streams


class _NoSession:
    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        return [lambda: memoryview(b"") for _ in rows]

    def close(self) -> None:
        """Do nothing: nothing was requested."""


def make_schedule(
    request: ScheduleRequest,
    open_storage: Callable[[Dataset], Storage],
    *,
    global_batch: int,
    drop_last: bool,
) -> Schedule:
    """Compile the order and open the datasets' storages.

    Raises ConfigError and OrderError for arguments that do not fit together, and what
    `compile_order` raises.
    """
    datasets, mix, split, spec, window, points, sweeps, chosen, layers = request
    check_compatible(datasets, points=points, chosen=chosen)
    if sweeps:
        require_poses(datasets)
    for dataset in datasets.values():
        dataset.split(split)  # an unknown split is an error before anything is computed
    times = isinstance(window, TimeWindow)
    clips = {
        name: None if window is None else ClipTable.of_split(opened, split, times=times)
        for name, opened in datasets.items()
    }
    order: EndlessOrder
    if mix is None:
        ((name, dataset),) = datasets.items()
        order = compile_order(
            spec,
            dataset,
            split,
            global_batch=global_batch,
            window=window,
            clips=clips[name],
            layers=layers[name],
        )
        fingerprints: str | dict[str, str] = dataset.manifest.fingerprint
    else:
        tables = list(clips.values())
        order = compile_mix(
            mix,
            spec,
            datasets,
            split,
            global_batch=global_batch,
            window=window,
            clips=tables,
            layers=layers,
        )
        fingerprints = {name: opened.manifest.fingerprint for name, opened in datasets.items()}
    sources = make_sources(
        datasets,
        split,
        open_storage,
        points=points,
        sweeps=sweeps,
        chosen=chosen,
        layers=layers,
        named=mix is not None,
    )
    parts = [
        Part(source.first_row, source.base, _make_lookup(window, table, source))
        for source, table in zip(sources, clips.values(), strict=True)
    ]
    identity = Identity(
        dataset=fingerprints,
        split=split,
        order=order.identity,
        drop_last=drop_last,
        frames=plain(window),
        layers=fingerprints_of(layers, is_mix=mix is not None),
    )
    return Schedule(sources, PositionIndex(order, parts), identity, layers)


def _make_lookup(
    window: Window | None,
    clips: ClipTable | None,
    source: Source,
) -> WindowLookup | None:
    """Return the map of a dataset's samples to their windows; raise OrderError where no window
    has another frame than the sample's.
    """
    if window is None:
        return None
    assert clips is not None
    lookup = window_lookup(clips, window)
    if len(window.frames) == 1:
        return lookup
    offset_columns = np.flatnonzero(lookup.window.offsets)
    for first in range(0, len(clips), _SEARCHED_AT_A_TIME):
        samples = np.arange(first, min(first + _SEARCHED_AT_A_TIME, len(clips)))
        if lookup(samples).present[:, offset_columns].any():
            return lookup
    raise OrderError(
        f"{window}: no sample of dataset '{source.dataset.root}' has any of these frames in its "
        "clip, so every window would be one frame repeated; its clips are too short, or it stores "
        "single frames"
    )
