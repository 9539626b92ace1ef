"""The trainer's loader: the plain one, with stages delayed or parts left out as the run's settings say."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, get_args

from fuelrail.bench.trainer.injection import delayed_stages
from fuelrail.loaders import DataLoader, Transforms
from fuelrail.loaders.batch.counterfactual import LoaderPart
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.settings import Injection, TrainSettings
    from fuelrail.pipeline.runtime.stages import Observer, Stage

_LOADER_PARTS: frozenset[LoaderPart] = frozenset(get_args(LoaderPart))


class _DelayedLoader(DataLoader):
    """A loader whose stages are delayed as ``inject`` says."""

    inject: Injection

    def stages(self) -> list[Stage]:
        return delayed_stages(super().stages(), self.inject)


def make_loader(
    settings: TrainSettings, device: str | None, trace: Observer | None = None, mesh: DeviceMesh | None = None
) -> DataLoader:
    """Make the loader of a run. Raises what DataLoader raises, and ConfigError for a transform that does not exist.

    On a ``mesh`` the ranks of one model-parallel group get the same batches.
    """
    window = settings.window
    loader = _DelayedLoader(
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
        transform=None if settings.transform is None else find_function(settings.transform),
        device=device,
        world=mesh,
        trace=trace,
    )
    loader.inject = settings.inject
    loader.leave_out(_LOADER_PARTS.intersection(settings.leave_out))
    return loader


def find_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """Import the function that ``MODULE:FUNCTION`` names. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"transform '{name}' cannot be imported as MODULE:FUNCTION: {error}") from error
    if not callable(function):
        raise ConfigError(f"transform '{name}' is not callable; name a function")
    found: Callable[[dict[str, Any]], Any] = function
    return found
