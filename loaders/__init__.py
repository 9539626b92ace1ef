"""Online: shards to batches on a device. Imports fuelrail.pipeline only.

The names below are resolved on first use, as those of `fuelrail` are: most of them need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fuelrail.loaders.batch.runner import LoaderStats
    from fuelrail.loaders.commands import serve_metrics
    from fuelrail.loaders.config import Budget, Normalize, StaticBatches, StorageOptions, Transforms
    from fuelrail.loaders.decode.lens import Undistort
    from fuelrail.loaders.decode.protocol import DaliOptions
    from fuelrail.loaders.distributed import mesh_world
    from fuelrail.loaders.integrations.iterable import IterableView
    from fuelrail.loaders.loader import DataLoader
    from fuelrail.loaders.schedule.bad_samples import BadSamplePolicy
    from fuelrail.loaders.schedule.layers import LayerOptions
    from fuelrail.loaders.schedule.ledger import LedgerOptions
    from fuelrail.loaders.serving.ray_workers import RemoteWorkers
    from fuelrail.pipeline.order.balance import Balance
    from fuelrail.pipeline.order.batching import World
    from fuelrail.pipeline.order.bucket import Bucket
    from fuelrail.pipeline.order.cost import Cost
    from fuelrail.pipeline.order.mix import Mix
    from fuelrail.pipeline.order.pack import Pack
    from fuelrail.pipeline.order.spec import OrderSpec
    from fuelrail.pipeline.order.weights import AttributeWeights, ClassBalance, FileWeights
    from fuelrail.pipeline.order.windows import FrameWindow
    from fuelrail.pipeline.runtime.trace import TraceRecorder
    from fuelrail.pipeline.transforms.ego import BevAugment
    from fuelrail.pipeline.transforms.image import CameraGroup, ImageAugment
    from fuelrail.pipeline.transforms.pixels import PixelAugment
    from fuelrail.pipeline.transforms.points import PointSweeps

__all__ = [
    "AttributeWeights",
    "BadSamplePolicy",
    "Balance",
    "BevAugment",
    "Bucket",
    "Budget",
    "CameraGroup",
    "ClassBalance",
    "Cost",
    "DaliOptions",
    "DataLoader",
    "FileWeights",
    "FrameWindow",
    "ImageAugment",
    "IterableView",
    "LayerOptions",
    "LedgerOptions",
    "LoaderStats",
    "Mix",
    "Normalize",
    "OrderSpec",
    "Pack",
    "PixelAugment",
    "PointSweeps",
    "RemoteWorkers",
    "StaticBatches",
    "StorageOptions",
    "TraceRecorder",
    "Transforms",
    "Undistort",
    "World",
    "mesh_world",
    "serve_metrics",
]

_OWN: Final = {
    "IterableView": "fuelrail.loaders.integrations.iterable",
    "LoaderStats": "fuelrail.loaders.batch.runner",
    "mesh_world": "fuelrail.loaders.distributed",
    "serve_metrics": "fuelrail.loaders.commands",
}
"""Names that `fuelrail` does not have, each with the module that defines it."""


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in __all__:
        return getattr(import_module(_OWN.get(name, "fuelrail")), name)
    raise AttributeError(f"module 'fuelrail.loaders' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
