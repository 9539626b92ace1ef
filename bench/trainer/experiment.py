"""The trainer's loader: the plain one, or one that does not do the work of some stage, to see what that costs."""

from __future__ import annotations

import importlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fuelrail.bench.trainer.injection import delayed_stages
from fuelrail.loaders import DataLoader, Transforms
from fuelrail.loaders.records import Fetched
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuelrail.bench.trainer.settings import TrainSettings
    from fuelrail.loaders.records import DecodedSample, Parsed, Task
    from fuelrail.loaders.storage.cache.future_uses import FutureUses
    from fuelrail.loaders.storage.protocol import PendingSpan
    from fuelrail.loaders.storage.reader import FetchedSpan
    from fuelrail.pipeline.format.index_row import IndexRow
    from fuelrail.pipeline.runtime.stages import Observer, Stage

# Samples whose bytes or parsed members stand in for all others; enough that their sizes average out.
_NUM_KEPT = 8


def make_loader(settings: TrainSettings, device: str | None, trace: Observer | None = None) -> DataLoader:
    """The loader of a run. Raises what DataLoader raises, and ConfigError for a transform that is not there."""
    transform = None if settings.transform is None else find_function(settings.transform)
    if transform is not None and "transform" in settings.leave_out:
        transform = _nothing
    window = settings.window
    return _ExperimentLoader(
        settings.dataset,
        settings.batch_size,
        split=settings.split,
        seed=settings.seed,
        order=None if window is None else OrderSpec(kind="windowed", seed=settings.seed, window=window),
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        transforms=Transforms(decoder=settings.decoder),
        storage={
            "backend": settings.storage,
            "cache_dir": settings.cache_dir,
            "look_ahead_bytes": settings.look_ahead_bytes,
            "verify": settings.verify,
        },
        transform=transform,
        device=device,
        trace=trace,
    ).set_up(settings)


def find_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """The function that ``MODULE:FUNCTION`` names. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"transform '{name}' cannot be imported as MODULE:FUNCTION: {error}") from error
    if not callable(function):
        raise ConfigError(f"transform '{name}' is no function")
    found: Callable[[dict[str, Any]], Any] = function
    return found


def _nothing(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class _ExperimentLoader(DataLoader):
    """Stages delayed or emptied as the settings say; plain where they say nothing."""

    _settings_of_run: TrainSettings

    def set_up(self, settings: TrainSettings) -> _ExperimentLoader:
        """Take the run's settings; to be called before the first iteration."""
        self._settings_of_run = settings
        if "storage" in settings.leave_out:
            (source,) = self._supply.sources
            split = source.dataset.split(settings.split)
            # Of all shards alike: neighbours may be of one clip.
            stride = max(1, split.num_samples // _NUM_KEPT)
            rows = range(split.first_sample, split.first_sample + split.num_samples, stride)[:_NUM_KEPT]
            kept = [source.reader.fetch(row) for row in rows]
            self._kept = [span._replace(span=memoryview(bytes(span.span))) for span in kept]
            # Sessions that ask for nothing: what nobody waits for must not come either.
            empty = source._replace(storage=_EmptyStorage(source.storage))
            self._supply = self._supply._replace(sources=(empty,))
        return self

    def stages(self) -> list[Stage]:
        settings = self._settings_of_run
        stages = delayed_stages(super().stages(), settings.inject)
        empty: dict[str, Callable[[Stage], Callable[[Any], Any]]] = {}
        if "storage" in settings.leave_out:
            empty["fetch"] = lambda _: _from(self._kept)
        if "decompression" in settings.leave_out:
            empty["parse"] = lambda stage: _Remembered(stage.work)
        if "decode" in settings.leave_out:
            empty["decode"] = lambda _: _undecoded
        return [replace(stage, work=empty[stage.name](stage)) if stage.name in empty else stage for stage in stages]


class _EmptyStorage:
    """The storage's numbers, and sessions that fetch nothing."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

    def recheck(self, index: int) -> None:
        """Nothing is read."""

    def session(self, future_uses: FutureUses | None = None, uses_per_step: int = 0) -> _EmptySession:  # noqa: ARG002
        return _EmptySession()


class _EmptySession:
    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        return [lambda: memoryview(b"") for _ in rows]

    def close(self) -> None:
        """Nothing was asked for."""


def _from(kept: list[FetchedSpan]) -> Callable[[Task], Fetched]:
    """Fetching without storage: the kept samples' bytes in turns, in the places of those asked for."""

    def fetch(task: Task) -> Fetched:
        return Fetched(task, tuple(kept[frame.row % len(kept)] for frame in task.frames))

    return fetch


class _Remembered:
    """Parsing that is done for the first samples only; their results stand in for all others'."""

    def __init__(self, work: Callable[[Fetched], Parsed]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._kept: list[Parsed] = []

    def __call__(self, fetched: Fetched) -> Parsed:
        with self._lock:
            if len(self._kept) < _NUM_KEPT:
                parsed = self._work(fetched)
                # The bytes lie in a buffer that the storage may reuse.
                samples = tuple(
                    replace(sample, images={name: bytes(image) for name, image in sample.images.items()})
                    for sample in parsed.samples
                )
                self._kept.append(parsed._replace(samples=samples))
                return parsed
        parsed = self._kept[fetched.task.row % len(self._kept)]
        return parsed._replace(task=fetched.task)


def _undecoded(parsed: Parsed | list[Parsed]) -> DecodedSample | list[DecodedSample]:
    """A sample, or those of a batch, whose places in the batch's buffer are left as they were."""
    if isinstance(parsed, list):
        return [one.decoded(one.task.slot) for one in parsed]
    return parsed.decoded(parsed.task.slot)
