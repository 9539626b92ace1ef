"""Fuelrail: deterministic multi-camera shards and a loader that keeps every GPU fed.

::

    import fuelrail as fr

    loader = fr.DataLoader("DATASET", batch_size=8, shuffle=True, drop_last=True, seed=7)

``__init__.pyi`` lists the public names of sharding, loading and order; errors are ``fr.errors.X``,
and what measures, plans and trains is ``fuelrail.bench``. A name is imported when it is first used:
importing this package imports neither torch nor any other heavy library.
"""

from fuelrail.pipeline.face import lazy_names

__version__ = "0.1.0.dev0"

__getattr__, __dir__ = lazy_names(__name__, __file__)
