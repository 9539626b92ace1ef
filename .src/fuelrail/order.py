"""The order of Fuelrail for datasets of any kind: see `BatchSampler`, and the guide "Your dataset, our order".

``import fuelrail.order`` imports numpy and msgspec, and neither torch nor pyarrow.
"""

from fuelrail.loaders.integrations.sampler import BatchSampler, CountedLoader, Sampler, StatefulSampler
from fuelrail.pipeline.errors import OrderError, StateMismatchError, WorldError
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.mix import Mix, MixStage
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Entry
from fuelrail.pipeline.order.weights import AttributeWeights, ClassBalance, FileWeights
from fuelrail.pipeline.order.windows import FrameWindow

__all__ = [
    "AttributeWeights",
    "BatchSampler",
    "ClassBalance",
    "CountedLoader",
    "Entry",
    "FileWeights",
    "FrameWindow",
    "Mix",
    "MixStage",
    "OrderError",
    "OrderSpec",
    "OrderStage",
    "Sampler",
    "StateMismatchError",
    "StatefulSampler",
    "World",
    "WorldError",
]
