"""The data of a run: the plain loader, with parts left out as the settings say, and its batches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import torch

from fuelrail.bench.measure.clock import thread_times
from fuelrail.bench.measure.cuda import count_training_flop
from fuelrail.bench.measure.records import InputFacts, TransformUse
from fuelrail.bench.studies.train.costs import cost_model
from fuelrail.bench.trainer.distill.teacher import LAYER
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import (
    MODEL_IMAGE,
    MODELS,
    GptSettings,
    import_function,
)
from fuelrail.loaders.batch.counterfactual import LoaderPart
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.loader import DataLoader
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.attributes import Attributes
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import open_layer_data
from fuelrail.pipeline.order.cost import compute_costs, cost_columns
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import as_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.measure.records import RankWriter
    from fuelrail.bench.studies.train.settings import TrainSettings
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.pipeline.runtime.stages import Observer

# Enough that the model doesn't see one batch alone, few enough to lie in memory.
_NUM_BATCHES_KEPT = 4
_LOADER_PARTS: frozenset[LoaderPart] = frozenset(get_args(LoaderPart))


def make_loader(
    settings: TrainSettings,
    device: str | None,
    trace: Observer | None = None,
    mesh: DeviceMesh | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> DataLoader:
    """Make the loader of a run.

    Raises what DataLoader raises, and ConfigError for a transform that does not exist.

    On a ``mesh`` the ranks of one model-parallel group get the same batches. ``transform`` takes
    the place of that of the settings, such as one that measures itself.
    """
    if transform is None and settings.transform is not None:
        transform = import_function(settings.transform, "transform")
    window = settings.window
    layer = settings.teacher_layer
    channels = token_channel(settings.dataset, settings.model)
    # Refused: packs that one of our models cannot read, and a teacher of documents in rows.
    pack = None if settings.order is None else settings.order.pack
    size = MODELS.get(settings.model)
    table = open_dataset(settings.dataset).manifest.extra_channels
    in_rows = any(channel.name in channels and channel.shape == (None,) for channel in table)
    if in_rows and (settings.teacher or settings.teacher_layer):
        raise ConfigError(
            "a teacher needs tokens of a fixed number, and channel 'tokens' has any number: "
            "leave it out"
        )
    room = size.context + 1 if in_rows and isinstance(size, GptSettings) else 0
    if pack is not None and size is not None and pack.budget > room:
        raise ConfigError(
            f"model '{settings.model}' reads packs of up to {room} tokens of this dataset, "
            f"and the order's have {pack.budget}: decoders read packs, of a channel "
            "'tokens' of any length; take a smaller budget, or none"
        )
    if channels and layer is not None:
        layer_channels = open_layer_data(layer).manifest.channels
        channels += [f"{LAYER}.{channel.name}" for channel in layer_channels]
    order = settings.order
    if order is None and window:
        order = OrderSpec(kind="windowed", seed=settings.seed, window=window)
    transforms = transforms_of(settings)
    if channels:
        names = (*(transforms.select or ()), *channels)
        transforms = msgspec.structs.replace(transforms, select=tuple(dict.fromkeys(names)))
    loader = DataLoader(
        settings.dataset,
        settings.batch_size,
        shuffle=True if order is None else None,
        split=settings.split,
        seed=settings.seed,
        drop_last=True,
        order=order,
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch_factor,
        transforms=transforms,
        layers=None if layer is None else {LAYER: layer},
        storage={
            "backend": settings.storage,
            "cache_dir": settings.cache_dir,
            "look_ahead_bytes": settings.look_ahead_bytes,
            "verify": settings.verify,
        },
        transform=transform,
        device=device,
        world=mesh,
        trace=trace,
        ledger=settings.ledger,
    )
    loader.leave_out(_LOADER_PARTS.intersection(settings.leave_out))
    return loader


class TimedTransform:
    """A transform of samples that counts the time it takes, and how much of it its thread computes.

    It goes by the name of the function: what identifies a run does not change.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        update_wrapper(self, function)
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        self._function = function
        self._lock = threading.Lock()
        self._num_calls = self._wall_ns = self._cpu_ns = self._queued_ns = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    def __call__(self, sample: Any) -> Any:
        """Return what the function makes of a sample."""
        start_ns = time.monotonic_ns()
        start = thread_times()
        try:
            return self._function(sample)
        finally:
            end = thread_times()
            end_ns = time.monotonic_ns()
            with self._lock:
                self._num_calls += 1
                self._wall_ns += end_ns - start_ns
                self._cpu_ns += end.cpu_ns - start.cpu_ns
                self._queued_ns += end.queued_ns - start.queued_ns
                self._first_ns = start_ns if self._first_ns is None else self._first_ns
                self._last_ns = end_ns

    def use(self) -> TransformUse | None:
        """Return what the calls took so far; None before the first."""
        if self._first_ns is None:
            return None
        return TransformUse(
            num_calls=self._num_calls,
            wall_ns=self._wall_ns,
            cpu_ns=self._cpu_ns,
            queued_ns=self._queued_ns,
            span_ns=self._last_ns - self._first_ns,
        )


def token_channel(place: str, model_name: str) -> list[str]:
    """Return the channel `tokens` for a decoder, where the dataset has it.

    Raises ConfigError where it has a fixed number of tokens, fewer than the model reads, or of more
    words.
    """
    size = MODELS.get(model_name)
    if not isinstance(size, GptSettings):
        return []
    dataset = open_dataset(place)
    channels = {channel.name: channel for channel in dataset.manifest.extra_channels}
    channel = channels.get("tokens")
    if channel is None:
        return []
    length = channel.shape[0] if channel.shape else 0
    words = channel.vocabulary
    is_long = length is None or length > size.context
    if channel.kind != "tokens" or words is None or not is_long:
        raise ConfigError(
            f"channel 'tokens' of '{dataset.location}' is of kind '{channel.kind}', shape "
            f"{list(channel.shape)}; model '{model_name}' reads kind 'tokens' of any "
            f"length, or of {size.context + 1} or more, with a vocabulary; use another model"
        )
    if words.size > size.vocabulary:
        raise ConfigError(
            f"channel 'tokens' of '{dataset.location}' has {words.size} words, model "
            f"'{model_name}' knows {size.vocabulary}; use another model"
        )
    return [channel.name]


def transforms_of(settings: TrainSettings) -> Transforms:
    """Return size and augmentation of a run's samples, and its decoder.

    Raise ConfigError for a file without them.
    """
    transforms = Transforms()
    if settings.transforms is not None:
        transforms = as_settings(settings.transforms, Transforms, "transforms")
    names_size = transforms.image is not None or transforms.camera_groups is not None
    if settings.model in MODELS and not names_size:
        transforms = msgspec.structs.replace(transforms, image=MODEL_IMAGE)
    if settings.decoder != "auto":
        transforms = msgspec.structs.replace(transforms, decoder=settings.decoder)
    return transforms


def from_memory(
    source: Iterator[Mapping[str, Any]], num_batches: int | None
) -> Iterator[Mapping[str, Any]]:
    """Return ``num_batches`` of the first batches in turns, taken now, without end if that is
    None.
    """
    batches = list(itertools.islice(source, _NUM_BATCHES_KEPT))
    return itertools.islice(itertools.cycle(batches), num_batches)


def summing(
    batches: Iterable[Mapping[str, Any]], settings: TrainSettings
) -> tuple[
    Iterator[Mapping[str, Any]],
    Callable[[], dict[str, tuple[int, float, float]]],
]:
    """Return the batches, and what gives the ``sums`` of a `StepRecord` over those taken since
    it was last called.
    """
    model = cost_model(settings.order)
    columns_of_model = () if model is None else cost_columns(model)
    names = list(dict.fromkeys((*settings.cost, *columns_of_model)))
    if not names:
        return iter(batches), dict
    dataset = open_dataset(settings.dataset)
    rows_taken = list[torch.Tensor]()
    table = Attributes(dataset, settings.split).read(names)
    first = dataset.split(settings.split).first_sample

    def sums() -> dict[str, tuple[int, float, float]]:
        samples = torch.cat(rows_taken).cpu().numpy() - first
        rows = table.take(samples)
        rows_taken.clear()
        sums_by_column = {}
        for name in names:
            values = compute_costs(name, rows).astype(np.float64)
            sum_of_squares = float(values @ values)
            sums_by_column[name] = len(rows), float(values.sum()), sum_of_squares
        return sums_by_column

    def noted() -> Iterator[Mapping[str, Any]]:
        for batch in batches:
            rows_taken.append(batch["global_index"].clone())
            yield batch
            del batch

    return noted(), sums


def noting_input(
    batches: Iterable[Mapping[str, Any]],
    writer: RankWriter,
    count_for: ModelSettings | None,
) -> Iterator[Mapping[str, Any]]:
    """Yield the batches; write the facts of the first one, with the FLOP of a sample in that
    model.
    """
    for number, batch in enumerate(batches):
        if number == 0:
            _, num_cameras, _, height, width = batch["img"].shape
            flop = None
            if count_for is not None:
                # In full precision, on no device: a rank may hold a part of the model only.
                with torch.device("meta"):
                    model = build_model(count_for)
                inputs = [tensor[:1].to("meta") for tensor in model.inputs(batch)]
                flop = count_training_flop(model, inputs)
            facts = InputFacts(
                num_cameras=num_cameras,
                height=height,
                width=width,
                train_flop=flop,
            )
            writer.write(facts)
        yield batch
        del batch  # or its buffer would not be free while the next one is waited for
