"""The order of Fuelrail for datasets of any kind: see `BatchSampler`, and the guide "Your dataset,
our order".

``import fuelrail.order`` imports numpy and msgspec, and neither torch nor pyarrow.
"""

import numpy as np  # noqa: F401 (here, for deep in other imports CPython 3.11 maps its stack again for each call)

from fuelrail.loaders.integrations.sampler import (
    BatchSampler,
    CountedLoader,
    Sampler,
    StatefulSampler,
)
from fuelrail.pipeline.errors import OrderError, StateMismatchError, WorldError
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.bucket import Bucket
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Entry
from fuelrail.pipeline.order.weights import AttributeWeights, ClassBalance, FileWeights
from fuelrail.pipeline.order.windows import FrameWindow

__all__ = [
    "AttributeWeights",
    "Balance",
    "BatchSampler",
    "Bucket",
    "ClassBalance",
    "Cost",
    "CountedLoader",
    "Entry",
    "FileWeights",
    "FrameWindow",
    "Mix",
    "MixStage",
    "OrderError",
    "OrderSpec",
    "OrderStage",
    "Pack",
    "Sampler",
    "StateMismatchError",
    "StatefulSampler",
    "World",
    "WorldError",
]
