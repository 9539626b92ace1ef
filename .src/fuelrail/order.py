"""The order of Fuelrail for datasets of any kind: see `BatchSampler`, and the guide "Your dataset,
our order".

``import fuelrail.order`` imports numpy and msgspec, and neither torch nor pyarrow.
"""

import numpy as np  # noqa: F401 (here, for deep in other imports CPython 3.11 maps its stack again for each call)

from fuelrail.loaders.integrations.sampler import BatchSampler as BatchSampler
from fuelrail.loaders.integrations.sampler import CountedLoader as CountedLoader
from fuelrail.loaders.integrations.sampler import Sampler as Sampler
from fuelrail.loaders.integrations.sampler import StatefulSampler as StatefulSampler
from fuelrail.pipeline.errors import OrderError as OrderError
from fuelrail.pipeline.errors import StateMismatchError as StateMismatchError
from fuelrail.pipeline.errors import WorldError as WorldError
from fuelrail.pipeline.order.balance import Balance as Balance
from fuelrail.pipeline.order.batching import World as World
from fuelrail.pipeline.order.bucket import Bucket as Bucket
from fuelrail.pipeline.order.cost import Cost as Cost
from fuelrail.pipeline.order.mix import Mix as Mix
from fuelrail.pipeline.order.mix import MixStage as MixStage
from fuelrail.pipeline.order.pack import Pack as Pack
from fuelrail.pipeline.order.spec import OrderSpec as OrderSpec
from fuelrail.pipeline.order.spec import OrderStage as OrderStage
from fuelrail.pipeline.order.table import Entry as Entry
from fuelrail.pipeline.order.weights import AttributeWeights as AttributeWeights
from fuelrail.pipeline.order.weights import ClassBalance as ClassBalance
from fuelrail.pipeline.order.weights import FileWeights as FileWeights
from fuelrail.pipeline.order.windows import FrameWindow as FrameWindow
