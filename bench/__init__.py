"""The laboratory: measures loaders and training runs, plans, trains.

``__init__.pyi`` lists its public names, each of which is imported when it is first used. The top
floor: may import every other folder.
"""

from fuelrail.pipeline.face import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
