"""Online: shards to batches on a device. Imports fuelrail.pipeline only."""

from fuelrail.loaders.budget import Budget
from fuelrail.loaders.iterable import IterableView
from fuelrail.loaders.loader import DataLoader
from fuelrail.loaders.mesh import mesh_world
from fuelrail.loaders.normalize import Normalize
from fuelrail.loaders.observe import serve_metrics
from fuelrail.loaders.stats import LoaderStats
from fuelrail.loaders.undistort import Undistort
from fuelrail.pipeline.augment import ImageAugment
from fuelrail.pipeline.bev_augment import BevAugment
from fuelrail.pipeline.mix import Mix
from fuelrail.pipeline.order import OrderSpec
from fuelrail.pipeline.pixel_augment import PixelAugment
from fuelrail.pipeline.sweeps import PointSweeps
from fuelrail.pipeline.trace import TraceRecorder
from fuelrail.pipeline.weights import AttributeWeights, ClassBalance, FileWeights
from fuelrail.pipeline.world import World

__all__ = [
    "AttributeWeights",
    "BevAugment",
    "Budget",
    "ClassBalance",
    "DataLoader",
    "FileWeights",
    "ImageAugment",
    "IterableView",
    "LoaderStats",
    "Mix",
    "Normalize",
    "OrderSpec",
    "PixelAugment",
    "PointSweeps",
    "TraceRecorder",
    "Undistort",
    "World",
    "mesh_world",
    "serve_metrics",
]
