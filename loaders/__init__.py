"""Online: shards to batches on a device. Imports fuelrail.pipeline only."""

from fuelrail.loaders.iterable import IterableView
from fuelrail.loaders.loader import DataLoader, LoaderStats
from fuelrail.loaders.mesh import mesh_world
from fuelrail.pipeline.augment import ImageAugment
from fuelrail.pipeline.order import OrderSpec
from fuelrail.pipeline.world import World

__all__ = ["DataLoader", "ImageAugment", "IterableView", "LoaderStats", "OrderSpec", "World", "mesh_world"]
